"""How fast the links of a relay are: a few MiB over each, for :func:`tasks.ways.choose_way`."""

import os
import time
from collections.abc import Callable
from secrets import token_hex
from typing import TypeVar

from tasks.actions import Part, Upload, escape
from tasks.approvals import Approval
from tasks.changes import upload
from tasks.channel import GateError
from tasks.contents import SourceError, WholeFile
from tasks.ends import Reader, ReadSource, open_reader, open_receiver
from tasks.inventory import Location
from tasks.object_store import ObjectStore
from tasks.relayable import relayable
from tasks.selection import What
from tasks.ssh import Connector
from tasks.store_errors import StoreError
from tasks.transfer import FetchError, Receiver, write_all
from tasks.ways import Links

SAMPLE_BYTES = 8 << 20

T = TypeVar("T")


def measure(
    connector: Connector,
    store: ObjectStore | None,
    approval: Approval | None,
    source: Location,
    destination: Location,
    *,
    what: What = "all",
    sample: int = SAMPLE_BYTES,
) -> Links:
    """Send up to ``sample`` bytes of ``source``, of a directory its largest file, over each link; none of them stays.

    It costs ``approval`` a session and as many bytes. Whether a protected host reaches the store cannot be tried
    without spending an upload's approval, so it counts as one that does not. What the store, or the way of a host to
    it, lacks is said in the result; all else is raised as :func:`tasks.relay.relay` does.
    """
    with open_reader(connector, source, approval) as reader:
        content, alone = _to_measure(reader, source)
        path, count = content.source.path, min(sample, content.size)
        to_here, data = _timed(count, lambda: _read(reader, path, count))
    # where the files of a selection go may be another disk than what the folder lies in
    probe = f"{destination.path}.speed-" if alone and what == "all" else f"{destination.path}/speed-"
    with open_receiver(connector, destination) as receiver:
        receiver.open(probe + token_hex(4), count, token_hex(8))
        try:
            to_destination, _ = _timed(count, lambda: _write(receiver, data))
            if store is None:
                return Links(to_here, to_destination, trouble="hosts.yaml names no object store")
            try:
                to_store, back = _store_speed(store, receiver, data)
                # only all of one file is what a host can put there by itself
                by_source = _upload_speed(connector, store, content, count) if alone and what == "all" else None
            except (StoreError, FetchError) as error:
                return Links(to_here, to_destination, trouble=str(error))
        finally:
            receiver.discard()
    return Links(to_here, to_destination, by_source, to_store, back)


def _to_measure(reader: Reader, source: Location) -> tuple[WholeFile, bool]:
    """A file to measure with, and whether it is the source itself."""
    found = reader.stat(source.path)
    if found.kind != "directory":
        return WholeFile(source, relayable(reader, source, found)), True
    place = ReadSource(reader, source)
    look = place.look()
    if not look:
        raise SourceError(f"{escape(str(source))} holds no file: name another")
    largest = Location(source.host, place.path(max(look, key=lambda name: (look[name].size, name))))
    return WholeFile(largest, relayable(reader, largest, reader.stat(largest.path))), False


def _read(reader: Reader, path: str, count: int) -> bytes:
    content = bytearray()
    with reader.read(path, 0, count) as stream:
        while len(content) < count and (piece := os.read(stream.fileno(), count - len(content))):
            content += piece
    return bytes(content)


def _write(receiver: Receiver, data: bytes) -> None:
    receiver.begin(0, len(data))
    write_all(receiver.sink, memoryview(data))
    receiver.stored()


def _store_speed(store: ObjectStore, receiver: Receiver, data: bytes) -> tuple[int, int]:
    """From here into the store, and from there to the destination."""
    store.probe()
    key = f"{store.prefix}probe-{token_hex(8)}"
    try:
        to_store, _ = _timed(len(data), lambda: store.put(key, len(data), [data]))
        back, _ = _timed(len(data), lambda: receiver.fetch(0, len(data), store.presign_get(key)))
    finally:
        store.delete([key])
    return to_store, back


def _upload_speed(connector: Connector, store: ObjectStore, content: WholeFile, count: int) -> int | None:
    """From the source's host into the store; None where it may not, or does not get there."""
    host, found = content.source.host, content.identity
    if host is None or host.protected or not store.takes_uploads:
        return None
    key = f"{store.prefix}probe-{token_hex(8)}"
    # two parts, so that the start of the session does not count
    parts = (Part(offset=0, length=1, key=f"{key[:-1]}x"), Part(offset=0, length=count, key=key))
    action = Upload(
        host=host.name,
        host_keys=host.fingerprints,
        path=content.source.path,
        identity=(found.device, found.inode, found.size, found.mtime_ns),
        endpoint=store.endpoint,
        bucket=store.bucket,
        parts=parts,
        seconds=600,
    )
    times: list[float] = []
    try:
        urls = [store.presign_put(part.key) for part in parts]
        upload(connector, host, None, action, urls, each=lambda _: times.append(time.monotonic()))
    except GateError:
        return None
    finally:
        store.delete([part.key for part in parts])
    return max(1, round(count / max(times[1] - times[0], 1e-6)))


def _timed(count: int, act: Callable[[], T]) -> tuple[int, T]:
    begun = time.monotonic()
    result = act()
    return max(1, round(count / max(time.monotonic() - begun, 1e-6))), result
