"""The doctor's attempts that need a session: what an approval must not open beyond what it is for.

One plan asks for all of it: reading the gate program, and one harmless command that is run once. Everything else that
is tried with their certificates has to be refused by the host itself, so it is sent past this program's own checks.
"""

import hashlib
import ipaddress
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from dflash.errors import DFlashError, UsageError
from tasks import changes, process
from tasks.actions import ReadGrant, Run, said
from tasks.approvals import Approval, Approved
from tasks.channel import GateError, second_line
from tasks.errors import FileChanged, Refused
from tasks.finding import Finding
from tasks.gate import open_session
from tasks.guard_setup import gate_path
from tasks.inventory import Host
from tasks.plans import Plan
from tasks.process import PIPE, ProcessError, TimeoutExpired, last_line
from tasks.ssh import Connector

SECONDS = 30.0
"""For one attempt; one that the host does not end by then went through."""
FORMAT = "%u %a %n"
ROWS = (
    "gate and job user",
    "replay",
    "altered action line",
    "other action",
    "other source address",
    "other login",
    "port forwarding",
    "jump host",
    "agent forwarding",
    "gate program",
    "budget",
)


def full_plan(host: Host, *, gate: str | None = None) -> Plan:
    """What the doctor asks for to make its attempts; ``gate`` as for :func:`tasks.guard_doctor.diagnose`.

    :raises UsageError: nothing is installed on ``host`` that could be looked at.
    """
    if not host.protected or host.enforcement == "client":
        raise UsageError(f"nothing is installed on {host.name} that could refuse a session; leave --full out")
    program = gate or gate_path(host)
    grant = ReadGrant(
        host=host.name,
        host_keys=host.fingerprints,
        paths=(program,),
        verbs=("stat", "read", "hash"),
        sessions=2,
        # enough to hash it, and too little to read it as well
        bytes=2 * len(_shipped()) - 1,
    )
    parents = [str(parent) for parent in Path(program).parents]
    look = Run(
        host=host.name,
        host_keys=host.fingerprints,
        argv=("/usr/bin/stat", "-L", "-c", FORMAT, "/proc/self", host.gate_state, program, *parents),
        seconds=30,
        bytes=1 << 16,
    )
    effect = "the gate program is read and its owner looked up once; whatever else is tried has to be refused"
    return Plan(grant=grant, changes=(look,), effect=effect)


def skipped() -> list[Finding]:
    """The rows of :func:`attempt` where there is no approval."""
    why = "not looked at: it needs a session, which needs an approval; ask for one with --full"
    return [Finding(name, "skipped", "needs approval", why) for name in ROWS]


def attempt(
    connector: Connector, host: Host, approved: Approved, gate: str | None, tell: Callable[[str], None]
) -> Iterator[Finding]:
    """Make every attempt with the certificates of ``approved``, which is for :func:`full_plan`."""
    program = gate or gate_path(host)
    (look,) = [approval for approval in approved.approvals if isinstance(approval.action, Run)]
    with tempfile.TemporaryDirectory(prefix="dflash-doctor-") as folder:
        # the store deletes the keys of what is spent, and the host has to be asked behind that
        copies = [_copied(approval, Path(folder)) for approval in (approved.read, look)]
        attempts = _Attempts(connector, host, approved, program, *copies)
        for name, row in zip(ROWS, attempts.rows(), strict=True):
            tell(name)
            yield row()


@dataclass(frozen=True)
class _Answer:
    """What came of one attempt."""

    status: int | None
    """ssh's or the gate's exit status; None: it went on until it was stopped."""
    output: bytes
    errors: str

    @property
    def refusal(self) -> str | None:
        """What the gate said when it refused; None when it did not."""
        with suppress(ValueError, KeyError, TypeError, RecursionError, IndexError):
            reply = json.loads(self.output.splitlines()[-1])
            return str(reply["message"]) if self.status == Refused.exit_code and reply["refused"] is True else None
        return None

    @property
    def spent(self) -> bool:
        """Whether it refused because the approval was used."""
        with suppress(ValueError, KeyError, TypeError, RecursionError, IndexError):
            return self.refusal is not None and json.loads(self.output.splitlines()[-1])["spent"] is True
        return False

    @property
    def last(self) -> str:
        lines = [line for line in self.errors.splitlines() if not line.startswith("debug1:")]
        return said(last_line("\n".join(lines))) or f"exit status {self.status}"


