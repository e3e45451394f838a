"""``dflash-ops hosts``: what the inventory knows, and whether the machines are as it needs them."""

import json
from typing import Annotated

import typer
from rich.text import Text

from dflash.command_line import NOTHING_CHANGED, leaves
from dflash.errors import UsageError
from dflash.report import Check
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, console, listing, show_plan, waiting
from tasks import host_check, inventory
from tasks.errors import Refused
from tasks.facts import plan_facts
from tasks.inventory import Host
from tasks.quantities import show_rate
from tasks.ssh import Connector

hosts_app = typer.Typer(no_args_is_help=True, help="The machines in hosts.yaml.")


@hosts_app.callback()
def hosts() -> None:
    """The machines in hosts.yaml."""


@hosts_app.command("list")
def list_hosts(hosts: HostsFile = None, as_json: AsJson = False) -> None:
    """List the hosts, their addresses and which of them are protected."""
    known = list(inventory.load(hosts).hosts.values())
    if as_json:
        typer.echo(json.dumps([_row(host) for host in known], indent=2))
        return
    table = listing("host", "role", "address", "login", "keys", "limits", folded="limits")
    for host in known:
        addresses = "\n".join(f"{address}:{port}" for address, port in host.endpoints)
        names = "\n".join([host.name, *(f"alias {alias.name}" for alias in host.aliases)])
        limits = f"protected, {show_rate(host.read_limit)}" if host.protected else "none"
        table.add_row(*map(Text, (names, host.role, addresses, host.user, str(len(host.all_host_keys)), limits)))
    console().print(table)


@hosts_app.command()
@leaves(NOTHING_CHANGED)
def check(
    host: Annotated[str | None, typer.Argument(metavar="[HOST]", help="Else every host of hosts.yaml.")] = None,
    kernel: Annotated[bool, typer.Option("--kernel", help="Also try that fla's kernels load; half a minute.")] = False,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Ask each host what it is and has, and say what is wrong; exit code 1 when something has to be mended.

    A protected host is asked under an approval only, one for each time; the others are asked meanwhile.
    """
    connector = Connector.load(hosts)
    chosen = list(connector.inventory.hosts.values()) if host is None else [connector.inventory.host(host)]
    if plan and len(chosen) > 1:
        raise UsageError("name the host whose plan is to be shown")
    found: dict[str, tuple[Check, ...]] = {}
    refusals: list[Refused] = []
    for one in chosen:
        asked = host_check.check_questions(one, kernel=kernel)
        needed = plan_facts(one, asked)
        if plan:
            show_plan(connector.store, needed, f"what {one.name} is and has", as_json=as_json)
            return
        try:
            approved = None if needed is None else connector.store.require(needed, asked_here())
            with waiting(f"asking {one.name} what it is and has"):
                found[one.name] = host_check.check_host(connector, one, approved, asked)
        except Refused as refusal:
            refusals.append(refusal)
    if as_json:
        shown = {name: [check.model_dump(mode="json") for check in checks] for name, checks in found.items()}
        typer.echo(json.dumps(shown, indent=2))
    else:
        _show_checks(found)
    for other in refusals[:-1]:
        typer.echo(f"error: {other}", err=True)
    if refusals:
        raise refusals[-1]
    if any(map(host_check.failed, found.values())):
        raise typer.Exit(1)


def _show_checks(found: dict[str, tuple[Check, ...]]) -> None:
    for name, checks in found.items():
        table = listing("", name, "measured", folded="measured")
        for one in checks:
            measured = "" if one.measured is None else str(one.measured)
            status = "not verified" if one.status == "skipped" else one.status
            what = f"{measured}: {one.explanation}" if measured else one.explanation
            table.add_row(*map(Text, (status, one.name, what)))
        console().print(table)


def _row(host: Host) -> dict[str, object]:
    return {
        "name": host.name,
        "role": host.role,
        "protected": host.protected,
        "aliases": [alias.name for alias in host.aliases],
        "endpoints": [{"address": address, "port": port} for address, port in host.endpoints],
        "user": host.user,
        "host_keys": host.fingerprints,
        "read_limit": host.read_limit if host.protected else None,
    }
