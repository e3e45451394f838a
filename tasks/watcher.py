"""One watch: look after look, whatever fails between them, with a named state for what somebody has to act on.

Everything it touches is handed in, so that two weeks of it can be lived through in a minute.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash.errors import DFlashError
from tasks.approvals import Approval
from tasks.inventory import Location
from tasks.ledger import Ledger, LedgerError, Seen, Watch
from tasks.looking import Look, Memory
from tasks.watch import LOOK_SECONDS, Handed, Order, Rules, Runs, hand_on, take
from tasks.watch_grants import GrantEndedError, WatchNotApprovedError

WATCHING = "watching"
LOOK_FAILED = "LookFailed"
LONGEST_BACKOFF = 900.0
TOLD_AFTER = 3600.0
"""Seconds that a watch may be kept from looking, as by a host that is away, before somebody is told."""
AT_ONCE = ("GrantEnded", "AwaitingApproval", "HostKeyMismatch", "NoSuchFolder")
"""What passes by nobody but a person."""

Tell = Callable[[str, str], None]
"""Subject and body, for people; raises what kept it from being told."""


@dataclass(frozen=True)
class Surroundings:
    """What one watch uses of the world."""

    admit: Callable[[str | None], Approval | None]
    """The approval to look under, by the request of the last one; see :func:`tasks.watch_grants.admit`."""
    look: Callable[[Approval | None, Memory, float], Look]
    runs: Runs
    tell: Tell
    warning: Callable[[Approval, float], str | None] = lambda approval, now: None
    """What has to be said before an approval ends."""
    news: Callable[[Seen], None] = lambda seen: None
    """Hears of every new checkpoint, before its evaluation begins."""
    begun: Callable[[Order], None] = lambda order: None
    """Hears of every evaluation that was begun."""
    clock: Callable[[], float] = time.time


class Watcher:
    """The watch of ``source`` for the numbers of one ``suite`` (its digest)."""

    def __init__(self, ledger: Ledger, source: Location, suite: str, rules: Rules, around: Surroundings) -> None:
        self.source, self.suite = source, suite
        self._ledger, self._rules, self._around = ledger, rules, around
        self._memory: Memory | None = None
        self._told: dict[str, Any] = {}
        self._failures = 0
        self._warned_at = 0.0
        self.handed = Handed()

    @property
    def name(self) -> str:
        return str(self.source)

    def pause(self) -> float:
        """Seconds until the next look: a minute, after failures in a row twice as long each time."""
        return float(min(LOOK_SECONDS * 2 ** max(0, min(self._failures, 16) - 1), LONGEST_BACKOFF))

    def look(self) -> Watch:
        """Look once, record what was found and start what is due; how the watch stands then.

        Raises :class:`LedgerError` only: of anything else the state says what it was.
        """
        now = self._around.clock()
        before = self._ledger.watch(self.name)
        failure, request, looked = None, None if before is None else before.request, None
        try:
            approval = self._around.admit(request)
            request = None if approval is None else approval.id
            self._take(self._around.look(approval, self._remembered(), now), now)
            looked = now
        except LedgerError:
            self._memory = None
            raise
        except DFlashError as error:
            failure, approval = error, None
        failure = self._hand_on(now, begin=failure is None) or failure
        self._failures = self._failures + 1 if failure is not None and not _is_quick(failure) else 0
        state = WATCHING if failure is None else state_of(failure)
        watch = self._ledger.record_watch(
            Watch(
                source=self.name,
                state=state,
                request=request,
                looked=looked if looked is not None or before is None else before.looked,
                message="" if failure is None else str(failure),
            )
        )
        self._tell(watch, approval, now)
        return watch

    def _remembered(self) -> Memory:
        if self._memory is None:
            content = self._ledger.memory(self.name)
            self._memory, self._told = Memory.load(content.get("look", {})), content.get("told", {})
        return self._memory

    def _take(self, look: Look, now: float) -> None:
        memory = self._remembered()
        new = take(self._ledger, self.source, look, now)
        # the ledger first: what is remembered as known is never named again
        if memory.changed:
            self._remember()
            memory.changed = False
        for seen in new:
            self._around.news(seen)

    def _remember(self) -> None:
        self._ledger.remember(self.name, {"look": self._remembered().dump(), "told": self._told})

    def _hand_on(self, now: float, *, begin: bool) -> DFlashError | None:
        self.handed = Handed()
        try:
            self.handed = hand_on(self._ledger, self.suite, self._rules, self._around.runs, now, begin=begin)
        except LedgerError:
            raise
        except DFlashError as error:
            return error
        for order in self.handed.begun:
            self._around.begun(order)
        return None

    def _tell(self, watch: Watch, approval: Approval | None, now: float) -> None:
        """Tell people what they have to know, once; what could not be told is tried again with the next look."""
        self._remembered()
        told = dict(self._told)
        subject, body = self._message(watch, approval, now)
        if subject is None:
            return
        try:
            self._around.tell(subject, body)
        except DFlashError as error:
            self._told = told
            self._ledger.record_watch(
                Watch(watch.source, watch.state, watch.request, watch.looked, f"{watch.message} ({error})".strip())
            )
            return
        self._remember()

    def _message(self, watch: Watch, approval: Approval | None, now: float) -> tuple[str | None, str]:
        """Subject and body of what has to be told, None for nothing; ``_told`` then says that it was."""
        if watch.state != WATCHING:
            due = watch.state in AT_ONCE or now - watch.since >= TOLD_AFTER
            if not due or self._told.get("state") == watch.state:
                return None, ""
            self._told["state"] = watch.state
            return f"{watch.state}: {watch.source} is not watched", watch.message
        if self._told.pop("state", None) is not None:
            return f"{watch.source} is watched again", f"It was looked into, and {WATCHING} is its state."
        if approval is None or self._told.get("ends") == approval.id or abs(now - self._warned_at) < TOLD_AFTER:
            return None, ""
        self._warned_at = now
        warning = self._around.warning(approval, now)
        if warning is None:
            return None, ""
        self._told["ends"] = approval.id
        return f"the approval for watching {watch.source} ends soon", warning


def state_of(failure: DFlashError) -> str:
    """The name of the state that a watch is in after ``failure``."""
    return LOOK_FAILED if failure.state_name == DFlashError.state_name else failure.state_name


def _is_quick(failure: DFlashError) -> bool:
    """Whether nothing was connected to, so that trying again next minute costs nobody anything."""
    return isinstance(failure, GrantEndedError | WatchNotApprovedError)
