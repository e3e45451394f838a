"""Where the attempts to get around the guard are made, and the table that they stand in."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tasks import ssh
from tasks.actions import Action, ReadGrant, Run
from tasks.approvals import Approval, Approved
from tasks.channel import Channel
from tasks.inventory import Host
from tasks.plans import Plan
from tasks.process import PIPE
from tasks.routes import Settings
from tasks.ssh import Connector
from tests.sshds import Operator, Site, Sshd

DISGUISED = "127.66054"
"""Another spelling of the protected host's address, which the inventory cannot see through."""
SECRET = b"not for anybody"


@dataclass
class More:
    """Further ways to the protected host."""

    alias: Sshd
    """An sshd with other keys, as a container on it has."""
    ipv6_port: int
    """Of an sshd on ``::1`` with the protected host's keys."""
    forwarded_port: int
    """On 127.0.0.1; leads to the protected host."""


@dataclass
class Stage:
    """An operator, a tree of which one file may be read, and a file that appears when something was done."""

    site: Site
    more: "More"
    operator: Operator
    folder: Path
    monkeypatch: pytest.MonkeyPatch
    open: ExitStack
    settings: dict[str, Settings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree.mkdir(parents=True)
        self.step.write_bytes(b"weights" * 1000)
        self.secret.write_bytes(SECRET)
        (self.tree / "link").symlink_to(self.secret)
        self.monkeypatch.setattr(ssh, "effective_settings", lambda one: self.settings.get(one, Settings(one)))

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def step(self) -> Path:
        return self.tree / "step.pt"

    @property
    def secret(self) -> Path:
        return self.folder / "secret"

    @property
    def effect(self) -> Path:
        return self.folder / "done"

    @property
    def connector(self) -> Connector:
        return self.operator.connector

    @property
    def train(self) -> Host:
        return self.operator.train

    # --- what the operator approved

    def may_read(self, **terms: Any) -> Approval:
        """An approval of reading the one file, or what ``terms`` say."""
        place = {} if "root" in terms else {"path": str(self.step)}
        return self.operator.approve(**(place | terms))

    def run(self, **terms: Any) -> Run:
        """A command that leaves the file by which one sees that it ran."""
        train = self.train
        fields = {"argv": ("/usr/bin/touch", str(self.effect)), "seconds": 20}
        return Run(host=train.name, host_keys=train.fingerprints, **(fields | terms))

    def approved(self, *actions: Action, **terms: Any) -> Approved:
        grants = [action for action in actions if isinstance(action, ReadGrant)]
        rest = tuple(action for action in actions if not isinstance(action, ReadGrant))
        plan = Plan(grant=grants[0] if grants else None, changes=rest, effect="a test")  # type: ignore[arg-type]
        store = self.operator.store
        return store.approve(store.request(plan).id, reason="test", ca_key=self.site.ca_key, **terms)

    # --- other inventories

    def elsewhere(self, **entries: dict[str, Any]) -> Connector:
        """A connector of the same operator with another hosts.yaml."""
        other = self.site.operator(self.folder / "elsewhere", **entries)
        return Connector(other.inventory, other.store, self.operator.audit)

    # --- past the program's own checks

    def past(self, approval: Approval, line: bytes | None = None, host: Host | None = None) -> Channel:
        """A channel on which ``line`` (by default what was approved) was taken: as if this program checked nothing."""
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - the channel closes it
        host = host or self.train
        child = self.connector.start_gate(approval, host, stdin=PIPE, stdout=PIPE, stderr=stderr)
        channel = Channel(self.connector, host, approval, child, stderr)
        self.open.callback(channel.end, "the test is over")
        with channel.ending_on_error():
            channel.send(approval.action.canonical() if line is None else line)
            channel.reply()
        return channel

    def past_with(self, approval: Approval, **request: Any) -> Any:
        """One request in a session past the program."""
        channel = self.past(approval)
        with channel.ending_on_error():
            channel.send(json.dumps(request).encode())
            return channel.reply()

    def forged(self, *options: str, approval: Approval | None = None, **terms: Any) -> Channel:
        """A session with the key of an approval and a certificate that the CA signed with ``options``."""
        approval = approval or self.may_read()
        return self.past(self.operator.forge(approval, *options, **terms))

    def own(self, approval: Approval) -> Approval:
        """The approval with copies of its key and certificate, which the store cannot delete."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        files = [Path(shutil.copy(file, folder)) for file in (approval.key_path, approval.certificate_path)]
        return dataclasses.replace(approval, key_path=files[0], certificate_path=files[1])


Bypass = Callable[[Stage], object]
ATTEMPTS: dict[str, tuple[Bypass, str]] = {}
"""Name → (what is tried, what the refusal has to say)."""


def attempt(name: str, says: str) -> Callable[[Bypass], Bypass]:
    def register(function: Bypass) -> Bypass:
        assert name not in ATTEMPTS
        ATTEMPTS[name] = (function, says)
        return function

    return register


SLOW = frozenset(
    (
        "a certificate of a CA that nobody knows",
        "a command for longer",
        "a command under an approval of reading",
        "a file of 1 GiB hashed along",
        "a file of other content",
        "a job under another name",
        "a key twice in the action",
        "a name that looks alike",
        "a name that the ssh configuration includes, control connection",
        "a negative offset",
        "a path with a NUL",
        "a proc link",
        "a request file that says approved",
        "an action that never ends",
        "an approval for another host",
        "an empty action",
        "another file",
        "another key type, control connection",
        "another port, control connection",
        "another port, ssh process",
        "as the jump host of another, by address, control connection",
        "as the jump host of another, disguised, ssh process",
        "client enforcement, a certificate of another CA",
        "client enforcement, a link out of the root",
        "client enforcement, one byte more than the budget",
        "client enforcement, one session more than approved",
        "for another digest",
        "for the user root",
        "its address, spelled otherwise, control connection",
        "not yet valid",
        "one more session",
        "one more verb",
        "reading under the certificate of a command",
        "that forces a gate of the sender's",
        "that forces a shell",
        "the CA's own key",
        "the certificate of another request",
        "the command with one more argument",
        "the folder above the root",
        "through a jump host, ssh process",
        "what was denied",
        "with everything permitted",
    )
)
"""Variations of others in the table; only ``make test-slow`` makes them."""
