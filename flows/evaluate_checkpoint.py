"""One checkpoint: relayed to the inference host, measured there, its report brought home and published.

Only order stands here. Every step is a function of ``tasks``; what a Prefect run adds is history and a page to look at.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from dflash.render import to_markdown
from dflash.report import Report
from flows.awaiting import awaiting_approval, require
from flows.named_states import named_states
from flows.prefect_home import forget_agent
from flows.terminal import shown_progress
from tasks import evaluation
from tasks.approvals import Approved
from tasks.errors import Refused
from tasks.evaluation import Suite, Workspace
from tasks.inventory import Host, Location
from tasks.relay import RelayResult, relay
from tasks.ssh import Connector


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: the report, and the folder on this machine that holds it."""

    report: Report
    folder: Path


@flow(name="evaluate-checkpoint", flow_run_name="evaluate {source} on {on}")
@named_states
def evaluate_checkpoint(source: str, on: str, suite: Suite, reports: Path, hosts: Path | None = None) -> Evaluation:
    """Evaluate the checkpoint ``source`` (HOST:/path) on the inference host ``on``; the report lands below ``reports``.

    Raises ``Refused`` when the source is protected and reading it is not approved; the run is then in the state
    ``AwaitingApproval`` and nothing has happened.
    """
    forget_agent()
    connector = Connector.load(hosts)
    location, host = connector.inventory.location(source), connector.inventory.host(on)
    plan = evaluation.plan_evaluation([location], host)
    try:
        approved = require(connector.store, plan)
        relayed = relay_step(connector, approved, location, host)
    except Refused as refusal:
        return awaiting_approval(connector.store, plan, refusal)  # type: ignore[no-any-return]  # Prefect resolves it
    workspace = evaluate_step(connector, host, relayed, suite)
    report = fetch_step(connector, host, workspace, relayed, reports / workspace.path.name)
    publish(report, location)
    return Evaluation(report, reports / workspace.path.name)


@task(name="relay", task_run_name="relay {source}", cache_policy=NO_CACHE)
def relay_step(connector: Connector, approved: Approved | None, source: Location, host: Host) -> RelayResult:
    """Stream what the evaluation needs of the checkpoint into the host's cache."""
    destination = evaluation.checkpoint_place(host, source)
    approval = None if approved is None else approved.read
    with shown_progress(str(source)) as progress:
        return relay(connector, approval, source, destination, evaluation.DRAFTER, progress=progress)


@task(name="evaluate", task_run_name="evaluate on {host.name}", cache_policy=NO_CACHE)
def evaluate_step(connector: Connector, host: Host, relayed: RelayResult, suite: Suite) -> Workspace:
    """Run ``dflash evaluate`` there; its progress is this run's log and goes to stderr as it comes."""
    log = get_run_logger()

    def show(line: str) -> None:
        log.info(line)
        print(f"  {host.name} │ {line}", file=sys.stderr, flush=True)

    checkpoint, name = PurePosixPath(relayed.destination.path), PurePosixPath(relayed.source.path).stem
    return evaluation.run_evaluation(connector, host, checkpoint, suite, name=name, on_line=show)


@task(name="fetch report", cache_policy=NO_CACHE)
def fetch_step(
    connector: Connector, host: Host, workspace: Workspace, relayed: RelayResult, destination: Path
) -> Report:
    """Copy the report here, with the way its checkpoint came."""
    return evaluation.fetch_report(connector, host, workspace, relayed, destination)


def publish(report: Report, source: Location) -> None:
    """Leave the numbers as Prefect artifacts: a table that answers at a glance, and the whole report."""
    key = re.sub("[^a-z0-9]+", "-", str(source).lower()).strip("-")
    create_table_artifact(acceptance_table(report), key=f"acceptance-{key}", description=report.headline())
    create_markdown_artifact(to_markdown(report), key=f"report-{key}", description=str(source))


def acceptance_table(report: Report) -> list[dict[str, str]]:
    """One row a drafter: its pooled τ with interval, τ macro, rounds and tokens."""
    measured = {"checkpoint": report.metrics, "reference": report.reference_metrics}
    return [
        {
            "drafter": name,
            "τ": f"{metrics.tau.pooled:.3f}" if report.valid else "not valid",
            "95 %": "–" if metrics.tau.ci95 is None else f"{metrics.tau.ci95[0]:.3f} … {metrics.tau.ci95[1]:.3f}",
            "τ macro": f"{metrics.tau.macro:.3f}",
            "rounds": str(metrics.rounds),
            "tokens": str(metrics.tokens),
        }
        for name, metrics in measured.items()
        if metrics is not None
    ]
