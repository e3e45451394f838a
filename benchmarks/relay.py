"""The relay against ``scp -3`` and rclone: MB/s from the first byte to the final name, and the operator's CPU.

    python benchmarks/relay.py [--runs 5] [--size 2GB] [--folder /dev/shm]

All move the same incompressible file from the lab's kpro6 over this machine to its ct129, in turns, so that whatever
else the machine does hits them all. What is not the same:

- The relay reads through the gate (niced, budget kept) under an approval, hashes on the way and on ct129, and ends with
  fsync and rename. scp does none of that; rclone has both hosts hash the file when it has arrived. The lab's read limit
  is lifted, it would be what is measured.
- kpro6 lets nobody in but the gate, so the others get a second sshd there, with the lab's ordinary login. rclone does
  not look at host keys as shipped.
- The others' first byte is when something at the destination has a size; the connects before it count for nobody.

The lab lives in ``--folder``, in memory by default: a disk's speed is not the relay's. Medians, and the relay's ratio
to each of the others beside what is aimed at; exit status 1 when one of those is missed.
"""

import argparse
import os
import resource
import statistics
import subprocess  # noqa: TID251 - the peer is scp, which the project itself never starts
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash.errors import run_cli
from tasks.inventory import Location
from tasks.lab import GATE_CONFIG, Lab
from tasks.quantities import show_size, size
from tasks.relay import plan_relay, relay
from tasks.ssh import Connector

SOURCE = "/workspace/dflash/checkpoints/benchmark.bin"
DESTINATION = "/root/eval/cache/benchmark.bin"
SCP_PORT = 2222
GCM = "aes128-gcm@openssh.com"
RELAY, SCP, SCP_GCM, RCLONE = "relay", "scp -3 as shipped", "scp -3 aes128-gcm", "rclone as shipped"
FASTER = {SCP: 1.3, SCP_GCM: 1.05, RCLONE: 1.2}
"""The relay's speed, as a multiple of theirs."""
CPU_SHARE = 0.75
"""The relay's CPU at most, as a multiple of that of ``scp -3`` as shipped."""


@dataclass(frozen=True)
class Run:
    """One transfer: seconds from the first byte to the end, CPU seconds of this process and its children."""

    seconds: float
    cpu: float


class Bench:
    """The lab with one file on kpro6, and the ways to move it."""

    def __init__(self, lab: Lab, scratch: Path) -> None:
        self.lab = lab
        self.connector = Connector.load(lab.hosts_file)
        self.known, self.store = self.connector.inventory, self.connector.store
        self.source, self.destination = lab.host_path("kpro6", SOURCE), lab.host_path("ct129", DESTINATION)
        self.ssh_config, self.rclone_config = scratch / "ssh_config", scratch / "rclone.conf"

    def prepare(self, count: int) -> None:
        """Write ``count`` random bytes on kpro6, lift its read limit and start the sshd for the others."""
        with self.source.open("wb") as file:
            for start in range(0, count, 1 << 24):
                file.write(os.urandom(min(1 << 24, count - start)))
        gate = self.lab.host_path("kpro6", GATE_CONFIG)
        gate.write_text(gate.read_text().replace('"read_limit": 200000000', '"read_limit": 100000000000'))
        self._serve_others()

    def _serve_others(self) -> None:
        kpro6, ct129 = self.known.host("kpro6"), self.known.host("ct129")
        etc, seen = self.lab.host_path("kpro6", "/etc/ssh"), self.lab.seen("kpro6", "/etc/ssh")
        (etc / "scp_keys").write_text(Path(f"{ct129.identity_file}.pub").read_text())
        (etc / "scp_config").write_text(
            f"Port {SCP_PORT}\nListenAddress {kpro6.address}\nHostKey {seen}/ssh_host_ed25519_key\nStrictModes no\n"
            f"AuthorizedKeysFile {seen}/scp_keys\nUsePAM no\nPidFile {seen}/scp.pid\nSubsystem sftp internal-sftp\n"
        )
        self.lab.exec("kpro6", ["/usr/sbin/sshd", "-f", f"{seen}/scp_config"], check=True)
        known_hosts = self.ssh_config.with_name("known_hosts")
        known_hosts.write_text("".join(f"{host.name} {key}\n" for host in (kpro6, ct129) for key in host.host_keys))
        ends = ((kpro6, SCP_PORT), (ct129, ct129.port))
        places = "".join(
            f"Host {host.name}\n  HostName {host.address}\n  Port {port}\n  HostKeyAlias {host.name}\n"
            for host, port in ends
        )
        self.ssh_config.write_text(
            f"{places}Host *\n  User {ct129.user}\n  IdentityFile {ct129.identity_file}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {known_hosts}\n  StrictHostKeyChecking yes\n"
        )
        self.rclone_config.write_text(
            "".join(
                f"[{host.name}]\ntype = sftp\nhost = {host.address}\nport = {port}\nuser = {ct129.user}\n"
                f"key_file = {ct129.identity_file}\nknown_hosts_file = none\n\n"
                for host, port in ends
            )
        )

    def end_others(self) -> None:
        """End the sshd for the others, which the lab knows nothing of."""
        pid = self.lab.host_path("kpro6", "/etc/ssh/scp.pid").read_text().strip()
        self.lab.exec("kpro6", ["kill", pid], check=True)

    def relay(self) -> float:
        """Relay under an approval of its own; seconds."""
        source = Location(self.known.host("kpro6"), self.lab.seen("kpro6", SOURCE))
        destination = Location(self.known.host("ct129"), self.lab.seen("ct129", DESTINATION))
        plan = plan_relay([source], "the benchmark reads it", max_bytes=2 * self.source.stat().st_size)
        assert plan is not None
        request = self.store.request(plan)
        approval = self.store.approve(request.id, reason="benchmark", ca_key=self.lab.ca_key).read
        return relay(self.connector, approval, source, destination).seconds

    def scp(self, *options: str) -> float:
        """Copy with ``scp -3``; seconds."""
        return self._timed(["scp", "-3", "-q", "-F", str(self.ssh_config), *options, *self._ends()])

    def rclone(self) -> float:
        """Copy with ``rclone copyto`` from sftp to sftp; seconds."""
        rclone = Path(sys.executable).with_name("rclone")
        return self._timed([str(rclone), "--config", str(self.rclone_config), "copyto", *self._ends()])

    def _ends(self) -> list[str]:
        return [f"{host}:{self.lab.seen(host, path)}" for host, path in (("kpro6", SOURCE), ("ct129", DESTINATION))]

    def _timed(self, argv: list[str]) -> float:
        with subprocess.Popen(argv) as running:
            begun = time.monotonic()
            while running.poll() is None and not self._arriving():
                begun = time.monotonic()
                time.sleep(0.005)
            if running.wait():
                sys.exit(f"{argv[0]} ended with exit code {running.returncode}")
        return time.monotonic() - begun

    def _arriving(self) -> bool:
        """Whether there are bytes at the destination, under whatever temporary name."""
        return any(file.stat().st_size for file in self.destination.parent.glob(f"{self.destination.name}*"))

    def measure(self, transfer: Callable[[], float]) -> Run:
        """Run one transfer from a warm source to no destination, with nothing left to write out before it."""
        for left in self.destination.parent.glob(f"{self.destination.name}*"):
            left.unlink()
        with self.source.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
        os.sync()
        before = _cpu()
        seconds = transfer()
        after = _cpu()
        if self.destination.stat().st_size != self.source.stat().st_size:
            sys.exit("the file did not arrive whole")
        return Run(seconds, after - before)


