"""Inference hosts with a stand-in for ``dflash evaluate``, which has tests of its own: what it prints, leaves and waits
for is told by files, so that a test decides when an evaluation ends and how."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.flows.conftest import _report as write_report

PROGRAM = """#!/bin/sh
while [ "$1" != --output ]; do shift; done
report=$2
job=$(dirname "$report")
echo $$ >> {home}/starts/$(basename "$job")
echo "[1/1] τ of $(basename "$job")"
while [ ! -e {home}/go ]; do sleep 0.1; done
if [ -e {home}/failure.json ]; then
    cp {home}/failure.json "$job"
    echo "error: it did not work" >&2
    exit 1
fi
mkdir -p "$report" && cp {home}/report/* "$report"
"""


@dataclass(frozen=True)
class StandIn:
    """One inference host's folders below ``home``; jobs wait until :meth:`let_go`."""

    home: Path

    @classmethod
    def make(cls, home: Path) -> "StandIn":
        program = home / "environments" / "current" / "bin" / "dflash"
        program.parent.mkdir(parents=True)
        program.write_text(PROGRAM.format(home=home))
        program.chmod(0o755)
        (home / "starts").mkdir()
        write_report(home / "report")
        return cls(home)

    @property
    def entry(self) -> dict[str, Any]:
        """What its entry of hosts.yaml says besides how it is reached."""
        return {name: str(self.home / name) for name in ("environments", "jobs", "cache", "target")}

    def let_go(self) -> None:
        """Have every job, and those to come, go on to its end."""
        (self.home / "go").touch()

    def hold(self) -> None:
        """Have those to come wait."""
        (self.home / "go").unlink()

    def starts(self) -> dict[str, int]:
        """How often each job was started."""
        return {file.name: len(file.read_text().splitlines()) for file in (self.home / "starts").iterdir()}

    def kill_jobs(self) -> None:
        """What a power cut does to the jobs: all of them and whatever watches over them are gone."""
        marker = f"{self.home}/jobs".encode()
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) != os.getpid() and _belongs(process, marker):
                os.kill(int(process.name), signal.SIGKILL)


def _belongs(process: Path, marker: bytes) -> bool:
    """The job itself names its folder in its arguments; its keeper stands in it."""
    try:
        return marker in (process / "cmdline").read_bytes() or os.readlink(process / "cwd").startswith(marker.decode())
    except OSError:
        return False
