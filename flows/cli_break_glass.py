"""``dflash-ops guard break-glass``: one command on a protected host, now, with a reason and in the open.

No Prefect, no second person and no earlier request: what an emergency needs is the CA key and somebody who answers for
it. Log and audit say so loudly, on both sides.
"""

import sys
from typing import Annotated, Literal

import typer

from dflash.command_line import leaves
from dflash.errors import DFlashError, UsageError
from flows.decide import CaKey, UseAgent, ask_reason
from flows.terminal import AsJson, HostsFile, PlanOnly, console, show_plan, typed
from tasks import changes
from tasks.actions import Run, escape
from tasks.plans import Plan
from tasks.quantities import duration, size
from tasks.ssh import Connector


class CommandFailedError(DFlashError):
    """The command ran on the host and did not end well."""


@leaves("dflash-ops audit show tells whether it was done")
def break_glass(
    name: Annotated[str, typer.Argument(metavar="HOST", help="A protected host.")],
    argv: Annotated[list[str], typer.Argument(metavar="-- ARGV…", help="The program's whole path, its arguments.")],
    reason: Annotated[str | None, typer.Option(help="Why; it enters both logs. Without one nothing happens.")] = None,
    folder: Annotated[str, typer.Option("--cwd", help="Folder to run it in.")] = "/",
    limit: Annotated[str, typer.Option("--time", help="After this long it is ended.")] = "5m",
    output: Annotated[str, typer.Option("--bytes", help="Output after which it is ended.")] = "10MB",
    ca_key: CaKey = None,
    agent: UseAgent = False,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """In an emergency: run one command on a protected host at once; everything about it is logged loudly."""
    connector = Connector.load(hosts)
    known, store = connector.inventory, connector.store
    host = known.host(name)
    if not host.protected:
        raise UsageError(f"{host.name} is not protected, so there is no glass to break; run it there over ssh")
    with typed():
        action = Run(
            host=host.name,
            host_keys=host.fingerprints,
            argv=tuple(argv),
            cwd=folder,
            seconds=duration(limit),
            bytes=size(output),
            break_glass=True,
        )
    wanted = Plan(changes=(action,), effect="an emergency: this runs at once, and both logs say who and why")
    if plan:
        show_plan(store, wanted, name, as_json=as_json)
        return
    if as_json:
        raise UsageError("--json is for --plan: what the command writes is printed as it is; leave it out")
    wanted.render(console(stderr=True))
    reason = ask_reason(reason)
    if sys.stdin.isatty() and not typer.confirm("break the glass for exactly this?", err=True):
        typer.echo("nothing was done", err=True)
        raise typer.Exit(1)
    key = None if agent else ca_key or known.guard.ca_key
    approved = store.break_glass(wanted, reason=reason, ca_key=key, agent=agent)
    status = changes.run(connector, host, approved.of(action), action, _show)
    if status:
        how = f"ended with exit status {status}" if status > 0 else f"was ended by signal {-status}"
        raise CommandFailedError(f"{escape(argv[0])} ran on {host.name} and {how}")


def _show(stream: Literal["stdout", "stderr"], data: bytes) -> None:
    """Pass output on as it is, but not to a terminal, where bytes can do more than be read."""
    to = sys.stdout if stream == "stdout" else sys.stderr
    if not to.isatty():
        to.buffer.write(data)
        to.buffer.flush()
        return
    for line in data.decode("utf-8", "replace").splitlines(keepends=True):
        text = line.rstrip("\r\n")
        to.write(escape(text) + line[len(text) :].replace("\r", ""))
    to.flush()
