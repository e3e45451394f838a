"""What became of every checkpoint: seen, relayed, evaluated, invalid, failed or superseded; SQLite in the state folder.

Prefect knows what runs now; what is due, and which numbers there are, stands here alone, so that a Prefect without any
memory goes on where the last one stopped. Every call is one transaction, safe for several threads and processes.

A transaction survives every crash of a process. After a power cut the last ones may be gone, never half of one; they
are done again then, and the job on the inference host, whose name follows from checkpoint, suite and number of the
attempt, is found there instead of started twice.
"""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from dflash.errors import DFlashError
from tasks.state import state_dir

State = Literal["seen", "relayed", "evaluated", "invalid", "failed", "superseded"]
OPEN: tuple[State, ...] = ("seen", "relayed")
"""The states of an attempt that has no result yet, in their order."""
RESULTS: tuple[State, ...] = ("evaluated", "invalid", "failed", "superseded")

MOST_ATTEMPTS = 3
"""Of one checkpoint in one suite that are made by themselves; somebody can ask for more."""
RETRY_SECONDS = 900.0
"""Until a failed attempt is followed by the next one, four times as long after each."""
BUSY_SECONDS = 60.0

FILE = "ledger.sqlite3"
VERSION = 1
SCHEMA = """
CREATE TABLE checkpoints (
    identity TEXT PRIMARY KEY, host TEXT NOT NULL, path TEXT NOT NULL, step INTEGER, seen REAL NOT NULL,
    written REAL, gone REAL
) STRICT;
CREATE INDEX by_place ON checkpoints (host, path);
CREATE TABLE attempts (
    identity TEXT NOT NULL REFERENCES checkpoints, suite TEXT NOT NULL, number INTEGER NOT NULL CHECK (number > 0),
    state TEXT NOT NULL CHECK (state IN ('seen', 'relayed', 'evaluated', 'invalid', 'failed', 'superseded')),
    host TEXT, job TEXT, flow_run TEXT, report TEXT, tau REAL, low REAL, high REAL, message TEXT NOT NULL DEFAULT '',
    updated REAL NOT NULL,
    PRIMARY KEY (identity, suite, number)
) STRICT;
CREATE UNIQUE INDEX one_open ON attempts (identity, suite) WHERE state IN ('seen', 'relayed');
CREATE INDEX by_time ON attempts (updated);
CREATE TABLE nights (
    date TEXT NOT NULL, suite TEXT NOT NULL, content TEXT NOT NULL, recorded REAL NOT NULL, PRIMARY KEY (date, suite)
) STRICT;
CREATE TABLE watches (
    source TEXT PRIMARY KEY, state TEXT NOT NULL, request TEXT, looked REAL, message TEXT NOT NULL,
    since REAL NOT NULL, content TEXT NOT NULL
) STRICT;
"""


class LedgerError(DFlashError):
    """The ledger cannot be opened, read or written."""

    state_name = "LedgerUnusable"


class LedgerBusyError(LedgerError):
    """Somebody else held the ledger for longer than anybody should."""

    state_name = "LedgerLocked"


@dataclass(frozen=True)
class Seen:
    """One complete checkpoint, where it lies and what its content is known by.

    ``identity`` is that of :class:`tasks.selection.Selection`; ``seen`` is the time of the look that found it whole.
    """

    host: str
    path: str
    identity: str
    step: int | None
    seen: float
    written: float | None = None
    """When its last byte was written, by its host's clock; orders those that one look found."""
    gone: float | None = None
    """Since when it does not lie there any more."""


@dataclass(frozen=True)
class Attempt:
    """One evaluation of a checkpoint in a suite: on its way while ``state`` is ``seen`` or ``relayed``, else ended."""

    identity: str
    suite: str
    number: int
    state: State
    on: str | None
    job: str | None
    flow_run: str | None
    report: str | None
    tau: float | None
    ci95: tuple[float, float] | None
    message: str
    updated: float

    @property
    def is_open(self) -> bool:
        """Whether it has no result yet."""
        return self.state in OPEN


