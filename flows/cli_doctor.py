"""``dflash-ops guard setup`` and ``guard doctor``: what a host needs to refuse by itself, and whether it does."""

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from dflash.command_line import NOTHING_CHANGED, leaves
from dflash.errors import DFlashError
from flows.terminal import (
    AsJson,
    HostsFile,
    PlanOnly,
    asked_here,
    console,
    listing,
    open_store,
    say_progress,
    show_plan,
    typed,
)
from tasks.actions import escape
from tasks.doctor_sessions import full_plan
from tasks.finding import Finding
from tasks.guard_doctor import diagnose
from tasks.guard_setup import setup_text
from tasks.ssh import Connector

HostName = Annotated[str, typer.Argument(metavar="HOST", help="A protected host of hosts.yaml.")]
COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


class HostOpenError(DFlashError):
    """A host let something through that only an approval may open."""


def setup(name: HostName, hosts: HostsFile = None) -> None:
    """Print what to do on HOST, by hand, so that it refuses what was not approved; nothing is done from here."""
    known, _ = open_store(hosts)
    typer.echo(setup_text(known, known.host(name)))


@leaves(NOTHING_CHANGED)
def doctor(
    name: HostName,
    full: Annotated[bool, typer.Option("--full", help="Also what needs a session; asks for an approval.")] = False,
    gate: Annotated[str | None, typer.Option(help="Path of the gate there, when setup put it elsewhere.")] = None,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Try to get into HOST in ways that must fail; exit code 0 only when all of them do."""
    connector = Connector.load(hosts)
    host = connector.inventory.host(name)
    with typed():
        wanted = full_plan(host, gate=gate) if full else None
    if plan:
        if wanted is None and not as_json:
            typer.echo(f"{host.name}: keys and certificates are offered that must be refused; none could log in")
        else:
            show_plan(connector.store, wanted, f"the doctor of {host.name}", as_json=as_json)
        return
    approved = None if wanted is None else connector.store.require(wanted, asked_here())
    found = diagnose(connector, host, full=approved, gate=gate, progress=_tell)
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in found]))
    else:
        console().print(_table(found))
    if open_ways := [finding.name for finding in found if finding.status == "fail"]:
        raise HostOpenError(f"{host.name} does not refuse what it must: {', '.join(open_ways)}")


def _table(found: list[Finding]) -> Table:
    table = listing("", "tried", "found", folded="found")
    for finding in found:
        status = Text(finding.status.upper(), style=COLOURS[finding.status])
        table.add_row(status, Text(escape(finding.name)), Text(escape(f"{finding.measured}: {finding.explanation}")))
    return table


def _tell(row: str) -> None:
    say_progress(f"  {row} …")
