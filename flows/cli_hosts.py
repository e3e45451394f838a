"""``dflash-ops hosts``: what the inventory knows. Nothing here connects anywhere."""

import json

import typer
from rich.text import Text

from flows.terminal import AsJson, HostsFile, console, listing
from tasks import inventory
from tasks.inventory import Host
from tasks.quantities import show_rate

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
