"""Every night: the newest checkpoint beside the best so far, the reference and the one of a day before.

Only order stands here; what is compared and what it means is in ``tasks``. The night is named by its date: a run that
comes twice, late, or after days without this machine finds it done or does it once.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run as this_run

from dflash.errors import DFlashError
from flows import events
from flows.awaiting import awaiting_approval, require
from flows.evaluate_checkpoint import Evaluation, evaluate_checkpoint
from flows.named_states import named_states
from flows.notify import NotNotifiedError, notify
from flows.prefect_home import forget_agent
from tasks import nights
from tasks.errors import Refused
from tasks.evaluation import EvaluationError, Suite
from tasks.evaluation_jobs import GpuBusyError, ServedModelSlowError
from tasks.inventory import Host
from tasks.ledger import AttemptHeldError, Ledger, Seen
from tasks.night_record import Night
from tasks.night_text import message, page
from tasks.night_time import DEFAULT_CRON, DEFAULT_ZONE, NightTime
from tasks.nightly import Choice, Measured, compare_night
from tasks.nights import NightHeldError
from tasks.plans import Plan
from tasks.ssh import ConnectionFailed, Connector
from tasks.state import state_dir

AGAIN_AFTER = (300.0, 900.0, 1800.0, 3600.0)
"""Seconds until a night that a host kept from its comparison tries again: it is lost otherwise."""
PASSING = (ConnectionFailed, AttemptHeldError, GpuBusyError, ServedModelSlowError)


def _run_name() -> str:
    asked = this_run.parameters
    return f"compare the night of {_date(NightTime.of_cron(asked['cron'], asked['timezone']))}"


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
    date = _date(NightTime.of_cron(cron, timezone))
    connector = Connector.load(hosts)
    chosen = suite or nights.nightly_suite()
    night = _Night(
        connector, Ledger.open(), chosen, date, nights.night_host(connector.inventory, on), reports, hosts, again_after
    )
    try:
        with nights.held(date, chosen.digest()):
            return night.compared()
    except Refused as refusal:
        _tell_of_failure(connector, date, refusal, attended)
        return awaiting_approval(connector.store, night.plan, refusal)  # type: ignore[no-any-return]  # Prefect resolves it
    except (NightHeldError, NotNotifiedError):
        raise
    except DFlashError as failure:
        _tell_of_failure(connector, date, failure, attended)
        raise


class _Night:
    """The order of one night."""

    def __init__(
        self,
        connector: Connector,
        ledger: Ledger,
        suite: Suite,
        date: str,
        host: Host,
        reports: Path | None,
        hosts: Path | None,
        again_after: Sequence[float],
    ) -> None:
        self.connector, self.ledger, self.suite, self.date, self.host = connector, ledger, suite, date, host
        self.reports, self.hosts, self.again_after = reports or state_dir() / "reports", hosts, again_after
        self.digest = suite.digest()
        self.plan: Plan | None = None

    def compared(self) -> Night:
        """The night: recorded before, or compared, told and recorded now."""
        known = nights.recorded_night(self.ledger, self.digest, self.date)
        if known is not None:
            return known
        nights.require_unspent(self.suite, self.connector.audit)
        night = self._compare()
        # told first: a crash between the two tells it twice, the other way round it would never be told
        failure = _told(self.connector, night)
        self.ledger.record_night(self.date, self.digest, night.model_dump(mode="json"))
        _publish(night, self.digest)
        if failure is not None:
            raise failure
        return night

    def _compare(self) -> Night:
        begun = nights.prepare(self.connector.inventory, self.ledger, self.digest, self.host, now=time.time())
        measured, choice, self.plan = begun.measured, begun.choice, begun.plan
        previous = nights.previous_nights(self.ledger, self.digest, self.date)
        nothing = nights.without_comparison(self.date, choice, previous, measured)
        if nothing is not None:
            return nothing
        assert choice.newest is not None
        require(self.connector.store, self.plan)
        newest = measured.get(choice.newest.identity)
        if newest is None:
            done = self._evaluate(choice.newest)
            if not done.report.valid:
                return nights.not_valid(self.date, choice.newest, done.report, done.folder)
            newest = nights.measurement(choice.newest, done.report, done.folder)
        notes = begun.notes + self._measure_day_before(choice, newest, measured)
        night = compare_night(
            self.date,
            newest,
            list(measured.values()),
            day_before=None if choice.day_before is None else choice.day_before.identity,
            previous=previous,
        )
        return night.model_copy(update={"notes": (*night.notes, *notes)})

    def _measure_day_before(self, choice: Choice, newest: Measured, measured: dict[str, Measured]) -> list[str]:
        """Add the checkpoint of a day before to what is ``measured``; why that could not be."""
        before = choice.day_before
        if before is None or (before.identity in measured and measured[before.identity].key == newest.key):
            return []
        try:
            done = self._evaluate(before)
        except EvaluationError as error:
            return [f"the checkpoint of a day before could not be evaluated: {error}"]
        if not done.report.valid:
            return [f"the checkpoint of a day before is not valid: {', '.join(done.report.invalid_because)}"]
        measured[before.identity] = nights.measurement(before, done.report, done.folder)
        return []

    def _evaluate(self, checkpoint: Seen) -> Evaluation:
        for seconds in self.again_after:
            try:
                return self._evaluate_once(checkpoint)
            except PASSING as failure:
                get_run_logger().warning("%s; tried again in %.0f s", failure, seconds)
                time.sleep(seconds)
        return self._evaluate_once(checkpoint)

    def _evaluate_once(self, checkpoint: Seen) -> Evaluation:
        return evaluate_checkpoint(
            nights.location_of(checkpoint),
            self.host.name,
            self.suite,
            self.reports,
            self.hosts,
            identity=checkpoint.identity,
        )


def _date(when: NightTime) -> str:
    """The night that this run is for: that of its start, or of its schedule when it was begun a moment early."""
    scheduled = this_run.scheduled_start_time
    return when.date(max(time.time(), scheduled.timestamp() if scheduled is not None else 0.0))


def _told(connector: Connector, night: Night) -> NotNotifiedError | None:
    try:
        notify(connector.inventory, *message(night))
    except NotNotifiedError as failure:
        return failure
    return None


def _tell_of_failure(connector: Connector, date: str, failure: DFlashError, attended: bool) -> None:
    """Have a night without a verdict noticed; that the failure could not be told as well stands in the run's log."""
    if attended:
        return
    body = f"{failure}\n\nNothing is recorded for this night: 'dflash-ops compare-nightly' does it while it lasts."
    try:
        notify(connector.inventory, f"DFlash {date}: no comparison ({failure.state_name})", body)
    except NotNotifiedError as also:
        get_run_logger().error("%s", also)


def _publish(night: Night, suite: str) -> None:
    get_run_logger().info("%s", night.verdict)
    create_markdown_artifact(page(night), key="nightly-comparison", description=night.verdict)
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
