"""What there is to know at a glance, gathered from the state folder and the Prefect server; no host is asked.

Everything here comes from files of this machine but the queue, which a server that does not answer leaves out.
"""

import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.prefect_home import server, serving
from tasks.actions import ReadGrant
from tasks.approvals import ApprovalStore
from tasks.audit import Audit
from tasks.credentials import Approval
from tasks.inventory import Inventory
from tasks.ledger import Attempt, Ledger, Watch
from tasks.look_memory import Memory

DAY = 86_400
WARN_SECONDS = 2 * DAY
"""A grant that ends sooner is said to."""
NUMBERS, RUNS = 8, 12
ANSWERED, STOPPED = "answered the last look", "stopped"
WATCHING = "watching"
OF_NO_HOST = (WATCHING, STOPPED, "PrefectUnreachable")
"""States of a watch whose host answered when it was looked at last; named here, for what has them loads for long."""
GOING = ("RUNNING", "PENDING", "CANCELLING", "PAUSED")
FAILED = ("FAILED", "CRASHED")
API_SECONDS = 3.0


@dataclass(frozen=True)
class HostRow:
    """A host, and the last thing that is known of it."""

    name: str
    role: str
    address: str
    protected: bool
    known: str
    since: float | None


@dataclass(frozen=True)
class RunRow:
    """A flow run that runs, is due, or has failed, with why."""

    name: str
    state: str
    since: float | None
    message: str = ""


@dataclass(frozen=True)
class Queue:
    """What Prefect has to do; ``problem`` says why it is not known."""

    api: str | None
    problem: str = ""
    going: list[RunRow] = field(default_factory=list)
    waiting: list[RunRow] = field(default_factory=list)
    next: RunRow | None = None
    """The first that is scheduled for later."""
    failed: list[RunRow] = field(default_factory=list)
    """Of the last day, the newest first; without those of the watches, whose checkpoints are tried again or counted."""


@dataclass(frozen=True)
class Number:
    """The last attempt at a checkpoint that has a result."""

    place: str
    step: int | None
    state: str
    tau: float | None
    ci95: tuple[float, float] | None
    on: str | None
    report: str | None
    message: str
    updated: float
    again: float | None = None
    """When a failed one is tried again by itself; None: never."""


@dataclass(frozen=True)
class Unfinished:
    """What lies in a watched folder and is no checkpoint yet, or a broken one."""

    place: str
    since: float
    """When it was looked into last."""
    reason: str


@dataclass(frozen=True)
class GrantRow:
    """A standing approval in force."""

    id: str
    host: str
    where: str
    not_after: float
    ends_soon: bool