class _Attempts:
    """The rows, each a method; ``grant`` and ``look`` are copies that outlive their use."""

    def __init__(
        self, connector: Connector, host: Host, approved: Approved, gate: str, grant: Approval, look: Approval
    ) -> None:
        self.connector, self.host, self.approved, self.gate = connector, host, approved, gate
        self.grant, self.look = grant, look

    def rows(self) -> list[Callable[[], Finding]]:
        """In the order of :data:`ROWS`: the budget is the last, because it uses the approval up."""
        return [
            self.owners,
            self.replay,
            self.altered_line,
            self.other_action,
            self.other_source,
            self.other_login,
            self.port_forwarding,
            self.jump_host,
            self.agent_forwarding,
            self.gate_program,
            self.budget,
        ]

    def owners(self) -> Finding:
        """Run the one command, whose output says who owns what, and as whom it ran."""
        name = "gate and job user"
        written = bytearray()
        try:
            approval = self.approved.of(self.look.action)
            assert isinstance(approval.action, Run)
            changes.run(self.connector, self.host, approval, approval.action, lambda _, data: written.extend(data))
        except DFlashError as error:
            return Finding(name, "fail", said(str(error)), "the command that looks at the owners could not be run")
        return judge_owners(self.host, self.gate, written.decode("utf-8", "replace"))

    def replay(self) -> Finding:
        answer = self.say(self.look, self.look.action.canonical())
        found = _refused_by_gate(
            "replay", answer, "a one-use approval that was used opens nothing, its key kept or not"
        )
        if found.status == "pass" and not answer.spent:
            return replace(found, status="fail", explanation="refused, but not because it was used")
        return found

    def altered_line(self) -> Finding:
        line = self.grant.action.canonical().replace(b'"sessions":2', b'"sessions":9')
        assert line != self.grant.action.canonical()
        return _refused_by_gate("altered action line", self.say(self.grant, line), "what was signed is what runs")

    def other_action(self) -> Finding:
        answer = self.say(self.grant, self.look.action.canonical())
        return _refused_by_gate("other action", answer, "the certificate of one action opens no other, approved or not")

    def other_source(self) -> Finding:
        name = "other source address"
        sources = [ipaddress.ip_network(source) for source in self.host.source_addresses]
        others = [one for one in _own_addresses() if not any(one in network for network in sources)]
        tried = []
        for address in others:
            answer = self.say(self.grant, b"", ("-o", f"BindAddress={address}"))
            if "Permission denied" in answer.errors:
                return Finding(
                    name, "pass", f"refused from {address}", "a certificate that is stolen opens nothing there"
                )
            if answer.status != 255:
                why = "sshd does not keep to source-address of the certificate"
                return Finding(name, "fail", f"let in from {address}", f"{why}: {answer.last}")
            tried.append(f"{address}: {answer.last}")
        why = "not looked at: this machine has no other address that reaches the host"
        return Finding(name, "skipped", "; ".join(tried) or "no other address here", why)

    def other_login(self) -> Finding:
        name = "other login"
        users = [user for user in ("root", "nobody") if user != self.host.user]
        for user in users:
            answer = self.say(self.grant, b"", ("-o", f"User={user}"))
            if answer.status != 255 or "Permission denied" not in answer.errors:
                return Finding(name, "fail", f"as {user}: {answer.last}", "the certificate opens another login")
        return Finding(
            name, "pass", f"refused as {', '.join(users)}", "the certificate opens the gate's login and no other"
        )

    def port_forwarding(self) -> Finding:
        name = "port forwarding"
        here = self.say(self.grant, b"", ("-W", "127.0.0.1:1"))
        back = ("-N", "-o", "ClearAllForwardings=no", "-o", "ExitOnForwardFailure=yes", "-R", "127.0.0.1:0:127.0.0.1:1")
        there = self.say(self.grant, b"", back)
        if "administratively prohibited" in here.errors and "remote port forwarding failed" in there.errors:
            return Finding(name, "pass", "refused in both directions", "no connection leads through the host")
        return Finding(
            name, "fail", f"{here.last}; {there.last}", "sshd forwards ports: DisableForwarding yes is missing"
        )

    def jump_host(self) -> Finding:
        name = "jump host"
        others = [each for each in self.connector.inventory.hosts.values() if each.name != self.host.name]
        if not others:
            return Finding(name, "skipped", "no other host", "not looked at: hosts.yaml has no other host to jump to")
        answer = self.say(self.grant, b"", ("-W", f"{_bracketed(others[0].address)}:{others[0].port}"))
        if "administratively prohibited" in answer.errors:
            return Finding(name, "pass", f"refused on the way to {others[0].name}", "no host is reached over it")
        return Finding(name, "fail", f"to {others[0].name}: {answer.last}", "the host can be jumped over")

    def agent_forwarding(self) -> Finding:
        name = "agent forwarding"
        answer = self.say(self.grant, b"", ("-o", "LogLevel=DEBUG1", "-o", "ForwardAgent=yes"))
        allowed = [line for line in answer.errors.splitlines() if line.startswith("debug1: Remote: cert: key options:")]
        if not allowed:
            return Finding(name, "skipped", "sshd does not say", "not looked at: this sshd does not say what it allows")
        if any("agent-forwarding" in line for line in allowed):
            return Finding(name, "fail", said(allowed[-1]), "the host could use the keys of an agent of the operator's")
        return Finding(name, "pass", "sshd does not allow it", "no agent of the operator's is lent to the host")

    def gate_program(self) -> Finding:
        """Compare the program on the host with the shipped one."""
        name, shipped = "gate program", _shipped()
        expected = hashlib.sha256(shipped).hexdigest()
        lie = (
            "an altered gate could answer this too, so look at it on the host itself once: "
            f"'sha256sum {self.gate}' has to print {expected}"
        )
        try:
            with open_session(self.connector, self.host, self.approved.read) as session:
                size = session.stat(self.gate).size
                found = session.hash(self.gate) if size <= self.approved.read.grant.bytes else f"{size} bytes"
        except DFlashError as error:
            return Finding(name, "fail", said(str(error)), f"the gate does not show its own program; {lie}")
        if found != expected:
            return Finding(name, "fail", f"it is {found}, and {expected} was shipped", f"another program; {lie}")
        return Finding(name, "pass", f"sha256 {expected[:16]}…, as shipped", lie)

    def budget(self) -> Finding:
        """Ask for more than is left, which ends the approval."""
        name, grant = "budget", self.approved.read.grant
        reading = False
        try:
            with open_session(self.connector, self.host, self.approved.read) as session:
                size = session.stat(self.gate).size
                reading = True
                for _ in range(grant.bytes // max(size, 1) + 1):
                    with session.read(self.gate, 0, size) as stream:
                        _drain(stream.fileno(), stream.length)
        except DFlashError as error:
            if reading and isinstance(error, Refused) and not isinstance(error, FileChanged):
                return Finding(name, "pass", said(str(error)), "more than was approved is not read")
            return Finding(name, "fail", said(str(error)), "it could not be seen whether the budget holds")
        return Finding(name, "fail", f"more than {grant.bytes} bytes were read", "the host keeps no budget")

    def say(self, approval: Approval, line: bytes, options: Sequence[str] = ()) -> _Answer:
        """One session past this program's own checks: ``line`` to the gate, with more ``options`` of ssh."""
        child = self.connector.start_gate(approval, self.host, stdin=PIPE, stdout=PIPE, stderr=PIPE, options=options)
        lines = line + b"\n"
        if approval.second_signature is not None:
            lines += second_line(approval.second_person, approval.second_signature) + b"\n"
        status: int | None = None
        try:
            output, errors = child.communicate(lines, SECONDS)
            status = child.returncode
        except TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)
            output, errors = child.communicate()
        return _Answer(status, output, errors.decode("utf-8", "replace"))


