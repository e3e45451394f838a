"""One look at what is watched, now, and at a job that was launched; the loop of ``dflash-ops serve`` does it a minute.

It can run beside that loop: both write the same ledger, and whatever is due is started once.
"""

from dataclasses import dataclass
from pathlib import Path

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from dflash.errors import DFlashError
from flows.awaiting import awaiting_approval, require
from flows.named_states import named_states
from flows.prefect_home import forget_agent
from flows.watching import Looks, Watching, default_suite, sources
from tasks import inventory, jobs
from tasks.actions import escape
from tasks.approvals import Approved
from tasks.audit import show_time
from tasks.errors import Refused
from tasks.evaluation import Suite
from tasks.inventory import Host
from tasks.jobs import JobStatus
from tasks.ledger import Watch
from tasks.ssh import Connector
from tasks.watcher import WATCHING


class NothingToWatchError(DFlashError):
    """No source was named, and hosts.yaml names no checkpoints of a training host."""

    state_name = "NothingToWatch"


class StandsStillError(DFlashError):
    """A watch could not look; ``state_name`` is that of what kept it from it."""

    def __init__(self, message: str, state_name: str = "LookFailed") -> None:
        super().__init__(message, state_name)
        self.state_name = state_name  # type: ignore[misc]  # one class for what any watch can meet

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class WatchedTraining:
    """How each watch stands, and the job that was asked for."""

    watches: tuple[Watch, ...]
    job: JobStatus | None = None


@flow(name="watch-training")
@named_states
def watch_training(
    source: str | None = None,
    job: str | None = None,
    suite: Suite | None = None,
    on: str | None = None,
    reports: Path | None = None,
    hosts: Path | None = None,
) -> WatchedTraining:
    """Look once into ``source`` (HOST:/folder; every training host's checkpoints without one) and start what is due.

    ``job`` is one on the host of ``source``: how it is stands in the result. Raises :class:`NothingToWatchError`,
    ``Refused`` where looking at the job is not approved, and, when all else was done, :class:`StandsStillError` for the
    first watch that could not look.
    """
    forget_agent()
    known = inventory.load(hosts)
    wanted = (source,) if source is not None else sources(known)
    if not wanted:
        raise NothingToWatchError("no training host of hosts.yaml has checkpoints: name what to watch, as HOST:/folder")
    asked = suite or default_suite()
    watches = tuple(look_step(Watching(one, asked, on=on, reports=reports, hosts=hosts)) for one in wanted)
    found = None
    if job is not None:
        connector, host = Connector.load(hosts), known.location(wanted[0]).host
        if host is None:
            raise NothingToWatchError(f"{escape(wanted[0])} is on this machine, which has no jobs: name HOST:/folder")
        plan = jobs.plan_observation(host, job)
        try:
            found = job_step(connector, host, require(connector.store, plan), job)
        except Refused as refusal:
            return awaiting_approval(connector.store, plan, refusal)  # type: ignore[no-any-return]
    publish(watches, found)
    if stopped := [watch for watch in watches if watch.state != WATCHING]:
        raise StandsStillError(stopped[0].message, stopped[0].state)
    return WatchedTraining(watches, found)


@task(name="look", task_run_name="look into {watching.source}", cache_policy=NO_CACHE)
def look_step(watching: Watching) -> Watch:
    """One look, with all that follows from it."""
    return Looks(watching).look_or_raise()


@task(name="job", task_run_name="look at {job}", cache_policy=NO_CACHE)
def job_step(connector: Connector, host: Host, approved: Approved | None, job: str) -> JobStatus:
    """How the job is; a host that does not answer makes it unreachable and nothing worse."""
    return jobs.status(connector, host, None if approved is None else approved.read, job)


def publish(watches: tuple[Watch, ...], job: JobStatus | None) -> None:
    """Leave what was seen as a table, a row each."""
    rows = [
        {
            "what": escape(watch.source),
            "state": watch.state,
            "last look": "never" if watch.looked is None else show_time(watch.looked),
            "message": watch.message,
        }
        for watch in watches
    ]
    if job is not None:
        when = "" if job.started is None else f"started {show_time(job.started)}"
        rows.append({"what": f"job {job.job}", "state": job.state, "last look": when, "message": job.message})
    create_table_artifact(rows, key="watch-training", description="What is watched, and how it stands")
