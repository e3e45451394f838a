"""The SQLite file of the ledger: its tables, transactions that several threads and processes share, and what fails.

A transaction survives every crash of a process. After a power cut the last ones may be gone, never half of one: they
are done again then, and the job on the inference host, whose name follows from checkpoint, suite and number of the
attempt, is found there instead of started twice.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash.errors import DFlashError

BUSY_SECONDS = 60.0
VERSION = 1
SCHEMA = """
CREATE TABLE checkpoints (
    number INTEGER PRIMARY KEY, identity TEXT NOT NULL UNIQUE, host TEXT NOT NULL, path TEXT NOT NULL, step INTEGER,
    seen REAL NOT NULL, written REAL, gone REAL
);
CREATE INDEX checkpoints_by_place ON checkpoints (host, path);
CREATE TABLE attempts (
    identity TEXT NOT NULL REFERENCES checkpoints (identity), suite TEXT NOT NULL,
    number INTEGER NOT NULL CHECK (number > 0),
    state TEXT NOT NULL CHECK (state IN ('seen', 'relayed', 'evaluated', 'invalid', 'failed', 'superseded')),
    host TEXT, job TEXT, flow_run TEXT, report TEXT, tau REAL, low REAL, high REAL, message TEXT NOT NULL DEFAULT '',
    updated REAL NOT NULL, restarts INTEGER NOT NULL DEFAULT 0, not_before REAL,
    PRIMARY KEY (identity, suite, number)
);
CREATE UNIQUE INDEX attempts_open ON attempts (identity, suite) WHERE state IN ('seen', 'relayed');
CREATE INDEX attempts_failed ON attempts (suite, identity, number) WHERE state = 'failed';
CREATE INDEX attempts_by_time ON attempts (updated);
CREATE TABLE suites (suite TEXT PRIMARY KEY, queued_to INTEGER NOT NULL);
CREATE TABLE queue (
    suite TEXT NOT NULL, identity TEXT NOT NULL REFERENCES checkpoints (identity), PRIMARY KEY (suite, identity)
);
CREATE TABLE nights (
    date TEXT NOT NULL, suite TEXT NOT NULL, content TEXT NOT NULL, recorded REAL NOT NULL, PRIMARY KEY (date, suite)
);
CREATE TABLE watches (
    source TEXT PRIMARY KEY, state TEXT NOT NULL, request TEXT, looked REAL, message TEXT NOT NULL, since REAL NOT NULL
);
CREATE TABLE memories (source TEXT PRIMARY KEY, content TEXT NOT NULL);
"""


class LedgerError(DFlashError):
    """The ledger cannot be opened, read or written, or was asked for what cannot be."""

    state_name = "LedgerUnusable"


class LedgerBusyError(LedgerError):
    """Somebody else held the ledger for longer than anybody should."""

    state_name = "LedgerLocked"


class LedgerFile:
    """One file, made with its tables when it is not there; raises :class:`LedgerError` for one that is no ledger."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = threading.local()
        if self._version() != VERSION:
            with self.transaction() as connection:
                # asked again: another process may have made it meanwhile
                if self._version() == 0:
                    for statement in SCHEMA.split(";"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {VERSION}")
        if (version := self._version()) != VERSION:
            raise LedgerError(
                f"{path} is of version {version}, and this program knows version {VERSION}: install the program that "
                "wrote it, or move the file away to begin a new one"
            )

    def rows(self, query: str, values: Mapping[str, Any]) -> list[sqlite3.Row]:
        """What ``query`` finds, as it is at one moment."""
        with self._named():
            return self._connection().execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection on which nobody else writes before the block ends; what raises leaves nothing behind."""
        with self._named():
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _version(self) -> int:
        return int(self.rows("PRAGMA user_version", {})[0][0])

    def _connection(self) -> sqlite3.Connection:
        """This thread's own; a forked child opens another, because SQLite's cannot be shared with it."""
        if getattr(self._own, "process", None) != os.getpid():
            connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            self._own.connection, self._own.process = connection, os.getpid()
        found: sqlite3.Connection = self._own.connection
        return found

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say what an error of SQLite means here."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise LedgerBusyError(
                    f"{self.path} was locked for {BUSY_SECONDS:.0f} s: another process holds it and does not go on; "
                    "end that one (`fuser` names it) and try again"
                ) from error
            raise LedgerError(
                f"{self.path}: {error}; make its folder writable and its disk less full, then try again"
            ) from error
        except sqlite3.DatabaseError as error:
            raise LedgerError(
                f"{self.path} is damaged ({error}): move it away together with its -wal and -shm files; the next look "
                "begins a new one, and jobs that run or ran on the inference hosts are found there"
            ) from error
