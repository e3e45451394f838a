"""``dflash-ops relay``: one file from host to host, past the operator's disk."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from flows.cli_hosts import AsJson, HostsFile, console
from tasks import inventory
from tasks.actions import Plan, escape
from tasks.approvals import ApprovalStore
from tasks.audit import Audit, show_time
from tasks.quantities import show_duration, show_rate, show_size, size
from tasks.relay import FILE_BYTES, check_destination, plan_relay
from tasks.relay import relay as relay_file
from tasks.ssh import Connector
from tasks.transfer import Progress as Report

PLAIN_AFTER_SECONDS = 2.0
PLAIN_EVERY_SECONDS = 5.0


def relay(
    source: Annotated[str, typer.Argument(metavar="SRC", help="HOST:/path of the file to read.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="HOST:/path to write, with the file's name.")],
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be asked for and done; touch nothing.")] = False,
    max_bytes: Annotated[
        str, typer.Option(help="What one approval lets be read in all; a second try reads again.")
    ] = show_size(FILE_BYTES).replace(" ", ""),
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Stream a file from one host to another; sha256 is taken on the way and again where it is written."""
    known, audit = inventory.load(hosts), Audit()
    store = ApprovalStore(known, audit)
    start, end = known.location(source), known.location(destination)
    check_destination(end)
    needed = plan_relay([start], f"is read once and written to {end}", max_bytes=size(max_bytes))
    if plan:
        _show_plan(store, needed, f"{start} to {end}", as_json=as_json)
        return
    approval = None if needed is None else store.require(needed)
    with shown_progress(str(start)) as progress:
        result = relay_file(Connector(known, store, audit), approval, start, end, progress=progress)
    if as_json:
        ends = {"source": str(result.source), "destination": str(result.destination)}
        speed = {"seconds": round(result.seconds, 3), "mb_per_s": round(result.mb_per_s, 1)}
        identity = result.identity.model_dump()
        typer.echo(json.dumps({**ends, "bytes": result.bytes, "sha256": result.sha256, "identity": identity, **speed}))
        return
    rate = show_rate(round(result.mb_per_s * 1e6))
    typer.echo(f"{escape(str(end))}: {show_size(result.bytes)} in {result.seconds:.1f} s, {rate}")
    typer.echo(f"sha256 {result.sha256}")


@contextmanager
def shown_progress(what: str) -> Iterator[Report]:
    """Show a transfer on stderr: a bar with rate and time left at a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _PlainProgress(escape(what))
        return
    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    title = TextColumn(escape_markup(escape(what)))
    with Progress(title, BarColumn(), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _PlainProgress:
    """One line after two seconds and then every five, for logs and pipes."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun: float | None = None
        self._due = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._begun is None:
            self._begun, self._due = now, now + PLAIN_AFTER_SECONDS
        if now < self._due:
            return
        self._due = now + PLAIN_EVERY_SECONDS
        rate = done / (now - self._begun)
        left = show_duration((total - done) / rate) if done else "unknown time"
        line = f"{self._what}: {show_size(done)} of {show_size(total)}, {show_rate(round(rate))}, {left} left"
        print(line, file=sys.stderr, flush=True)


def _show_plan(store: ApprovalStore, plan: Plan | None, way: str, *, as_json: bool) -> None:
    approval = None if plan is None else store.find(plan)
    if as_json:
        grant = None if plan is None else plan.grant.model_dump(mode="json")
        typer.echo(json.dumps({"grant": grant, "approval": None if approval is None else approval.id}))
    elif plan is None:
        typer.echo(f"{escape(way)}: neither host is protected, so nothing needs an approval")
    else:
        plan.render(console())
        if approval is None:
            typer.echo("not approved: the relay would be refused and leave a request")
        else:
            typer.echo(f"approved: {approval.id}, until {show_time(approval.not_after)}")
