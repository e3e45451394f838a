"""What a look leads to: which checkpoints are new or gone, whose evaluation begins, and whose is started again.

Nothing here knows Prefect or a host: runs are whatever :class:`Runs` says, and what is due stands in the ledger. One
attempt at a checkpoint has one run, by its key; a run that ended without a result is started again and finds the job
that it had launched.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from dflash.errors import DFlashError
from tasks.actions import ReadGrant
from tasks.inventory import Location
from tasks.ledger import Attempt, Ledger, Seen
from tasks.looking import Look
from tasks.plans import Plan

LOOK_SECONDS = 60.0
LOOK_BYTES, LOOK_SESSIONS = 10**9, 8
"""What one look may read at the most, when very many checkpoints are new."""
DAY_BYTES, DAY_SESSIONS = 10**12, 24 * 60 * 3
"""What a standing approval is asked for by the day: looks, and the relays of what they find."""
WATCH_DAYS = 30

EVENT_PATIENCE = 120.0
"""Seconds until a checkpoint that an event was to start is started without: events can be lost."""
DEAD_SECONDS = 180.0
"""Seconds until a run without a process is taken for dead, whatever Prefect has it for."""
PAUSE_SECONDS, LONGEST_PAUSE = 60.0, 1800.0
MOST_RESTARTS = 6
"""Of a run that ends in any other state than :data:`PASSING` and leaves no result."""
STUCK_RESTARTS = 3
"""After so many an attempt gives its place to the next one and goes on beside it."""
PASSING = frozenset(
    (
        *("HostUnreachable", "HostBusy", "HostKeyMismatch", "AwaitingApproval", "Refused", "GrantEnded"),
        *(
            "GpuBusy",
            "GpuMemoryShort",
            "ServedModelSlow",
            "SourceChanged",
            "LedgerLocked",
            "AlreadyRunning",
            "Vanished",
        ),
    )
)
"""States that say nothing about the checkpoint: what they name passes, by itself or by somebody's doing."""
CANCELLED = ("Cancelled", "Cancelling")


class CheckpointGoneError(DFlashError):
    """A checkpoint was deleted, or moved away, after it was seen and before it was read."""

    state_name = "CheckpointGone"


@dataclass(frozen=True)
class Rules:
    """How many evaluations there may be."""

    at_once: int = 2
    """That are under way; as many as there are inference hosts, and one that is relayed meanwhile."""
    most_waiting: int = 20
    """That wait; older ones are superseded."""
    by_event: bool = False
    """The event ``dflash.checkpoint.saved`` starts evaluations; from here they are only when it gets lost."""


@dataclass(frozen=True)
class Order:
    """One evaluation to be run."""

    attempt: Attempt
    checkpoint: Seen

    @property
    def key(self) -> str:
        """The idempotency key of its run."""
        return evaluation_key(self.attempt.identity, self.attempt.suite, self.attempt.number)

    @property
    def source(self) -> str:
        """HOST:/path, as flows take it."""
        return source_of(self.checkpoint)


@dataclass(frozen=True)
class Run:
    """A flow run, as Prefect has it."""

    id: str
    phase: Literal["waiting", "running", "ended"]
    state: str
    """The name of its state."""
    message: str = ""
    alive: bool = False
    """Of one that is running: whether its process lives on this machine."""


class Runs(Protocol):
    """The runs of the evaluation, at Prefect or in a test."""

    def find(self, run: str) -> Run | None:
        """The run with that id; None when it is not known."""

    def start(self, order: Order) -> str:
        """The id of the run of ``order``: the one with its key, else a new one."""

    def again(self, run: str) -> None:
        """Run it once more, under the same id."""


@dataclass(frozen=True)
class Handed:
    """What was started, and what will not be."""

    begun: tuple[Order, ...] = ()
    restarted: tuple[Order, ...] = ()
    failed: tuple[Order, ...] = ()
    cancelled: tuple[Order, ...] = ()
    """Whose run somebody cancelled; a job of theirs may go on."""


def evaluation_key(identity: str, suite: str, attempt: int) -> str:
    """The idempotency key of the run of one attempt: whoever asks for it twice gets one run."""
    return f"{identity}:{suite}:{attempt}"


def source_of(checkpoint: Seen) -> str:
    """HOST:/path of a checkpoint, or the path alone of one on this machine."""
    return f"{checkpoint.host}:{checkpoint.path}" if checkpoint.host else checkpoint.path


def plan_look(source: Location) -> Plan | None:
    """What a look at the folder ``source`` has to be allowed; None when its host is not protected."""
    grant = _grant(source, LOOK_SESSIONS, LOOK_BYTES)
    return None if grant is None else Plan(grant=grant, effect=f"{source} is looked into once")


def plan_watch(source: Location, days: int = WATCH_DAYS) -> Plan | None:
    """The standing approval for watching ``source`` for so many days; None when its host is not protected."""
    grant = _grant(source, DAY_SESSIONS * days, DAY_BYTES * days)
    effect = f"{source} is looked into every minute, and the drafters of new checkpoints are read and evaluated"
    return None if grant is None else Plan(grant=grant, effect=effect)


def take(ledger: Ledger, source: Location, look: Look, now: float) -> tuple[Seen, ...]:
    """Record what ``look`` found in ``source``; the checkpoints that are new, the newest first."""
    host = _host(source)
    new = [
        seen
        for whole in look.appeared
        if ledger.see(seen := Seen(host, whole.path, whole.identity, whole.step, now, whole.written))
    ]
    for identity in look.vanished:
        known = ledger.checkpoint(identity)
        # a copy that another watch knows is still there
        if known is not None and _is_below(source, known):
            ledger.miss(identity)
    return tuple(sorted(new, key=lambda seen: (-(seen.written or 0), -(seen.step or 0))))


