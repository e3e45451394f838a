"""One watch: look after look, whatever fails between them, with a named state for what somebody has to act on.

Everything it touches is handed in, so that two weeks of it can be lived through in a minute.
"""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash.errors import DFlashError
from dflash.failure import DISK_FULL
from tasks.approvals import Approval
from tasks.errors import HostBusy, Refused
from tasks.inventory import Location
from tasks.ledger import Ledger, LedgerError, Seen, Watch
from tasks.look_memory import Memory
from tasks.looking import Look
from tasks.watch import LOOK_SECONDS, Handed, Order, Rules, Runs, hand_on, leave, take
from tasks.watch_grants import GrantEndedError, WatchNotApprovedError

WATCHING = "watching"
LONGEST_BACKOFF = 900.0
TOLD_AFTER = 3600.0
"""Seconds that a watch may be kept from looking, as by a host that is away, before somebody is told."""
AT_ONCE = ("GrantEnded", "AwaitingApproval", "HostKeyMismatch", "NoSuchFolder")
"""What passes by nobody but a person."""


@dataclass(frozen=True)
class Notice:
    """What people have to know of a watch."""

    kind: Literal["stands still", "goes on", "ends soon"]
    subject: str
    body: str
    watch: Watch


class LookFailedError(DFlashError):
    """A watch could not look, for a reason that has no name of its own; the message has it."""

    state_name = "LookFailed"


Tell = Callable[[Notice], None]
"""Raises what kept it from being told."""


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
    cancelled: Callable[[Order], None] = lambda order: None
    """Hears of every evaluation whose run somebody cancelled."""
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
        before = self._ledger.watch(self.name) or Watch(self.name, "")
        approval, kept_from = None, None
        try:
            approval = self._around.admit(before.request)
            self._take(self._around.look(approval, self._remembered(), now), now)
        except LedgerError:
            self._memory = None
            raise
        except (DFlashError, OSError) as error:
            kept_from = self._reason(error, approval)
        away = kept_from is not None and not isinstance(kept_from, GrantEndedError | WatchNotApprovedError)
        self._failures = self._failures + 1 if away else 0
        stopped = self._hand_on(now, begin=kept_from is None or isinstance(kept_from, HostBusy))
        watch = self._ledger.record_watch(
            Watch(
                source=self.name,
                state=_state(kept_from or stopped, before, now),
                request=before.request if approval is None else approval.id,
                looked=now if kept_from is None else before.looked,
                message=str(kept_from or stopped or ""),
            )
        )
        self._tell(watch, approval, now)
        return watch

    def _reason(self, failure: DFlashError | OSError, approval: Approval | None) -> DFlashError | OSError:
        """``failure``, or that the approval has ended, when the host refused it in the middle of a look."""
        if approval is not None and isinstance(failure, Refused):
            try:
                self._around.admit(approval.id)
            except (GrantEndedError, WatchNotApprovedError) as ended:
                return ended
        return failure

    def _remembered(self) -> Memory:
        if self._memory is None:
            content = self._ledger.memory(self.name)
            self._memory, self._told = Memory.load(content.get("look", {})), content.get("told", {})
            former = content.get("suite", self.suite)
            if former != self.suite:
                leave(self._ledger, self.source, former)
                self._remember()
        return self._memory

    def _take(self, look: Look, now: float) -> None:
        new = take(self._ledger, self.source, look, now)
        # the ledger first: what is remembered as known is never named again
        if self._remembered().changed:
            self._remember()
        for seen in new:
            self._around.news(seen)

    def _remember(self) -> None:
        memory = self._remembered()
        self._ledger.remember(self.name, {"look": memory.dump(), "told": self._told, "suite": self.suite})
        memory.changed = False

    def _hand_on(self, now: float, *, begin: bool) -> DFlashError | None:
        self.handed = Handed()
        try:
            self.handed = hand_on(
                self._ledger, self.source, self.suite, self._rules, self._around.runs, now, begin=begin
            )
        except LedgerError:
            raise
        except DFlashError as error:
            return error
        for order in self.handed.begun:
            self._around.begun(order)
        for order in self.handed.cancelled:
            self._around.cancelled(order)
        return None

    def _tell(self, watch: Watch, approval: Approval | None, now: float) -> None:
        """Tell people what they have to know, once; what could not be told is tried again with a later look."""
        self._remembered()
        told = dict(self._told)
        try:
            notice = self._notice(watch, approval, now)
            if notice is None:
                return
            self._around.tell(notice)
        except DFlashError as error:
            self._told = told
            self._ledger.record_watch(replace(watch, message=f"{watch.message} ({error})".strip()))
            return
        self._remember()

    def _notice(self, watch: Watch, approval: Approval | None, now: float) -> Notice | None:
        """What has to be told now; ``_told`` then says that it was."""
        name = watch.source
        if watch.state != WATCHING:
            due = watch.state in AT_ONCE or now - watch.since >= TOLD_AFTER
            if not due or self._told.get("state") == watch.state:
                return None
            self._told["state"] = watch.state
            return Notice("stands still", f"{watch.state}: {name} is not watched", watch.message, watch)
        if self._told.pop("state", None) is not None:
            return Notice("goes on", f"{name} is watched again", f"The last look at {name} went well.", watch)
        if approval is None or self._told.get("ends") == approval.id or abs(now - self._warned_at) < TOLD_AFTER:
            return None
        self._warned_at = now
        warning = self._around.warning(approval, now)
        if warning is None:
            return None
        self._told["ends"] = approval.id
        return Notice("ends soon", f"the approval for watching {name} ends soon", warning, watch)


def state_of(failure: DFlashError | OSError) -> str:
    """The name of the state that a watch is in after ``failure``."""
    if isinstance(failure, OSError):
        full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
        return DISK_FULL if full else LookFailedError.state_name
    return LookFailedError.state_name if failure.state_name == DFlashError.state_name else failure.state_name


def _state(failure: DFlashError | OSError | None, before: Watch, now: float) -> str:
    # all sessions of a host in use for a while is how it is meant to be
    busy = isinstance(failure, HostBusy) and before.looked is not None and now - before.looked < TOLD_AFTER
    return WATCHING if failure is None or busy else state_of(failure)
