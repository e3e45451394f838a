"""The nights on this machine: what of the ledger a night's comparison is made of, and what it leaves there.

Everything a night decides by lies in the ledger and in the reports it names; a night that was recorded stays as it is,
so that a run which comes twice, or again after a crash, finds its work done.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dflash.compare import comparison_key, reference_totals, totals
from dflash.errors import DFlashError, UsageError
from dflash.prompts import PromptFileError, default_prompts, read_prompts
from dflash.report import Report, ReportError, read_report
from tasks.audit import Audit, select
from tasks.evaluation import Suite, plan_evaluation
from tasks.inventory import Host, Inventory, Location
from tasks.ledger import Ledger, Seen
from tasks.night_record import Drafter, Night
from tasks.nightly import Choice, Measured, choose
from tasks.plans import Plan
from tasks.state import state_dir
from tasks.watch import source_of

NIGHTLY_PROMPTS = "nightly.jsonl"
PROMOTION_PROMPTS = "promotion.jsonl"
EXPORTED = "export"
"""The audit log's event of a drafter that was written on a host to be served."""
PROMOTED = "promotion"
"""The audit log's event of a promotion; it names the prompts that confirmed it."""


class NightHeldError(DFlashError):
    """Another process is at work on this night's comparison."""

    state_name = "AlreadyRunning"


class SpentSuiteError(UsageError):
    """A suite that drafters were chosen by cannot confirm a choice, nor the other way round."""

    state_name = "SpentSuite"


def shipped(name: str) -> Path:
    """The prompt file ``name`` of those that are shipped. Raises :class:`~dflash.prompts.PromptFileError`."""
    file = default_prompts().with_name(name)
    if not file.is_file():
        raise PromptFileError(f"the shipped prompts {file} are not there; install again, or name others")
    return file


def nightly_suite() -> Suite:
    """What is asked on a night when nobody says otherwise."""
    return Suite(prompts=shipped(NIGHTLY_PROMPTS), thinking="off")


def night_host(inventory: Inventory, on: str | None) -> Host:
    """The inference host called ``on``, else the first of hosts.yaml: always the same, so that nights compare.

    Raises ``UsageError`` when there is none.
    """
    hosts = [host for host in inventory.hosts.values() if host.role == "inference"]
    wanted = None if on is None else inventory.host(on)
    if wanted is not None and wanted not in hosts:
        raise UsageError(f"{wanted.name} is a {wanted.role} host; evaluations run on an inference host")
    if not hosts:
        raise UsageError("hosts.yaml has no inference host: add the one that evaluates")
    return wanted or hosts[0]


def require_unspent(suite: Suite, audit: Audit) -> None:
    """Raise :class:`SpentSuiteError` when the prompts of ``suite`` have confirmed a promotion.

    Drafters that are chosen by them would be confirmed by what they were chosen by.
    """
    sha256 = read_prompts(suite.prompts).sha256
    if any(entry.get("prompts") == sha256 for entry in select(audit.entries(), event=PROMOTED)):
        raise SpentSuiteError(
            f"{suite.prompts} has confirmed a promotion, so nothing may be chosen by it; compare nights on other "
            f"prompts, as the shipped {NIGHTLY_PROMPTS}"
        )


def known_measurements(ledger: Ledger, suite: str) -> tuple[dict[str, Measured], list[str]]:
    """The valid reports in ``suite`` by the checkpoint's identity, and what is to be said of those that are gone."""
    found: dict[str, Measured] = {}
    unreadable = 0
    for attempt in ledger.attempts(suite=suite):
        if attempt.state != "evaluated" or attempt.report is None or attempt.identity in found:
            continue
        checkpoint = ledger.checkpoint(attempt.identity)
        try:
            report = read_report(Path(attempt.report) / "report.json")
        except ReportError:
            unreadable += 1
            continue
        if checkpoint is not None and report.valid:
            found[attempt.identity] = measurement(checkpoint, report, Path(attempt.report))
    notes = [f"{unreadable} earlier reports cannot be read any more and are not compared"] if unreadable else []
    return found, notes


