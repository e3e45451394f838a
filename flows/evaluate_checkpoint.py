"""One checkpoint: relayed to an inference host, measured there as a job, its report brought home and published.

Only order stands here. Every step is a function of ``tasks``; what a Prefect run adds is history and a page to look at.
A run that is started again goes on where the last one stopped: the ledger names the attempt, the host has its job.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.runtime import flow_run as this_run

from dflash.errors import UsageError
from dflash.records import NotACheckpointError
from dflash.report import Report, read_report
from flows import events, pages, workers
from flows.awaiting import awaiting_approval, require
from flows.named_states import named_states
from flows.prefect_home import forget_agent
from flows.terminal import say_progress, shown_progress
from tasks import evaluating, evaluation
from tasks.actions import escape
from tasks.approvals import Approved
from tasks.channel import GateError, RequestFailed
from tasks.ends import is_missing
from tasks.errors import Refused
from tasks.evaluating import Case
from tasks.evaluation import EvaluationError, Suite
from tasks.evaluation_jobs import Prepared, is_away
from tasks.inventory import Host, Location
from tasks.ledger import Ledger
from tasks.relay import RelayResult, relay
from tasks.ssh import ConnectionFailed, Connector
from tasks.state import state_dir
from tasks.transfer import TransferError
from tasks.watch import CheckpointGoneError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: the report, and the folder on this machine that holds it."""

    report: Report
    folder: Path
    steps: Mapping[str, float] = field(default_factory=dict)
    """Seconds that relay, evaluation and fetching took; empty for one that had its result before."""


def _run_name() -> str:
    asked = this_run.parameters
    return f"evaluate {pages.title(asked['source'])}" + (f" on {asked['on']}" if asked.get("on") else "")


@flow(name="evaluate-checkpoint", flow_run_name=_run_name)
@named_states
def evaluate_checkpoint(
    source: str,
    on: str | None = None,
    suite: Suite | None = None,
    reports: Path | None = None,
    hosts: Path | None = None,
    identity: str | None = None,
    attempt: int | None = None,
    not_on: Sequence[str] = (),
) -> Evaluation:
    """Evaluate the checkpoint ``source`` (HOST:/path) in ``suite``; the report lands below ``reports``.

    On the inference host ``on``, else on that of the worker that runs this, else on the only one. ``identity`` and
    ``attempt`` say which content was seen there and which attempt at it this is; without them it is what lies there
    now, and the attempt that is open or the next. ``not_on`` are hosts that went away with its job.

    Raises ``Refused`` when the source is protected and reading it is not approved; the run is then in the state
    ``AwaitingApproval`` and nothing has happened. A host that does not answer ends the run in ``HostUnreachable`` and
    ends nothing else: the attempt stays open, and its next run finds the job.
    """
    forget_agent()
    if suite is None:
        raise UsageError("no suite is named: say which prompts, as in {'prompts': 'prompts/nightly.jsonl'}")
    connector = Connector.load(hosts)
    location, host = connector.inventory.location(source), evaluation.inference_host(connector.inventory, on)
    plan = evaluation.plan_evaluation([location], host)
    asked = _Asked(location, host, suite, reports or state_dir() / "reports", identity, attempt, tuple(not_on))
    run = _Run(connector, Ledger.open(), asked)
    try:
        return run.evaluate()
    except Refused as refusal:
        return awaiting_approval(connector.store, plan, refusal)  # type: ignore[no-any-return]  # Prefect resolves it
    except (ConnectionFailed, TransferError, GateError) as error:
        if not is_away(connector, host):
            raise
        if workers.is_shared(on):
            run.hand_on()
        raise ConnectionFailed(f"{host.name} went away: {error}") from error


@dataclass(frozen=True)
class _Asked:
    source: Location
    host: Host
    suite: Suite
    reports: Path
    identity: str | None
    attempt: int | None
    not_on: tuple[str, ...]


