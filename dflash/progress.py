"""Phases of a command on stderr: a bar at a terminal, now and then a plain line where the output is piped or logged."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dflash.command_line import is_quiet

Report = Callable[[int, int], None]
"""``report(done, total)``: how far the phase is, in whatever unit it counts."""
PLAIN_SECONDS = 5.0
BAR_WIDTH = 20


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
    def phase(self, key: str, title: str, *, unit: str = "", waits: bool = True) -> Iterator[Report]:
        """Run one phase, which counts ``unit``; its seconds are kept under ``key``.

        :attr:`between` is called in one that ``waits``.
        """
        self._console.print(f"[{len(self.timings) + 1}/{self._total}] {title} …")
        started = time.monotonic()
        with self._bar(unit) if self._console.is_terminal else self._lines(unit, started) as report:
            yield self._waiting(report) if waits else report
        self.timings[key] = round(time.monotonic() - started, 3)

    def _waiting(self, report: Report) -> Report:
        def waiting(done: int, total: int) -> None:
            if self.between is not None:
                self.between()
            report(done, total)

        return waiting

    @contextmanager
    def _bar(self, unit: str) -> Iterator[Report]:
        columns = (BarColumn(BAR_WIDTH), _Counted(unit), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=None)

            def report(done: int, total: int) -> None:
                if done < progress.tasks[0].completed:  # it counts something else from here on
                    progress.reset(task)
                progress.update(task, completed=done, total=total)

            yield report

    @contextmanager
    def _lines(self, unit: str, started: float) -> Iterator[Report]:
        said = started
        first: tuple[float, int] | None = None
        before = 0

        def report(done: int, total: int) -> None:
            nonlocal said, first, before
            now = time.monotonic()
            if first is None or done < before:
                # what was there at first tells nothing of the rate, and what counts down counts something else
                first = now, done
            before = done
            if now - said >= PLAIN_SECONDS:
                said = now
                pace = _pace(now - first[0], done - first[1], total - done)
                self._console.print(f"      {_counted(done, total, unit)} after {now - started:.0f} s{pace}")

        yield report


class _Counted(ProgressColumn):
    """How many of how many, and how many a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        rate = "" if not task.speed else f", {show_rate(task.speed)}"
        return Text(f"{_counted(int(task.completed), int(task.total), self._unit)}{rate}")


def _pace(seconds: float, done: int, left: int) -> str:
    if seconds <= 0 or done <= 0:
        return ""
    rate = done / seconds
    return f", {show_rate(rate)}, {show_seconds(max(0, left) / rate)} left"


def _counted(done: int, total: int, unit: str) -> str:
    return f"{done}/{total} {unit}".rstrip()


def show_rate(rate: float) -> str:
    """So many a second, or so many seconds for one: ``30/s``, ``4.2/s``, ``3.1 s each``."""
    if rate < 1:
        return f"{show_seconds(1 / rate)} each"
    return f"{rate:.0f}/s" if rate >= 10 else f"{rate:.1f}/s"


def show_seconds(seconds: float) -> str:
    """A time that is left, as exact as anybody wants it: ``8 s``, ``12 min``, ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 5 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
