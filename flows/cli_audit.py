"""``dflash-ops audit``: what was asked for, decided, used and refused, and whether the record of it holds."""

import json
import time
from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text

from dflash.errors import DFlashError, UsageError
from flows.terminal import AsJson, HostsFile, console, listing
from tasks import inventory
from tasks.actions import escape
from tasks.approvals import ApprovalStore
from tasks.audit import Audit, select, show_time
from tasks.errors import Refused
from tasks.quantities import duration

app = typer.Typer(no_args_is_help=True, help="The record of requests, decisions, uses and refusals.")


class AuditBrokenError(DFlashError):
    """The audit log does not hold together."""


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
        shown = (show_time(entry["time"]), entry["event"], str(entry.get("request", "")), what)
        table.add_row(*(Text(escape(text)) for text in shown))
    console().print(table)


@app.command()
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
    typer.echo(f"{count} entries hold together, {len(heads)} certificates were signed over them")


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
