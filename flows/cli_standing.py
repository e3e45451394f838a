"""``dflash-ops guard standing``: the standing approvals, which are live credentials on this machine."""

import json
from typing import Annotated, get_args

import typer
from rich.text import Text

from dflash.errors import UsageError
from flows.decide import RequestId
from flows.terminal import AsJson, HostsFile, PlanOnly, console, listing, open_store, place, show_plan
from tasks.actions import LARGEST, ReadGrant, Verb, escape, is_text
from tasks.audit import show_time
from tasks.plans import Plan
from tasks.quantities import rate, show_rate, show_size, size

app = typer.Typer(help="List the standing approvals; request or drop one.")


@app.callback(invoke_without_command=True)
def standing(context: typer.Context, hosts: HostsFile = None, as_json: AsJson = False) -> None:
    """List the standing approvals in force: each is a live credential on this machine."""
    if context.invoked_subcommand is not None:
        return
    known, store = open_store(hosts)
    live = store.standing()
    if as_json:
        fields = [
            {
                "id": approval.id,
                "serial": approval.serial,
                "not_after": approval.not_after,
                **approval.grant.model_dump(),
            }
            for approval in live
        ]
        typer.echo(json.dumps(fields))
        return
    if not live:
        typer.echo("no standing approval is in force")
        return
    table = listing("id", "limits", "where", "may", folded="where")
    for approval in live:
        grant = approval.grant
        host = known.hosts.get(grant.host)
        limit = grant.rate or (host.read_limit if host is not None else 0)
        speed = show_rate(limit) if limit else "the host's read_limit"
        limits = f"{grant.sessions} sessions", f"{show_size(grant.bytes)} in all", speed
        ends = f"until {show_time(approval.not_after)}"
        table.add_row(approval.id, "\n".join((*limits, ends)), Text(place(grant)), "\n".join(grant.verbs))
    console().print(table)


@app.command()
def request(
    root: Annotated[str, typer.Argument(metavar="HOST:ROOT", help="The tree to watch.")],
    sessions: Annotated[int, typer.Option(min=1, max=LARGEST, help="Sessions it may open in all.")],
    size_in_all: Annotated[str, typer.Option("--bytes", help="Bytes it may read in all, as in 2TB.")],
    verbs: Annotated[str, typer.Option(help="What it may do there.")] = "stat,list,read,hash",
    speed: Annotated[str | None, typer.Option("--rate", help="As in 50MB/s; else the host's read_limit.")] = None,
    effect: Annotated[str, typer.Option(help="What it is for, in a sentence.")] = "watch this tree and read from it",
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Ask for a standing approval: a tree, budgets, and an end that the approval sets."""
    known, store = open_store(hosts)
    tree = known.location(root)
    if tree.host is None or not tree.host.protected:
        raise UsageError(f"{escape(root)} is not on a protected host, so it needs no approval; name HOST:/root")
    if not is_text(effect):
        raise UsageError(f"--effect '{escape(effect)}' is not UTF-8 text; write it again")
    grant = ReadGrant(
        host=tree.host.name,
        host_keys=tree.host.fingerprints,
        root=tree.path,
        verbs=_verbs(verbs),
        sessions=sessions,
        bytes=size(size_in_all),
        rate=rate(speed) if speed else 0,
    )
    wanted = Plan(grant=grant, effect=effect)
    if plan:
        show_plan(store, wanted, root, as_json=as_json)
        return
    made = store.request(wanted, standing=True)
    if as_json:
        typer.echo(json.dumps({"id": made.id, "status": made.status, "digest": made.digest}))
    else:
        typer.echo(f"request {made.id} waits; dflash-ops guard approve {made.id} --valid 30d")


@app.command()
def drop(request_id: RequestId, hosts: HostsFile = None) -> None:
    """End a standing approval: its key is deleted from this machine at once."""
    _, store = open_store(hosts)
    store.drop(request_id)
    typer.echo(f"dropped: {request_id}")


def _verbs(text: str) -> tuple[Verb, ...]:
    known = get_args(Verb)
    asked = tuple(word.strip() for word in text.split(","))
    for word in asked:
        if word not in known:
            raise UsageError(f"--verbs {escape(word)!r} is not one of {', '.join(known)}; join them with commas")
    return asked  # type: ignore[return-value]
