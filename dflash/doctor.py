"""The doctor: a small measurement, made for what its checks say and not for its τ."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dflash.errors import one_line
from dflash.evaluate import PHASES, measure
from dflash.progress import Phases
from dflash.report import Check
from dflash.request import Request

_SHOWN = {"pass": ("pass", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}
_NOT_VERIFIED = ("not verified", "dim")


def examine(request: Request) -> list[Check]:
    """Measure ``request`` and return every check of it; writes no report (``request.output`` stays untouched).

    What cannot be measured at all is an error, and names the fault itself: a target of another class or with weights
    that are not its config's, tensors that are not the drafter's, a drafter of another target.
    """
    report, _ = measure(request, Phases(PHASES[request.mode]))
    return report.checks


def to_table(checks: Sequence[Check]) -> Table:
    """Name and status of each check and, stacked so that a narrow terminal holds it, value, limit and meaning."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("check", "status"):
        table.add_column(title, no_wrap=True)
    table.add_column("measured, limit; what it means", overflow="fold")
    for check in checks:
        status, style = _SHOWN.get(check.status, _NOT_VERIFIED)
        meaning = one_line(check.explanation.removeprefix("not verified: "))
        values = one_line(f"{_value(check.measured)}, limit {_value(check.limit)}")
        found = Text(meaning) if check.status == "skipped" else Text(f"{values}\n{meaning}")
        table.add_row(Text(one_line(check.name)), Text(status, style=style), found)
    return table


def verdict(checks: Sequence[Check]) -> str:
    """One line: what failed, else how many checks passed, warn, and are not verified."""
    failed = [check.name for check in checks if check.status == "fail"]
    if failed:
        return f"not valid: {', '.join(failed)}"
    counts = [
        (sum(check.status == status for check in checks), words)
        for status, words in (("pass", "passed"), ("warn", "warn"), ("skipped", "not verified"))
    ]
    return "nothing is wrong: " + ", ".join(f"{count} {words}" for count, words in counts if count)


def _value(value: float | int | str | None) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