@dataclass(frozen=True)
class Watch:
    """What is known of the watch of one ``source`` (HOST:/folder)."""

    source: str
    state: str
    """``watching``, or the name of the state that keeps it from it: ``GrantEnded``, ``HostUnreachable``, …"""
    request: str | None = None
    """The request whose standing approval it reads under."""
    looked: float | None = None
    """When it last saw the folder."""
    message: str = ""
    since: float = 0.0
    """When it came into ``state``."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """What the watch itself remembers from look to look, JSON."""


class Ledger:
    """The ledger in one file; :meth:`open` makes it."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        self.file = file
        self._clock = clock
        self._own = threading.local()

    @classmethod
    def open(cls, state: Path | None = None, *, clock: Callable[[], float] = time.time) -> Self:
        """The ledger of the state folder ``state``, made when there is none.

        Raises :class:`LedgerError` when the file is none, is damaged, or was written by a later version.
        """
        ledger = cls((state or state_dir()) / FILE, clock)
        with ledger._transaction() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise LedgerError(
                    f"{ledger.file} is of version {version}, and this program knows version {VERSION}: install the "
                    "program that wrote it, or move the file away to begin a new one"
                )
        return ledger

    # checkpoints

    def see(self, checkpoint: Seen) -> bool:
        """Record a checkpoint that a look found whole; True when it is new.

        A known one keeps when it was first seen; where it lies now is corrected, and it is not gone.
        """
        values = (checkpoint.identity, checkpoint.host, checkpoint.path)
        with self._transaction() as connection:
            new = connection.execute(
                "INSERT INTO checkpoints (identity, host, path, step, seen, written) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (*values, checkpoint.step, checkpoint.seen, checkpoint.written),
            )
            if new.rowcount:
                return True
            connection.execute(
                "UPDATE checkpoints SET host = ?2, path = ?3, gone = NULL WHERE identity = ?1 "
                "AND (host, path, gone IS NULL) != (?2, ?3, TRUE)",
                values,
            )
        return False

    def miss(self, identity: str) -> bool:
        """Record that a checkpoint does not lie there any more; True when that is new."""
        with self._transaction() as connection:
            return bool(
                connection.execute(
                    "UPDATE checkpoints SET gone = ? WHERE identity = ? AND gone IS NULL", (self._clock(), identity)
                ).rowcount
            )

    def checkpoint(self, identity: str) -> Seen | None:
        """One checkpoint; None when it was never seen."""
        found = self._rows(f"{_CHECKPOINTS} WHERE identity = ?", (identity,))
        return _seen(found[0]) if found else None

    def checkpoints(self, limit: int | None = None) -> list[Seen]:
        """Those seen, the newest first."""
        return [_seen(row) for row in self._rows(f"{_CHECKPOINTS} {_NEWEST_FIRST} LIMIT ?", (_most(limit),))]

    # attempts

    def due(self, suite: str, *, limit: int) -> list[Seen]:
        """What has to be evaluated in ``suite`` now, the newest first.

        That is every checkpoint that still lies where it was seen and has no attempt that counts: none, or a failed
        one that may be repeated (:data:`MOST_ATTEMPTS`, :data:`RETRY_SECONDS`). Of more than ``limit``, the older are
        superseded here and now, and so is one in whose place a newer lies: after days without a watch, and behind a
        trainer that is faster than the evaluations, the newest numbers come first and the queue stays short.
        """
        with self._transaction() as connection:
            now = self._clock()
            waiting = [_seen(row) for row in connection.execute(_DUE, {"suite": suite, "now": now, **_RULES})]
            places: set[tuple[str, str]] = set()
            due: list[Seen] = []
            for checkpoint in waiting:
                place = (checkpoint.host, checkpoint.path)
                if place in places or self._is_overwritten(connection, checkpoint):
                    self._supersede(connection, checkpoint, suite, "a newer checkpoint lies in its place")
                elif len(due) >= limit:
                    self._supersede(connection, checkpoint, suite, f"{limit} newer checkpoints wait already")
                else:
                    due.append(checkpoint)
                places.add(place)
        return due

    def begin(self, identity: str, suite: str, *, number: int | None = None, flow_run: str | None = None) -> Attempt:
        """The open attempt, else a new one; several callers at once get the same.

        With ``number`` that attempt and no other, also when it has ended: whoever was started for it and finds it
        ended has nothing to do. Raises :class:`LedgerError` for a checkpoint that was never seen, and for a number
        that does not follow on the last one.
        """
        with self._transaction() as connection:
            last = self._last(connection, identity, suite)
            attempt = last
            if number is not None and last is not None and number < last.number:
                attempt = self._one(connection, identity, suite, number)
            following = last is None or not last.is_open
            wanted = following if number is None else number == (0 if last is None else last.number) + 1
            if wanted and not following:
                raise LedgerError(f"attempt {number} at {identity} cannot begin before the one before it has ended")
            if wanted:
                attempt = self._new(connection, identity, suite, 1 if last is None else last.number + 1)
            if attempt is None or (number is not None and attempt.number != number):
                count = 0 if last is None else last.number
                raise LedgerError(f"attempt {number} at {identity} is asked for, and {count} were made")
            if flow_run is not None and attempt.is_open and attempt.flow_run != flow_run:
                connection.execute(
                    f"UPDATE attempts SET flow_run = ?, updated = ? WHERE {_KEY}",
                    (flow_run, self._clock(), *_key(attempt)),
                )
                attempt = self._one(connection, *_key(attempt))
        assert attempt is not None
        return attempt

    def advance(
        self, attempt: Attempt, *, state: State | None = None, on: str | None = None, job: str | None = None
    ) -> Attempt:
        """Record how far an open attempt has come; what is None stays. The attempt as it is now.

        It never goes back, and one that has ended stays as it is.
        """
        if state is not None and state not in OPEN:
            raise LedgerError(f"{state} is a result: finish the attempt")
        with self._transaction() as connection:
            connection.execute(
                "UPDATE attempts SET state = CASE WHEN ? = 'relayed' THEN 'relayed' ELSE state END, "
                f"host = coalesce(?, host), job = coalesce(?, job), updated = ? WHERE {_KEY} AND {_IS_OPEN}",
                (state, on, job, self._clock(), *_key(attempt)),
            )
            return self._require(connection, attempt)

    def finish(
        self,
        attempt: Attempt,
        state: State,
        *,
        report: str | None = None,
        tau: float | None = None,
        ci95: tuple[float, float] | None = None,
        message: str = "",
    ) -> bool:
        """Record the result of an attempt, once: False when it has one already, which stays."""
        if state not in RESULTS:
            raise LedgerError(f"{state} is no result; one of {', '.join(RESULTS)} is")
        low, high = ci95 or (None, None)
        with self._transaction() as connection:
            self._require(connection, attempt)
            recorded = connection.execute(
                "UPDATE attempts SET state = ?, report = ?, tau = ?, low = ?, high = ?, message = ?, updated = ? "
                f"WHERE {_KEY} AND {_IS_OPEN}",
                (state, report, tau, low, high, message, self._clock(), *_key(attempt)),
            )
            return bool(recorded.rowcount)

    def attempts(
        self, identity: str | None = None, suite: str | None = None, limit: int | None = None
    ) -> list[Attempt]:
        """The attempts, the one that changed last first; of one checkpoint, one suite, or both."""
        return self._attempts(
            "(?1 IS NULL OR identity = ?1) AND (?2 IS NULL OR suite = ?2)", (identity, suite, _most(limit))
        )

    def open_attempts(self, suite: str | None = None) -> list[Attempt]:
        """Those without a result, of ``suite`` or of all."""
        return self._attempts(f"{_IS_OPEN} AND (?1 IS NULL OR suite = ?1 OR ?2 IS NOT NULL)", (suite, None, -1))

    def counts(self, suite: str | None = None) -> dict[State, int]:
        """How many checkpoints are in which state, by the last attempt at each; without one they are ``seen``."""
        rows = self._rows(
            "SELECT coalesce(a.state, 'seen'), count(*) FROM checkpoints c LEFT JOIN attempts a "
            "ON a.rowid = (SELECT rowid FROM attempts WHERE identity = c.identity AND (?1 IS NULL OR suite = ?1) "
            "ORDER BY updated DESC, number DESC LIMIT 1) GROUP BY 1",
            (suite,),
        )
        found: dict[State, int] = dict(rows)
        return {state: found.get(state, 0) for state in get_args(State)}

    # nights

    def night(self, date: str, suite: str) -> dict[str, Any] | None:
        """What was recorded for the night of ``date`` (YYYY-MM-DD); None when nothing was."""
        found = self._rows("SELECT content FROM nights WHERE (date, suite) = (?, ?)", (date, suite))
        return json.loads(found[0][0]) if found else None

    def nights(self, suite: str, limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
        """Every night of a suite with its date, the last one first."""
        rows = self._rows(
            "SELECT date, content FROM nights WHERE suite = ? ORDER BY date DESC LIMIT ?", (suite, _most(limit))
        )
        return [(date, json.loads(content)) for date, content in rows]

    def record_night(self, date: str, suite: str, content: Mapping[str, Any]) -> bool:
        """Record the night of ``date``, once: False when there is one already, which stays. ``content`` is JSON."""
        with self._transaction() as connection:
            recorded = connection.execute(
                "INSERT INTO nights VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (date, suite, json.dumps(content), self._clock()),
            )
            return bool(recorded.rowcount)

    # watches

    def watch(self, source: str) -> Watch | None:
        """What is known of one watch; None when there never was one."""
        found = self._rows(f"{_WATCHES} WHERE source = ?", (source,))
        return _watch(found[0]) if found else None

    def watches(self) -> list[Watch]:
        """Every watch, by its source."""
        return [_watch(row) for row in self._rows(f"{_WATCHES} ORDER BY source", ())]

    def record_watch(self, watch: Watch) -> Watch:
        """Record a watch as it is now; ``since`` is kept while its state stays. The watch as it was recorded."""
        with self._transaction() as connection:
            found = connection.execute(f"{_WATCHES} WHERE source = ?", (watch.source,)).fetchone()
            same = found is not None and _watch(found).state == watch.state
            recorded = replace(watch, since=_watch(found).since if same else self._clock())
            connection.execute(
                "INSERT OR REPLACE INTO watches (source, state, request, looked, message, since, content) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(recorded.source, recorded.state, recorded.request, recorded.looked, recorded.message),
                    *(recorded.since, json.dumps(recorded.content)),
                ),
            )
        return recorded

    def forget_watch(self, source: str) -> bool:
        """Forget a watch that was ended; True when there was one. Its checkpoints stay."""
        with self._transaction() as connection:
            return bool(connection.execute("DELETE FROM watches WHERE source = ?", (source,)).rowcount)

    # the file

    def _new(self, connection: sqlite3.Connection, identity: str, suite: str, number: int) -> Attempt:
        known = connection.execute("SELECT 1 FROM checkpoints WHERE identity = ?", (identity,)).fetchone()
        if known is None:
            raise LedgerError(f"no checkpoint {identity} was ever seen: record it before it is evaluated")
        connection.execute(
            "INSERT INTO attempts (identity, suite, number, state, updated) VALUES (?, ?, ?, 'seen', ?)",
            (identity, suite, number, self._clock()),
        )
        attempt = self._one(connection, identity, suite, number)
        assert attempt is not None
        return attempt

    def _supersede(self, connection: sqlite3.Connection, checkpoint: Seen, suite: str, why: str) -> None:
        last = self._last(connection, checkpoint.identity, suite)
        number = 1 if last is None else last.number + 1
        self._new(connection, checkpoint.identity, suite, number)
        connection.execute(
            f"UPDATE attempts SET state = 'superseded', message = ? WHERE {_KEY}",
            (why, checkpoint.identity, suite, number),
        )

    def _is_overwritten(self, connection: sqlite3.Connection, checkpoint: Seen) -> bool:
        newest = connection.execute(
            f"SELECT identity FROM checkpoints WHERE (host, path) = (?, ?) AND gone IS NULL {_NEWEST_FIRST} LIMIT 1",
            (checkpoint.host, checkpoint.path),
        ).fetchone()
        return bool(newest[0] != checkpoint.identity)

    def _last(self, connection: sqlite3.Connection, identity: str, suite: str) -> Attempt | None:
        row = connection.execute(
            f"{_ATTEMPTS} WHERE (identity, suite) = (?, ?) ORDER BY number DESC LIMIT 1", (identity, suite)
        ).fetchone()
        return None if row is None else _attempt(row)

    def _one(self, connection: sqlite3.Connection, identity: str, suite: str, number: int) -> Attempt | None:
        row = connection.execute(f"{_ATTEMPTS} WHERE {_KEY}", (identity, suite, number)).fetchone()
        return None if row is None else _attempt(row)

    def _require(self, connection: sqlite3.Connection, attempt: Attempt) -> Attempt:
        found = self._one(connection, *_key(attempt))
        if found is None:
            raise LedgerError(f"{self.file} has no attempt {attempt.number} at {attempt.identity}: was it exchanged?")
        return found

    def _attempts(self, where: str, values: Sequence[Any]) -> list[Attempt]:
        rows = self._rows(f"{_ATTEMPTS} WHERE {where} ORDER BY updated DESC, rowid DESC LIMIT ?3", values)
        return [_attempt(row) for row in rows]

    def _rows(self, query: str, values: Sequence[Any]) -> list[Any]:
        with self._named():
            return self._connection().execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
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

    def _connection(self) -> sqlite3.Connection:
        """This thread's own; a forked child opens another, because SQLite's cannot be shared with it."""
        if getattr(self._own, "process", None) != os.getpid():
            connection = sqlite3.connect(self.file, timeout=BUSY_SECONDS, isolation_level=None)
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
                    f"{self.file} was locked for {BUSY_SECONDS:.0f} s: another process of this program holds it and "
                    "does not go on; end it (`fuser` names it) and try again"
                ) from error
            raise LedgerError(
                f"{self.file}: {error}; make its folder writable and its disk less full, then try again"
            ) from error
        except sqlite3.DatabaseError as error:
            raise LedgerError(
                f"{self.file} is damaged ({error}): move it away together with its -wal and -shm files; the next look "
                "begins a new one, and what has a report is then asked for again"
            ) from error


