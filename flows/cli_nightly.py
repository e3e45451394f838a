"""``dflash-ops compare-nightly``: this night's comparison, by hand; the deployment does the same by itself."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from dflash.command_line import leaves
from dflash.errors import NotValidError, UsageError
from dflash.prompts import read_prompts, require_thinking
from flows.prefect_home import configure_prefect
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, console, listing, show_plan
from tasks import nights
from tasks.actions import escape
from tasks.evaluation import Suite
from tasks.ledger import Ledger
from tasks.night_time import DEFAULT_CRON, DEFAULT_ZONE, NightTime
from tasks.ssh import Connector

if TYPE_CHECKING:
    from tasks.night_record import Night


@leaves("the night is not recorded, evaluations that have begun go on on their host; the same command ends it")
def compare_nightly(
    on: Annotated[str | None, typer.Option(help="Inference host; else the first of hosts.yaml.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines; the shipped nightly prompts by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion.")] = 256,
    thinking: Annotated[str | None, typer.Option(help="on or off; off for the shipped prompts.")] = None,
    reports: Annotated[Path | None, typer.Option(help="Where reports go; else the state folder's reports/.")] = None,
    cron: Annotated[str, typer.Option(help="When a night is due, as the deployment has it.")] = DEFAULT_CRON,
    timezone: Annotated[str, typer.Option(help="The time zone of that.")] = DEFAULT_ZONE,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare the newest checkpoint with the best so far, the reference and the one of a day before, once a night.

    A night that was compared is shown as it was recorded. Exit code 3 when the newest checkpoint's report is not valid.
    """
    suite = _suite(prompts, max_new_tokens, thinking)
    connector = Connector.load(hosts)
    host = nights.night_host(connector.inventory, on)
    ledger, now = Ledger.open(), time.time()
    night = nights.recorded_night(ledger, suite.digest(), NightTime.of_cron(cron, timezone).date(now))
    if night is None:
        begun = nights.prepare(connector.inventory, ledger, suite.digest(), host, now=now)
        if plan:
            names = ", ".join(map(str, begun.sources)) or "what is measured already"
            show_plan(connector.store, begun.plan, f"{names} on {host.name}", as_json=as_json)
            return
        if begun.plan is not None:
            connector.store.require(begun.plan, asked_here())
        configure_prefect()
        from flows.nightly_comparison import nightly_comparison

        night = nightly_comparison(on, suite, reports, hosts, cron, timezone, again_after=(), attended=True)
    elif plan:
        show_plan(connector.store, None, f"the night of {night.date}, which is compared", as_json=as_json)
        return
    if as_json:
        typer.echo(night.model_dump_json())
    else:
        show_night(night)
    if night.outcome == "not valid":
        raise typer.Exit(NotValidError.exit_code)


def show_night(night: "Night") -> None:
    """Print a night: its verdict, the comparisons, what is to be noted."""
    typer.echo(f"{night.date}: {night.verdict}")
    if night.comparisons:
        table = listing("against", "its τ", "difference", "interval", "verdict", folded="against")
        for one in night.comparisons:
            name = one.kind if one.kind == "reference" else f"{one.kind}: {one.name}"
            interval = f"{one.interval[0]:+.3f} … {one.interval[1]:+.3f}"
            table.add_row(Text(name), f"{one.tau:.3f}", f"{one.difference:+.3f}", interval, one.verdict)
        console().print(table)
    for note in night.notes:
        typer.echo(f"note: {note}")
    if night.newest is not None and night.newest.report is not None:
        typer.echo(night.newest.report)


def _suite(prompts: Path | None, max_new_tokens: int, thinking: str | None) -> Suite:
    if thinking not in (None, "on", "off"):
        raise UsageError(f"--thinking {escape(str(thinking))!r} is neither on nor off")
    usual = nights.nightly_suite()
    if prompts is None:
        return replace(usual, max_new_tokens=max_new_tokens, thinking=thinking or usual.thinking)
    require_thinking(read_prompts(prompts).prompts, None if thinking is None else thinking == "on")
    return Suite(prompts=prompts, max_new_tokens=max_new_tokens, thinking=thinking)
