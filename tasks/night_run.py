"""One night's comparison in its order: done once a date, told, then recorded.

What it needs of others is handed in: who evaluates a checkpoint, who approves what is read for it, who is told.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash.errors import DFlashError
from dflash.report import Report
from tasks import nights
from tasks.audit import Audit
from tasks.evaluation import EvaluationError, Suite
from tasks.inventory import Host, Inventory
from tasks.ledger import Ledger, Seen
from tasks.night_record import Night
from tasks.nightly import Choice, Measured, compare_night
from tasks.plans import Plan

Evaluate = Callable[[Seen], tuple[Report, Path]]
"""Gives a checkpoint's report in the night's suite, and the folder it lies in."""


@dataclass(frozen=True)
class Around:
    """What surrounds a night."""

    inventory: Inventory
    audit: Audit
    ledger: Ledger
    approve: Callable[[Plan | None], object]
    """Raises ``Refused`` when the plan needs an approval that is not there."""
    evaluate: Evaluate
    tell: Callable[[Night], None]
    """Raises a :class:`DFlashError` when somebody could not be told; the night counts nevertheless."""


def run_night(around: Around, suite: Suite, host: Host, date: str, *, now: float) -> Night:
    """The night of ``date``; one that was recorded before is returned as it is.

    Raises :class:`~tasks.nights.NightHeldError` when another process is at work on it,
    :class:`~tasks.nights.SpentSuiteError` for prompts that have confirmed a promotion, and what is raised around it. A
    night whose newest checkpoint could not be evaluated is not recorded: its next run does it.
    """
    digest = suite.digest()
    with nights.held(date, digest):
        known = nights.recorded_night(around.ledger, digest, date)
        if known is not None:
            return known
        nights.require_unspent(suite, around.audit)
        night = _compare(around, digest, host, date, now)
        # told first: a crash between the two tells it twice, the other way round it would never be told
        try:
            around.tell(night)
        except DFlashError:
            _record(around, digest, night)
            raise
        _record(around, digest, night)
        return night


def _record(around: Around, digest: str, night: Night) -> None:
    around.ledger.record_night(night.date, digest, night.model_dump(mode="json"))


def _compare(around: Around, digest: str, host: Host, date: str, now: float) -> Night:
    begun = nights.prepare(around.inventory, around.ledger, digest, host, now=now)
    measured, choice = begun.measured, begun.choice
    previous = nights.previous_nights(around.ledger, digest, date)
    nothing = nights.without_comparison(date, choice, previous, measured)
    if nothing is not None:
        return nothing
    assert choice.newest is not None
    around.approve(begun.plan)
    newest = measured.get(choice.newest.identity)
    if newest is None:
        report, folder = around.evaluate(choice.newest)
        if not report.valid:
            return nights.not_valid(date, choice.newest, report, folder)
        newest = nights.measurement(choice.newest, report, folder)
    notes = begun.notes + _measure_day_before(around, choice, newest, measured)
    night = compare_night(
        date,
        newest,
        list(measured.values()),
        day_before=None if choice.day_before is None else choice.day_before.identity,
        previous=previous,
    )
    return night.model_copy(update={"notes": (*night.notes, *notes)})


def _measure_day_before(around: Around, choice: Choice, newest: Measured, measured: dict[str, Measured]) -> list[str]:
    """Add the checkpoint of a day before to what is ``measured``; what is to be said when that could not be."""
    before = choice.day_before
    if before is None or (before.identity in measured and measured[before.identity].key == newest.key):
        return []
    try:
        report, folder = around.evaluate(before)
    except EvaluationError as error:
        return [f"the checkpoint of a day before could not be evaluated: {error}"]
    if not report.valid:
        return [f"the checkpoint of a day before is not valid: {', '.join(report.invalid_because)}"]
    measured[before.identity] = nights.measurement(before, report, folder)
    return []
