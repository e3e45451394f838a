"""How much of its database a Prefect server needs for runs, and what two weeks of them come to."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flows.pruning import Retention

CHECKPOINTS_A_DAY = 96
"""A checkpoint every quarter of an hour, more than any training of this size saves."""
OTHER_RUNS_A_DAY = 12
"""The night's comparison with its four evaluations, and what people start."""
RUNS_A_DAY = CHECKPOINTS_A_DAY + OTHER_RUNS_A_DAY
TWO_WEEKS = 14
EVENTS = ("events", "event_resources")


@dataclass(frozen=True)
class Size:
    """Bytes of a server's database, indexes included: of events, which are forgotten first, and of all else."""

    events: int
    rest: int

    @classmethod
    def of(cls, file: Path) -> "Size":
        """What is in use in ``file``, whichever of SQLite's files it is in just now."""
        with closing(sqlite3.connect(file, timeout=60)) as database:
            owners = dict(database.execute("SELECT name, tbl_name FROM sqlite_master"))
            pages = database.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name").fetchall()
        of_events = sum(size for name, size in pages if owners.get(name) in EVENTS)
        return cls(of_events, sum(size for _, size in pages) - of_events)

    def __sub__(self, before: "Size") -> "Size":
        return Size(self.events - before.events, self.rest - before.rest)

    def megabytes(self, runs: float, of: int) -> float:
        """What ``runs`` come to, when ``of`` of them took this, and nothing is forgotten."""
        return (self.events + self.rest) / max(1, of) * runs / 1e6

    def in_two_weeks(self, of: int) -> float:
        """The database's megabytes after two weeks, when ``of`` runs took this: events are kept for some days alone."""
        days = min(TWO_WEEKS, Retention().events)
        return (self.rest * TWO_WEEKS + self.events * days) / max(1, of) * RUNS_A_DAY / 1e6

    def told(self, of: int) -> str:
        """Both as a line, when ``of`` runs took this."""
        thousand, unpruned = self.megabytes(1000, of), self.megabytes(RUNS_A_DAY * TWO_WEEKS, of)
        events = Size(self.events, 0).megabytes(1000, of)
        return (
            f"{thousand:.1f} MB per 1 000 runs, {events:.1f} of them events, measured over {of}; in two weeks "
            f"{self.in_two_weeks(of):.0f} MB, and {unpruned:.0f} MB if no event were forgotten"
        )