@dataclass(frozen=True)
class Status:
    """One look at everything."""

    time: float
    hosts: list[HostRow]
    watches: list[Watch]
    queue: Queue
    checkpoints: dict[str, dict[str, int]]
    """By the digest of the suite: how many checkpoints are in which state; those without any attempt are counted only
    where a watch asks the suite of them."""
    numbers: list[Number]
    grants: list[GrantRow]
    unfinished: list[Unfinished] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, for other programs."""
        return asdict(self)


def gather(inventory: Inventory, *, clock: Callable[[], float] = time.time, state: Path | None = None) -> Status:
    """One look; ``state`` is the state folder's, by default this user's."""
    now = clock()
    ledger = Ledger.open(state)
    watches = as_served(ledger.watches())
    memories = {one.source: ledger.memory(one.source) for one in watches}
    watched = {memory.get("suite") for memory in memories.values()}
    attempts = ledger.attempts(limit=20 * NUMBERS)
    ended = [attempt for attempt in attempts if not attempt.is_open]
    results = [attempt for attempt in ended if attempt.state != "superseded"]
    suites = dict.fromkeys(attempt.suite for attempt in attempts)
    return Status(
        time=now,
        hosts=hosts(inventory, watches, ended),
        watches=watches,
        queue=queue(server(), now),
        checkpoints={suite: dict(ledger.counts(suite, begun=suite not in watched).items()) for suite in suites},
        numbers=[_number(ledger, one, watched=one.suite in watched) for one in results[:NUMBERS]],
        grants=[_grant(one, now) for one in ApprovalStore(inventory, Audit()).standing()],
        unfinished=[one for source, memory in memories.items() for one in unfinished(source, memory.get("look", {}))],
    )


def unfinished(source: str, remembered: dict[str, Any]) -> list[Unfinished]:
    """What the last looks into ``source`` found that does not count, the newest finding first."""
    entries = Memory.load(remembered).entries.items()
    found = [
        Unfinished(f"{source.rstrip('/')}/{name}", known.since, known.reason)
        for name, known in entries
        if known.kind == "unfinished"
    ]
    return sorted(found, key=lambda one: -one.since)


def as_served(watches: list[Watch]) -> list[Watch]:
    """``watches`` as they are: what the ledger has for watching was so when ``dflash-ops serve`` ended."""
    if serving() is not None:
        return watches
    message = "no dflash-ops serve runs over this state folder: start it to go on watching"
    return [replace(one, state=STOPPED, message=message) if one.state in OF_NO_HOST else one for one in watches]


def hosts(inventory: Inventory, watches: list[Watch], ended: list[Attempt]) -> list[HostRow]:
    """Every host with what the last look or the last evaluation says of it."""
    known: dict[str, tuple[str, float | None]] = {}
    for attempt in reversed(ended):
        if attempt.on is not None:
            known[attempt.on] = (f"last evaluation: {attempt.state}", attempt.updated)
    for watch in watches:
        state = ANSWERED if watch.looked and watch.state in OF_NO_HOST else watch.state
        known[watch.source.partition(":")[0]] = (state, watch.looked or watch.since)
    return [
        HostRow(host.name, host.role, host.address, host.protected, *known.get(host.name, ("–", None)))
        for host in inventory.hosts.values()
    ]


def queue(api: str | None, now: float) -> Queue:
    """The runs of the Prefect server at ``api`` that are going, waiting, and next."""
    if api is None:
        return Queue(None, "no dflash-ops serve runs over this state folder")
    try:
        flows = {flow["id"]: flow["name"] for flow in _ask(api, "flows/filter", {})}
        going = [_run(run, _name(run, flows)) for run in _runs(api, GOING, "START_TIME_ASC")]
        due = [_run(run, _name(run, flows)) for run in _runs(api, ("SCHEDULED",), "NEXT_SCHEDULED_START_TIME_ASC")]
        failed = [_ended(run) for run in _runs(api, FAILED, "END_TIME_DESC") if not _asked(run).get("identity")]
    except (OSError, ValueError) as error:
        return Queue(api, f"it does not answer ({getattr(error, 'reason', None) or error})")
    later = [run for run in due if run.since is not None and run.since > now]
    waiting = [run for run in due if run not in later]
    recent = [run for run in failed if run.since is not None and now - run.since < DAY]
    return Queue(api, "", going, waiting, later[0] if later else None, recent)


def _runs(api: str, states: tuple[str, ...], sort: str) -> list[dict[str, Any]]:
    states_of = {"flow_runs": {"state": {"type": {"any_": list(states)}}}}
    return _ask(api, "flow_runs/filter", {**states_of, "sort": sort, "limit": RUNS})


def _ask(api: str, what: str, question: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(  # noqa: S310 - http only, the server of PREFECT_API_URL
        f"{api}/{what}", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=API_SECONDS) as answer:  # noqa: S310
        found: list[dict[str, Any]] = json.load(answer)
    return found


def _name(run: dict[str, Any], flows: dict[str, str]) -> str:
    """A run gets its own name when it starts; until then Prefect's is chance, and what it was asked for tells more."""
    if run.get("state_type") not in ("SCHEDULED", "PENDING"):
        return str(run["name"])
    flow, source = flows.get(run.get("flow_id", ""), run["name"]), _asked(run).get("source")
    return f"{flow} {source}" if isinstance(source, str) else str(flow)


def _asked(run: dict[str, Any]) -> dict[str, Any]:
    return run.get("parameters") or {}


def _run(run: dict[str, Any], name: str) -> RunRow:
    when = run.get("start_time") or run.get("next_scheduled_start_time") or run.get("expected_start_time")
    return RunRow(str(name), _state(run), _time(when))


def _ended(run: dict[str, Any]) -> RunRow:
    message = (run.get("state") or {}).get("message") or ""
    return RunRow(str(run["name"]), _state(run), _time(run.get("end_time")), str(message))


def _state(run: dict[str, Any]) -> str:
    return str(run.get("state_name") or run.get("state_type"))


def _time(when: str | None) -> float | None:
    return None if when is None else datetime.fromisoformat(when).astimezone(UTC).timestamp()


def _number(ledger: Ledger, attempt: Attempt, *, watched: bool) -> Number:
    """``attempt`` as it is shown; where its suite is ``watched``, a failed one may be tried again."""
    checkpoint = ledger.checkpoint(attempt.identity)
    place = attempt.identity if checkpoint is None else f"{checkpoint.host}:{checkpoint.path}"
    step = None if checkpoint is None else checkpoint.step
    return Number(
        place=place,
        step=step,
        state=attempt.state,
        tau=attempt.tau,
        ci95=attempt.ci95,
        on=attempt.on,
        report=attempt.report,
        message=attempt.message,
        updated=attempt.updated,
        again=ledger.again(attempt) if watched else None,
    )


def _grant(approval: Approval, now: float) -> GrantRow:
    grant: ReadGrant = approval.grant
    where = grant.root or ", ".join(grant.paths)
    return GrantRow(approval.id, grant.host, where, approval.not_after, approval.not_after - now < WARN_SECONDS)
