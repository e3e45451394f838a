"""A file on its way from one real sshd to another, and the means to break that way."""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dflash.errors import DFlashError
from tasks import journal, process
from tasks.approvals import Approval
from tasks.inventory import Host, Location
from tasks.relay import FILE_BYTES, RelayResult, Settings, plan_relay, relay
from tasks.transfer import Progress
from tests.sshds import Operator, Site

MIB = 1 << 20


@dataclass
class Way:
    """One source on a host and its destination on another, as one operator sees them; every file below ``folder``."""

    operator: Operator
    source: Location
    destination: Location
    state: Path
    """The operator's $DFLASH_STATE while it relays."""

    @classmethod
    def through(
        cls,
        site: Site,
        folder: Path,
        entries: Mapping[str, dict[str, Any]] | None = None,
        *,
        source: str = "train",
        name: str = "operator",
    ) -> "Way":
        """From host ``source`` to ``infer``; ``name`` tells one operator from another on the same way.

        ``entries`` as in :meth:`Site.hosts_text`.
        """
        operator = site.operator(folder / name / "guard", **entries or {})
        start, end = operator.inventory.host(source), operator.inventory.host("infer")
        return cls(
            operator,
            Location(start, str(folder / "there" / "step 1's «τ» $(true).pt")),
            Location(end, str(folder / "here" / "step_1.pt")),
            folder / name,
        )

    @property
    def source_file(self) -> Path:
        return Path(self.source.path)

    @property
    def destination_file(self) -> Path:
        return Path(self.destination.path)

    def host(self, name: str) -> Host:
        return self.operator.inventory.host(name)

    def lay(self, size: int) -> bytes:
        """Write the source: ``size`` random bytes."""
        content = os.urandom(size)
        self.source_file.parent.mkdir(parents=True, exist_ok=True)
        self.source_file.write_bytes(content)
        return content

    def approve(self, *, max_bytes: int = FILE_BYTES) -> Approval | None:
        """The approval of this relay: the one there is, else a new one."""
        plan = plan_relay([self.source], "a test reads it", max_bytes=max_bytes)
        if plan is None:
            return None
        store = self.operator.store
        approved = store.find(plan) or store.approve(
            store.request(plan).id, reason="test", ca_key=self.operator.site.ca_key, seconds=600
        )
        return approved.read

    def relay(self, progress: Progress | None = None, *, max_bytes: int = FILE_BYTES, **options: Any) -> RelayResult:
        """Relay it in this process, under :meth:`approve`'s approval."""
        os.environ["DFLASH_STATE"] = str(self.state)
        approval, connector = self.approve(max_bytes=max_bytes), self.operator.connector
        return relay(connector, approval, self.source, self.destination, progress=progress, **options)

    def stored_bytes(self) -> int:
        """What the journals of this operator say the destination has."""
        found = (journal.read(file) for file in (self.state / "relays").glob("*.json"))
        spans = [span for content in found if content is not None for span in content.spans]
        return sum(span.length for span in spans if span.stored)

    def names(self) -> list[str]:
        """Everything in the destination's folder."""
        folder = self.destination_file.parent
        return sorted(os.listdir(folder)) if folder.exists() else []

    def nothing_arrived(self) -> bool:
        return all(name.startswith(f".{self.destination_file.name}.part-") for name in self.names())

    def whole(self) -> bool:
        """Whether the file is there with its sidecar, equals the source, and nothing else is left of the relay."""
        name = self.destination_file.name
        if self.names() != [name, f"{name}.relay.json"] or list((self.state / "relays").glob("*.json")):
            return False
        content = self.destination_file.read_bytes()
        sidecar = json.loads(self.destination_file.with_name(f"{name}.relay.json").read_bytes())
        digest = hashlib.sha256(content).hexdigest()
        return content == self.source_file.read_bytes() and (sidecar["sha256"], sidecar["bytes"]) == (
            digest,
            len(content),
        )


@dataclass
class Forked:
    """A relay in a process of its own, which may be killed."""

    child: BaseProcess
    answers: Connection

    @property
    def pid(self) -> int:
        assert self.child.pid is not None
        return self.child.pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> RelayResult | DFlashError | None:
        """What it returned or raised once it has ended; None when it was killed."""
        try:
            answer: RelayResult | DFlashError | None = self.answers.recv()
        except EOFError:
            answer = None
        self.child.join(60)
        return answer


def fork(way: Way, progress: Progress | None = None, **options: Any) -> Forked:
    """Start ``way.relay`` in a child."""
    context = multiprocessing.get_context("fork")
    answers, send = context.Pipe(duplex=False)

    def run() -> None:
        answers.close()
        try:
            result: RelayResult | DFlashError = way.relay(progress, **options)
        except DFlashError as error:
            result = error
        send.send(result)

    way.approve(max_bytes=options.get("max_bytes", FILE_BYTES))
    child = context.Process(target=run)
    child.start()
    send.close()
    return Forked(child, answers)


SCRIPT = """
import sys, typer
from pathlib import Path
from dflash.errors import run_cli
from flows.cli_relay import relay
app = typer.Typer()
app.command()(relay)
try:
    run_cli(app)
finally:
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(peak.split()[1], file=sys.stderr)
"""


def command(*arguments: str, environment: Mapping[str, str] | None = None) -> process.Popen[bytes]:
    """Start ``dflash-ops relay`` with these arguments; its last line on stderr is its peak memory in KiB."""
    argv = [sys.executable, "-c", SCRIPT, *arguments]
    return process.start(argv, stdout=process.PIPE, stderr=process.PIPE, env=environment)


def peak_memory(running: process.Popen[bytes]) -> int:
    """Bytes that a :func:`command` took at the most, once it has ended well."""
    _, said = running.communicate()
    assert running.returncode == 0, said.decode()
    return int(said.split()[-1]) * 1024


def once(at: int, action: Callable[[], object]) -> Progress:
    """A progress callback that acts once, as soon as ``at`` bytes are done."""
    waiting = [action]

    def progress(done: int, _: int) -> None:
        if done >= at and waiting:
            waiting.pop()()

    return progress


def ssh_children(pid: int, host: Host) -> list[int]:
    """The ssh processes of ``pid`` that lead to ``host``, the oldest first."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            words = _words(child)
            if words[0].endswith(b"ssh") and host.name.encode() in words:
                found.append(child)
    return sorted(found)


def working_on(path: Path) -> list[int]:
    """The processes on this machine that have a file below ``path`` open."""
    folders = Path("/proc").glob("[0-9]*/fd")
    return [
        int(folder.parent.name)
        for folder in folders
        if any(target.startswith(f"{path}/") for target in _targets(folder))
    ]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def parts(size: int, count: int, *, streams: int = 1, **more: Any) -> Settings:
    """Settings that cut ``size`` bytes into ``count`` ranges, whatever the round trip on a busy machine is."""
    return Settings(range_bytes=-(-size // count), streams=streams, **more)


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def _targets(folder: Path) -> Iterator[str]:
    try:
        for file in folder.iterdir():
            yield os.readlink(file)
    except OSError:
        return
