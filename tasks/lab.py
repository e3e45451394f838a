"""The local lab: the shipped setting of two hosts on two networks, address by address, on one machine.

Its folder holds ``hosts.yaml``, ``keys/`` (the lab's own CA and ordinary login) and one tree of files a host. Both
hosts run a real sshd; on ``kpro6`` the only way in is a certificate, and the only program the gate.
"""

import json
import os
import re
import shutil
import socket  # noqa: TID251 - whether the lab's own sshds answer
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

import yaml

from tasks import process
from tasks.lab_isolated import IsolatedSite, can_isolate
from tasks.lab_record import ISOLATED_RECORD, LabBusyError, LabDownError, LabError, Life, Record, exclusive, read_record
from tasks.lab_sites import HOSTS, OPERATOR, LabHost, LoopbackSite, Site, kill, login, session_path, sshd_sessions
from tasks.public_keys import fingerprint

__all__ = ["HostStatus", "Lab", "LabBusyError", "LabDownError", "LabError"]

KEY_TYPES = ("ed25519", "ecdsa", "rsa")
TRAINING, INFERENCE = "kpro6", "ct129"
READ_LIMIT = 200_000_000
PRINCIPAL = "dflash-gate"

GATE = "/opt/dflash/dflash-gate"
GATE_CONFIG = "/etc/dflash/gate.json"
GATE_STATE = "/var/lib/dflash-gate"

CHECKPOINTS = "/workspace/dflash/checkpoints"
ENVIRONMENTS = {TRAINING: "/workspace/dflash/environments", INFERENCE: "/root/eval/environments"}
JOBS = {TRAINING: "/workspace/dflash/jobs", INFERENCE: "/root/eval/jobs"}
CACHE = "/root/eval/cache"
MODELS = "/root/models"

MARK = "made-by-dflash-lab"
"""File in the lab's folder: without it nothing there is a lab's, whatever it is called."""
MADE = ("keys", *HOSTS)


@dataclass(frozen=True)
class HostStatus:
    """One host as it is now."""

    name: str
    address: str
    port: int
    sshd: int | None
    """Pid of the listening sshd on this machine, None when it is not running."""
    reachable: bool
    """Whether an sshd answers the operator's side."""


