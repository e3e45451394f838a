"""One evaluation from the ledger's point of view: who is at work on it, where its job is, and what came of it.

An attempt begins once, is worked on by one process at a time, and gets one result. A process that dies leaves it open
with the name of its job and of the host that has it; the next one asks that host first.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from dflash.checkpoint_layout import step_in_name
from dflash.errors import UsageError
from dflash.report import Report
from tasks import changes, jobs
from tasks.actions import Signal
from tasks.channel import GateError, RequestFailed
from tasks.evaluation import EvaluationError, Suite, job_id, workspace
from tasks.evaluation_jobs import JobVanishedError, Prepared, fetch_report, find_or_start, follow, forget
from tasks.inventory import Host, Location, UnknownHostError
from tasks.ledger import MOST_ATTEMPTS, Attempt, Ledger, Seen
from tasks.ssh import ConnectionFailed, Connector


class CheckpointReplacedError(EvaluationError):
    """Another checkpoint lies where the one that was seen lay; it is seen by itself."""

    state_name = "CheckpointReplaced"


@dataclass(frozen=True)
class Case:
    """An attempt at a checkpoint in a suite, and what keeps others from it."""

    connector: Connector
    ledger: Ledger
    suite: Suite
    attempt: Attempt
    holding: ExitStack

    @property
    def job(self) -> str | None:
        """The id of its job, when one was begun."""
        return self.attempt.job


@contextmanager
def opened(
    connector: Connector,
    ledger: Ledger,
    suite: Suite,
    identity: str,
    *,
    number: int | None = None,
    flow_run: str | None = None,
) -> Iterator[Case]:
    """The open attempt at ``identity``, else the next one, or that with ``number``; nobody else is at work on it.

    Raises :class:`~tasks.ledger.AttemptHeldError` when somebody is, and what :meth:`Ledger.begin` raises.
    """
    attempt = ledger.begin(identity, suite.digest(), number=number, flow_run=flow_run)
    with ExitStack() as holding:
        holding.enter_context(ledger.held(attempt))
        # with what another process recorded between the two
        yield Case(connector, ledger, suite, ledger.advance(attempt), holding)


def see(ledger: Ledger, source: Location, prepared: Prepared) -> None:
    """Enter a checkpoint that somebody named into the ledger, which knows those that a watch saw."""
    if ledger.checkpoint(prepared.identity) is None:
        host = "" if source.host is None else source.host.name
        ledger.see(Seen(host, source.path, prepared.identity, step_in_name(source.path), time.time()))


def host_of_job(case: Case, own: Host, not_on: Collection[str] = ()) -> Host | None:
    """The host that has the job of ``case``, running or ended; None when no host that answers has it.

    ``not_on`` names hosts that went away with it: they are not asked again from elsewhere. Raises
    :class:`ConnectionFailed` when it is on ``own``, which does not answer.
    """
    attempt = case.attempt
    if attempt.on is None or attempt.job is None or (attempt.on != own.name and attempt.on in not_on):
        return None
    try:
        host = case.connector.inventory.host(attempt.on)
    except UnknownHostError:
        return None  # it is not in hosts.yaml any more
    found = jobs.status(case.connector, host, None, attempt.job)
    if found.state == "unreachable" and host == own:
        raise ConnectionFailed(f"{host.name}: {found.message}")
    return host if found.state in ("running", "exited") else None


def required_identity(case: Case, prepared: Prepared) -> None:
    """Raise :class:`CheckpointReplacedError`, and end the attempt, when another content arrived than the one seen."""
    if prepared.identity != case.attempt.identity:
        case.ledger.finish(case.attempt, "superseded", message="another checkpoint lies in its place")
        raise CheckpointReplacedError(
            f"{prepared.relay.source} is not the checkpoint any more that was seen there; the one that lies there now "
            "is found by the watch, or evaluate it by name"
        )


def measure(
    case: Case,
    host: Host,
    prepared: Prepared,
    on_line: Callable[[str], None],
    *,
    poll: float | None = None,
    patience: float | None = None,
) -> Case:
    """Have ``host`` evaluate the checkpoint and wait for it; the case as it is then, its job ended with a report.

    A job that is there already is followed, not started. One that vanished ends its attempt, and the next begins, as
    long as there may be another. Raises what :func:`~tasks.evaluation_jobs.follow` raises: an
    :class:`EvaluationError` has ended the attempt, anything else has left it open.
    """
    waits = {name: value for name, value in (("poll", poll), ("patience", patience)) if value is not None}
    while True:
        job = job_id(prepared.name, prepared.identity, case.attempt.suite, case.attempt.number)
        prepared.keep(job)
        case = replace(case, attempt=case.ledger.advance(case.attempt, state="relayed", on=host.name, job=job))
        try:
            if not find_or_start(case.connector, host, PurePosixPath(prepared.checkpoint), case.suite, job):
                on_line(f"{job} is there already and is followed")
            follow(case.connector, host, job, on_line, **waits)
            return case
        except JobVanishedError as vanished:
            _fail(case, vanished)
            if case.attempt.number >= MOST_ATTEMPTS:
                raise
            on_line(f"{vanished}; it is evaluated again")
            case = replace(case, attempt=_next(case))
        except EvaluationError as error:
            _fail(case, error)
            raise


def bring_home(case: Case, host: Host, reports: Path) -> tuple[Report, Path]:
    """The report of a case whose job has ended, and its folder below ``reports``.

    Raises what :func:`~tasks.evaluation_jobs.fetch_report` raises; a lost report has ended the attempt.
    """
    assert case.job is not None
    kept = Prepared.kept(case.job)
    folder = reports / case.job
    try:
        way = None if kept is None else kept.relay
        return fetch_report(case.connector, host, workspace(host, case.job), way, folder), folder
    except EvaluationError as error:
        _fail(case, error)
        raise


def record(case: Case, report: Report, folder: Path) -> bool:
    """Record the report as the attempt's result; False when it has one already."""
    tau = report.metrics.tau
    recorded = case.ledger.finish(
        case.attempt,
        "evaluated" if report.valid else "invalid",
        report=str(folder),
        tau=tau.pooled if report.valid else None,
        ci95=tau.ci95 if report.valid else None,
        message="" if report.valid else report.headline(),
    )
    if case.job is not None:
        forget(case.job)
    return recorded


