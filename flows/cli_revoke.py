"""``dflash-ops guard revoke``: an approval counts no longer, here at once and on its host as soon as that is told."""

import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import typer

from dflash.command_line import leaves
from flows.decide import CaKey, Reason, RequestId, UseAgent, ask_reason, decide
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, show_plan
from tasks import changes
from tasks.actions import Revoke
from tasks.plans import Plan
from tasks.requests import Request, revocation
from tasks.ssh import Connector


@leaves("dflash-ops guard standing tells what is still in force; the same command ends it")
def revoke(
    request_id: RequestId,
    reason: Reason = None,
    ca_key: CaKey = None,
    agent: UseAgent = False,
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Take an approval back: its key is deleted here, and its host is told, which the CA key signs for."""
    connector = Connector.load(hosts)
    store = connector.store
    request = store.get(request_id)
    wanted = revocation(request)
    if plan:
        show_plan(store, wanted, f"revoke {request.id}", as_json=as_json)
        return
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        told = _take_back(connector, request, wanted, reason, ca_key, agent=agent)
    if as_json:
        typer.echo(json.dumps({"id": request.id, "status": store.get(request.id).status, "refused_there": told}))


def _take_back(
    connector: Connector, request: Request, wanted: Plan, reason: str | None, ca_key: Path | None, *, agent: bool
) -> list[int]:
    """Revoke ``request`` here, then tell its host as ``wanted`` says; the serials that it refuses from now on."""
    known, store = connector.inventory, connector.store
    reason = ask_reason(reason)
    if request.status != "ended":
        store.revoke(request.id, reason=reason)
    typer.echo(f"revoked here: {request.id}, its key is deleted from this machine")
    host = known.host(request.plan.host)
    if host.enforcement == "client":
        typer.echo(f"{host.name} enforces nothing itself (enforcement: client), so there is nobody to tell")
        return []
    if store.find(wanted) is None:
        asked = store.request(wanted)
        decide(known, store, asked, reason=reason, ca_key=ca_key, agent=agent)
    # asked again, for where two persons are needed the first one's signature is not enough
    approved = store.require(wanted, asked_here())
    told = []
    for action in wanted.changes:
        assert isinstance(action, Revoke)
        changes.revoke(connector, host, approved.of(action), action)
        typer.echo(f"{host.name} refuses serial {action.serial} from now on")
        told.append(action.serial)
    return told