@contextmanager
def on_the_lab(folder: Path, count: int) -> Iterator[Bench]:
    """A lab in ``folder`` with ``count`` random bytes on kpro6, entered on the operator's side."""
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash-benchmark-", dir=folder)))
        lab = Lab.up(state, outlive=False)
        stack.callback(lab.down)
        os.environ.update(lab.environment)
        stack.enter_context(lab.entered())
        bench = Bench(lab, state)
        bench.prepare(count)
        stack.callback(bench.end_others)
        yield bench


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--size", type=size, default=size("2GB"))
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    asked = options.parse_args()
    print(f"writing {show_size(asked.size)} of random bytes", file=sys.stderr)
    with on_the_lab(asked.folder, asked.size) as bench:
        ways = {RELAY: bench.relay, SCP: bench.scp, SCP_GCM: lambda: bench.scp("-c", GCM), RCLONE: bench.rclone}
        runs: dict[str, list[Run]] = {way: [] for way in ways}
        for number in range(asked.runs):
            for way, transfer in ways.items():
                runs[way].append(bench.measure(transfer))
                rate = asked.size / 1e6 / runs[way][-1].seconds
                print(f"run {number + 1} of {asked.runs}: {way:18} {rate:6.0f} MB/s", file=sys.stderr, flush=True)
    if not _print_table(runs, asked.size):
        sys.exit(1)


def _print_table(runs: dict[str, list[Run]], count: int) -> bool:
    """Print the medians and the relay's ratios; whether every one of them is as aimed at."""
    rates = {way: [count / 1e6 / run.seconds for run in each] for way, each in runs.items()}
    cpu = {way: statistics.median(run.cpu for run in each) / (count / 1e9) for way, each in runs.items()}
    print(f"{show_size(count)}, {len(runs[RELAY])} runs in turns, {os.cpu_count()} cores, medians (lowest to highest)")
    print(f"{'':18}  {'MB/s':>15}  {'relay is':>8}  {'aim':>7}  {'operator CPU s/GB':>17}")
    for way in runs:
        rate, spread = statistics.median(rates[way]), f"({min(rates[way]):.0f} to {max(rates[way]):.0f})"
        aim = f">= {FASTER[way]}" if way in FASTER else ""
        print(f"{way:18}  {rate:4.0f} {spread:>10}  {_faster(rates, way):7.2f}x  {aim:>7}  {cpu[way]:17.2f}")
    share = cpu[RELAY] / cpu[SCP]
    print(f"operator CPU of the relay: {share:.2f} x that of {SCP} (aim <= {CPU_SHARE})")
    return share <= CPU_SHARE and all(_faster(rates, way) >= aim for way, aim in FASTER.items())


def _faster(rates: dict[str, list[float]], way: str) -> float:
    return statistics.median(rates[RELAY]) / statistics.median(rates[way])


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    run_cli(main)