def judge_owners(host: Host, gate: str, output: str) -> Finding:
    """What the command of :func:`full_plan` tells about the gate program, the budgets and who commands run as."""
    name = "gate and job user"
    owners = dict(_owners(output))
    if not {"/proc/self", host.gate_state, gate} <= owners.keys():
        return Finding(name, "fail", said(output), "the command that looks at the owners does not name all files")
    job, gate_user = owners["/proc/self"][0], owners[host.gate_state][0]
    loose = [
        f"{path} is of user {user} with mode {mode:o}"
        for path, (user, mode) in owners.items()
        if path not in ("/proc/self", host.gate_state) and (user != 0 or (mode & 0o022 and not mode & 0o1000))
    ]
    if owners[host.gate_state][1] & 0o077:
        loose.append(f"{host.gate_state} can be entered by others than its user")
    if loose and host.enforcement == "host":
        why = "whoever can write there can put another gate in its place: make it root's and unwritable for others"
        return Finding(name, "fail", "; ".join(loose), why)
    if job == gate_user:
        why = (
            "an approved command runs as the user who keeps budgets and spent serials, so it could rewrite those "
            "and the gate's log: approve only what you would trust with that, or set job_user in hosts.yaml"
        )
        return Finding(name, "warn", f"gate and job are one user ({job}), state {host.gate_state}", why)
    why = "an approved command can reach neither budgets nor spent serials, and the gate program is root's"
    return Finding(name, "pass", f"gate is user {gate_user}, job is user {job}", why)


