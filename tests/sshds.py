"""Fixtures: two real sshds on loopback, a protected host behind the gate and an ordinary one.

They run as whoever runs the tests, without namespaces: what they show is how the gate, the certificates and the host
keys behave, not that two networks are apart (the lab's tests do that).
"""

import dataclasses
import getpass
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Template
from typing import Any

import pytest

from tasks import process, public_keys
from tasks.actions import ReadGrant
from tasks.approvals import Approval, ApprovalStore
from tasks.audit import Audit
from tasks.inventory import Host, Inventory, parse
from tasks.lab_sites import sshd_sessions
from tasks.plans import Plan
from tasks.process import Popen
from tasks.ssh import Connector

REPOSITORY = Path(__file__).parents[1]
GATE = REPOSITORY / "deploy" / "training-host" / "dflash-gate"
MATCH = REPOSITORY / "deploy" / "training-host" / "sshd_match.conf"
# a CA without a passphrase signs for these addresses only
PROTECTED, ORDINARY = "127.1.2.6", "127.1.230.172"
READ_LIMIT = 2 * 10**9

SSHD_CONFIG = """
Port {port}
Port {second_port}
ListenAddress {address}
{host_keys}
PidFile none
LogLevel VERBOSE
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthorizedKeysFile {authorized_keys}
Subsystem sftp internal-sftp
MaxStartups 100:30:200
# a shell would read the start files of whoever runs the tests
SetEnv HOME={home}
# the exchange that is newer takes a tenth of a second, and there are thousands of sessions; the lab's sshds have it
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org
{more}
"""


