"""``dflash-ops guard``: the operator decides what may happen on a protected host."""

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from dflash.command_line import leaves
from dflash.errors import UsageError
from flows import cli_break_glass, cli_doctor, cli_plan, cli_revoke, cli_standing
from flows.decide import CaKey, Reason, RequestId, UseAgent, ask_reason, decide, go_on
from flows.terminal import AsJson, HostsFile, console, listing, may, open_store, place
from tasks.actions import escape
from tasks.approvals import default_seconds
from tasks.quantities import LONGEST_DURATION, duration, show_duration
from tasks.requests import Request

app = typer.Typer(no_args_is_help=True, help="Decide what may happen on a protected host.")


@app.command()
def requests(
    everything: Annotated[bool, typer.Option("--all", help="Also those that were decided.")] = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """List the requests that wait for a decision."""
    _, store = open_store(hosts)
    found = [request for request in store.requests() if everything or request.status == "pending"]
    if as_json:
        fields = [
            {**request.model_dump(mode="json"), "status": request.status, "outcome": request.outcome}
            for request in found
        ]
        typer.echo(json.dumps(fields))
        return
    if not found:
        typer.echo("no request waits for a decision")
        return
    table = listing("id", "status", "asked", "where", "may", folded="where")
    for request in found:
        status = request.status if request.outcome is None else f"{request.status},\n{escape(request.outcome)}"
        asked = f"{show_duration(time.time() - request.created)} ago"
        for number, action in enumerate(request.plan.actions):
            first = (request.id, Text(status), asked) if number == 0 else ("", "", "")
            table.add_row(*first, Text(place(action)), Text(may(action)))
    console().print(table)
    if any(request.status == "pending" for request in found):
        typer.echo("decide with: dflash-ops guard approve ID, or dflash-ops guard deny ID")


@app.command()
@leaves("dflash-ops guard requests tells whether it is decided")
def approve(
    request_id: RequestId,
    reason: Reason = None,
    valid: Annotated[
        str | None,
        typer.Option(help="How long from now, as in 10m, 1h or 30d.  [default: 1h; 10m for what changes the host]"),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Until this local time, as in 2027-01-31 or 2027-01-31T06:00.")
    ] = None,
    ca_key: CaKey = None,
    agent: UseAgent = False,
    hosts: HostsFile = None,
) -> None:
    """Show a request and sign it with the operator's CA key, which asks for its passphrase, a touch or a yes."""
    known, store = open_store(hosts)
    request = store.get(request_id)
    seconds = _seconds(request, valid, until)
    decide(known, store, request, reason=reason, seconds=seconds, ca_key=ca_key, agent=agent)
    go_on(store, request.id)


@app.command()
@leaves("dflash-ops guard requests tells whether it is decided")
def countersign(
    request_id: RequestId,
    name: Annotated[str, typer.Option(help="The second person, as guard.second_persons of hosts.yaml names them.")],
    key: Annotated[Path, typer.Option(help="That person's own private key.")],
    hosts: HostsFile = None,
) -> None:
    """Show an approved request and sign it as the second person, where the guard asks for two."""
    _, store = open_store(hosts)
    request = store.get(request_id)
    request.plan.render(console())
    if sys.stdin.isatty() and not typer.confirm(f"sign exactly this as {escape(name)}?"):
        typer.echo("nothing was signed")
        raise typer.Exit(1)
    store.countersign(request.id, name=name, key=key)
    typer.echo(f"countersigned: {request.id}, by {escape(name)}")
    go_on(store, request.id)


@app.command()
def deny(request_id: RequestId, reason: Reason = None, hosts: HostsFile = None) -> None:
    """Answer no and delete the request's key."""
    _, store = open_store(hosts)
    store.deny(request_id, reason=ask_reason(reason))
    typer.echo(f"denied: {escape(request_id)}")


app.command()(cli_revoke.revoke)
app.add_typer(cli_standing.app, name="standing")
app.command()(cli_plan.plan)
app.command("break-glass")(cli_break_glass.break_glass)
app.command()(cli_doctor.setup)
app.command()(cli_doctor.doctor)


def _seconds(request: Request, valid: str | None, until: str | None) -> int:
    if valid is not None and until is not None:
        raise UsageError("--valid and --until say the same thing; give one")
    if valid is not None:
        return duration(valid)
    if until is None:
        if request.standing:
            raise UsageError("a standing approval needs an end; give --valid 30d or --until 2027-01-31")
        return default_seconds(request.plan)
    try:
        seconds = int(datetime.fromisoformat(until).timestamp() - time.time())
    except (ValueError, OverflowError):
        raise UsageError(f"--until {until!r} is not a date; write it as 2027-01-31 or 2027-01-31T06:00") from None
    if seconds < 1:
        raise UsageError(f"--until {until} is over; name a time to come")
    if request.standing and seconds > LONGEST_DURATION:
        raise UsageError(f"--until {until} is too far away; the longest is {show_duration(LONGEST_DURATION)} from now")
    return seconds