@dataclass(frozen=True)
class Preparation:
    """What a night begins with."""

    measured: dict[str, Measured]
    notes: list[str]
    choice: Choice
    sources: tuple[Location, ...]
    """The checkpoints that have to be evaluated first."""
    plan: Plan | None
    """What must be approved for that; None when nothing must be."""


def prepare(inventory: Inventory, ledger: Ledger, suite: str, host: Host, *, now: float) -> Preparation:
    """Choose the night's checkpoints at ``now``, and say what of them has to be evaluated on ``host``."""
    measured, notes = known_measurements(ledger, suite)
    choice = choose(ledger.checkpoints(), measured, now=now)
    chosen = [one for one in (choice.newest, choice.day_before) if one is not None]
    sources = [inventory.location(source_of(one)) for one in chosen if one.identity not in measured]
    plan = plan_evaluation(sources, host) if sources else None
    return Preparation(measured, notes, choice, tuple(sources), plan)


def measurement(checkpoint: Seen, report: Report, folder: Path) -> Measured:
    """What a comparison needs of a valid ``report`` about ``checkpoint``, which lies in ``folder``."""
    return Measured(
        identity=checkpoint.identity,
        step=checkpoint.step if checkpoint.step is not None else report.checkpoint.step,
        source=source_of(checkpoint),
        report=str(folder),
        key=comparison_key(report),
        tau=report.metrics.tau.pooled,
        ci95=report.metrics.tau.ci95,
        totals=totals(report),
        reference=reference_totals(report),
        prompts_sha256=report.settings.prompts_sha256,
    )


def previous_nights(ledger: Ledger, suite: str, date: str) -> list[Night]:
    """The nights of ``suite`` before ``date``, the last one first; a later version's are passed over."""
    found = []
    for before, content in ledger.nights(suite):
        if before < date:
            try:
                found.append(Night.model_validate(content))
            except ValidationError:
                continue
    return found


def recorded_night(ledger: Ledger, suite: str, date: str) -> Night | None:
    """The night of ``date`` when it was recorded."""
    content = ledger.night(date, suite)
    return None if content is None else Night.model_validate(content)


def without_comparison(date: str, choice: Choice, previous: list[Night], measured: dict[str, Measured]) -> Night | None:
    """The night on which there is nothing to compare: no checkpoint, or none since the last comparison; else None."""
    newest = choice.newest
    if newest is None:
        return Night(
            date=date,
            outcome="no checkpoint",
            verdict="no checkpoint: none was seen yet, or all are gone; see 'dflash-ops status' for the watches",
        )
    last = next((night for night in previous if night.outcome in ("compared", "not valid")), None)
    if last is None or last.newest is None or last.newest.identity != newest.identity:
        return None
    if last.outcome == "compared" and newest.identity not in measured:
        return None  # its report is gone
    drafter = last.newest
    verdict = f"nothing new: {drafter.name} is still the newest, as on {last.date}"
    return Night(date=date, outcome="nothing new", verdict=verdict, newest=drafter)


def not_valid(date: str, checkpoint: Seen, report: Report, folder: Path) -> Night:
    """The night whose newest checkpoint has a report that must not be believed."""
    source = source_of(checkpoint)
    drafter = Drafter(identity=checkpoint.identity, step=checkpoint.step, source=source, report=str(folder))
    return Night(
        date=date,
        outcome="not valid",
        verdict=f"not valid: {', '.join(report.invalid_because)}; {drafter.name} was compared with nothing",
        newest=drafter,
    )


@contextmanager
def held(date: str, suite: str, state: Path | None = None) -> Iterator[None]:
    """Nobody else on this machine is at work on the night of ``date`` in the block; it ends with the process.

    Raises :class:`NightHeldError` when somebody is.
    """
    folder = (state or state_dir()) / "nights"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / hashlib.sha256(suite.encode()).hexdigest()[:32]
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NightHeldError(
                f"the comparison of {date} is at work in another process; its verdict comes from there, nothing needs "
                "to be done"
            ) from None
        yield
    finally:
        os.close(descriptor)
