"""Two records of the same uses, laid side by side: the program's audit log and the log of the gate on the host.

Each side writes before it acts, so what stands in one and not in the other is a use by somebody else, a log that was
cut, or a session that never arrived. The comparison is pure; the host's log is read under an ordinary read grant.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash.errors import UsageError
from tasks.actions import ReadGrant, said
from tasks.approvals import Approval
from tasks.audit import LATEST, show_time
from tasks.channel import GateError
from tasks.gate import open_session
from tasks.inventory import Host
from tasks.plans import Plan
from tasks.ssh import Connector

LOG = "gate.log"
LOG_BYTES = 256 << 20
"""What one approval lets be read of it in all."""
OPENED = "session opened"
"""Event of the gate's log that stands for one use of a certificate."""
NOT_ARRIVED = ("ConnectionFailed", "HostKeyError", "Refused")
"""Outcomes after which the program itself says that the host may have done nothing."""
CLOCKS_APART = 300.0
"""Seconds by which the two machines' clocks may differ."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """Something that one record has and the other has not."""

    side: Literal["host", "program"]
    """Whose record has it."""
    time: float
    """Seconds since the epoch, by that side's clock."""
    serial: int
    """Of the certificate; 0 where there is none."""
    what: str
    """What was found and what it may mean."""

    def __str__(self) -> str:
        return f"{self.side}, {show_time(self.time)}, serial {self.serial or '–'}: {self.what}"


def plan_reconcile(host: Host) -> Plan:
    """The plan for reading the gate's log on ``host``.

    :raises UsageError: no gate keeps a log there.
    """
    if not host.protected or host.enforcement == "client":
        why = "the gate is only sent along there" if host.protected else "it is not protected"
        raise UsageError(f"{host.name} keeps no log of a gate, because {why}; there is nothing to compare")
    grant = ReadGrant(
        host=host.name,
        host_keys=host.fingerprints,
        paths=(f"{host.gate_state}/{LOG}",),
        verbs=("stat", "read"),
        sessions=2,
        bytes=LOG_BYTES,
    )
    return Plan(grant=grant, effect="the log of the gate is read and compared with this machine's, nothing changes")


def reconcile_host(connector: Connector, host: Host, approval: Approval) -> list[Difference]:
    """Read the gate's log under ``approval``, which is for :func:`plan_reconcile`, and compare it with the audit log.

    :raises Refused: the gate refused.
    :raises GateError: the log could not be read.
    """
    until = time.time()
    content = host_log(connector, host, approval)
    entries = [entry for entry in connector.audit.entries() if entry.get("host") == host.name]
    return reconcile(entries, content, until=until)


def host_log(connector: Connector, host: Host, approval: Approval) -> list[bytes]:
    """The lines of the gate's log on ``host``, the oldest first; a line that is being written is left out."""
    path = f"{host.gate_state}/{LOG}"
    parts: list[bytes] = []
    with open_session(connector, host, approval) as session:
        left = session.stat(path).size
        with session.read(path, 0, left) as stream:
            while left and (part := os.read(stream.fileno(), min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
            if left:
                raise GateError(f"{path} ended {left} bytes early")
    return b"".join(parts).split(b"\n")[:-1]


def reconcile(audit: Iterable[Entry], log: Sequence[bytes], *, until: float = LATEST) -> list[Difference]:
    """What the host's ``log`` has that the program's ``audit`` has not, and the other way round, the oldest first.

    ``audit`` are the entries about that host; what was used after ``until`` may be missing in ``log``.
    """
    uses: dict[int, _Use] = {}
    differences = list(_read_log(log, uses))
    begins = min((use.first for use in uses.values() if use.host_times), default=LATEST)
    earlier: list[float] = []
    for entry in audit:
        _read_audit(entry, uses, until, begins, earlier)
    for serial, use in uses.items():
        differences += _compared(serial, use)
    if earlier:
        what = (
            f"{len(earlier)} uses are from before the host's log begins, at {show_time(begins)}; it was begun anew "
            "since, or cut"
        )
        differences.append(Difference("program", min(earlier), 0, what))
    return sorted(differences, key=lambda one: one.time)


@dataclass
class _Use:
    """What both sides say about one serial."""

    host_times: list[float] = field(default_factory=list)
    host_digests: set[str] = field(default_factory=set)
    refusals: list[tuple[float, str]] = field(default_factory=list)
    program_times: list[float] = field(default_factory=list)
    recent: int = 0
    """Uses so late that the host's log may not have them yet."""
    digest: str | None = None
    outcomes: list[str] = field(default_factory=list)
    approved: bool = False

    @property
    def first(self) -> float:
        return min(self.host_times)


def _read_log(log: Sequence[bytes], uses: dict[int, _Use]) -> Iterator[Difference]:
    latest = 0.0
    for number, line in enumerate(log, 1):
        try:
            entry = json.loads(line)
            at, event, serial = float(entry["time"]), str(entry["event"]), entry.get("serial")
            if not 0 <= at <= LATEST or not (serial is None or type(serial) is int):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
            shown = said(line[:60].decode("utf-8", "replace"))
            yield Difference("host", latest, 0, f"line {number} of its log is not an entry: {shown}")
            continue
        latest = at
        if serial is None:
            continue
        use = uses.setdefault(serial, _Use())
        if event == OPENED:
            use.host_times.append(at)
            use.host_digests.add(str(entry.get("digest")))
        if event == "refused":
            use.refusals.append((at, said(str(entry.get("message")))))


def _read_audit(entry: Entry, uses: dict[int, _Use], until: float, begins: float, earlier: list[float]) -> None:
    match entry["event"]:
        case "decision":
            for serial in entry.get("serials", ()):
                uses.setdefault(serial, _Use()).approved = True
        case "consumption":
            use = uses.setdefault(entry["serial"], _Use())
            if entry["time"] < begins - CLOCKS_APART:
                earlier.append(entry["time"])
                return
            use.program_times.append(entry["time"])
            use.digest = str(entry["digest"])
            use.recent += entry["time"] > until
        case "end" if "serial" in entry:
            use = uses.setdefault(entry["serial"], _Use())
            use.outcomes.append(str(entry.get("outcome", "")))


def _compared(serial: int, use: _Use) -> Iterator[Difference]:
    there, here = len(use.host_times), len(use.program_times)
    if there > here:
        at = sorted(use.host_times)[here]
        if not use.approved:
            what = f"{there - here} uses of a certificate that no decision here is about: somebody else approved it"
        else:
            what = f"{there} uses, and this machine made {here}: somebody else has its key, or the audit log was cut"
        yield Difference("host", at, serial, what)
    if use.refusals and not use.approved:
        at, why = use.refusals[0]
        what = f"refused {len(use.refusals)} times ({why}): your CA signed it, and no decision here is about it"
        yield Difference("host", at, serial, what)
    lost = sum(outcome.startswith(NOT_ARRIVED) for outcome in use.outcomes)
    if there < here - lost - use.recent:
        at = sorted(use.program_times)[there]
        ends = "; ".join(dict.fromkeys(map(said, use.outcomes))) or "unknown"
        what = f"{here} uses (outcome: {ends}), and the host knows {there}: its log was cut, or they never arrived"
        yield Difference("program", at, serial, what)
    if use.digest is not None and use.host_digests - {use.digest}:
        yield Difference("host", use.first, serial, "the host did another action under this serial than was approved")
