"""The embedded server's SQLite file before the server starts: readable, free for us, and not full of holes."""

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from dflash.errors import DFlashError

PATIENCE_SECONDS = 5.0
HOLES_BYTES = 32 << 20
"""Deleted runs leave pages that later ones fill; only more than this is worth writing the file anew."""


class DatabaseLockedError(DFlashError):
    """Another process holds the Prefect database."""

    state_name = "DatabaseLocked"


def make_ready(file: Path, notice: Callable[[str], None], *, patience: float = PATIENCE_SECONDS) -> None:
    """See to it that a server can start over ``file``; one that cannot be read is put aside, and ``notice`` told.

    Only the history of runs is lost with it: what was seen, relayed and evaluated is in the ledger. Raises
    :class:`DatabaseLockedError` when another process writes to it for longer than ``patience`` seconds.
    """
    if not file.exists():
        return
    try:
        holes = _look(file, patience)
        if holes > HOLES_BYTES:
            with contextlib.closing(sqlite3.connect(file, timeout=patience)) as database:
                database.execute("VACUUM")
    except sqlite3.OperationalError as error:
        if "locked" not in str(error) and "busy" not in str(error):
            raise DatabaseLockedError(f"the Prefect database {file} cannot be opened: {error}; mend that") from error
        raise DatabaseLockedError(
            f"the Prefect database {file} is locked by another process: end the other Prefect server over it "
            f"(fuser {file} names it), or set $PREFECT_HOME to another folder"
        ) from error
    except sqlite3.DatabaseError as error:
        aside = _put_aside(file)
        notice(
            f"the Prefect database could not be read ({error}) and lies in {aside} now; a new one is made. The "
            "ledger knows what is due, so only the history of runs begins anew"
        )


def _look(file: Path, patience: float) -> int:
    """Bytes of free pages in a file that holds together."""
    with contextlib.closing(sqlite3.connect(file, timeout=patience, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        (pages,) = database.execute("PRAGMA freelist_count").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
        database.execute("ROLLBACK")
    if verdict != "ok":
        raise sqlite3.DatabaseError(str(verdict))
    return int(pages * size)


def _put_aside(file: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for ending in ("", "-wal", "-shm"):
        part = file.with_name(file.name + ending)
        if part.exists():
            part.rename(file.with_name(f"{file.name}.unreadable-{stamp}{ending}"))
    return file.with_name(f"{file.name}.unreadable-{stamp}")
