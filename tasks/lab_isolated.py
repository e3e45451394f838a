"""The lab as root makes it: network namespaces for the three sides, and a machine of its own for each host.

    dflash-operator   10.1.2.1 ── veth ── 10.1.2.6      dflash-kpro6
                      10.1.230.1 ─ veth ── 10.1.230.172  dflash-ct129

Nothing is forwarded, and the machine's own namespace gets neither an address nor a route. A host has a mount, pid, ipc
and uts namespace as well: with a shared pid namespace ``/proc/<pid>/root`` would open the other host's files.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.resources import files
from pathlib import Path

from tasks import process
from tasks.lab_record import LabError, Life, Record
from tasks.lab_sites import (
    HOSTS,
    OPERATOR,
    OWN_FOLDERS,
    LabHost,
    dying_with_caller,
    kill,
    login,
    pid_in,
    session_path,
    sshd_error,
    wait_until,
)

NETNS = Path("/run/netns")
CLONE_NEWNET = 0x40000000
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21

TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# what a host shows of the machine's /etc: enough for programs to run, and no secret; not nsswitch.conf, because
# nss-systemd calls a root without a shadow entry locked, and sshd then lets it in with no key
# fmt: off
SHOWN_OF_ETC = (
    "alternatives", "ca-certificates", "crypto-policies", "environment", "group", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "login.defs", "mime.types", "os-release", "passwd", "pki", "profile",
    "protocols", "services", "shells", "ssl", "terminfo",
)
# fmt: on


def can_isolate() -> bool:
    """Whether this process may make namespaces: root, and not in a container that took that away."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    needed = 1 << CAP_NET_ADMIN | 1 << CAP_SYS_ADMIN
    return os.geteuid() == 0 and effective & needed == needed