class Lab:
    """A running lab. Paths on its hosts: those of the shipped ``hosts.yaml``; see :meth:`host_path`."""

    def __init__(self, record: Record, site: Site) -> None:
        self._record = record
        self._site = site

    @classmethod
    def up(cls, state: Path, *, isolated: bool | None = None, outlive: bool = True) -> "Lab":
        """Bring the lab of the ``state`` folder up, or return it when it is up; mend or replace a crashed one.

        ``isolated`` defaults to what this process may do. With ``outlive`` false the lab's processes end with the
        calling thread. Raises :class:`LabBusyError` when another lab is up on this machine and :class:`LabError` when
        something that no lab made is in the way.
        """
        isolated = can_isolate() if isolated is None else isolated
        sshd = _required_programs(isolated=isolated)
        folder = _lab_folder(state)
        with _one_at_a_time(folder, isolated=isolated):
            for record in _records(folder):
                elsewhere = record.folder != folder
                if elsewhere and not isolated:
                    # on loopback addresses nothing is shared with it
                    continue
                site = _site(record)
                lab = cls(record, site)
                if elsewhere and record.alive:
                    raise LabBusyError(
                        f"another lab is up in {record.folder} (brought up by process {record.owner.pid}), and "
                        "addresses and names exist once: take it down with "
                        f"`DFLASH_STATE={record.folder.parent} dflash-ops lab down`"
                    )
                if not elsewhere and record.isolated == isolated and lab._is_whole():
                    return lab
                site.tear_down()
            _claim(folder)
            record = Record(folder=folder, owner=Life.of(os.getpid()), isolated=isolated)
            record.save()
            lab = cls(record, _site(record, outlive=outlive))
            try:
                lab._build(sshd)
            except BaseException:
                lab._site.tear_down()
                raise
            return lab

    @classmethod
    def running(cls, state: Path) -> "Lab":
        """The lab of the ``state`` folder; raises :class:`LabDownError` when it is not up."""
        folder = _lab_folder(state)
        record = next((record for record in _records(folder) if record.folder == folder), None)
        if record is None:
            raise LabDownError(f"no lab is up in {folder}: bring it up with `dflash-ops lab up`")
        return cls(record, _site(record))

    @classmethod
    def remove(cls, state: Path) -> bool:
        """Take down whatever is left of a lab in the ``state`` folder, after a crash too; False when nothing is."""
        folder = _lab_folder(state)
        with _one_at_a_time(folder, isolated=can_isolate()):
            own = [record for record in _records(folder) if record.folder == folder]
            for record in own:
                _site(record).tear_down()
            return _remove(folder) or bool(own)

    def down(self) -> None:
        """End and remove all that this lab made, with the files of its hosts; nothing else."""
        with _one_at_a_time(self.folder, isolated=self.privileged):
            self._site.tear_down()
            _remove(self.folder)

    @property
    def folder(self) -> Path:
        return self._record.folder

    @property
    def privileged(self) -> bool:
        """Whether the hosts have networks and files of their own."""
        return self._record.isolated

    @property
    def weaker(self) -> str:
        """What this lab does not give, in one sentence; empty when it is whole."""
        return self._site.weaker

    @property
    def hosts_file(self) -> Path:
        return self.folder / "hosts.yaml"

    @property
    def ca_key(self) -> Path:
        return self.folder / "keys/ca"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point this program at the lab."""
        return {"DFLASH_STATE": str(self.folder.parent), "DFLASH_HOSTS": str(self.hosts_file)}

    def host_path(self, host: str, path: str) -> Path:
        """Where this machine keeps the absolute ``path`` of the shipped setting on ``host``."""
        return self._record.tree(_host(host).name) / path.lstrip("/")

    def seen(self, host: str, path: str) -> str:
        """How programs on ``host`` spell that ``path``: as it is, or, where files are shared, this machine's path."""
        return self._site.seen(_host(host), path)

    def status(self) -> list[HostStatus]:
        """Every host with its address, sshd and whether it answers the operator's side."""
        return [
            HostStatus(
                name=host.name,
                address=self._site.address(host),
                port=self._site.port(host),
                sshd=self._sshd(host),
                reachable=self._answers(host),
            )
            for host in HOSTS.values()
        ]

    def argv(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` on a host, or on the side of the operator (``operator``)."""
        if name != OPERATOR:
            _host(name)
        return self._site.argv(name, argv)

    def exec(
        self, name: str, argv: Sequence[str], *, input: str | None = None, timeout: float = 60.0, check: bool = False
    ) -> process.CompletedProcess[str]:
        """Run ``argv`` to its end there, without ssh and without the guard: the lab's hosts are ours."""
        return process.run(
            self.argv(name, argv), input=input, timeout=timeout, check=check, env={**os.environ, **self.environment}
        )

    def entered(self) -> AbstractContextManager[None]:
        """The operator's side of the network, for the calling thread and the threads and processes it starts."""
        return self._site.entered()

    def kill_sshd(self, host: str) -> None:
        """Kill the host's sshd with all its sessions, as a crash would; commands run in them lose their streams."""
        life = self._record.sshds[_host(host).name]
        for pid in (life.pid, *sshd_sessions(life.pid)) if life.alive else ():
            kill(pid)

    def restart_sshd(self, host: str) -> None:
        """Start the host's sshd, at the same address and port, after ending one that still runs."""
        self.kill_sshd(host)
        self._site.start_sshd(_host(host), _program("sshd"))

    def cut_link(self, host: str) -> None:
        """Unplug the host's network: open connections freeze, new ones find nobody."""
        self._site.set_link(_host(host), up=False)

    def restore_link(self, host: str) -> None:
        self._site.set_link(_host(host), up=True)

    def _is_whole(self) -> bool:
        return self.hosts_file.exists() and all(status.sshd and status.reachable for status in self.status())

    def _build(self, sshd: str) -> None:
        self._site.start()
        self._make_keys()
        for host in HOSTS.values():
            self._lay_paths(host)
        self._install_gate()
        self._write_hosts_file()
        for host in HOSTS.values():
            self._configure_sshd(host, sshd)
            self._site.start_sshd(host, sshd)

    def _make_keys(self) -> None:
        """CA, login and host keys; those that exist stay, so that a mended lab is the same lab."""
        wanted = {self.ca_key: "ed25519", self.folder / "keys/login": "ed25519"}
        for host in HOSTS.values():
            wanted |= {self.host_path(host.name, f"/etc/ssh/ssh_host_{kind}_key"): kind for kind in KEY_TYPES}
        self.ca_key.parent.mkdir(mode=0o700, exist_ok=True)
        makers = []
        for file, kind in wanted.items():
            if not file.with_suffix(".pub").exists():
                file.unlink(missing_ok=True)
                command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", f"dflash lab {file.name}", "-f", str(file)]
                makers.append((file, process.start(command, stdin=process.DEVNULL)))
        for file, maker in makers:
            if maker.wait() != 0:
                raise LabError(f"ssh-keygen could not make {file}")

    def _lay_paths(self, host: LabHost) -> None:
        """The folders that the shipped ``hosts.yaml`` names; the current environment is the one that runs here."""
        named = [ENVIRONMENTS[host.name], JOBS[host.name]]
        named += [CHECKPOINTS] if host.name == TRAINING else [CACHE, MODELS]
        for path in named:
            self.host_path(host.name, path).mkdir(parents=True, exist_ok=True)
        current = self.host_path(host.name, ENVIRONMENTS[host.name]) / "current"
        current.unlink(missing_ok=True)
        current.symlink_to(sys.prefix)

    def _install_gate(self) -> None:
        """The gate with its configuration and what sshd needs to know about certificates, all on the training host."""
        source = files("deploy").joinpath("training-host", "dflash-gate")
        self._write(TRAINING, GATE, source.read_text(encoding="utf-8"), mode=0o755)
        self.host_path(TRAINING, GATE_STATE).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(
            TRAINING,
            GATE_CONFIG,
            _render(
                "lab/gate.json",
                state=json.dumps(self.seen(TRAINING, GATE_STATE)),
                host_keys=json.dumps(sorted(fingerprint(key) for key in self._host_keys(TRAINING))),
                read_limit=str(READ_LIMIT),
                ca=json.dumps(self.seen(TRAINING, "/etc/ssh/dflash_ca.pub")),
                revoked=json.dumps(self.seen(TRAINING, "/etc/ssh/dflash_revoked")),
            ),
        )
        self._write(TRAINING, "/etc/ssh/dflash_ca.pub", _public(self.ca_key) + "\n")
        self._write(TRAINING, "/etc/ssh/dflash_principals", f"{PRINCIPAL}\n")
        # without the file sshd refuses every key
        revoked = self.host_path(TRAINING, "/etc/ssh/dflash_revoked")
        if not revoked.exists():
            process.run(["ssh-keygen", "-q", "-k", "-f", str(revoked)])

    def _write_hosts_file(self) -> None:
        ca = {"ca_public_key": _public(self.ca_key), "lab": True, "ca_key": str(self.ca_key)}
        training = {
            "role": "training",
            "aliases": [{"name": "ct200"}],
            "enforcement": "host",
            "read_limit": f"{READ_LIMIT // 10**6}MB/s",
            "checkpoints": self.seen(TRAINING, CHECKPOINTS),
            "gate": self.seen(TRAINING, GATE),
            "gate_state": self.seen(TRAINING, GATE_STATE),
        }
        inference = {
            "role": "inference",
            "identity_file": str(self.folder / "keys/login"),
            "cache": self.seen(INFERENCE, CACHE),
            "target": self.seen(INFERENCE, f"{MODELS}/target"),
            "reference": self.seen(INFERENCE, f"{MODELS}/reference"),
            "server": None,
            "gpu": {"device": "cpu", "kernel": "torch", "dtype": "float32"},
        }
        hosts = {name: own | self._host_entry(name) for name, own in ((TRAINING, training), (INFERENCE, inference))}
        text = yaml.safe_dump({"version": 1, "guard": ca, "hosts": hosts}, sort_keys=False, width=1000)
        self.hosts_file.write_text(text, encoding="utf-8")

    def _host_entry(self, name: str) -> dict[str, object]:
        host = HOSTS[name]
        return {
            "address": self._site.address(host),
            "port": self._site.port(host),
            "user": login().pw_name,
            "host_keys": self._host_keys(name),
            "source_addresses": [self._site.source_address(host)],
            "environments": self.seen(name, ENVIRONMENTS[name]),
            "jobs": self.seen(name, JOBS[name]),
        }

    def _host_keys(self, name: str) -> list[str]:
        return [_public(self.host_path(name, f"/etc/ssh/ssh_host_{kind}_key")) for kind in KEY_TYPES]

    def _configure_sshd(self, host: LabHost, sshd: str) -> None:
        """Write the host's sshd_config; sshd itself says whether it is right and which options it knows."""
        if host.name == INFERENCE:
            self._write(host.name, "/etc/ssh/authorized_keys", _public(self.folder / "keys/login") + "\n")
        config = "/etc/ssh/sshd_config"
        self._write(host.name, config, self._sshd_config(host, penalties=""))
        connection = f"user={login().pw_name},host=lab,addr={self._site.source_address(host)}"
        check = self._site.argv(host.name, [sshd, "-T", "-f", self.seen(host.name, config), "-C", connection])
        known = process.run(check).stdout
        if "\npersourcepenalties" in known:
            self._write(host.name, config, self._sshd_config(host, penalties="PerSourcePenalties no"))

    def _sshd_config(self, host: LabHost, *, penalties: str) -> str:
        keys = self.seen(host.name, "/etc/ssh")
        match = ""
        if host.name == TRAINING:
            gate = f"{sys.base_prefix}/bin/python3 -I {self.seen(TRAINING, GATE)}"
            match = _render(
                "training-host/sshd_match.conf",
                user=login().pw_name,
                gate=gate,
                config=self.seen(TRAINING, GATE_CONFIG),
                ca=f"{keys}/dflash_ca.pub",
                principals=f"{keys}/dflash_principals",
                revoked=f"{keys}/dflash_revoked",
            )
        return _render(
            "lab/sshd_config",
            address=self._site.address(host),
            port=str(self._site.port(host)),
            keys=keys,
            pid_file=self.seen(host.name, "/run/sshd.pid"),
            strict_modes="yes" if self.privileged else "no",
            authorized_keys="none" if host.name == TRAINING else f"{keys}/authorized_keys",
            home=self.seen(host.name, "/root"),
            path=session_path(),
            penalties=penalties,
            match=match,
        )

    def _sshd(self, host: LabHost) -> int | None:
        life = self._record.sshds.get(host.name)
        return life.pid if life is not None and life.alive else None

    def _answers(self, host: LabHost) -> bool:
        """Whether an sshd greets; nothing is sent, and no session is begun."""
        try:
            with (
                self._site.entered(),
                socket.create_connection((self._site.address(host), self._site.port(host)), timeout=2) as connection,
            ):
                return connection.recv(8) == b"SSH-2.0-"
        except (OSError, LabError, KeyError):
            return False

    def _write(self, host: str, path: str, text: str, *, mode: int = 0o644) -> None:
        file = self.host_path(host, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)


def _lab_folder(state: Path) -> Path:
    return state.resolve() / "lab"


def _site(record: Record, *, outlive: bool = True) -> Site:
    kind = IsolatedSite if record.isolated else LoopbackSite
    return kind(record, outlive=outlive)


def _records(folder: Path) -> Iterator[Record]:
    """The labs on record that concern one in ``folder``: the isolated one of this machine and the folder's own."""
    for isolated in (True, False):
        record = read_record(folder, isolated=isolated)
        if record is not None:
            yield record


@contextmanager
def _one_at_a_time(folder: Path, *, isolated: bool) -> Iterator[None]:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive(ISOLATED_RECORD.parent if isolated else folder.parent):
        yield


def _claim(folder: Path) -> None:
    """Mark ``folder`` as a lab's before anything is put into it; refuse one that holds what a lab would overwrite."""
    if _is_marked(folder):
        return
    taken = [folder] if folder.is_symlink() else [folder / name for name in (*MADE, "hosts.yaml")]
    for path in taken:
        if os.path.lexists(path):
            raise LabError(f"{path} is there and no lab made it: move it away, or name another $DFLASH_STATE")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / MARK).touch()


def _is_marked(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / MARK).exists()


def _remove(folder: Path) -> bool:
    """Remove what a lab put into its folder, and the folder when nothing else is in it; False when there is none."""
    if not _is_marked(folder):
        return False
    _refuse_mounts(folder)
    for name in MADE:
        remove_tree(folder / name)
    for name in ("hosts.yaml", MARK):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
    return True


def remove_tree(folder: Path) -> None:
    """Remove ``folder``, which this program made; nothing behind a symbolic link or a mount is touched."""
    if folder.is_symlink() or not folder.is_dir():
        return
    _refuse_mounts(folder)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise LabError(f"{error.filename}: {error.strerror}: remove {folder} by hand") from None


def _refuse_mounts(folder: Path) -> None:
    if mounted := [point for point in _mount_points() if point.is_relative_to(folder.resolve())]:
        raise LabError(f"{mounted[0]} is mounted inside {folder}, which would be removed: unmount it first")


def _mount_points() -> list[Path]:
    """Every mount point that the calling thread sees; its namespace need not be the process's."""
    lines = Path("/proc/thread-self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    # the kernel writes blanks and backslashes as three octal digits
    return [Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])) for line in lines]


def _host(name: str) -> LabHost:
    if name not in HOSTS:
        raise LabError(f"the lab has no host {name!r}; it has {', '.join((OPERATOR, *HOSTS))}")
    return HOSTS[name]


def _required_programs(*, isolated: bool) -> str:
    """The path of sshd, when all the programs the lab needs are there; names the packages otherwise."""
    packages = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
    if isolated:
        packages |= {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "pivot_root": "util-linux"}
    missing = sorted({package for program, package in packages.items() if _find(program) is None})
    if missing:
        raise LabError(f"the lab needs {', '.join(missing)}: install with `apt-get install {' '.join(missing)}`")
    return _program("sshd")


def _program(name: str) -> str:
    found = _find(name)
    if found is None:
        raise LabError(f"{name} was not found: install it")
    return found


def _find(name: str) -> str | None:
    # a user's PATH seldom holds the system's programs
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def _public(key: Path) -> str:
    """``type base64`` of a key's public half."""
    return " ".join(key.with_suffix(".pub").read_text(encoding="ascii").split()[:2])


def _render(template: str, **values: str) -> str:
    text = files("deploy").joinpath(*template.split("/")).read_text(encoding="utf-8")
    return Template(text).substitute(values)
