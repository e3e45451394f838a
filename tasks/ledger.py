"""What became of every checkpoint: seen, relayed, evaluated, invalid, failed or superseded; SQLite in the state folder.

Prefect knows what runs now; what is due, and which numbers there are, stands here alone, so that a Prefect without any
memory goes on where the last one stopped. Every call is one transaction, safe for several threads and processes.
"""

import fcntl
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self, get_args

from tasks.ledger_entries import OPEN, Attempt, Seen, State, Watch
from tasks.ledger_file import LedgerBusyError, LedgerError, LedgerFile
from tasks.state import state_dir

__all__ = ["Attempt", "AttemptHeldError", "Ledger", "LedgerBusyError", "LedgerError", "Seen", "State", "Watch"]

FILE = "ledger.sqlite3"
MOST_ATTEMPTS = 5
"""Of one checkpoint in one suite that are made by themselves, within a day; somebody can ask for more."""
RETRY_SECONDS = 900.0
"""Until a failed attempt is followed by the next one, four times as long after each: what failed for want of a free GPU
must not be given up before the evening is over."""


class AttemptHeldError(LedgerError):
    """Another process is at work on this attempt."""

    state_name = "AlreadyRunning"


class Ledger:
    """The ledger of one state folder; :meth:`open` makes it.

    Whoever evaluates a checkpoint that was seen takes an attempt by :meth:`begin`, has nothing to do when that has
    ended, holds it (:meth:`held`) while at work, says how far it is (:meth:`advance`), and records what came of it
    (:meth:`finish`). One that leaves it open without a result, because a host is away or an approval is missing, is
    started again by the watch. Runs that the watch or an event starts are told ``identity`` and ``attempt`` (the
    ``number`` of :meth:`begin`), so that none of them makes an attempt of its own.
    """

    def __init__(self, file: LedgerFile, clock: Callable[[], float]) -> None:
        self._file, self._clock = file, clock

    @classmethod
    def open(cls, state: Path | None = None, *, clock: Callable[[], float] = time.time) -> Self:
        """The ledger of the folder ``state``, made when there is none.

        Raises :class:`LedgerError` when the file is none, is damaged, or was written by a later version.
        """
        return cls(LedgerFile((state or state_dir()) / FILE), clock)

    # --- checkpoints

    def see(self, checkpoint: Seen) -> bool:
        """Record a checkpoint that a look found whole; True when it is new.

        A known one keeps when it was first seen; where it lies now is corrected, and it is not gone.
        """
        with self._file.transaction() as connection:
            new = connection.execute(
                "INSERT INTO checkpoints (identity, host, path, step, seen, written) "
                "VALUES (:identity, :host, :path, :step, :seen, :written) ON CONFLICT DO NOTHING",
                vars(checkpoint),
            )
            if not new.rowcount:
                connection.execute(
                    "UPDATE checkpoints SET host = :host, path = :path, gone = NULL WHERE identity = :identity",
                    vars(checkpoint),
                )
        return bool(new.rowcount)

    def miss(self, identity: str) -> bool:
        """Record that a checkpoint does not lie there any more; True when that is new."""
        with self._file.transaction() as connection:
            missed = connection.execute(
                "UPDATE checkpoints SET gone = :now WHERE identity = :identity AND gone IS NULL",
                {"identity": identity, "now": self._clock()},
            )
        return bool(missed.rowcount)

    def checkpoint(self, identity: str) -> Seen | None:
        """One checkpoint; None when it was never seen."""
        found = self._file.rows("SELECT * FROM checkpoints WHERE identity = :identity", {"identity": identity})
        return _seen(found[0]) if found else None

    def checkpoints(self, limit: int | None = None) -> list[Seen]:
        """Those seen, the newest first."""
        found = self._file.rows(
            "SELECT * FROM checkpoints ORDER BY coalesce(written, seen) DESC, step DESC, seen DESC, number DESC "
            "LIMIT :most",
            {"most": _most(limit)},
        )
        return list(map(_seen, found))

    # --- attempts

    def due(self, suite: str, *, limit: int) -> list[Seen]:
        """What has to be evaluated in ``suite`` now, the newest first.

        That is every checkpoint that still lies where it was seen and has no attempt that counts: none, or a failed
        one that may be repeated (:data:`MOST_ATTEMPTS`, :data:`RETRY_SECONDS`). Of more than ``limit``, the older are
        superseded here and now, and so is one in whose place a newer lies: after days without a watch, and behind a
        trainer that is faster than the evaluations, the newest numbers come first and the queue stays short.
        """
        rules = {"suite": suite, "most": MOST_ATTEMPTS, "retry": RETRY_SECONDS, "now": self._clock()}
        if not self._file.rows(_ANYTHING_NEW, rules) and not self._file.rows(_WAITING, rules):
            return []
        due: list[Seen] = []
        with self._file.transaction() as connection:
            for statement in _QUEUE_WHAT_IS_NEW:
                connection.execute(statement, rules)
            for checkpoint in map(_seen, connection.execute(_WAITING, rules).fetchall()):
                if _is_overwritten(connection, checkpoint):
                    self._supersede(connection, checkpoint, suite, "a newer checkpoint lies in its place")
                elif len(due) >= limit:
                    self._supersede(connection, checkpoint, suite, f"{limit} newer ones wait already")
                else:
                    due.append(checkpoint)
        return due

    def again(self, attempt: Attempt) -> float | None:
        """When a failed attempt is followed by the next one, where a watch asks its suite; None: not by itself."""
        if attempt.state != "failed" or attempt.number >= MOST_ATTEMPTS:
            return None
        later = any(other.number > attempt.number for other in self.attempts(attempt.identity, attempt.suite))
        checkpoint = self.checkpoint(attempt.identity)
        if later or checkpoint is None or checkpoint.gone is not None:
            return None
        return attempt.updated + RETRY_SECONDS * (1 << 2 * (attempt.number - 1))

    def queue(self, suite: str) -> list[Seen]:
        """What waits in ``suite`` for its turn, the newest first; as :meth:`due`, changing nothing."""
        rules = {"suite": suite, "most": MOST_ATTEMPTS, "retry": RETRY_SECONDS, "now": self._clock()}
        return list(map(_seen, self._file.rows(_WAITING, rules)))

    def begin(self, identity: str, suite: str, *, number: int | None = None, flow_run: str | None = None) -> Attempt:
        """The open attempt, else a new one; several callers at once get the same.

        With ``number`` that attempt and no other, also when it has ended: whoever was started for it and finds it
        ended has nothing to do. Raises :class:`LedgerError` for a checkpoint that was never seen, and for a number
        that does not follow on the last one.
        """
        with self._file.transaction() as connection:
            last = _last(connection, identity, suite)
            made = 0 if last is None else last.number
            if last is not None and last.is_open and number in (None, made):
                attempt = last
            elif number is not None and number <= made:
                attempt = _require(connection, identity, suite, number)
            elif number in (None, made + 1) and not (last is not None and last.is_open):
                attempt = self._new(connection, identity, suite, made + 1)
            else:
                raise LedgerError(f"attempt {number} at {identity} is asked for, and {made} were begun")
            if flow_run is None or not attempt.is_open:
                return attempt
            connection.execute(
                "UPDATE attempts SET flow_run = :flow_run, updated = :now "
                "WHERE identity = :identity AND suite = :suite AND number = :number",
                _key(attempt) | {"flow_run": flow_run, "now": self._clock()},
            )
            return _require(connection, identity, suite, attempt.number)

    def advance(
        self, attempt: Attempt, *, state: State | None = None, on: str | None = None, job: str | None = None
    ) -> Attempt:
        """Record how far an open attempt has come; what is None stays. The attempt as it is now.

        It never goes back, and one that has ended stays as it is.
        """
        if state is not None and state not in OPEN:
            raise LedgerError(f"{state} is a result: finish the attempt")
        with self._file.transaction() as connection:
            connection.execute(
                "UPDATE attempts SET state = CASE WHEN :state = 'relayed' THEN 'relayed' ELSE state END, "
                "host = coalesce(:on, host), job = coalesce(:job, job), updated = :now "
                "WHERE identity = :identity AND suite = :suite AND number = :number AND state IN ('seen', 'relayed')",
                _key(attempt) | {"state": state, "on": on, "job": job, "now": self._clock()},
            )
            return _require(connection, attempt.identity, attempt.suite, attempt.number)

    def postpone(self, attempt: Attempt, *, seconds: float, message: str) -> Attempt:
        """Record that the run of an open attempt ended without a result and starts again in ``seconds``."""
        now = self._clock()
        with self._file.transaction() as connection:
            connection.execute(
                "UPDATE attempts SET restarts = restarts + 1, not_before = :next, message = :message, updated = :now "
                "WHERE identity = :identity AND suite = :suite AND number = :number AND state IN ('seen', 'relayed')",
                _key(attempt) | {"next": now + seconds, "message": message, "now": now},
            )
            return _require(connection, attempt.identity, attempt.suite, attempt.number)

    def resume(self, attempt: Attempt) -> Attempt:
        """Record that the run of a postponed attempt was started again."""
        with self._file.transaction() as connection:
            connection.execute(
                "UPDATE attempts SET not_before = NULL, updated = :now "
                "WHERE identity = :identity AND suite = :suite AND number = :number AND state IN ('seen', 'relayed')",
                _key(attempt) | {"now": self._clock()},
            )
            return _require(connection, attempt.identity, attempt.suite, attempt.number)

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
        if state in OPEN:
            raise LedgerError(f"{state} is no result; one of {', '.join(set(get_args(State)) - set(OPEN))} is")
        low, high = ci95 or (None, None)
        values = {"state": state, "report": report, "tau": tau, "low": low, "high": high, "message": message}
        with self._file.transaction() as connection:
            _require(connection, attempt.identity, attempt.suite, attempt.number)
            recorded = connection.execute(
                "UPDATE attempts SET state = :state, report = :report, tau = :tau, low = :low, high = :high, "
                "message = :message, updated = :now "
                "WHERE identity = :identity AND suite = :suite AND number = :number AND state IN ('seen', 'relayed')",
                _key(attempt) | values | {"now": self._clock()},
            )
        return bool(recorded.rowcount)

    def attempts(
        self, identity: str | None = None, suite: str | None = None, limit: int | None = None
    ) -> list[Attempt]:
        """The attempts, the one that changed last first; of one checkpoint, one suite, or both."""
        found = self._file.rows(
            "SELECT * FROM attempts WHERE (:identity IS NULL OR identity = :identity) "
            "AND (:suite IS NULL OR suite = :suite) ORDER BY updated DESC, number DESC, rowid DESC LIMIT :most",
            {"identity": identity, "suite": suite, "most": _most(limit)},
        )
        return list(map(_attempt, found))

    def open_attempts(self, suite: str | None = None) -> list[Attempt]:
        """Those without a result, of ``suite`` or of all, the one that changed last first."""
        found = self._file.rows(
            "SELECT * FROM attempts INDEXED BY attempts_open WHERE state IN ('seen', 'relayed') "
            "AND (:suite IS NULL OR suite = :suite) ORDER BY updated DESC, rowid DESC",
            {"suite": suite},
        )
        return list(map(_attempt, found))

    def counts(self, suite: str, *, begun: bool = False) -> dict[State, int]:
        """How many checkpoints are in which state, by the last attempt at each; without one they are ``seen``.

        ``begun`` leaves those without one out: not every suite is asked of every checkpoint.
        """
        found = self._file.rows(
            "SELECT coalesce(state, 'seen') AS state, count(*) AS number FROM checkpoints LEFT JOIN attempts AS last "
            "ON (last.identity, last.suite) = (checkpoints.identity, :suite) AND last.number = (SELECT max(number) "
            "FROM attempts WHERE identity = checkpoints.identity AND suite = :suite) "
            "WHERE state IS NOT NULL OR NOT :begun GROUP BY 1",
            {"suite": suite, "begun": begun},
        )
        numbers = {row["state"]: row["number"] for row in found}
        return {state: numbers.get(state, 0) for state in get_args(State)}

    @contextmanager
    def held(self, attempt: Attempt) -> Iterator[None]:
        """Nobody else on this machine is at work on ``attempt`` in the block; it ends with the process, however.

        Raises :class:`AttemptHeldError` when somebody is.
        """
        descriptor = self._take(attempt)
        if descriptor is None:
            raise AttemptHeldError(
                f"attempt {attempt.number} at {attempt.identity} is at work in another process; its result comes from "
                "there, nothing needs to be done"
            )
        try:
            yield
        finally:
            self._lock(attempt).unlink(missing_ok=True)
            os.close(descriptor)

    def is_held(self, attempt: Attempt) -> bool:
        """Whether a process is at work on ``attempt``."""
        with suppress(AttemptHeldError), self.held(attempt):
            return False
        return True

    # --- nights

    def night(self, date: str, suite: str) -> dict[str, Any] | None:
        """What was recorded for the night of ``date`` (YYYY-MM-DD); None when nothing was."""
        found = self._file.rows(
            "SELECT content FROM nights WHERE date = :date AND suite = :suite", {"date": date, "suite": suite}
        )
        return json.loads(found[0]["content"]) if found else None

    def nights(self, suite: str, limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
        """Every night of a suite with its date, the last one first."""
        found = self._file.rows(
            "SELECT date, content FROM nights WHERE suite = :suite ORDER BY date DESC LIMIT :most",
            {"suite": suite, "most": _most(limit)},
        )
        return [(row["date"], json.loads(row["content"])) for row in found]

    def record_night(self, date: str, suite: str, content: Mapping[str, Any]) -> bool:
        """Record the night of ``date``, once: False when there is one already, which stays. ``content`` is JSON."""
        with self._file.transaction() as connection:
            recorded = connection.execute(
                "INSERT INTO nights (date, suite, content, recorded) VALUES (:date, :suite, :content, :now) "
                "ON CONFLICT DO NOTHING",
                {"date": date, "suite": suite, "content": json.dumps(content), "now": self._clock()},
            )
        return bool(recorded.rowcount)

    # --- watches

    def watch(self, source: str) -> Watch | None:
        """What is known of one watch; None when there never was one."""
        found = self._file.rows("SELECT * FROM watches WHERE source = :source", {"source": source})
        return Watch(**found[0]) if found else None

    def watches(self) -> list[Watch]:
        """Every watch, by its source."""
        return [Watch(**row) for row in self._file.rows("SELECT * FROM watches ORDER BY source", {})]

    def record_watch(self, watch: Watch) -> Watch:
        """Record a watch as it is now; ``since`` is kept while its state stays. The watch as it was recorded."""
        with self._file.transaction() as connection:
            row = connection.execute("SELECT * FROM watches WHERE source = ?", (watch.source,)).fetchone()
            same = row is not None and row["state"] == watch.state
            recorded = replace(watch, since=row["since"] if same else self._clock())
            connection.execute(
                "INSERT OR REPLACE INTO watches (source, state, request, looked, message, since) "
                "VALUES (:source, :state, :request, :looked, :message, :since)",
                vars(recorded),
            )
        return recorded

    def forget_watch(self, source: str) -> bool:
        """Forget a watch that was ended; True when there was one. Its checkpoints stay."""
        with self._file.transaction() as connection:
            connection.execute("DELETE FROM memories WHERE source = ?", (source,))
            return bool(connection.execute("DELETE FROM watches WHERE source = ?", (source,)).rowcount)

    def memory(self, source: str) -> dict[str, Any]:
        """What the watch of ``source`` remembers from look to look; empty when nothing."""
        found = self._file.rows("SELECT content FROM memories WHERE source = :source", {"source": source})
        return json.loads(found[0]["content"]) if found else {}

    def remember(self, source: str, content: Mapping[str, Any]) -> None:
        """Keep ``content``, which is JSON, as :meth:`memory`."""
        with self._file.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO memories (source, content) VALUES (?, ?)", (source, json.dumps(content))
            )

    # --- inside

    def _new(self, connection: sqlite3.Connection, identity: str, suite: str, number: int) -> Attempt:
        if connection.execute("SELECT 1 FROM checkpoints WHERE identity = ?", (identity,)).fetchone() is None:
            raise LedgerError(f"no checkpoint {identity} was ever seen: record it before it is evaluated")
        connection.execute(
            "INSERT INTO attempts (identity, suite, number, state, updated) VALUES (?, ?, ?, 'seen', ?)",
            (identity, suite, number, self._clock()),
        )
        connection.execute("DELETE FROM queue WHERE suite = ? AND identity = ?", (suite, identity))
        return _require(connection, identity, suite, number)

    def _supersede(self, connection: sqlite3.Connection, checkpoint: Seen, suite: str, why: str) -> None:
        last = _last(connection, checkpoint.identity, suite)
        superseded = self._new(connection, checkpoint.identity, suite, 1 if last is None else last.number + 1)
        connection.execute(
            "UPDATE attempts SET state = 'superseded', message = :why "
            "WHERE identity = :identity AND suite = :suite AND number = :number",
            _key(superseded) | {"why": why},
        )

    def _take(self, attempt: Attempt) -> int | None:
        """The locked file of ``attempt``; None when another process has it."""
        while True:
            descriptor = os.open(self._lock(attempt), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # one that was unlinked while it was opened is nobody's
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            os.close(descriptor)

    def _lock(self, attempt: Attempt) -> Path:
        folder = self._file.path.parent / "attempts"
        folder.mkdir(mode=0o700, exist_ok=True)
        key = json.dumps([attempt.identity, attempt.suite, attempt.number])
        return folder / hashlib.sha256(key.encode()).hexdigest()[:32]


_SEEN = tuple(field.name for field in fields(Seen))
_ANYTHING_NEW = """
SELECT 1 FROM checkpoints WHERE number > coalesce((SELECT queued_to FROM suites WHERE suite = :suite), 0) LIMIT 1
"""
_QUEUE_WHAT_IS_NEW = (
    """
    INSERT INTO queue (suite, identity) SELECT :suite, identity FROM checkpoints
    WHERE number > coalesce((SELECT queued_to FROM suites WHERE suite = :suite), 0)
    AND NOT EXISTS (SELECT 1 FROM attempts WHERE identity = checkpoints.identity AND suite = :suite)
    """,
    "INSERT OR REPLACE INTO suites (suite, queued_to) SELECT :suite, coalesce(max(number), 0) FROM checkpoints",
)
_WAITING = """
WITH waiting AS (
    SELECT identity FROM queue WHERE suite = :suite
    UNION SELECT identity FROM attempts AS last WHERE suite = :suite AND state = 'failed' AND number < :most
    AND updated + :retry * (1 << (2 * (number - 1))) <= :now
    AND NOT EXISTS (SELECT 1 FROM attempts WHERE identity = last.identity AND suite = :suite AND number > last.number)
)
SELECT checkpoints.* FROM waiting JOIN checkpoints USING (identity) WHERE gone IS NULL
ORDER BY coalesce(written, seen) DESC, step DESC, seen DESC, number DESC
"""


def _is_overwritten(connection: sqlite3.Connection, checkpoint: Seen) -> bool:
    newest = connection.execute(
        "SELECT identity FROM checkpoints WHERE host = :host AND path = :path AND gone IS NULL "
        "ORDER BY coalesce(written, seen) DESC, seen DESC, number DESC LIMIT 1",
        vars(checkpoint),
    ).fetchone()
    return bool(newest["identity"] != checkpoint.identity)


def _last(connection: sqlite3.Connection, identity: str, suite: str) -> Attempt | None:
    row = connection.execute(
        "SELECT * FROM attempts WHERE identity = ? AND suite = ? ORDER BY number DESC LIMIT 1", (identity, suite)
    ).fetchone()
    return None if row is None else _attempt(row)


def _require(connection: sqlite3.Connection, identity: str, suite: str, number: int) -> Attempt:
    row = connection.execute(
        "SELECT * FROM attempts WHERE identity = ? AND suite = ? AND number = ?", (identity, suite, number)
    ).fetchone()
    if row is None:
        raise LedgerError(f"the ledger has no attempt {number} at {identity}: was its file exchanged?")
    return _attempt(row)


def _seen(row: sqlite3.Row) -> Seen:
    return Seen(**{name: row[name] for name in _SEEN})


def _attempt(row: sqlite3.Row) -> Attempt:
    fields = dict(row)
    on, low, high = fields.pop("host"), fields.pop("low"), fields.pop("high")
    return Attempt(**fields, on=on, ci95=None if low is None else (low, high))


def _key(attempt: Attempt) -> dict[str, Any]:
    return {"identity": attempt.identity, "suite": attempt.suite, "number": attempt.number}


def _most(limit: int | None) -> int:
    return -1 if limit is None else limit