class IsolatedSite:
    """Three network namespaces and, for each host, files and processes of its own."""

    weaker = ""

    def __init__(self, record: Record, *, outlive: bool) -> None:
        self.record = record
        self._outlive = outlive
        self._children: list[process.Popen[bytes]] = []

    def address(self, host: LabHost) -> str:
        return host.address

    def source_address(self, host: LabHost) -> str:
        return host.operator

    def port(self, host: LabHost) -> int:
        return 22

    def seen(self, host: LabHost, path: str) -> str:
        return path

    def start(self) -> None:
        self._lay_network()
        shown = _shown_paths()
        hidden = _hidden_path(self.record.folder.parent, shown)
        for host in HOSTS.values():
            _lay_tree(self.record.tree(host.name), host, shown)
        children = [self._start_first_process(host, shown, hidden) for host in HOSTS.values()]
        for host, child in zip(HOSTS.values(), children, strict=True):
            self.record.first_processes[host.name] = _first_process(host, child)
            self.record.save()

    def argv(self, name: str, argv: Sequence[str]) -> list[str]:
        if name == OPERATOR:
            return ["nsenter", f"--net={_path(OPERATOR)}", "--", *argv]
        target = f"--target={self.record.first_processes[name].pid}"
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid")
        return ["nsenter", target, *spaces, "--", "env", "-i", *_environment(), *argv]

    def start_sshd(self, host: LabHost, program: str) -> None:
        pid_file = self.record.tree(host.name) / "run/sshd.pid"
        pid_file.unlink(missing_ok=True)
        process.run(
            self.argv(host.name, [program, "-f", "/etc/ssh/sshd_config", "-E", "/var/log/sshd.log"]),
            timeout=20,
        )
        wait_until(lambda: pid_in(pid_file) is not None)
        inside = pid_in(pid_file)
        outside = _pid_outside(self.record.first_processes[host.name].pid, inside) if inside else None
        if outside is None:
            raise sshd_error(self.record, host)
        self.record.sshds[host.name] = Life.of(outside)
        self.record.save()

    def set_link(self, host: LabHost, *, up: bool) -> None:
        # the host's end: without the operator's a connection would fail at once instead of hanging
        process.run(["ip", "-n", _namespace(host.name), "link", "set", "eth0", "up" if up else "down"])

    def entered(self) -> AbstractContextManager[None]:
        return _inside_network(_path(OPERATOR))

    def tear_down(self) -> None:
        ours = [name for name, identity in self.record.namespaces.items() if _is_ours(NETNS / name, identity)]
        for host in HOSTS.values():
            if _namespace(host.name) in ours:
                _end_processes(_namespace(host.name))
        for life in self.record.first_processes.values():
            life.kill()
        for child in self._children:
            child.wait()
        self._children.clear()
        for name in ours:
            process.run(["ip", "netns", "delete", name])
        self.record.remove()

    def _lay_network(self) -> None:
        names = [_namespace(name) for name in (OPERATOR, *HOSTS)]
        for name in names:
            if (NETNS / name).exists():
                raise LabError(
                    f"there is a network namespace {name} that no lab made: remove it with `ip netns delete {name}` "
                    "if nothing needs it"
                )
        for name in names:
            self.record.namespaces[name] = ""
            self.record.save()
            process.run(["ip", "netns", "add", name])
            self.record.namespaces[name] = _identity(NETNS / name)
            self.record.save()
        with self.entered():
            # a new namespace may begin with the machine's own setting
            for switch in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
                _switch_off(Path("/proc/sys/net", switch))
        operator = ["link set lo up"]
        for host in HOSTS.values():
            operator += [
                f"link add {host.name} type veth peer name eth0 netns {_namespace(host.name)}",
                f"address add {host.operator}/24 dev {host.name}",
                f"link set {host.name} up",
            ]
        _ip(OPERATOR, operator)
        for host in HOSTS.values():
            _ip(host.name, ["link set lo up", f"address add {host.address}/24 dev eth0", "link set eth0 up"])

    def _start_first_process(self, host: LabHost, shown: list[Path], hidden: Path | None) -> process.Popen[bytes]:
        script = str(files("deploy").joinpath("lab", "first-process.sh"))
        spaces = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--propagation", "private")
        child = process.start(
            [
                *dying_with_caller(outlive=self._outlive),
                *("ip", "netns", "exec", _namespace(host.name), "unshare", *spaces, "--"),
                *("sh", script, str(self.record.tree(host.name)), host.name, str(hidden or "")),
            ],
            stdin=process.PIPE,
            stdout=process.PIPE,
            stderr=process.PIPE,
            start_new_session=True,
        )
        self._children.append(child)
        assert child.stdin is not None
        with child.stdin as stdin:
            stdin.write("".join(f"{path}\n" for path in shown).encode())
        return child


def _namespace(name: str) -> str:
    return f"dflash-{name}"


def _path(name: str) -> Path:
    return NETNS / _namespace(name)


def _ip(name: str, commands: Sequence[str]) -> None:
    process.run(["ip", "-n", _namespace(name), "-batch", "-"], input="".join(f"{command}\n" for command in commands))


def _identity(path: Path) -> str:
    found = os.stat(path)
    return f"{found.st_dev}:{found.st_ino}"


def _is_ours(path: Path, identity: str) -> bool:
    """Whether what is at ``path`` is the namespace that was recorded, or the empty file that one leaves behind."""
    if not path.exists():
        return False
    is_namespace = os.stat(path).st_dev == os.stat("/proc/self/ns/net").st_dev
    return identity in ("", _identity(path)) or not is_namespace


def _end_processes(name: str) -> None:
    listed = process.run(["ip", "netns", "pids", name], check=False)
    for pid in listed.stdout.split():
        kill(int(pid))


def _switch_off(switch: Path) -> None:
    if not switch.exists() or switch.read_text(encoding="ascii").strip() == "0":
        return
    try:
        switch.write_text("0", encoding="ascii")
    except OSError as error:
        raise LabError(f"{switch} is on and cannot be switched off, so the hosts would be routed: {error}") from None


