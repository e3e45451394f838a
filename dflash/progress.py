"""Phases of a command on stderr: a bar at a terminal, now and then a plain line where the output is piped or logged."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from dflash.command_line import is_quiet

Report = Callable[[int, int], None]
"""``report(done, total)``: how far the phase is, in whatever unit it counts."""
PLAIN_SECONDS = 5.0


class Phases:
    """Announces ``[k/total] title …``, unless all is to be quiet, and keeps the seconds of each in ``timings``."""

    def __init__(self, total: int) -> None:
        self.timings: dict[str, float] = {}
        self.between: Callable[[], None] | None = None
        """Called before each report of progress; whoever sets it can make the work wait there."""
        self._total = total
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=is_quiet())

    def say(self, text: str) -> None:
        """Print one line of the phase that runs."""
        self._console.print(f"      {text}")

    def forget_between(self) -> None:
        """Have nothing wait any more."""
        self.between = None

    @contextmanager
    def phase(self, key: str, title: str, *, waits: bool = True) -> Iterator[Report]:
        """Run one phase; its seconds are kept under ``key``. :attr:`between` is called in one that ``waits``."""
        self._console.print(f"[{len(self.timings) + 1}/{self._total}] {title} …")
        started = time.monotonic()
        with self._bar() if self._console.is_terminal else self._lines(started) as report:
            yield self._waiting(report) if waits else report
        self.timings[key] = round(time.monotonic() - started, 3)

    def _waiting(self, report: Report) -> Report:
        def waiting(done: int, total: int) -> None:
            if self.between is not None:
                self.between()
            report(done, total)

        return waiting

    @contextmanager
    def _bar(self) -> Iterator[Report]:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    @contextmanager
    def _lines(self, started: float) -> Iterator[Report]:
        last = started

        def report(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= PLAIN_SECONDS:
                last = now
                self._console.print(f"      {done}/{total} after {now - started:.0f} s")

        yield report
