"""``dflash-ops audit``: what was asked for, decided, used and refused, and whether the record of it holds."""

import json
import time
from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text

from dflash.command_line import NOTHING_CHANGED, leaves
from dflash.errors import DFlashError, UsageError
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, console, listing, show_plan
from tasks import inventory
from tasks.actions import escape
from tasks.approvals import ApprovalStore
from tasks.audit import Audit, select, show_time
from tasks.errors import Refused
from tasks.quantities import duration
from tasks.reconcile import plan_reconcile, reconcile_host
from tasks.ssh import Connector

app = typer.Typer(no_args_is_help=True, help="The record of requests, decisions, uses and refusals.")


class AuditBrokenError(DFlashError):
    """The audit log does not hold together."""


class LogsDifferError(DFlashError):
    """A host's log and the audit log do not tell the same."""


@app.command()
def show(
    last: Annotated[int, typer.Option(min=1, help="How many entries, the newest last.")] = 20,
    event: Annotated[str | None, typer.Option(help="Only these: request, decision, consumption, refusal, …")] = None,
    host: Annotated[str | None, typer.Option(help="Only what is about this host.")] = None,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Only what is about this request.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only from this local time on, as in 2027-01-31T06:00, or the last 2h or 7d.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest entries of the audit log, of those that were asked for."""
    begin = None if since is None else _since(since)
    entries = select(Audit().entries(), event=event, host=host, request=request, since=begin)[-last:]
    if as_json:
        typer.echo(json.dumps(entries))
        return
    if not entries:
        typer.echo("no such entry")
        return
    table = listing("time", "event", "request", "what", folded="what")
    for entry in entries:
        rest = {
            name: value for name, value in entry.items() if name not in ("time", "event", "request", "prev", "digest")
        }
        what = ", ".join(f"{name} {value}" for name, value in rest.items())
        shown = (show_time(entry["time"]), entry["event"], str(entry.get("request") or ""), what)
        table.add_row(*(Text(escape(text)) for text in shown))
    console().print(table)


@app.command()
def verify(hosts: HostsFile = None, as_json: AsJson = False) -> None:
    """Check the chain of the audit log, and that no entry an approval was signed over is gone."""
    audit = Audit()
    problems: list[str] = []
    heads: list[str] = []
    try:
        heads = ApprovalStore(inventory.load(hosts), audit).heads(problems)
    except Refused as error:
        problems.append(str(error))
    problems += audit.verify(heads)
    if problems:
        raise AuditBrokenError(f"{audit.file} does not hold: {'; '.join(problems)}")
    count = sum(1 for _ in audit.entries())
    if as_json:
        typer.echo(json.dumps({"entries": count, "certificates": len(heads)}))
    else:
        typer.echo(f"{count} entries hold together; certificates that were signed over them: {len(heads)}")


@app.command()
@leaves(NOTHING_CHANGED)
def reconcile(
    name: Annotated[str, typer.Argument(metavar="HOST", help="A protected host with a gate of its own.")],
    plan: PlanOnly = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Lay HOST's own log beside this one: what either has that the other has not. Reading it needs an approval."""
    connector = Connector.load(hosts)
    host = connector.inventory.host(name)
    wanted = plan_reconcile(host)
    if plan:
        show_plan(connector.store, wanted, host.name, as_json=as_json)
        return
    found = reconcile_host(connector, host, connector.store.require(wanted, asked_here()).read)
    if as_json:
        typer.echo(json.dumps([vars(difference) for difference in found]))
    elif found:
        table = listing("time", "in the log of", "serial", "what", folded="what")
        for one in found:
            side = "the host" if one.side == "host" else "this program"
            table.add_row(show_time(one.time), side, str(one.serial), Text(escape(one.what)))
        console().print(table)
    else:
        typer.echo(f"both logs tell the same of {host.name}")
    if found:
        raise LogsDifferError(f"the logs of {host.name} and of this machine differ in {len(found)} points; see above")


def _since(text: str) -> float:
    try:
        return time.time() - duration(text)
    except UsageError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since '{escape(text)}' is neither a time nor a duration; write it as 2027-01-31T06:00 or as 2h"
        ) from None