def _refused_by_gate(name: str, answer: _Answer, meaning: str) -> Finding:
    if answer.refusal is not None:
        return Finding(name, "pass", f"refused: {said(answer.refusal)}", meaning)
    if answer.status == 255 and "Permission denied" in answer.errors:
        return Finding(name, "pass", f"refused by sshd: {answer.last}", meaning)
    if answer.status == 255:
        # a connection that did not come about refused nothing
        return Finding(name, "skipped", answer.last, "not looked at: no session came about; try again")
    went = said(answer.output[:200].decode("utf-8", "replace"))
    return Finding(
        name, "fail", f"exit status {answer.status}: {went}", "the gate did not refuse it; install the shipped one"
    )


def _owners(output: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Path → (user, mode) of each line in :data:`FORMAT`."""
    for line in output.splitlines():
        if found := re.fullmatch(r"([0-9]+) ([0-7]+) (/.*)", line):
            yield found[3], (int(found[1]), int(found[2], 8))


def _own_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of this machine, and of each loopback network another one that also works."""
    try:
        listed = json.loads(process.run(["ip", "-j", "address"]).stdout)
        inside = [one for link in listed for one in link["addr_info"]]
        found = [ipaddress.ip_interface(f"{one['local']}/{one['prefixlen']}") for one in inside]
    except (ProcessError, ValueError, KeyError, TypeError):
        return []
    more = [one.ip + 1 for one in found if one.is_loopback and one.network.num_addresses > 2]
    return [one.ip for one in found] + more


def _copied(approval: Approval, folder: Path) -> Approval:
    key = Path(shutil.copy(approval.key_path, folder))
    certificate = Path(shutil.copy(approval.certificate_path, folder))
    return replace(approval, key_path=key, certificate_path=certificate)


def _drain(descriptor: int, length: int) -> None:
    while length:
        data = os.read(descriptor, min(length, 1 << 16))
        if not data:
            raise GateError("the stream ended early")
        length -= len(data)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _shipped() -> bytes:
    return files("deploy").joinpath("training-host", "dflash-gate").read_bytes()
