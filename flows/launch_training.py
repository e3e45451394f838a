"""One training run, launched as a job of its own on its host; the run of this flow ends when the job has begun.

Only order stands here. The job is no child of it: whatever becomes of Prefect, of this machine or of the link, it goes
on, and launching it again finds it.
"""

from pathlib import Path

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from flows.awaiting import awaiting_approval, require
from flows.fenced import fenced
from flows.named_states import named_states
from flows.prefect_home import forget_agent
from tasks import launching
from tasks.actions import escape
from tasks.approvals import Approved
from tasks.errors import Refused
from tasks.launching import Launched, Prepared
from tasks.run_file import read_run
from tasks.ssh import Connector


@flow(name="launch-training", flow_run_name="launch {config}")
@named_states
def launch_training(
    config: str, on: str | None = None, attempt: int | None = None, hosts: Path | None = None
) -> Launched:
    """Launch what the ``run.yaml`` at ``config`` describes, on the host it names or ``on``; a job that is there stays.

    ``attempt`` replaces the one in the file. Raises ``Refused`` when the host is protected and this is not approved;
    the run is then in the state ``AwaitingApproval`` and nothing has happened.
    """
    forget_agent()
    connector = Connector.load(hosts)
    described = read_run(Path(config), attempt=attempt)
    prepared = launching.prepare(described, launching.run_host(connector.inventory, described, on))
    found = find_step(connector, prepared)
    if found is not None:
        return found
    try:
        launched = launch_step(connector, prepared, require(connector.store, prepared.plan))
    except Refused as refusal:
        return awaiting_approval(connector.store, prepared.plan, refusal)  # type: ignore[no-any-return]  # Prefect resolves it
    publish(prepared)
    return launched


@task(name="find", cache_policy=NO_CACHE)
def find_step(connector: Connector, prepared: Prepared) -> Launched | None:
    """Look whether the job is there, where looking is allowed."""
    return launching.find(connector, prepared)


@task(name="launch", cache_policy=NO_CACHE)
def launch_step(connector: Connector, prepared: Prepared, approved: Approved | None) -> Launched:
    """Send what the run needs and start it there."""
    return launching.launch(connector, prepared, approved)


def publish(prepared: Prepared) -> None:
    """Leave what was launched as a Prefect artifact, with the commands that look after it."""
    job, host, described = prepared.job, prepared.host.name, prepared.described
    argv = "\n".join(map(escape, described.run.command))
    digests = "\n".join(
        f"- {word}: `{file.sha256}`"
        for word, file in (("config", described.config), ("script", described.script))
        if file is not None
    )
    create_markdown_artifact(
        f"# {job} on {host}\n\n{fenced(argv)}\n{digests}\n\n"
        + fenced(f"dflash-ops jobs status {host} {job}\ndflash-ops jobs logs {host} {job} --follow"),
        key=f"launch-{''.join(c if c.isalnum() else '-' for c in job.lower())}",
        description=f"{job} on {host}",
    )