class _Run:
    """The order of one run."""

    def __init__(self, connector: Connector, ledger: Ledger, asked: _Asked) -> None:
        self.connector, self.ledger, self.asked = connector, ledger, asked
        self.steps: dict[str, float] = {}
        self.case: Case | None = None

    def evaluate(self) -> Evaluation:
        asked = self.asked
        with ExitStack() as held:
            case, prepared = None, None
            if asked.identity is not None:
                case = self._opened(held, asked.identity, asked.attempt)
                if not case.attempt.is_open:
                    return already(case)
                place = evaluating.host_of_job(case, asked.host, asked.not_on)
                prepared = None if place is None or case.job is None else Prepared.kept(case.job)
            if prepared is None:
                prepared = Prepared.of(self._relay())
                if case is None:
                    evaluating.see(self.ledger, asked.source, prepared)
                    case = self._opened(held, prepared.identity, asked.attempt)
                evaluating.required_identity(case, prepared)
                place = evaluating.host_of_job(case, asked.host, asked.not_on)
            assert case is not None
            return self._measure(case, place or asked.host, prepared)

    def hand_on(self) -> None:
        """Give the checkpoint to another host, and wait until this one is back, so that it takes no other meanwhile."""
        host, log = self.asked.host, get_run_logger()
        successor = workers.hand_on(_flow_run(), self.asked.not_on, host)
        if self.case is not None:
            evaluating.give_to(self.case, str(successor.id))
        log.warning("%s does not answer: handed on as %s", host.name, successor.name)
        evaluating.wait_for(self.connector, host, is_away)
        if self.case is not None and evaluating.end_leftover(self.case, host):
            log.info("the job that was left on %s was asked to end", host.name)

    def _opened(self, held: ExitStack, identity: str, number: int | None) -> Case:
        opened = evaluating.opened(
            self.connector, self.ledger, self.asked.suite, identity, number=number, flow_run=str(_flow_run().id)
        )
        self.case = held.enter_context(opened)
        return self.case

    def _relay(self) -> RelayResult:
        asked = self.asked
        approved = require(self.connector.store, evaluation.plan_evaluation([asked.source], asked.host))
        try:
            with self._timed("relay"):
                return relay_step(self.connector, approved, asked.source, asked.host)
        except RequestFailed as error:
            if not is_missing(error):
                raise
            if asked.identity is None:
                raise NotACheckpointError(f"{escape(str(asked.source))} is not there: is the path right?") from error
            self.ledger.miss(asked.identity)
            raise CheckpointGoneError(
                f"{asked.source} is not there any more: it was deleted before it was read, so it gets no number; keep "
                "checkpoints for longer, or evaluate fewer"
            ) from error

    def _measure(self, case: Case, place: Host, prepared: Prepared) -> Evaluation:
        with self._timed("evaluate"):
            case = self.case = evaluate_step(case, place, prepared)
        with self._timed("fetch"):
            report, folder = fetch_step(case, place, self.asked.reports)
        if evaluating.record(case, report, folder):
            pages.leave_evaluation(report, str(self.asked.source))
            tell(case, report, folder)
        return Evaluation(report, folder, self.steps)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.steps[step] = round(time.monotonic() - begun, 3)


@task(name="relay", task_run_name="relay {source}", cache_policy=NO_CACHE)
def relay_step(connector: Connector, approved: Approved | None, source: Location, host: Host) -> RelayResult:
    """Stream what the evaluation needs of the checkpoint into the host's cache."""
    destination = evaluation.checkpoint_place(host, source)
    approval = None if approved is None else approved.read
    with shown_progress(str(source)) as progress:
        return relay(connector, approval, source, destination, evaluation.DRAFTER, progress=progress)


@task(name="evaluate", task_run_name="evaluate on {host.name}", cache_policy=NO_CACHE)
def evaluate_step(case: Case, host: Host, prepared: Prepared) -> Case:
    """Have ``dflash evaluate`` run there; its progress is this run's log and goes to stderr as it comes."""
    log = get_run_logger()

    def show(line: str) -> None:
        log.info(line)
        say_progress(f"  {host.name} │ {line}")

    return evaluating.measure(case, host, prepared, show)


@task(name="fetch report", cache_policy=NO_CACHE)
def fetch_step(case: Case, host: Host, reports: Path) -> tuple[Report, Path]:
    """Copy the report here, with the way its checkpoint came."""
    return evaluating.bring_home(case, host, reports)


def already(case: Case) -> Evaluation:
    """The result that an attempt has got from an earlier run; raises what it was when it was none."""
    attempt = case.attempt
    if attempt.report is None:
        raise EvaluationError(
            f"attempt {attempt.number} at this checkpoint ended before as {attempt.state} "
            f"({attempt.message or 'no word why'}); ask for it anew without an attempt"
        )
    folder = Path(attempt.report)
    return Evaluation(read_report(folder / "report.json"), folder)


def tell(case: Case, report: Report, folder: Path) -> None:
    """Have everybody who waits for numbers know that there is one."""
    attempt = case.attempt
    events.emit(
        events.EVALUATION_FINISHED,
        attempt.identity,
        suite=attempt.suite,
        attempt=attempt.number,
        on=attempt.on,
        valid=report.valid,
        tau=report.metrics.tau.pooled if report.valid else None,
        step=report.checkpoint.step,
        headline=report.headline(),
        report=str(folder),
    )


def _flow_run() -> "FlowRun":
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run
