"""``dflash-ops guard revoke``: an approval counts no longer, here at once and on its host as soon as that is told."""

import typer

from flows.decide import CaKey, Reason, RequestId, UseAgent, ask_reason, decide
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, show_plan
from tasks import changes
from tasks.actions import Revoke
from tasks.requests import revocation
from tasks.ssh import Connector


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
    known, store = connector.inventory, connector.store
    request = store.get(request_id)
    wanted = revocation(request)
    if plan:
        show_plan(store, wanted, f"revoke {request.id}", as_json=as_json)
        return
    reason = ask_reason(reason)
    if request.status != "ended":
        store.revoke(request.id, reason=reason)
    if not as_json:
        typer.echo(f"revoked here: {request.id}, its key is deleted from this machine")
    host = known.host(request.plan.host)
    if host.enforcement == "client":
        typer.echo(f"{host.name} enforces nothing itself (enforcement: client), so there is nobody to tell")
        return
    if store.find(wanted) is None:
        asked = store.request(wanted)
        decide(known, store, asked, reason=reason, ca_key=ca_key, agent=agent)
    # asked again, for where two persons are needed the first one's signature is not enough
    approved = store.require(wanted, asked_here())
    for action in wanted.changes:
        assert isinstance(action, Revoke)
        changes.revoke(connector, host, approved.of(action), action)
        typer.echo(f"{host.name} refuses serial {action.serial} from now on")
