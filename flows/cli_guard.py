"""``dflash-ops guard`` and ``dflash-ops audit``: the operator decides, and sees what was decided and done."""

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.text import Text

from dflash.errors import DFlashError, UsageError
from flows.terminal import AsJson, HostsFile, console, listing
from tasks import inventory
from tasks.actions import LARGEST, ReadGrant, Verb, escape, is_text
from tasks.approvals import DEFAULT_SECONDS, ApprovalStore, Request
from tasks.audit import Audit, show_time
from tasks.errors import Refused
from tasks.inventory import Inventory
from tasks.plans import Plan
from tasks.quantities import duration, rate, show_duration, show_rate, show_size, size

app = typer.Typer(no_args_is_help=True, help="Decide what may happen on a protected host.")
standing_app = typer.Typer(help="List the standing approvals; request or drop one.")
audit_app = typer.Typer(no_args_is_help=True, help="The record of requests, decisions, uses and refusals.")
app.add_typer(standing_app, name="standing")

RequestId = Annotated[str, typer.Argument(metavar="ID", help="Id of a request, as 'guard requests' lists it.")]
Reason = Annotated[str | None, typer.Option(help="Why; asked for at a terminal when left out.")]


class AuditBrokenError(DFlashError):
    """The audit log does not hold together."""


