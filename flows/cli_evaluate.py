"""``dflash-ops evaluate``: checkpoints are relayed, measured on an inference host, and their reports brought home."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.command_line import leaves
from dflash.errors import DFlashError, NotValidError, UsageError
from dflash.prompts import default_prompts, read_prompts, require_thinking
from flows.prefect_home import configure_prefect, serving
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, console, listing, show_plan
from flows.workers import sharing_hosts
from tasks.actions import escape
from tasks.evaluation import Suite, inference_host, plan_evaluation
from tasks.inventory import Host, Location
from tasks.ssh import Connector
from tasks.state import state_dir

if TYPE_CHECKING:
    from flows.evaluate_checkpoint import Evaluation


DEPLOYMENT = "evaluate-checkpoint/dflash"


class NotServingError(DFlashError):
    """There is no queue that an evaluation could be put into."""

    state_name = "PrefectUnreachable"


@leaves("an evaluation that has begun on the host goes on there; the same command finds it and fetches its report")
def evaluate(
    checkpoints: Annotated[list[str], typer.Argument(metavar="HOST:PATH…", help="Checkpoints, asked for in one plan.")],
    on: Annotated[str | None, typer.Option(help="Inference host; needed when there are several.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines; the shipped coding10 by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion.")] = 256,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Take the first N prompts.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end of sequence.")] = False,
    thinking: Annotated[str | None, typer.Option(help="on or off; needed when prompts are chats.")] = None,
    reports: Annotated[Path | None, typer.Option(help="Where reports go; else the state folder's reports/.")] = None,
    queue: Annotated[
        bool,
        typer.Option("--queue", help="Hand them to dflash-ops serve, whose inference hosts share them; no waiting."),
    ] = False,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure checkpoints on the inference host; exit code 3 when a check says a number must not be believed."""
    if thinking not in (None, "on", "off"):
        raise UsageError(f"--thinking {escape(str(thinking))!r} is neither on nor off")
    chosen = prompts or default_prompts()
    require_thinking(read_prompts(chosen, limit=num_prompts).prompts, None if thinking is None else thinking == "on")
    connector = Connector.load(hosts)
    shared = sharing_hosts(connector.inventory) if queue and on is None else ()
    host = shared[0] if shared else inference_host(connector.inventory, on)
    sources = [connector.inventory.location(checkpoint) for checkpoint in checkpoints]
    needed = plan_evaluation(sources, host)
    if plan:
        show_plan(connector.store, needed, f"{', '.join(checkpoints)} to {host.name}", as_json=as_json)
        return
    suite = Suite(
        prompts=chosen,
        max_new_tokens=max_new_tokens,
        num_prompts=num_prompts,
        ignore_eos=ignore_eos,
        thinking=thinking,
    )
    if needed is not None:
        connector.store.require(needed, asked_here())
    where = reports or state_dir() / "reports"
    if queue:
        show_queued(queue_evaluations(sources, on, suite, where, hosts), as_json=as_json)
        return
    done = run_evaluations(sources, host, suite, where, hosts)
    if as_json:
        typer.echo(json.dumps([{"folder": str(one.folder), **json.loads(one.report.to_json())} for one in done]))
    else:
        show_evaluations(done)
    if not all(one.report.valid for one in done):
        raise typer.Exit(NotValidError.exit_code)


def run_evaluations(
    sources: Sequence[Location], host: Host, suite: Suite, reports: Path, hosts: Path | None
) -> "list[Evaluation]":
    """Run the flow once for every source, one after the other."""
    configure_prefect()
    from flows.evaluate_checkpoint import evaluate_checkpoint

    return [evaluate_checkpoint(str(source), host.name, suite, reports, hosts) for source in sources]


def queue_evaluations(
    sources: Sequence[Location], on: str | None, suite: Suite, reports: Path, hosts: Path | None
) -> dict[str, str]:
    """Make a run of each source in the queue of ``dflash-ops serve``; the runs' ids by source.

    Raises :class:`NotServingError` when there is no queue.
    """
    configure_prefect()
    api = os.environ.get("PREFECT_API_URL") or serving()
    if api is None:
        raise NotServingError(
            "no queue is there: start dflash-ops serve, or leave --queue out and name a host with --on"
        )
    import httpx
    from prefect.deployments import run_deployment
    from prefect.exceptions import PrefectException
    from prefect.settings import PREFECT_API_URL, temporary_settings

    parameters: dict[str, Any] = {
        "on": on,
        "suite": asdict(suite) | {"prompts": str(suite.prompts.absolute())},
        "reports": str(reports.absolute()),
    }
    if hosts is not None:  # else the one that is served
        parameters["hosts"] = str(hosts.absolute())
    runs: dict[str, str] = {}
    try:
        with temporary_settings({PREFECT_API_URL: api}):
            for source in sources:
                run: Any = run_deployment(
                    DEPLOYMENT, parameters=parameters | {"source": str(source)}, timeout=0, as_subflow=False
                )
                runs[str(source)] = str(run.id)
    except (PrefectException, httpx.HTTPError, ValueError) as error:
        raise NotServingError(
            f"{api} took {len(runs)} of {len(sources)} evaluations ({error or type(error).__name__}): see whether "
            "dflash-ops serve runs there"
        ) from error
    return runs


def show_queued(runs: dict[str, str], *, as_json: bool) -> None:
    """Print which run does what."""
    if as_json:
        typer.echo(json.dumps(runs))
        return
    for source, run in runs.items():
        typer.echo(f"{escape(source)}: queued as run {run}; see dflash-ops status")


def show_evaluations(done: "Sequence[Evaluation]") -> None:
    """Print step → τ with its interval beside the reference drafter's, which numbers not to believe, and the reports.

    The last two columns are the top-1 streak (drafts only) as measured, and as the training logged it.
    """
    from dflash.renderings import PAGE

    reasons: list[str] = []
    table = listing("step", "τ", "95 %", "ref. τ", "differs by", "95 %", "streak", "logged", folded="τ")
    for report in (one.report for one in done):
        step = "–" if report.checkpoint.step is None else str(report.checkpoint.step)
        if not report.valid:
            table.add_row(step, "[bold red]not valid[/]")
            reasons.append(f"step {step}: {escape(report.headline())}")
            continue
        reference, compared = report.reference_metrics, report.comparison
        table.add_row(
            step,
            f"{report.metrics.tau.pooled:.3f}",
            _interval(report.metrics.tau.ci95),
            "–" if reference is None else f"{reference.tau.pooled:.3f}",
            "–" if compared is None else f"{compared.difference:+.3f}",
            "–" if compared is None else _interval(compared.ci95),
            f"{report.metrics.streak['1']:.2f}",
            "–" if report.training is None or report.training.streak1 is None else f"{report.training.streak1:.2f}",
        )
    console().print(table)
    for reason in reasons:
        typer.echo(reason)
    for one in done:
        page = one.folder / PAGE
        typer.echo(page if page.exists() else one.folder / "report.md")


def _interval(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"{ends[0]:.2f} … {ends[1]:.2f}"
