"""``dflash-ops audit``: what was asked for, decided, used and refused, and whether the record of it holds."""

import json
from typing import Annotated

import typer
from rich.text import Text

from dflash.errors import DFlashError
from flows.terminal import AsJson, HostsFile, console, listing
from tasks import inventory
from tasks.actions import escape
from tasks.approvals import ApprovalStore
from tasks.audit import Audit, show_time
from tasks.errors import Refused

app = typer.Typer(no_args_is_help=True, help="The record of requests, decisions, uses and refusals.")


class AuditBrokenError(DFlashError):
    """The audit log does not hold together."""


@app.command()
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
