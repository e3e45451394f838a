"""Every night: the newest checkpoint beside the best so far, the reference and the one of a day before.

Only order stands here; what is compared and what it means is in ``tasks``. The night is named by its date: a run that
comes twice, late, or after days without this machine finds it done or does it once.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run as this_run

from dflash.errors import DFlashError, UsageError
from dflash.report import Report
from flows import events, pages
from flows.awaiting import awaiting_approval, require
from flows.evaluate_checkpoint import Evaluation, evaluate_checkpoint
from flows.named_states import named_states
from flows.notify import NotNotifiedError, notify
from flows.prefect_home import forget_agent
from tasks import nights
from tasks.errors import Refused
from tasks.evaluation import Suite
from tasks.evaluation_jobs import GpuBusyError, ServedModelSlowError
from tasks.inventory import Inventory
from tasks.ledger import AttemptHeldError, Ledger, Seen
from tasks.night_record import Night
from tasks.night_run import Around, run_night
from tasks.night_text import message
from tasks.night_time import DEFAULT_CRON, DEFAULT_ZONE, NightTime
from tasks.nights import NightHeldError
from tasks.plans import Plan
from tasks.ssh import ConnectionFailed, Connector
from tasks.state import state_dir
from tasks.watch import source_of

AGAIN_AFTER = (300.0, 900.0, 1800.0, 3600.0)
"""Seconds until a night that a host kept from its comparison tries again: it is lost otherwise."""
PASSING = (ConnectionFailed, AttemptHeldError, GpuBusyError, ServedModelSlowError)


def _run_name() -> str:
    asked = this_run.parameters
    try:
        return f"compare the night of {NightTime.of_cron(asked['cron'], asked['timezone']).date(_now())}"
    except UsageError:  # the flow itself says what is wrong with them
        return "compare a night"


@flow(name="nightly-comparison", flow_run_name=_run_name)
@named_states
def nightly_comparison(
    on: str | None = None,
    suite: Suite | None = None,
    reports: Path | None = None,
    hosts: Path | None = None,
    cron: str = DEFAULT_CRON,
    timezone: str = DEFAULT_ZONE,
    again_after: Sequence[float] = AGAIN_AFTER,
    attended: bool = False,
) -> Night:
    """Compare the night that was last due by ``cron`` in ``timezone``; one that is recorded is returned as it is.

    On the inference host ``on``, else the first of hosts.yaml; in ``suite``, else the shipped nightly prompts. A host
    that does not answer or is busy is tried again after each of ``again_after`` seconds. Unless somebody ``attended``
    the run, a failure is told as the verdict is.

    Raises ``Refused`` when reading a checkpoint is not approved, with the run in ``AwaitingApproval``; what an
    evaluation raises, with no night recorded, so that the next run of that night does it; and ``NotNotifiedError``
    when the night is recorded and somebody could not be told.
    """
    forget_agent()
    now = _now()
    date = NightTime.of_cron(cron, timezone).date(now)
    connector = Connector.load(hosts)
    chosen, host = suite or nights.nightly_suite(), nights.night_host(connector.inventory, on)
    folder = reports or state_dir() / "reports"
    asked: list[Plan | None] = []

    def approve(plan: Plan | None) -> None:
        asked.append(plan)
        require(connector.store, plan)

    def evaluate(checkpoint: Seen) -> tuple[Report, Path]:
        source = source_of(checkpoint)
        done = _again(
            again_after,
            lambda: evaluate_checkpoint(source, host.name, chosen, folder, hosts, identity=checkpoint.identity),
        )
        return done.report, done.folder

    around = Around(
        connector.inventory,
        connector.audit,
        Ledger.open(),
        approve,
        evaluate,
        lambda night: _tell(connector.inventory, chosen.digest(), folder, night),
    )
    try:
        return run_night(around, chosen, host, date, now=now)
    except Refused as refusal:
        _tell_of_failure(connector.inventory, date, refusal, attended)
        return awaiting_approval(connector.store, next(iter(asked), None), refusal)  # type: ignore[no-any-return]  # Prefect resolves it
    except (NightHeldError, NotNotifiedError):
        raise
    except DFlashError as failure:
        _tell_of_failure(connector.inventory, date, failure, attended)
        raise


def _again(after: Sequence[float], evaluate: Callable[[], Evaluation]) -> Evaluation:
    """What ``evaluate`` gives, tried again when a host kept it from that."""
    for seconds in after:
        try:
            return evaluate()
        except PASSING as failure:
            get_run_logger().warning("%s; tried again in %.0f s", failure, seconds)
            time.sleep(seconds)
    return evaluate()


def _now() -> float:
    """When this run is for: its start, or its schedule when it was begun a moment early."""
    scheduled = this_run.scheduled_start_time
    return max(time.time(), 0.0 if scheduled is None else scheduled.timestamp())


def _tell(inventory: Inventory, suite: str, reports: Path, night: Night) -> None:
    _publish(night, suite, reports)
    notify(inventory, *message(night))


def _tell_of_failure(inventory: Inventory, date: str, failure: DFlashError, attended: bool) -> None:
    """Have a night without a verdict noticed; that this could not be told either stands in the run's log."""
    if attended:
        return
    body = f"{failure}\n\nNothing is recorded for this night: 'dflash-ops compare-nightly' does it while it lasts."
    try:
        notify(inventory, f"DFlash {date}: no comparison ({failure.state_name})", body)
    except NotNotifiedError as also:
        get_run_logger().error("%s", also)


def _publish(night: Night, suite: str, reports: Path) -> None:
    get_run_logger().info("%s", night.verdict)
    pages.leave_night(night)
    try:
        pages.leave_trend(reports)
    except DFlashError as error:
        # the night is what it is without a drawing of the days before
        get_run_logger().warning("the trend was not drawn: %s", error)
    newest: dict[str, Any] = {} if night.newest is None else {"newest": night.newest.identity}
    events.emit(
        events.NIGHT_COMPARED,
        night.date,
        suite=suite,
        outcome=night.outcome,
        alarm=night.alarm,
        verdict=night.verdict,
        **newest,
    )
