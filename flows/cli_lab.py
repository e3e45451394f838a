"""``dflash-ops lab``: the two hosts of the shipped setting on this machine, to try everything against."""

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from dflash.command_line import NOTHING_CHANGED, leaves
from flows.terminal import AsJson, console, listing
from tasks import process
from tasks.lab import HostStatus, Lab
from tasks.state import state_dir

app = typer.Typer(help="A local lab: two hosts with a real sshd on two networks.", no_args_is_help=True)


@app.command()
@leaves("dflash-ops lab down removes what is there of the lab")
def up() -> None:
    """Bring the lab up; when it is up already, nothing changes."""
    lab = Lab.up(state_dir())
    _show(lab.status())
    if lab.weaker:
        print(f"weaker than as root: {lab.weaker}")
    print(f"\nexport DFLASH_HOSTS={lab.hosts_file}")
    if lab.privileged:
        print("dflash-ops lab exec operator -- bash    # a shell that reaches the hosts")


@app.command()
@leaves("the same command removes the rest")
def down() -> None:
    """End the lab and remove its hosts with all their files."""
    state = state_dir()
    print("lab down" if Lab.remove(state) else f"there is no lab in {state}")


@app.command()
@leaves(NOTHING_CHANGED)
def status(as_json: AsJson = False) -> None:
    """Show the hosts; exit code 1 when one of them does not answer."""
    lab = Lab.running(state_dir())
    hosts = lab.status()
    if as_json:
        typer.echo(json.dumps([asdict(host) for host in hosts]))
    else:
        _show(hosts)
    if not all(host.reachable for host in hosts):
        raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True})
def exec(
    host: Annotated[str, typer.Argument(help="operator, kpro6 or ct129")],
    argv: Annotated[list[str], typer.Argument(help="the command, after --")],
) -> None:
    """Run a command there, without ssh and without the guard; its exit code is this one's."""
    lab = Lab.running(state_dir())
    child = process.start(lab.argv(host, argv), env={**os.environ, **lab.environment})
    while True:
        try:
            code = child.wait()
            break
        except KeyboardInterrupt:
            # the terminal sent it to the command too, which decides what it means
            continue
    raise typer.Exit(code if code >= 0 else 128 - code)


def _show(hosts: list[HostStatus]) -> None:
    table = listing("host", "address", "sshd", "reachable", folded="address")
    for host in hosts:
        sshd = "not running" if host.sshd is None else f"pid {host.sshd}"
        table.add_row(host.name, f"{host.address}:{host.port}", sshd, "yes" if host.reachable else "no")
    console().print(table)