def hand_on(
    ledger: Ledger, source: Location, suite: str, rules: Rules, runs: Runs, now: float, *, begin: bool = True
) -> Handed:
    """Start what of ``source`` is due in ``suite``, the newest first, and again what ended without a result.

    Without ``begin`` nothing new is started: what would be read cannot be. Raises what ``runs`` raises; the ledger
    then knows what was begun, and the next call goes on with it.
    """
    restarted, failed, cancelled, under_way = [], [], [], 0
    for attempt in ledger.open_attempts(suite):
        order = Order(attempt, _checkpoint(ledger, attempt))
        what = "left" if not _is_below(source, order.checkpoint) else _tend(ledger, order, runs, now)
        if what == "failed":
            failed.append(order)
            continue
        if what == "cancelled":
            cancelled.append(order)
            continue
        if what == "restarted":
            restarted.append(order)
        under_way += attempt.restarts < STUCK_RESTARTS
    due = ledger.due(suite, limit=rules.most_waiting) if begin else []
    due = [checkpoint for checkpoint in due if _is_below(source, checkpoint)]
    if rules.by_event:
        # a run that the event started begins the attempt itself
        due = [checkpoint for checkpoint in due if abs(now - checkpoint.seen) >= EVENT_PATIENCE]
    begun = []
    for checkpoint in due[: max(0, rules.at_once - under_way)]:
        begun.append(_start(ledger, Order(ledger.begin(checkpoint.identity, suite), checkpoint), runs))
    return Handed(tuple(begun), tuple(restarted), tuple(failed), tuple(cancelled))


def leave(ledger: Ledger, source: Location, suite: str) -> None:
    """End what is open in a ``suite`` that ``source`` is not watched for any more, and at which nobody is at work."""
    for attempt in ledger.open_attempts(suite):
        if _is_below(source, _checkpoint(ledger, attempt)) and not ledger.is_held(attempt):
            ledger.finish(attempt, "superseded", message="the watch asks another suite now")


Verdict = Literal["leave", "start", "postpone", "again", "give up", "gone", "cancelled"]


def verdict(attempt: Attempt, run: Run | None, now: float, *, held: bool) -> Verdict:
    """What becomes of an open attempt whose run is ``run``; ``held`` is whether a process is at work on it."""
    since = abs(now - attempt.updated)  # a clock that was set back must not stop anything
    if held:
        return "leave"
    if attempt.not_before is not None:
        if now < attempt.not_before and since < LONGEST_PAUSE:
            return "leave"
        return "start" if run is None else "again"
    if run is None:
        return "start"
    if run.phase == "waiting":
        return "leave"
    if run.phase == "running":
        return "leave" if run.alive or since <= DEAD_SECONDS else "postpone"
    if run.state in CANCELLED:
        return "cancelled"
    if run.state == CheckpointGoneError.state_name:
        return "gone"
    return "postpone" if run.state in PASSING or attempt.restarts < MOST_RESTARTS else "give up"


def pause(restarts: int) -> float:
    """Seconds until a run that ended without a result is started again."""
    return float(min(PAUSE_SECONDS * 2 ** min(restarts, 16), LONGEST_PAUSE))


def _tend(ledger: Ledger, order: Order, runs: Runs, now: float) -> Literal["left", "restarted", "failed", "cancelled"]:
    attempt = order.attempt
    run = None if attempt.flow_run is None else runs.find(attempt.flow_run)
    match verdict(attempt, run, now, held=ledger.is_held(attempt)):
        case "leave":
            return "left"
        case "start":
            _start(ledger, order, runs)
            return "restarted"
        case "again":
            assert run is not None
            # first what is certain: were it the other way round, a crash between would have it started twice
            ledger.resume(attempt)
            runs.again(run.id)
            return "restarted"
        case "postpone":
            assert run is not None
            message = f"its run ended as {run.state}: {run.message}" if run.phase == "ended" else "its run died"
            ledger.postpone(attempt, seconds=pause(attempt.restarts), message=message)
            return "left"
        case "gone":
            # should it lie there again, it is due again
            ledger.finish(attempt, "failed", message="it was deleted, or moved away, before it was relayed")
            return "failed"
        case "cancelled":
            # somebody did not want it, so it is not tried again by itself
            ledger.finish(attempt, "superseded", message="its run was cancelled")
            return "cancelled"
        case "give up":
            assert run is not None
            why = f"its run ended {attempt.restarts + 1} times without a result, at last as {run.state}: {run.message}"
            ledger.finish(attempt, "failed", message=why)
            return "failed"


def _start(ledger: Ledger, order: Order, runs: Runs) -> Order:
    run = runs.start(order)
    attempt = ledger.begin(order.attempt.identity, order.attempt.suite, number=order.attempt.number, flow_run=run)
    if attempt.not_before is not None:
        attempt = ledger.resume(attempt)
    return Order(attempt, order.checkpoint)


def _is_below(source: Location, checkpoint: Seen) -> bool:
    return checkpoint.host == _host(source) and checkpoint.path.startswith(source.path.rstrip("/") + "/")


def _host(source: Location) -> str:
    return "" if source.host is None else source.host.name


def _checkpoint(ledger: Ledger, attempt: Attempt) -> Seen:
    found = ledger.checkpoint(attempt.identity)
    assert found is not None  # an attempt refers to one
    return found


def _grant(source: Location, sessions: int, size: int) -> ReadGrant | None:
    if source.host is None or not source.host.protected:
        return None
    return ReadGrant(
        host=source.host.name,
        host_keys=source.host.fingerprints,
        root=source.path,
        verbs=("list", "read", "stat"),
        sessions=sessions,
        bytes=size,
    )
