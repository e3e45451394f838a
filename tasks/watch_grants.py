"""The standing approval that a watch reads under: whether there is one, what ended it, and when it will end.

It ends at the time that its certificate says, or earlier, when its sessions or bytes are used up; how fast that goes is
reckoned from the audit log.
"""

from dataclasses import dataclass

from tasks.actions import ReadGrant, escape
from tasks.approvals import Approval, ApprovalStore
from tasks.audit import Audit, show_time
from tasks.errors import Refused
from tasks.inventory import Location
from tasks.requests import Request
from tasks.watch import WATCH_DAYS, plan_look, plan_watch

WARNING_SECONDS = 2 * 24 * 3600.0
RECKONING_SECONDS = 24 * 3600.0
"""Of use at least, before a pace is believed in."""


class GrantEndedError(Refused):
    """The standing approval of a watch counts no longer."""

    state_name = "GrantEnded"


class WatchNotApprovedError(Refused):
    """A protected host is to be watched, and nobody has approved it yet."""

    state_name = "AwaitingApproval"


@dataclass(frozen=True)
class Used:
    """What was used of a grant, and since when."""

    sessions: int = 0
    bytes: int = 0
    since: float = 0.0


def admit(store: ApprovalStore, source: Location, previous: str | None = None) -> Approval | None:
    """The approval under which ``source`` may be looked into; None when it needs none.

    ``previous`` is the request of the one that was used last. Raises :class:`GrantEndedError` when that is over,
    :class:`WatchNotApprovedError` when there never was one; a request for a standing approval waits then. Raises
    ``Refused`` when no approval can be believed at all.
    """
    plan = plan_look(source)
    if plan is None:
        return None
    approved = store.find(plan)
    if approved is not None:
        return approved.read
    waiting = ask(store, source)
    command = f"dflash-ops guard approve {waiting.id} --valid {WATCH_DAYS}d"
    if previous is None:
        raise WatchNotApprovedError(
            f"{escape(str(source))} is to be watched and that is not approved; request {waiting.id} waits: {command}",
            request_id=waiting.id,
        )
    raise GrantEndedError(
        f"the watch of {escape(str(source))} stands still: its approval {previous} {_why(store, previous)}; request "
        f"{waiting.id} waits: {command}",
        request_id=waiting.id,
    )


def ask(store: ApprovalStore, source: Location) -> Request:
    """The pending request for a standing approval of watching ``source``, which must be on a protected host."""
    plan = plan_watch(source)
    assert plan is not None
    return store.request(plan, standing=True)


def used(audit: Audit, approval: Approval) -> Used:
    """What this machine used of ``approval``, by its audit log."""
    sessions, size, since = 0, 0, 0.0
    for entry in audit.uses(approval.serial):
        if entry["event"] == "consumption":
            sessions += 1
            since = since or entry["time"]
        else:
            size += entry.get("bytes", 0)
    return Used(sessions, size, since)


def ends_at(grant: ReadGrant, not_after: float, spent: Used, now: float) -> tuple[float, str]:
    """When the grant will end, and in words why: its time is over, or at this pace a budget is used up before."""
    ends = [(float(not_after), "its time is over")]
    elapsed = max(now - spent.since, RECKONING_SECONDS)
    for had, gone, what in ((grant.sessions, spent.sessions, "sessions"), (grant.bytes, spent.bytes, "bytes")):
        if gone:
            left = max(0, had - gone)
            ends.append((now + left * elapsed / gone, f"its {what} are used up ({left} of {had} are left)"))
    return min(ends)


def warning(source: Location, approval: Approval, spent: Used, now: float) -> str | None:
    """What has to be said of an approval that ends within two days; None of another."""
    end, why = ends_at(approval.grant, approval.not_after, spent, now)
    if end - now > WARNING_SECONDS:
        return None
    return (
        f"the watch of {escape(str(source))} will stand still at about {show_time(end)}: {why}, of approval "
        f"{approval.id}. Approve another before"
    )


def _why(store: ApprovalStore, request_id: str) -> str:
    try:
        ended = store.get(request_id).ended
    except Refused:
        return "is not in the store any more"
    return "is past its time" if ended is None else f"has ended ({escape(ended)})"
