"""The relay where the network is slow and where the file is huge: streams over 50 ms, and memory for 20 GB.

    python benchmarks/relay_far.py [--runs 5] [--size 1GB] [--folder /dev/shm] [--sparse 20GB] [--disk /var/tmp]

- ``--size`` random bytes go from a host that is far away to one that is not, with one stream and with four, in turns.
  The way to the first leads through a proxy in this machine's user space that holds everything for 25 ms each way. That
  host is unprotected, because a gate serves two sessions at most. From the first byte to the final name, medians; all
  files are in ``--folder``, in memory by default.
- A sparse file of ``--sparse`` goes the same way without the proxy, by ``dflash-ops relay``, whose memory at its peak
  is printed beside that for 20 MB. All files are in ``--disk``, which needs that much room. ``--no-sparse`` leaves
  this out.

The hosts are sshds on loopback addresses. Exit status 1 when four streams are not 2.2 times as fast as one, or when the
peak is 150 MB or more.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash.errors import run_cli
from tasks.quantities import show_size, size
from tasks.relay import Settings
from tests.proxies import in_a_process
from tests.relaying import Way, command, peak_memory
from tests.sshds import Site, Sshd, another_sshd, both_sshds

ROUND_TRIP = 0.05
STREAMS, FASTER = 4, 2.2
MOST_MEMORY = 150 * 10**6
FAR = "127.1.230.173"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--size", type=size, default=size("1GB"))
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options.add_argument("--sparse", type=size, default=size("20GB"))
    options.add_argument("--no-sparse", dest="sparse", action="store_const", const=0)
    options.add_argument("--disk", type=Path, default=Path("/var/tmp"))
    asked = options.parse_args()
    with _hosts(asked.folder) as (site, far, folder):
        reached = _streams(site, far, folder, asked.size, asked.runs)
    if asked.sparse:
        with _hosts(asked.disk) as (site, far, folder):
            reached = _memory(site, far, folder, asked.sparse) and reached
    if not reached:
        sys.exit(1)


@contextmanager
def _hosts(folder: Path) -> Iterator[tuple[Site, Sshd, Path]]:
    with tempfile.TemporaryDirectory(prefix="dflash-benchmark-", dir=folder) as scratch:
        sshds = Path(scratch) / "sshds"
        sshds.mkdir()
        with both_sshds(sshds) as site, another_sshd(site, "far", FAR) as far:
            yield site, far, Path(scratch)


def _streams(site: Site, far: Sshd, folder: Path, count: int, runs: int) -> bool:
    rates: dict[int, list[float]] = {1: [], STREAMS: []}
    with in_a_process(far.address, far.port, delay=ROUND_TRIP / 2) as port:
        way = Way.through(site, folder, {"far": site.ordinary_entry(far, port=port)}, source="far")
        way.lay(count)
        for number in range(runs):
            for streams, measured in rates.items():
                way.destination_file.unlink(missing_ok=True)
                measured.append(way.relay(settings=Settings(streams=streams)).mb_per_s)
                done = f"{number + 1} of {runs}: {streams} streams {measured[-1]:6.0f} MB/s"
                print(f"run {done}", file=sys.stderr, flush=True)
    print(f"{show_size(count)} over a round trip of {ROUND_TRIP * 1000:.0f} ms, {runs} runs in turns, medians")
    for streams, measured in rates.items():
        print(
            f"{streams} streams: {statistics.median(measured):4.0f} ({min(measured):.0f} to {max(measured):.0f}) MB/s"
        )
    ratio = statistics.median(rates[STREAMS]) / statistics.median(rates[1])
    print(f"{STREAMS} streams are {ratio:.2f} x as fast as one (aim >= {FASTER})")
    return ratio >= FASTER


def _memory(site: Site, far: Sshd, folder: Path, count: int) -> bool:
    entries = {"far": site.ordinary_entry(far)}
    way = Way.through(site, folder, entries, source="far")
    way.lay(0)
    hosts = folder / "hosts.yaml"
    hosts.write_text(site.hosts_text(**entries))
    environment = os.environ | {"DFLASH_HOSTS": str(hosts), "DFLASH_STATE": str(way.state)}
    peaks = []
    for each in (size("20MB"), count):
        os.truncate(way.source_file, each)
        ends = (f"far:{way.source.path}", f"infer:{way.destination.path}")
        peaks.append(peak_memory(command(*ends, environment=environment)))
        if way.destination_file.stat().st_size != each:
            sys.exit("the file did not arrive whole")
        way.destination_file.unlink()
        print(f"{show_size(each)} took {show_size(peaks[-1])} of memory at the peak (aim < {show_size(MOST_MEMORY)})")
    return max(peaks) < MOST_MEMORY


if __name__ == "__main__":
    run_cli(main)
