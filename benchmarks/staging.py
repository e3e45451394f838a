"""The relay through an object store against its longer leg, each leg held to 20 MB/s; unthrottled figures beside it.

    python benchmarks/staging.py [--runs 3] [--chunks 16] [--rate 20MB/s] [--kind seaweedfs]

One host uploads and another fetches, both real sshds on this machine, and the store is a real server behind a proxy
that holds what goes to it, and what comes from it, to ``--rate`` each. A leg alone is all uploads and nothing fetched,
or all fetches of what is there already; the relay does both at once, so that it should take as long as the longer leg
and one chunk. In turns; medians, and the ratio of the relay to the longer leg. Unthrottled all parties share these
cores, and there is nothing to gain from doing both at once.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from dflash.errors import run_cli
from tasks.actions import Part, Upload
from tasks.changes import upload
from tasks.ends import open_receiver
from tasks.inventory import Location
from tasks.object_store import ObjectStore
from tasks.quantities import rate, show_rate, show_size
from tasks.staged_relay import relay_staged
from tasks.staging import CHUNK_BYTES
from tests.object_stores import store_server
from tests.proxies import Proxy
from tests.sshds import both_sshds

MOST = 1.2
"""What the relay may take, of its longer leg."""


@dataclass
class Bench:
    """Two hosts and a way to the store."""

    store: ObjectStore
    folder: Path
    chunks: int

    def __post_init__(self) -> None:
        self.site = contextlib.ExitStack()
        (self.folder / "sshds").mkdir()
        hosts = self.site.enter_context(both_sshds(self.folder / "sshds"))
        self.operator = hosts.operator(self.folder / "operator")
        self.source, self.destination = self.folder / "source.bin", self.folder / "there" / "destination.bin"
        with self.source.open("wb") as file:
            for _ in range(self.chunks):
                file.write(os.urandom(CHUNK_BYTES))
        self.host = self.operator.infer

    def upload_leg(self) -> float:
        """Seconds for all uploads."""
        action = self._action()
        urls = [self.store.presign_put(part.key, seconds=3600) for part in action.parts]
        begun = time.monotonic()
        upload(self.operator.connector, self.host, None, action, urls)
        return time.monotonic() - begun

    def fetch_leg(self) -> float:
        """Seconds for all fetches of what :meth:`upload_leg` left."""
        begun = time.monotonic()
        with open_receiver(self.operator.connector, Location(self.host, str(self.destination))) as receiver:
            receiver.open(str(self.destination), self._size, "0" * 16)
            for part in self._action().parts:
                receiver.fetch(part.offset, part.length, self.store.presign_get(part.key))
            seconds = time.monotonic() - begun
            receiver.discard()
        self.store.delete([part.key for part in self._action().parts])
        return seconds

    def relay(self) -> float:
        """Seconds for the relay, from the first look at the source to the final name."""
        ends = (Location(self.host, str(self.source)), Location(self.host, str(self.destination)))
        result = relay_staged(self.operator.connector, self.store, None, *ends)
        self.destination.unlink()
        return result.seconds

    @property
    def _size(self) -> int:
        return self.chunks * CHUNK_BYTES

    def _action(self) -> Upload:
        found = self.source.stat()
        parts = (Part(offset=at * CHUNK_BYTES, length=CHUNK_BYTES, key=f"leg/{at}") for at in range(self.chunks))
        return Upload(
            host=self.host.name,
            host_keys=self.host.fingerprints,
            path=str(self.source),
            identity=(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns),
            endpoint=self.store.endpoint,
            bucket=self.store.bucket,
            parts=tuple(parts),
            seconds=3600,
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--chunks", type=int, default=16)
    options.add_argument("--rate", type=rate, default=rate("20MB/s"))
    options.add_argument("--kind", choices=("seaweedfs", "rclone"), default="seaweedfs")
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    asked = options.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash-staging-", dir=asked.folder)))
        ratios = []
        for limit in (asked.rate, 0):
            # a store of its own: deleted objects keep their room, and after some gigabytes there is none
            with (
                store_server(asked.kind, folder / f"store-{limit}") as server,
                mock.patch.dict(os.environ, {**server.environment, "DFLASH_STATE": str(folder / f"state-{limit}")}),
                held_to(limit, server.endpoint) as endpoint,
            ):
                store = ObjectStore(server.staging(endpoint_url=endpoint))
                ratios.append(_measure(store, folder / f"at-{limit}", asked.chunks, asked.runs, limit))
            shutil.rmtree(folder / f"store-{limit}")
    print(f"held to {show_rate(asked.rate)} the relay takes {ratios[0]:.2f} of its longer leg; {MOST} are the most")
    sys.exit(ratios[0] > MOST)


@contextlib.contextmanager
def held_to(limit: int, endpoint: str) -> Iterator[str]:
    """The address of a proxy before ``endpoint`` that lets ``limit`` bytes a second through each way.

    It has a process to itself: what is measured is not to wait for its interpreter.
    """
    target = urllib.parse.urlsplit(endpoint)
    assert target.hostname is not None
    assert target.port is not None
    if not limit:
        yield endpoint
        return
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()

    def serve(host: str, port: int) -> None:
        there.send(Proxy(host, port, rate=limit).port)
        there.recv()

    child = fork.Process(target=serve, args=(target.hostname, target.port), daemon=True)
    child.start()
    try:
        yield f"http://{target.hostname}:{here.recv()}"
    finally:
        child.kill()
        child.join()


def _measure(store: ObjectStore, folder: Path, chunks: int, runs: int, limit: int) -> float:
    folder.mkdir()
    bench = Bench(store, folder, chunks)
    ways = {"upload alone": bench.upload_leg, "fetch alone": bench.fetch_leg, "relay": bench.relay}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with bench.site:
        for number in range(runs):
            for way, run in ways.items():
                seconds[way].append(run())
                print(f"run {number + 1} of {runs}: {way:12} {seconds[way][-1]:6.1f} s", file=sys.stderr, flush=True)
    bench.source.unlink()
    size = chunks * CHUNK_BYTES
    held = f"each leg held to {show_rate(limit)}" if limit else "unthrottled"
    print(f"{show_size(size)} in {chunks} chunks, {held}, {runs} runs in turns, {os.cpu_count()} cores")
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    longer = max(medians["upload alone"], medians["fetch alone"])
    for way, median in medians.items():
        spread = f"({min(seconds[way]):.1f} to {max(seconds[way]):.1f})"
        print(f"{way:12}  {median:6.1f} s {spread:>16}  {size / 1e6 / median:6.0f} MB/s  {median / longer:5.2f}x")
    return medians["relay"] / longer


if __name__ == "__main__":
    run_cli(main)