_CHECKPOINTS = "SELECT host, path, identity, step, seen, written, gone FROM checkpoints"
_NEWEST_FIRST = "ORDER BY coalesce(written, seen) DESC, step DESC, seen DESC, rowid DESC"
_ATTEMPTS = (
    "SELECT identity, suite, number, state, host, job, flow_run, report, tau, low, high, message, updated FROM attempts"
)
_WATCHES = "SELECT source, state, request, looked, message, since, content FROM watches"
_KEY = "identity = ? AND suite = ? AND number = ?"
_IS_OPEN = "state IN ('seen', 'relayed')"
_RULES = {"most": MOST_ATTEMPTS, "retry": RETRY_SECONDS}
_DUE = f"""
SELECT c.host, c.path, c.identity, c.step, c.seen, c.written, c.gone FROM checkpoints c LEFT JOIN attempts a
ON (a.identity, a.suite) = (c.identity, :suite)
AND a.number = (SELECT max(number) FROM attempts WHERE (identity, suite) = (c.identity, :suite))
WHERE c.gone IS NULL AND (
    a.number IS NULL
    OR (a.state = 'failed' AND a.number < :most AND a.updated + :retry * (1 << (2 * (a.number - 1))) <= :now)
)
{_NEWEST_FIRST.replace("rowid", "c.rowid")}
"""


def _seen(row: Sequence[Any]) -> Seen:
    return Seen(*row)


def _attempt(row: Sequence[Any]) -> Attempt:
    *fields, low, high, message, updated = row
    return Attempt(*fields, None if low is None else (low, high), message, updated)


def _watch(row: Sequence[Any]) -> Watch:
    *fields, content = row
    return Watch(*fields, content=json.loads(content))


def _key(attempt: Attempt) -> tuple[str, str, int]:
    return attempt.identity, attempt.suite, attempt.number


def _most(limit: int | None) -> int:
    return -1 if limit is None else limit