def give_to(case: Case, flow_run: str) -> None:
    """Record that another run goes on with the attempt, when it is still open."""
    attempt = case.attempt
    case.ledger.begin(attempt.identity, attempt.suite, number=attempt.number, flow_run=flow_run)


def wait_for(connector: Connector, host: Host, away: Callable[[Connector, Host], bool], *, every: float = 5.0) -> None:
    """Return when ``host`` answers again, however long that takes."""
    while away(connector, host):
        time.sleep(every)


def end_leftover(case: Case, host: Host) -> bool:
    """Ask the job of ``case`` on ``host`` to end when it runs for nothing: its attempt is elsewhere, or has its result.

    Returns whether it was asked. To be called when ``host`` has come back after the case was handed on.
    """
    attempt = case.ledger.advance(case.attempt)
    if case.job is None or (attempt.is_open and attempt.on == host.name):
        return False
    return end_job(case.connector, host, case.job)


def end_job(connector: Connector, host: Host, job: str) -> bool:
    """Ask ``job`` on the inference host ``host`` to end; False when it does not run, or nobody could be asked."""
    try:
        if jobs.status(connector, host, None, job).state != "running":
            return False
        action = Signal(
            host=host.name, host_keys=host.fingerprints, jobs=jobs.jobs_folder(host), job=job, signal="TERM"
        )
        changes.signal(connector, host, None, action)
        return True
    except (RequestFailed, GateError, ConnectionFailed, UsageError):
        return False  # it has just ended, or the host is away


def _fail(case: Case, error: EvaluationError) -> None:
    case.ledger.finish(case.attempt, "failed", message=str(error))
    if case.job is not None:
        forget(case.job)


def _next(case: Case) -> Attempt:
    last = case.attempt
    following = case.ledger.begin(last.identity, last.suite, number=last.number + 1, flow_run=last.flow_run)
    case.holding.enter_context(case.ledger.held(following))
    return following
