"""A guard for tests: an inventory with fresh keys, a CA with or without a passphrase, a store."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tasks import inventory, process
from tasks.actions import AnyChange, Launch, Put, ReadGrant, Run
from tasks.approvals import ApprovalStore, Approved
from tasks.audit import Audit
from tasks.inventory import Inventory
from tasks.plans import Plan

PASSPHRASE = "correct horse"
PERSONS = ("ada", "bob")
CHECKPOINT = "/workspace/dflash/checkpoints/step_400.pt"


def make_key(path: Path, *, kind: str = "ed25519", passphrase: str = "") -> str:
    """A key pair at ``path``; returns the public line without its comment."""
    if kind != "ed25519" or passphrase:
        process.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", path])
        return public_line(path)
    # as ssh-keygen writes it, without a process: there are thousands of them in a run
    made = Ed25519PrivateKey.generate()
    path.touch(mode=0o600)
    path.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    line = made.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(line + b" test\n")
    return public_line(path)


def public_line(path: Path) -> str:
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


@dataclass
class GuardState:
    """Everything under ``folder``: hosts.yaml, the CA, the store and the audit log."""

    folder: Path
    lab: bool = True
    passphrase: str = ""
    address: str = "10.1.2.6"
    enforcement: str = "host"
    two_person: bool = False
    """Then ada and bob may be the second."""
    keys: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.keys["ca"] = make_key(self.ca_key, passphrase=self.passphrase)
        for name in ("training", "container", "inference"):
            self.keys[name] = make_key(self.folder / name)
        if self.two_person:
            for name in PERSONS:
                self.keys[name] = make_key(self.folder / name)
        self.hosts_file.write_text(self.hosts_text())

    @property
    def ca_key(self) -> Path:
        return self.folder / "ca"

    @property
    def hosts_file(self) -> Path:
        return self.folder / "hosts.yaml"

    def hosts_text(self) -> str:
        persons = ", ".join(f'{name}: "{self.keys[name]}"' for name in PERSONS if name in self.keys)
        return f"""\
version: 1
guard:
  ca_public_key: "{self.keys["ca"]}"
  ca_key: {self.ca_key}
  lab: {str(self.lab).lower()}
  two_person: {str(self.two_person).lower()}
  second_persons: {{{persons}}}
hosts:
  kpro6:
    role: training
    address: {self.address}
    aliases:
      - name: ct200
        host_keys: ["{self.keys["container"]}"]
    user: dflash
    host_keys: ["{self.keys["training"]}"]
    source_addresses: [10.1.2.1]
    enforcement: {self.enforcement}
  ct129:
    role: inference
    address: 10.1.230.172
    user: root
    host_keys: ["{self.keys["inference"]}"]
"""

    @property
    def inventory(self) -> Inventory:
        return inventory.load(self.hosts_file)

    @property
    def audit(self) -> Audit:
        return Audit(self.folder / "guard" / "audit.jsonl")

    @property
    def store(self) -> ApprovalStore:
        return ApprovalStore(self.inventory, self.audit, self.folder / "guard")

    def grant(self, path: str | None = CHECKPOINT, *, root: str | None = None, size: int = 1000) -> ReadGrant:
        return ReadGrant(
            host="kpro6",
            host_keys=self.inventory.host("kpro6").fingerprints,
            paths=() if path is None else (path,),
            root=root,
            verbs=("stat", "read"),
            sessions=2,
            bytes=size,
        )

    def plan(self, path: str | None = CHECKPOINT, *, root: str | None = None, size: int = 1000) -> Plan:
        """A plan that only reads."""
        return Plan(grant=self.grant(path, root=root, size=size), effect="the file is read, nothing changes")

    def put(self, path: str = "/workspace/dflash/jobs/config.yaml", content: bytes = b"seed: 1\n") -> Put:
        keys = self.inventory.host("kpro6").fingerprints
        sha256 = hashlib.sha256(content).hexdigest()
        return Put(host="kpro6", host_keys=keys, path=path, size=len(content), sha256=sha256, seconds=60)

    def launch(self, job: str = "night-1") -> Launch:
        keys = self.inventory.host("kpro6").fingerprints
        return Launch(host="kpro6", host_keys=keys, argv=("/bin/true",), jobs="/workspace/dflash/jobs", job=job)

    def emergency(self) -> Run:
        keys = self.inventory.host("kpro6").fingerprints
        return Run(host="kpro6", host_keys=keys, argv=("/bin/true",), seconds=60, break_glass=True)

    def changing(self, *changes: AnyChange, grant: ReadGrant | None = None) -> Plan:
        """A plan that changes something."""
        return Plan(grant=grant, changes=changes, effect="a test changes something")

    def approve(self, plan: Plan, *, seconds: int | None = None) -> Approved:
        """Ask for ``plan`` and approve it as the operator does."""
        return self.store.approve(self.store.request(plan).id, reason="a test", ca_key=self.ca_key, seconds=seconds)

    def events(self) -> list[str]:
        return [entry["event"] for entry in self.audit.entries()]
