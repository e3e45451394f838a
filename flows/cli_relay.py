"""``dflash-ops relay``: one file from host to host, past the operator's disk."""

import json
from typing import Annotated

import typer

from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, show_plan, shown_progress
from tasks.actions import escape
from tasks.quantities import show_rate, show_size, size
from tasks.relay import FILE_BYTES, check_destination, plan_relay
from tasks.relay import relay as relay_file
from tasks.ssh import Connector


def relay(
    source: Annotated[str, typer.Argument(metavar="SRC", help="HOST:/path of the file to read.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="HOST:/path to write, with the file's name.")],
    plan: PlanOnly = False,
    max_bytes: Annotated[
        str, typer.Option(help="What one approval lets be read in all; a second try reads again.")
    ] = show_size(FILE_BYTES).replace(" ", ""),
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Stream a file from one host to another; sha256 is taken on the way and again where it is written."""
    connector = Connector.load(hosts)
    start, end = connector.inventory.location(source), connector.inventory.location(destination)
    check_destination(end)
    needed = plan_relay([start], f"the file is read and written to {end}", max_bytes=size(max_bytes))
    if plan:
        show_plan(connector.store, needed, f"{start} to {end}", as_json=as_json)
        return
    approval = None if needed is None else connector.store.require(needed, asked_here()).read
    with shown_progress(str(start)) as progress:
        result = relay_file(connector, approval, start, end, progress=progress)
    if as_json:
        ends = {"source": str(result.source), "destination": str(result.destination)}
        speed = {"seconds": round(result.seconds, 3), "mb_per_s": round(result.mb_per_s, 1)}
        identity = result.identity.model_dump()
        typer.echo(json.dumps({**ends, "bytes": result.bytes, "sha256": result.sha256, "identity": identity, **speed}))
        return
    rate = show_rate(round(result.mb_per_s * 1e6))
    typer.echo(f"{escape(str(end))}: {show_size(result.bytes)} in {result.seconds:.1f} s, {rate}")
    typer.echo(f"sha256 {result.sha256}")