@dataclasses.dataclass
class Sshd:
    """One running sshd on two ports, and what it logged."""

    address: str
    port: int
    second_port: int
    host_keys: tuple[str, ...]
    log: Path
    running: Popen[bytes]

    def logged(self) -> str:
        return self.log.read_text()

    @property
    def config(self) -> Path:
        return self.log.with_name("sshd_config")

    def sessions(self) -> list[int]:
        """The processes that serve its open sessions."""
        return sshd_sessions(self.running.pid)

    def crash(self) -> None:
        """Kill it with all its sessions; what ran in them loses its streams."""
        for pid in (self.running.pid, *self.sessions()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.running.wait()

    def restart(self) -> None:
        """Start it again, after a crash or with a changed configuration."""
        if self.running.poll() is None:
            self.crash()
        self.running = _run(self.running.args[0], self.config, self.log)  # type: ignore[index]
        _wait_for(self.address, self.port, self.running, self.log)


@dataclasses.dataclass
class Site:
    """The two hosts and the operator's keys."""

    folder: Path
    protected: Sshd
    ordinary: Sshd
    ca_key: Path
    login_key: Path

    def inventory(self, **entries: dict[str, Any]) -> Inventory:
        """What :meth:`hosts_text` says."""
        return parse(self.hosts_text(**entries))

    def hosts_text(self, **entries: dict[str, Any]) -> str:
        """hosts.yaml with ``train`` (protected) and ``infer``; ``entries`` change one of them or add another host."""
        hosts: dict[str, dict[str, Any]] = {
            "train": {
                "role": "training",
                "address": self.protected.address,
                "port": self.protected.port,
                "user": getpass.getuser(),
                "host_keys": list(self.protected.host_keys),
                "source_addresses": ["127.0.0.0/8"],
            },
            "infer": self.ordinary_entry(),
        }
        for name, changes in entries.items():
            hosts[name] = hosts.get(name, {}) | changes
        ca = public_keys.normalise_signing(self.ca_key.with_suffix(".pub").read_text())
        return json.dumps({"version": 1, "guard": {"ca_public_key": ca, "lab": True}, "hosts": hosts})

    def ordinary_entry(self, sshd: Sshd | None = None, **changes: Any) -> dict[str, Any]:
        """An entry of hosts.yaml for the ordinary host, or for :func:`another_sshd`."""
        sshd = sshd or self.ordinary
        entry: dict[str, Any] = {
            "role": "inference",
            "address": sshd.address,
            "port": sshd.port,
            "user": getpass.getuser(),
            "identity_file": str(self.login_key),
            "host_keys": list(sshd.host_keys),
        }
        return entry | changes

    def operator(self, folder: Path, **entries: dict[str, Any]) -> "Operator":
        """An operator whose files are in ``folder``; ``entries`` as in :meth:`inventory`."""
        inventory = self.inventory(**entries)
        audit = Audit(folder / "audit.jsonl")
        store = ApprovalStore(inventory, audit, folder)
        return Operator(self, inventory, store, audit, Connector(inventory, store, audit))

    @property
    def gate_state(self) -> Path:
        return self.folder / "gate"


@dataclasses.dataclass
class Operator:
    """One operator's files, fresh for a test."""

    site: Site
    inventory: Inventory
    store: ApprovalStore
    audit: Audit
    connector: Connector

    @property
    def train(self) -> Host:
        return self.inventory.host("train")

    @property
    def infer(self) -> Host:
        return self.inventory.host("infer")

    def grant(self, **changes: Any) -> ReadGrant:
        fields: dict[str, Any] = {
            "host": "train",
            "host_keys": self.train.fingerprints,
            "verbs": ("stat", "list", "read", "hash"),
            "sessions": 100,
            "bytes": 10**9,
        }
        if "path" in changes:
            changes["paths"] = (changes.pop("path"),)
        return ReadGrant(**(fields | changes))

    def approve(self, *, seconds: int = 600, **changes: Any) -> Approval:
        """An approval of reading, as the operator gives it."""
        request = self.store.request(Plan(grant=self.grant(**changes), effect="a test reads"))
        return self.store.approve(request.id, reason="test", ca_key=self.site.ca_key, seconds=seconds).read

    def forge(self, approval: Approval, *options: str, principal: str = "dflash-gate") -> Approval:
        """The same key with another certificate of the operator's CA, signed with ``options`` of ssh-keygen."""
        public = Path(shutil.copy(approval.key_path.with_suffix(".pub"), self.store.folder / "forged.pub"))
        argv = ["ssh-keygen", "-q", "-s", str(self.site.ca_key), "-I", "forged", "-n", principal, "-z", "7", *options]
        process.run([*argv, str(public)])
        return dataclasses.replace(approval, certificate_path=public.with_name("forged-cert.pub"))

    def events(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.audit.entries() if entry["event"] == event]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Both sshds, for the whole run."""
    with both_sshds(tmp_path_factory.mktemp("sshds")) as running:
        yield running


@contextmanager
def both_sshds(folder: Path, ca_public_key: str | None = None) -> Iterator[Site]:
    """Both sshds, with all their files in ``folder``; the test is skipped where none is installed.

    ``ca_public_key`` is of a CA whose key is elsewhere, in a token.
    """
    sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
    if sshd is None:
        pytest.skip("no sshd is installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    ca_key, login_key = folder / "ca", folder / "login"
    for key in (ca_key, login_key):
        process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)])
    if ca_public_key is not None:
        ca_key.unlink()
        ca_key.with_suffix(".pub").write_text(ca_public_key + "\n")
    (folder / "principals").write_text("dflash-gate\n")
    process.run(["ssh-keygen", "-q", "-k", "-f", str(folder / "revoked")])
    (folder / "gate").mkdir(mode=0o700)
    match = Template(MATCH.read_text()).substitute(
        user=getpass.getuser(),
        ca=ca_key.with_suffix(".pub"),
        principals=folder / "principals",
        revoked=folder / "revoked",
        gate=GATE,
        config=folder / "gate.json",
    )
    protected = _start(sshd, folder / "train", PROTECTED, authorized_keys="none", more=match)
    ordinary = _start(sshd, folder / "infer", ORDINARY, authorized_keys=str(login_key.with_suffix(".pub")), more="")
    write_gate_configuration(folder, host_keys=[public_keys.fingerprint(key) for key in protected.host_keys])
    yield Site(folder, protected, ordinary, ca_key, login_key)
    for each in (protected, ordinary):
        each.running.terminate()
        each.running.wait()


@contextmanager
def another_sshd(site: Site, name: str, address: str) -> Iterator[Sshd]:
    """A further ordinary host beside those of ``site``, which lets the same login in."""
    program, login = site.ordinary.running.args[0], str(site.login_key.with_suffix(".pub"))  # type: ignore[index]
    sshd = _start(program, site.folder / name, address, authorized_keys=login, more="")
    try:
        yield sshd
    finally:
        sshd.running.terminate()
        sshd.running.wait()


@pytest.fixture
def operator(site: Site, tmp_path: Path) -> Operator:
    """An operator without any approval yet."""
    return site.operator(tmp_path / "operator")


def write_gate_configuration(folder: Path, **changes: Any) -> None:
    """The gate's configuration in ``folder``, with the state beside it."""
    configuration = folder / "gate.json"
    configuration.write_text(json.dumps({"state": str(folder / "gate"), "read_limit": READ_LIMIT} | changes))
    configuration.chmod(0o600)


def _start(sshd: str, folder: Path, address: str, *, authorized_keys: str, more: str) -> Sshd:
    folder.mkdir()
    keys = [folder / f"host_{kind}" for kind in ("ed25519", "ecdsa")]
    for key in keys:
        process.run(["ssh-keygen", "-q", "-t", key.name.removeprefix("host_"), "-N", "", "-C", "", "-f", str(key)])
    with socket.create_server((address, 0)) as one, socket.create_server((address, 0)) as other:
        port, second_port = one.getsockname()[1], other.getsockname()[1]
    config, log = folder / "sshd_config", folder / "log"
    config.write_text(
        SSHD_CONFIG.format(
            port=port,
            second_port=second_port,
            address=address,
            host_keys="\n".join(f"HostKey {key}" for key in keys),
            authorized_keys=authorized_keys,
            home=folder,
            more=_penalties(sshd, keys[0]) + more,
        )
    )
    running = _run(sshd, config, log)
    _wait_for(address, port, running, log)
    public = tuple(public_keys.normalise(key.with_suffix(".pub").read_text()) for key in keys)
    return Sshd(address, port, second_port, public, log, running)


def _run(sshd: str, config: Path, log: Path) -> Popen[bytes]:
    return process.start([sshd, "-D", "-f", str(config), "-E", str(log)])


def _penalties(sshd: str, host_key: Path) -> str:
    known = process.run([sshd, "-T", "-f", "/dev/null", "-h", str(host_key)]).stdout
    return "PerSourcePenalties no\n" if "persourcepenalties" in known else ""


def _wait_for(address: str, port: int, running: Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and running.poll() is None:
        try:
            with socket.create_connection((address, port), timeout=1) as connection:
                if connection.recv(3) == b"SSH":
                    return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"sshd on {address} port {port} does not answer: {log.read_text()}")
