"""What the guard costs: request → certificate → session, against a plain ``ssh HOST true``.

    python benchmarks/guard.py [--runs 30] [--folder DIR]

In turns, so that whatever else the machine does hits both, in one process, medians:

- guarded: a plan is asked for, a throw-away key is made for it, the CA key (without a passphrase, as unlocked) signs
  its certificate, the use is recorded, ssh logs in with it, the gate takes the action, and the session is closed.
  Everything is synced to the disk of ``--folder``, the system's temporary folder by default.
- plain: the same ssh with the same options to the other sshd, by ordinary login; its command is ``true``.
- gate alone: the session under an approval that is there already, which is what every further session costs.

Both sshds are the lab's, on loopback addresses. The ratio is to plain; above 1.6 the exit status is 1.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from dflash.errors import run_cli
from tasks.actions import ReadGrant
from tasks.approvals import Approval
from tasks.gate import open_session
from tasks.lab import Lab
from tasks.plans import Plan
from tasks.process import DEVNULL
from tasks.ssh import Connector

LARGEST_RATIO = 1.6


class Bench:
    """The lab's two sshds, and the ways to a session on them."""

    def __init__(self, lab: Lab) -> None:
        self.ca_key = lab.ca_key
        self.connector = Connector.load(lab.hosts_file)
        self.protected = self.connector.inventory.host("kpro6")
        self.ordinary = self.connector.inventory.host("ct129")
        self.asked = 0
        self.standing = self._approve(sessions=10**6)

    def guarded(self) -> None:
        self._session(self._approve(sessions=1))

    def gate_alone(self) -> None:
        self._session(self.standing)

    def plain(self) -> None:
        running = self.connector.start(self.ordinary, ["true"], stdin=DEVNULL, stdout=DEVNULL, stderr=None)
        if running.wait():
            sys.exit(f"ssh ended with exit code {running.returncode}")

    def _approve(self, *, sessions: int) -> Approval:
        """A new plan, asked for and approved."""
        self.asked += 1
        grant = ReadGrant(
            host=self.protected.name,
            host_keys=self.protected.fingerprints,
            paths=("/etc/hostname",),
            verbs=("stat",),
            sessions=sessions,
            bytes=self.asked,
        )
        store = self.connector.store
        request = store.request(Plan(grant=grant, effect="the benchmark opens a session"))
        return store.approve(request.id, reason="benchmark", ca_key=self.ca_key).read

    def _session(self, approval: Approval) -> None:
        open_session(self.connector, self.protected, approval).close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=30)
    options.add_argument("--folder", type=Path, default=None)
    asked = options.parse_args()
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash-benchmark-", dir=asked.folder)))
        lab = Lab.up(state, isolated=False, outlive=False)
        stack.callback(lab.down)
        os.environ.update(lab.environment)
        bench = Bench(lab)
        ways: dict[str, Callable[[], None]] = {
            "plain": bench.plain,
            "guarded": bench.guarded,
            "gate alone": bench.gate_alone,
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(asked.runs + 1):
            for way, session in ways.items():
                begun = time.perf_counter()
                session()
                if number:  # the first of each warms up
                    seconds[way].append(time.perf_counter() - begun)
            if sys.stderr.isatty():
                print(f"\r{number} of {asked.runs}", end="", file=sys.stderr, flush=True)
    sys.exit(_print_table(seconds))


def _print_table(seconds: dict[str, list[float]]) -> int:
    plain = statistics.median(seconds["plain"])
    print(f"{len(seconds['plain'])} runs in turns, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, medians")
    print(f"{'':10}  {'ms':>22}  {'ratio':>6}")
    for way, each in seconds.items():
        middle = statistics.median(each)
        spread = f"({min(each) * 1000:.0f} to {max(each) * 1000:.0f})"
        print(f"{way:10}  {middle * 1000:5.0f} {spread:>16}  {middle / plain:5.2f}x")
    return statistics.median(seconds["guarded"]) > LARGEST_RATIO * plain


if __name__ == "__main__":
    run_cli(main)
