"""The object store's part of ``dflash-ops relay``: as the way between two hosts, or as one of the ends."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import typer

from dflash.errors import UsageError
from flows.relay_plan import Way, show_relay_plan
from flows.terminal import asked_here, shown_progress
from tasks.actions import escape
from tasks.approvals import Approval, Approved
from tasks.feeds import Feed, StoredFeed, feed_of
from tasks.from_store import fetch_object
from tasks.inventory import Location
from tasks.link_speed import measure
from tasks.object_store import ObjectPlace, ObjectStore
from tasks.plans import Plan
from tasks.quantities import show_rate, show_size
from tasks.relay import LINK_RATE, RelayResult, Settings, check_destination, estimate, plan_relay, relay
from tasks.ssh import Connector
from tasks.staged_relay import open_store, plan_staged_uploads, relay_staged
from tasks.staging import CHUNK_BYTES
from tasks.to_store import part_bytes, put_object
from tasks.transfer import Progress
from tasks.ways import choose_way

WAYS = ("ssh", "s3", "auto")
SCHEME = "s3://"

Notice = Callable[[str], None]


def is_object(text: str) -> bool:
    """Whether ``text`` names an object of a store."""
    return text.startswith(SCHEME)


def move(
    connector: Connector,
    approval: Approval | None,
    source: Location,
    destinations: Sequence[Location],
    settings: Settings,
    *,
    via: str,
    upload: bool,
    progress: Progress,
    notice: Notice,
) -> RelayResult:
    """Relay by ``via``, one of :data:`WAYS`; with ``upload`` a protected host sends to the store under an approval.

    Raises as :func:`tasks.relay.relay` and :func:`check_way`; :class:`Refused` when that approval is missing.
    """
    check_way(settings, [str(source), *map(str, destinations)], via, upload=upload)
    first, *also = destinations
    if via == "auto":
        via = _chosen(connector, approval, source, first, settings, notice)
    if via == "ssh":
        return relay(connector, approval, source, first, settings, also=also, progress=progress, notice=notice)
    store = open_store(connector.inventory)
    uploads: Approved | None = None
    if upload and source.host is not None and source.host.protected:
        plan = plan_staged_uploads(connector, store, approval, source, first, settings=settings)
        uploads = None if plan is None else connector.store.require(plan, asked_here())
    return relay_staged(
        connector,
        store,
        approval,
        source,
        first,
        also=also,
        uploads=uploads,
        settings=settings,
        progress=progress,
        notice=notice,
    )


def check_way(settings: Settings, ends: Sequence[str], via: str, *, upload: bool) -> None:
    """Raise :class:`UsageError` for options of which one has no say where the other is given."""
    objects = any(map(is_object, ends))
    if objects and settings.what != "all":
        raise UsageError(
            "what is wanted of a checkpoint goes to a host or to a folder here; an object is all of a file"
        )
    if objects and (via != "ssh" or upload):
        raise UsageError("--via and --upload are of a relay between hosts; an object as an end is the way already")
    if settings.streams is not None and (objects or via == "s3"):
        raise UsageError("--streams are of the way over ssh; by the store one chunk comes while the next goes")
    if upload and via == "ssh":
        raise UsageError("--upload is of the way by the store: give --via s3 or --via auto with it")
    if upload and settings.what != "all":
        raise UsageError(
            "a host uploads all of a file by itself, and what is wanted of one is made here: leave out --upload"
        )
    if len(set(ends)) != len(ends):
        raise UsageError("one place is named twice: name the source once, and each destination")


def relay_objects(
    connector: Connector,
    source: str,
    destinations: Sequence[str],
    settings: Settings,
    *,
    max_bytes: int,
    plan_only: bool,
    as_json: bool,
    notice: Notice,
) -> None:
    """Relay from or to objects, all of a file, and print what came of it.

    The source is read once: what goes to further destinations comes out of the first object that it became.
    """
    for end in destinations:
        if not is_object(end):
            check_destination(connector.inventory.location(end))
    start = None if is_object(source) else connector.inventory.location(source)
    needed = None
    if start is not None:
        needed = plan_relay([start], f"it is read and put into {' and '.join(destinations)}", max_bytes=max_bytes)
    if plan_only:
        ends = f"{source} to {' and '.join(destinations)}"

        def way(approval: Approval | None) -> Way:
            return _way_of_objects(connector, approval, source, start, destinations, settings)

        show_relay_plan(connector, needed, ends, way, as_json=as_json)
        return
    approval = _approved(connector, needed)
    origin = source
    for destination in sorted(destinations, key=lambda place: start is not None and not is_object(place)):
        with shown_progress(origin) as progress:
            if is_object(destination):
                result = _put(connector, approval, origin, start, destination, settings, progress, notice)
                if start is not None:
                    origin, start = destination, None
            else:
                place = ObjectPlace.parse(origin)
                result = fetch_object(
                    connector,
                    _store_of(connector, place),
                    place,
                    connector.inventory.location(destination),
                    settings=settings,
                    progress=progress,
                    notice=notice,
                ).model_dump()
        if as_json:
            typer.echo(json.dumps({"source": source, "destination": destination, **result}))
        else:
            rate = show_rate(round(result["moved"] / max(result["seconds"], 1e-3)))
            typer.echo(f"{escape(destination)}: {show_size(result['moved'])} in {result['seconds']:.1f} s, {rate}")
            typer.echo(f"sha256 {result['sha256']}")


def _way_of_objects(
    connector: Connector,
    approval: Approval | None,
    source: str,
    start: Location | None,
    destinations: Sequence[str],
    settings: Settings,
) -> Way:
    """How a file or an object comes to ``destinations``, of which each gets all of it."""
    if start is None:
        place = ObjectPlace.parse(source)
        size, rate = _store_of(connector, place).find(place.key).size, settings.bandwidth or LINK_RATE
    else:
        found = estimate(connector, approval, start, replace(settings, streams=1))
        size, rate = found.source_bytes, found.rate
    puts = f"this machine puts it there in parts of {show_size(part_bytes(size))}"
    gets = "the host fetches it from the store"
    ways = {puts if is_object(place) else gets for place in destinations}
    moving = size * len(destinations)
    return Way(size, moving, 1, " and ".join(sorted(ways, reverse=True)), rate)


def _put(
    connector: Connector,
    approval: Approval | None,
    source: str,
    start: Location | None,
    destination: str,
    settings: Settings,
    progress: Progress,
    notice: Notice,
) -> dict[str, Any]:
    place = ObjectPlace.parse(destination)
    feed: Feed
    if start is None:
        origin = ObjectPlace.parse(source)
        feed = StoredFeed(_store_of(connector, origin), origin)
    else:
        feed = feed_of(connector, approval, start)
    return put_object(
        feed,
        source if start is None else str(start),
        _store_of(connector, place),
        place,
        bandwidth=settings.bandwidth,
        reread=settings.reread,
        progress=progress,
        notice=notice,
    ).model_dump()


def _chosen(
    connector: Connector,
    approval: Approval | None,
    source: Location,
    destination: Location,
    settings: Settings,
    notice: Notice,
) -> str:
    size = estimate(connector, approval, source, settings).moving_bytes
    store = None if connector.inventory.staging is None else open_store(connector.inventory)
    links = measure(connector, store, approval, source, destination, what=settings.what)
    choice = choose_way(links, size, chunk=CHUNK_BYTES, limit=settings.bandwidth)
    notice(choice.why)
    return choice.way


def _approved(connector: Connector, plan: Plan | None) -> Approval | None:
    return None if plan is None else connector.store.require(plan, asked_here()).read


def _store_of(connector: Connector, place: ObjectPlace) -> ObjectStore:
    open_store(connector.inventory)
    assert connector.inventory.staging is not None
    return ObjectStore(connector.inventory.staging, bucket=place.bucket)