@contextmanager
def _inside_network(namespace: Path) -> Iterator[None]:
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _set_network(namespace)
        try:
            yield
        finally:
            _set_network(Path(f"/proc/self/fd/{before}"))
    finally:
        os.close(before)


def _set_network(namespace: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = os.open(namespace, os.O_RDONLY)
    except FileNotFoundError:
        raise LabError(f"{namespace} is gone: bring the lab up again") from None
    try:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise LabError(f"cannot enter the network namespace {namespace}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def _first_process(host: LabHost, child: process.Popen[bytes]) -> Life:
    """Wait until the host's tree stands; its first process prints its pid then."""
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout as stdout, child.stderr as stderr:
        pid = stdout.readline().strip()
        if not pid:
            said = process.last_line(stderr.read().decode(errors="replace"))
            raise LabError(f"{host.name} could not be made: {said}")
    return Life.of(int(pid))


def _pid_outside(first_process: int, inside: int) -> int | None:
    """The machine's number of the process that has the number ``inside`` on the host of ``first_process``."""
    space = os.readlink(f"/proc/{first_process}/ns/pid")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns/pid") != space:
                continue
            lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        if any(line.startswith("NSpid:") and line.split()[-1] == str(inside) for line in lines):
            return int(folder.name)
    return None


def _environment() -> list[str]:
    user = login()
    return [
        f"PATH={session_path()}",
        f"HOME={user.pw_dir}",
        f"USER={user.pw_name}",
        f"LOGNAME={user.pw_name}",
        f"SHELL={user.pw_shell}",
        f"TERM={os.environ.get('TERM', 'dumb')}",
        "LANG=C.UTF-8",
    ]


def _shown_paths() -> list[Path]:
    """Paths of the machine that every host shows read-only, none inside another: system, this Python, this program."""
    program = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parent.parent}
    candidates = [
        Path("/usr"),
        *(Path("/", name) for name in TOP_FOLDERS if not Path("/", name).is_symlink()),
        *(Path("/etc", name) for name in SHOWN_OF_ETC),
        *sorted(program | {path.resolve() for path in program}),
    ]
    shown: list[Path] = []
    for path in candidates:
        own = next((f"/{folder}" for folder in OWN_FOLDERS if Path("/", folder).is_relative_to(path)), None)
        if own is not None and path != Path("/usr"):
            raise LabError(f"Python or this program is in {path}, which would cover {own} of the hosts: move it deeper")
        if path.exists() and not any(path.is_relative_to(other) for other in shown):
            shown.append(path)
    return shown


def _hidden_path(state: Path, shown: Sequence[Path]) -> Path | None:
    """The state folder when a host would see it through a shown path: it holds the CA's key and the other host."""
    if not any(state.is_relative_to(path) for path in shown):
        return None
    if covered := next((path for path in shown if path.is_relative_to(state)), None):
        raise LabError(f"the state folder {state} contains {covered}, which the hosts must see: move $DFLASH_STATE")
    return state


def _lay_tree(tree: Path, host: LabHost, shown: Sequence[Path]) -> None:
    """Make the host's own folders and files, and a mount point for every shown path."""
    for folder in OWN_FOLDERS:
        (tree / folder).mkdir(parents=True, exist_ok=True)
    (tree / "root").chmod(0o700)
    for folder in ("tmp", "var/tmp"):
        (tree / folder).chmod(0o1777)
    (tree / "etc/hosts").write_text(f"127.0.0.1 localhost\n{host.address} {host.name}\n", encoding="ascii")
    for path in shown:
        point = tree / path.relative_to("/")
        if path.is_dir():
            point.mkdir(parents=True, exist_ok=True)
        else:
            point.touch()
    for name in TOP_FOLDERS:
        top, link = Path("/", name), tree / name
        if top.is_symlink() and not link.is_symlink():
            link.symlink_to(os.readlink(top))
