"""The hosts of the lab and the two kinds of place they can live in; here the one that needs no privilege."""

import os
import pwd
import shlex
import socket  # noqa: TID251 - to find a free port
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks import process
from tasks.lab_record import LabError, Life, Record

OPERATOR = "operator"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# fmt: off
OWN_FOLDERS = (
    "dev", "etc/dflash", "etc/ssh", "home", "mnt", "opt", "proc", "root", "run/sshd", "srv", "sys", "tmp", "usr",
    "var/empty", "var/lib", "var/log", "var/tmp", "workspace",
)
# fmt: on


@dataclass(frozen=True)
class LabHost:
    """One host: its address, the operator's on its network, and the address it has where there are no namespaces."""

    name: str
    address: str
    operator: str
    loopback: str


HOSTS = {
    host.name: host
    for host in (
        LabHost("kpro6", "10.1.2.6", "10.1.2.1", "127.1.2.6"),
        LabHost("ct129", "10.1.230.172", "10.1.230.1", "127.1.230.172"),
    )
}


class Site(Protocol):
    """What the lab needs of the place its hosts live in."""

    @property
    def weaker(self) -> str:
        """What this place does not give, in one sentence; empty when nothing is missing."""

    def address(self, host: LabHost) -> str: ...

    def source_address(self, host: LabHost) -> str:
        """The operator's machine as ``host`` sees it."""

    def port(self, host: LabHost) -> int: ...

    def seen(self, host: LabHost, path: str) -> str:
        """The absolute ``path`` of the host's tree as programs on the host spell it."""

    def start(self) -> None:
        """Make the hosts, without their sshds."""

    def argv(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` on a host or on the operator's side."""

    def start_sshd(self, host: LabHost, program: str) -> None:
        """Start the host's sshd from its ``/etc/ssh/sshd_config``."""

    def set_link(self, host: LabHost, *, up: bool) -> None:
        """Plug the host's network in or out; what is sent to it meanwhile gets lost."""

    def entered(self) -> AbstractContextManager[None]:
        """The operator's side of the network, for the calling thread and the ones it starts."""

    def tear_down(self) -> None:
        """End and remove what the record names."""


class LoopbackSite:
    """Two sshds of the current user on loopback addresses: one tree of files and one network for all."""

    def __init__(self, record: Record, *, outlive: bool) -> None:
        self.record = record
        self._outlive = outlive
        self._children: list[process.Popen[bytes]] = []

    @property
    def weaker(self) -> str:
        return (
            "without the right to make namespaces the lab's hosts share this machine's files and network: "
            "nothing keeps ct129 from reaching kpro6, and no link can be cut"
        )

    def address(self, host: LabHost) -> str:
        return host.loopback

    def source_address(self, host: LabHost) -> str:
        return "127.0.0.1"

    def port(self, host: LabHost) -> int:
        return self.record.ports[host.name]

    def seen(self, host: LabHost, path: str) -> str:
        return f"{self.record.tree(host.name)}{path}"

    def start(self) -> None:
        separation = Path("/run/sshd")
        if os.geteuid() == 0 and not separation.exists():
            # an sshd that root starts insists on this folder
            self.record.folders.append(separation)
            self.record.save()
            separation.mkdir(mode=0o755)
        for host in HOSTS.values():
            for folder in OWN_FOLDERS:
                (self.record.tree(host.name) / folder).mkdir(parents=True, exist_ok=True)
            self.record.ports[host.name] = _free_port(host.loopback)
        self.record.save()

    def argv(self, name: str, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def start_sshd(self, host: LabHost, program: str) -> None:
        config, log = self.seen(host, "/etc/ssh/sshd_config"), self.seen(host, "/var/log/sshd.log")
        child = process.start(
            [*dying_with_caller(outlive=self._outlive), program, "-D", "-f", config, "-E", log],
            stdin=process.DEVNULL,
            stdout=process.DEVNULL,
            stderr=process.DEVNULL,
            start_new_session=True,
        )
        self._children.append(child)
        pid_file = Path(self.seen(host, "/run/sshd.pid"))
        wait_until(lambda: pid_in(pid_file) == child.pid or child.poll() is not None)
        if child.poll() is not None or pid_in(pid_file) != child.pid:
            raise sshd_error(self.record, host)
        self.record.sshds[host.name] = Life.of(child.pid)
        self.record.save()

    def set_link(self, host: LabHost, *, up: bool) -> None:
        raise LabError(f"the link of {host.name} can be cut only where the lab has namespaces: bring it up as root")

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tear_down(self) -> None:
        for life in self.record.sshds.values():
            for pid in (life.pid, *sshd_sessions(life.pid)) if life.alive else ():
                kill(pid)
        for child in self._children:
            child.kill()
            child.wait()
        self._children.clear()
        for folder in self.record.folders:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        self.record.remove()


def login() -> pwd.struct_passwd:
    """The current user, who is the login on every host."""
    try:
        return pwd.getpwuid(os.geteuid())
    except KeyError:
        raise LabError(f"user id {os.geteuid()} has no name here, and sshd needs one: use a named user") from None


def session_path() -> str:
    """PATH of a session on a lab host: the Python that runs here comes first, so that python3 is one that is there."""
    return f"{sys.base_prefix}/bin:{SYSTEM_PATH}"


def dying_with_caller(*, outlive: bool) -> list[str]:
    """The words before a command that end it together with the thread that starts it."""
    return [] if outlive else ["setpriv", "--pdeathsig", "KILL"]


def sshd_error(record: Record, host: LabHost) -> LabError:
    """What sshd's log says about why it is not running."""
    log = record.tree(host.name) / "var/log/sshd.log"
    said = process.last_line(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else ""
    return LabError(f"sshd of {host.name} did not start: {said or 'its log is empty'} ({shlex.quote(str(log))})")


def sshd_sessions(listener: int) -> list[int]:
    """The processes of a running sshd that serve its open sessions, not the commands run in them."""
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        number, _, rest = text.partition(" (")
        names[int(number)], _, fields = rest.rpartition(")")
        parents[int(number)] = int(fields.split()[1])
    found, queue = [], [listener]
    while queue:
        parent = queue.pop()
        children = [pid for pid, other in parents.items() if other == parent and names[pid].startswith("sshd")]
        found += children
        queue += children
    return found


def kill(pid: int) -> None:
    """Kill a process of the lab and wait until it is gone."""
    born = process.birth(pid)
    if born is not None:
        Life(pid=pid, birth=born).kill()


def pid_in(file: Path) -> int | None:
    """The number in a pid file, or None while there is none."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def wait_until(condition: Callable[[], bool], *, seconds: float = 5.0) -> bool:
    """Whether ``condition`` came true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
