"""``dflash-ops relay``: a file, or what is wanted of a checkpoint, from anywhere to anywhere."""

import json
import os
import sys
from functools import partial
from typing import Annotated, Any, get_args

import typer

from dflash.command_line import leaves
from dflash.errors import UsageError
from flows.prefect_home import configure_prefect, server
from flows.relay_plan import Way, show_relay_plan
from flows.relay_store import WAYS, check_way, is_object, move, relay_objects
from flows.terminal import AsJson, HostsFile, PlanOnly, asked_here, shown_progress
from tasks.actions import escape
from tasks.approvals import Approval
from tasks.inventory import Location
from tasks.quantities import rate, show_rate, show_size, size
from tasks.relay import FILE_BYTES, RelayResult, Settings, check_destinations, estimate, plan_relay
from tasks.selection import Output, What
from tasks.ssh import Connector

STORED = "an object for every 64 MiB"


@leaves("nothing half has its final name; the same command goes on with what is missing")
def relay(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="HOST:/path, a path here or s3://B/KEY: a file or checkpoint.")
    ],
    destinations: Annotated[
        list[str],
        typer.Argument(
            metavar="DST…",
            help="HOST:/path, a path here or s3://B/KEY, one or more: the file, or a selection's folder.",
        ),
    ],
    what: Annotated[str, typer.Option(help="drafter: what an evaluation needs; model: its weights; all.")] = "all",
    dtype: Annotated[str | None, typer.Option(help="bfloat16: convert wider floats on the way.")] = None,
    output: Annotated[
        str, typer.Option(help="safetensors, or pt: a torch file with holes where nothing was selected.")
    ] = "safetensors",
    streams: Annotated[
        int | None, typer.Option(min=1, max=8, help="Streams at once; else what fills the link.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="No more than this, as in 50MB/s.")] = None,
    verify: Annotated[str, typer.Option(help="hash: while it is written; reread: from the disk again.")] = "hash",
    via: Annotated[
        str, typer.Option(help="ssh; s3: by the store of hosts.yaml; auto: what a few MiB over each link show.")
    ] = "ssh",
    upload: Annotated[
        bool, typer.Option("--upload", help="Have a protected source put into the store by itself, if approved.")
    ] = False,
    plan: PlanOnly = False,
    max_bytes: Annotated[
        str, typer.Option(help="What one approval lets be read in all; a second try reads again.")
    ] = show_size(FILE_BYTES).replace(" ", ""),
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Move a file or what is wanted of a checkpoint; what is there already does not move again."""
    settings = Settings(
        what=_one_of("--what", what, get_args(What)),
        dtype=None if dtype is None else _one_of("--dtype", dtype, ("bfloat16",)),
        output=_one_of("--output", output, get_args(Output)),
        streams=streams,
        bandwidth=rate(bandwidth) if bandwidth else 0,
        reread=_one_of("--verify", verify, ("hash", "reread")) == "reread",
    )
    way = _one_of("--via", via, WAYS)
    check_way(settings, [source, *destinations], way, upload=upload)
    connector = Connector.load(hosts)
    if any(map(is_object, [source, *destinations])):
        relay_objects(
            connector,
            source,
            destinations,
            settings,
            max_bytes=size(max_bytes),
            plan_only=plan,
            as_json=as_json,
            notice=_say,
        )
        return
    start, *ends = map(connector.inventory.location, [source, *destinations])
    check_destinations(ends)
    where = " and ".join(map(str, ends))
    needed = plan_relay([start], f"it is read and written to {where}", max_bytes=size(max_bytes))
    if plan:
        planned = partial(_planned, connector, start=start, settings=settings, via=way, upload=upload)
        show_relay_plan(connector, needed, f"{start} to {where}", planned, as_json=as_json)
        return
    approval = None if needed is None else connector.store.require(needed, asked_here()).read
    if server() is not None:
        result = _as_run(source, destinations, settings, via=way, upload=upload, max_bytes=size(max_bytes), hosts=hosts)
    else:
        # a server of its own would take longer to start than most relays take
        with shown_progress(str(start)) as progress:
            result = move(
                connector, approval, start, ends, settings, via=way, upload=upload, progress=progress, notice=_say
            )
    if as_json:
        typer.echo(json.dumps({"destinations": list(map(str, ends)), **_as_json(result)}))
    else:
        _show(result, where)


def _as_run(source: str, destinations: list[str], settings: Settings, **options: Any) -> RelayResult:
    """The same as a flow run, where a Prefect server is there to keep its history."""
    configure_prefect()
    from flows.relay_checkpoint import relay_checkpoint

    result: RelayResult = relay_checkpoint(source, destinations, settings, **options)
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _planned(
    connector: Connector, approval: Approval | None, *, start: Location, settings: Settings, via: str, upload: bool
) -> Way:
    found = estimate(connector, approval, start, settings)
    how = f"over SSH in {found.streams} stream{'s' if found.streams > 1 else ''}"
    if via != "ssh":
        how = f"by the object store, {STORED}" if via == "s3" else f"{how} or by the object store, whichever is faster"
    if upload and start.host is not None and start.host.protected:
        how = f"{how}; {start.host.name} puts them there itself, which is asked for when the relay begins"
    return Way(found.source_bytes, found.moving_bytes, found.streams, how, found.rate)


def _show(result: RelayResult, where: str) -> None:
    speed = show_rate(round(result.mb_per_s * 1e6)) if result.moved else "it was there already"
    streams = f" over {result.streams} streams" if result.streams > 1 else ""
    moved = show_size(result.moved)
    share = "" if result.bytes == result.source_bytes else f" of the source's {show_size(result.source_bytes)}"
    typer.echo(f"{escape(where)}: {moved}{share} in {result.seconds:.1f} s, {speed}{streams}")
    for file in result.files:
        typer.echo(f"sha256 {file.sha256}  {escape(os.path.basename(file.path))}")


def _as_json(result: RelayResult) -> dict[str, object]:
    return {
        "source": str(result.source),
        "identity": result.identity,
        "what": result.what,
        "source_bytes": result.source_bytes,
        "bytes": result.bytes,
        "moved": result.moved,
        "sha256": result.sha256,
        "files": [vars(file) for file in result.files],
        "seconds": round(result.seconds, 3),
        "mb_per_s": round(result.mb_per_s, 1),
        "streams": result.streams,
    }


def _one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise UsageError(f"{option} {escape(value)!r} is not one of {', '.join(known)}")
    return value