@app.command()
def requests(
    everything: Annotated[bool, typer.Option("--all", help="Also those that were decided.")] = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """List the requests that wait for a decision."""
    _, store = _open(hosts)
    found = [request for request in store.requests() if everything or request.status == "pending"]
    if as_json:
        typer.echo(json.dumps([{**request.model_dump(mode="json"), "status": request.status} for request in found]))
        return
    if not found:
        typer.echo("no request waits for a decision")
        return
    table = listing("id", "status", "asked", "bytes", "where", "may", folded="where")
    for request in found:
        grant = request.plan.grant
        table.add_row(
            request.id,
            request.status,
            f"{show_duration(time.time() - request.created)} ago",
            show_size(grant.bytes),
            Text(_place(grant)),
            "\n".join(grant.verbs),
        )
    console().print(table)
    typer.echo("decide with: dflash-ops guard approve ID, or dflash-ops guard deny ID")


@app.command()
def approve(
    request_id: RequestId,
    reason: Reason = None,
    valid: Annotated[str | None, typer.Option(help="How long from now, as in 10m, 1h or 30d.  [default: 1h]")] = None,
    until: Annotated[
        str | None, typer.Option(help="Until this local time, as in 2027-01-31 or 2027-01-31T06:00.")
    ] = None,
    ca_key: Annotated[Path | None, typer.Option(help="The operator's CA key; else guard.ca_key of hosts.yaml.")] = None,
    hosts: HostsFile = None,
) -> None:
    """Show a request and sign it with the operator's CA key, which asks for its passphrase."""
    known, store = _open(hosts)
    request = store.get(request_id)
    seconds = _seconds(request, valid, until)
    key = ca_key or known.guard.ca_key
    if key is None:
        raise Refused("no CA key to sign with; name it with --ca-key, or as guard.ca_key in hosts.yaml")
    request.plan.render(console())
    standing = "standing, " if request.standing else ""
    end = show_time(time.time() + seconds)
    typer.echo(f"request {request.id}: {standing}valid for {show_duration(seconds)}, until {end}")
    if sys.stdin.isatty():
        reason = reason or typer.prompt("reason")
        if request.status == "pending" and not typer.confirm("approve exactly this?"):
            typer.echo("nothing was decided")
            raise typer.Exit(1)
    approval = store.approve(request.id, reason=reason or "", ca_key=key, seconds=seconds, shown=request)
    by = "the lab's CA, unattended" if known.guard.lab and not sys.stdin.isatty() else "the operator's CA"
    typer.echo(f"approved: {request.id}, signed with {by}")
    typer.echo(f"serial {approval.serial}, until {show_time(approval.not_after)}")


@app.command()
def deny(request_id: RequestId, reason: Reason = None, hosts: HostsFile = None) -> None:
    """Answer no and delete the request's key."""
    _, store = _open(hosts)
    if reason is None and sys.stdin.isatty():
        reason = typer.prompt("reason")
    store.deny(request_id, reason=reason or "")
    typer.echo(f"denied: {escape(request_id)}")


@standing_app.callback(invoke_without_command=True)
def standing(context: typer.Context, hosts: HostsFile = None, as_json: AsJson = False) -> None:
    """List the standing approvals in force: each is a live credential on this machine."""
    if context.invoked_subcommand is not None:
        return
    known, store = _open(hosts)
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
        speed = show_rate(grant.rate or known.host(grant.host).read_limit)
        limits = f"{grant.sessions} sessions", f"{show_size(grant.bytes)} in all", speed
        ends = f"until {show_time(approval.not_after)}"
        table.add_row(approval.id, "\n".join((*limits, ends)), Text(_place(grant)), "\n".join(grant.verbs))
    console().print(table)


@standing_app.command("request")
def request_standing(
    root: Annotated[str, typer.Argument(metavar="HOST:ROOT", help="The tree to watch.")],
    sessions: Annotated[int, typer.Option(min=1, max=LARGEST, help="Sessions it may open in all.")],
    size_in_all: Annotated[str, typer.Option("--bytes", help="Bytes it may read in all, as in 2TB.")],
    verbs: Annotated[str, typer.Option(help="What it may do there.")] = "stat,list,read,hash",
    speed: Annotated[str | None, typer.Option("--rate", help="As in 50MB/s; else the host's read_limit.")] = None,
    effect: Annotated[str, typer.Option(help="What it is for, in a sentence.")] = "watch this tree and read from it",
    hosts: HostsFile = None,
) -> None:
    """Ask for a standing approval: a tree, budgets, and an end that the approval sets."""
    known, store = _open(hosts)
    place = known.location(root)
    if place.host is None or not place.host.protected:
        raise UsageError(f"{escape(root)} is not on a protected host, so it needs no approval; name HOST:/root")
    if not is_text(effect):
        raise UsageError(f"--effect '{escape(effect)}' is not UTF-8 text; write it again")
    plan = Plan(
        grant=ReadGrant(
            host=place.host.name,
            host_keys=place.host.fingerprints,
            root=place.path,
            verbs=_verbs(verbs),
            sessions=sessions,
            bytes=size(size_in_all),
            rate=rate(speed) if speed else 0,
        ),
        effect=effect,
    )
    request = store.request(plan, standing=True)
    typer.echo(f"request {request.id} waits; dflash-ops guard approve {request.id} --valid 30d")


@standing_app.command("drop")
def drop_standing(request_id: RequestId, hosts: HostsFile = None) -> None:
    """End a standing approval: its key is deleted from this machine at once."""
    _, store = _open(hosts)
    store.drop(request_id)
    typer.echo(f"dropped: {request_id}")


@audit_app.command()
def show(
    last: Annotated[int, typer.Option(min=1, help="How many entries, the newest last.")] = 20, as_json: AsJson = False
) -> None:
    """Show the newest entries of the audit log."""
    entries = list(Audit().entries())[-last:]
    if as_json:
        typer.echo(json.dumps(entries))
        return
    table = listing("time", "event", "request", "what", folded="what")
    for entry in entries:
        rest = {
            name: value for name, value in entry.items() if name not in ("time", "event", "request", "prev", "digest")
        }
        what = ", ".join(f"{name} {value}" for name, value in rest.items())
        shown = (show_time(entry["time"]), entry["event"], str(entry.get("request", "")), what)
        table.add_row(*(Text(escape(text)) for text in shown))
    console().print(table)


@audit_app.command()
def verify(hosts: HostsFile = None) -> None:
    """Check the chain of the audit log, and that no entry an approval was signed over is gone."""
    audit = Audit()
    problems: list[str] = []
    heads: list[str] = []
    try:
        heads = ApprovalStore(inventory.load(hosts), audit).heads()
    except Refused as error:
        problems.append(str(error))
    problems += audit.verify(heads)
    if problems:
        raise AuditBrokenError(f"{audit.file} does not hold: {'; '.join(problems)}")
    count = sum(1 for _ in audit.entries())
    typer.echo(f"{count} entries hold together, {len(heads)} approvals were signed over them")


def _open(hosts: Path | None) -> tuple[Inventory, ApprovalStore]:
    known = inventory.load(hosts)
    return known, ApprovalStore(known, Audit())


def _place(grant: ReadGrant) -> str:
    places = grant.paths or ((grant.root or "").rstrip("/") + "/**",)
    return "\n".join(escape(f"{grant.host}:{place}") for place in places)


def _seconds(request: Request, valid: str | None, until: str | None) -> int:
    if valid is not None and until is not None:
        raise UsageError("--valid and --until say the same thing; give one")
    if valid is not None:
        return duration(valid)
    if until is None:
        if request.standing:
            raise UsageError("a standing approval needs an end; give --valid 30d or --until 2027-01-31")
        return DEFAULT_SECONDS
    try:
        seconds = int(datetime.fromisoformat(until).timestamp() - time.time())
    except (ValueError, OverflowError):
        raise UsageError(f"--until {until!r} is not a date; write it as 2027-01-31 or 2027-01-31T06:00") from None
    if seconds < 1:
        raise UsageError(f"--until {until} is over; name a time to come")
    return seconds


def _verbs(text: str) -> tuple[Verb, ...]:
    known = get_args(Verb)
    asked = tuple(word.strip() for word in text.split(","))
    for word in asked:
        if word not in known:
            raise UsageError(f"--verbs {escape(word)!r} is not one of {', '.join(known)}; join them with commas")
    return asked  # type: ignore[return-value]
