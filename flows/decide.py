"""The operator's decision: the whole plan is shown, a reason asked for, and the CA key signs or does not."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from flows.awaiting import start_deployment
from flows.terminal import console
from tasks import countersigning
from tasks.actions import escape
from tasks.approvals import ApprovalStore, Approved, default_seconds
from tasks.audit import show_time
from tasks.inventory import Inventory
from tasks.quantities import show_duration
from tasks.requests import Origin, Request

RequestId = Annotated[str, typer.Argument(metavar="ID", help="Id of a request, as 'guard requests' lists it.")]
Reason = Annotated[str | None, typer.Option(help="Why; asked for at a terminal when left out.")]
CaKey = Annotated[Path | None, typer.Option(help="The operator's CA key; else guard.ca_key of hosts.yaml.")]
UseAgent = Annotated[bool, typer.Option("--agent", help="Sign with the agent, where ssh-add -c put the CA key.")]


def decide(
    known: Inventory,
    store: ApprovalStore,
    request: Request,
    *,
    reason: str | None,
    seconds: int | None = None,
    ca_key: Path | None = None,
    agent: bool = False,
) -> Approved:
    """Show ``request`` and sign it for ``seconds`` from now; at a terminal the operator is asked first.

    ``seconds`` are by default those of :func:`default_seconds`, and ``ca_key`` is that of hosts.yaml. Raises what
    :meth:`ApprovalStore.approve` raises, and ``typer.Exit(1)`` when the operator says no.
    """
    seconds = default_seconds(request.plan) if seconds is None else seconds
    request.plan.render(console())
    standing = "standing, " if request.standing else ""
    end = show_time(time.time() + seconds)
    typer.echo(f"request {request.id}: {standing}valid for {show_duration(seconds)}, until {end}")
    if request.origin is not None and request.origin.flow_run is not None:
        typer.echo(f"asked for by the flow run {escape(request.origin.flow_run)}")
    reason = ask_reason(reason)
    if sys.stdin.isatty() and request.status == "pending" and not typer.confirm("approve exactly this?"):
        typer.echo("nothing was decided")
        raise typer.Exit(1)
    key = None if agent else ca_key or known.guard.ca_key
    approved = store.approve(request.id, reason=reason, ca_key=key, agent=agent, seconds=seconds, shown=request)
    by = "the lab's CA, unattended" if known.guard.lab and not sys.stdin.isatty() else "the operator's CA"
    typer.echo(f"approved: {request.id}, signed with {by}")
    for approval in approved.approvals:
        typer.echo(f"serial {approval.serial}, until {show_time(approval.not_after)}")
    return approved


def ask_reason(reason: str | None) -> str:
    """``reason``, else what is typed at the terminal; empty without one, which the store refuses."""
    if reason is None and sys.stdin.isatty():
        return str(typer.prompt("reason"))
    return reason or ""


def go_on(store: ApprovalStore, request_id: str) -> None:
    """Start what asked for a request that counts now, or say how; where a second person is missing, say who."""
    request = store.get(request_id)
    if request.status == "pending":
        typer.echo(f"the operator approves it now: dflash-ops guard approve {request.id}")
        return
    if store.find(request.plan) is None:
        typer.echo(f"a second person signs it now:\n{countersigning.command(request.id)}")
        return
    started = start_deployment(request)
    if started is not None:
        typer.echo(f"started: flow run {escape(started)}")
    elif request.origin is not None:
        typer.echo(f"now run again: {_again(request.origin)}")
    elif not request.standing:
        typer.echo("now run the command again that asked for it")


def _again(origin: Origin) -> str:
    if origin.deployment is None:
        argv = ["dflash-ops", *origin.command]
    else:
        argv = ["prefect", "deployment", "run", "--id", origin.deployment, "--params", json.dumps(origin.parameters)]
    return escape(shlex.join(argv))
