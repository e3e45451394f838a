"""What a decision is made of: how long it holds, and the certificates that say so."""

import getpass
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks import certificates, countersigning, signing
from tasks.actions import escape, is_text
from tasks.certificates import Terms, form
from tasks.errors import Refused
from tasks.inventory import Host
from tasks.plans import Plan
from tasks.quantities import show_duration
from tasks.requests import Decision, Request
from tasks.signing import SigningKey

GRANT_SECONDS = 3600
CHANGE_SECONDS = 600
"""Validity when the operator names none: of a plan that only reads, and of one that changes something."""
LONGEST_GRANT_SECONDS = 24 * 3600
"""Longest validity of an approval that is not standing."""
LONGEST_CHANGE_SECONDS = 3600
BREAK_GLASS_SECONDS = 300
CLOCK_SKEW_SECONDS = 60
"""A certificate begins this long before the decision, for a host whose clock is a little behind."""


def default_seconds(plan: Plan) -> int:
    """How long an approval of ``plan`` is valid when the operator does not say."""
    if is_emergency(plan):
        return BREAK_GLASS_SECONDS
    return CHANGE_SECONDS if plan.changes else GRANT_SECONDS


def is_emergency(plan: Plan) -> bool:
    """Whether ``plan`` breaks the glass."""
    return any(countersigning.is_exempt(action) for action in plan.changes)


def decide(request: Request, reason: str, operator: str | None, *, approved: bool) -> Decision:
    """The answer to ``request``, now, with a fresh serial for each certificate; ``operator`` is by default the user."""
    serials = tuple(secrets.randbelow(2**63 - 1) + 1 for _ in request.plan.actions) if approved else ()
    return Decision(
        approved=approved, operator=operator or user_name(), reason=reason, time=time.time(), serials=serials
    )


def user_name() -> str:
    """Who runs this; a number where the system has no name for it, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def check_reason(reason: str) -> None:
    """Raise ``Refused`` unless ``reason`` says something."""
    if not reason.strip():
        raise Refused("a decision needs a reason; give one with --reason")
    if not is_text(reason):
        raise Refused(f"the reason '{escape(reason)}' is not UTF-8 text; write it again")


def check_validity(request: Request, seconds: int) -> None:
    """Raise ``Refused`` unless ``request`` may be approved for ``seconds``."""
    if seconds < 1:
        raise Refused("an approval is valid for at least a second; give one with --valid")
    if is_emergency(request.plan) and seconds > BREAK_GLASS_SECONDS:
        raise Refused(f"an emergency command is approved for {show_duration(BREAK_GLASS_SECONDS)} at most")
    if request.plan.changes and seconds > LONGEST_CHANGE_SECONDS:
        raise Refused(
            f"{show_duration(seconds)} is too long for a change (at most {show_duration(LONGEST_CHANGE_SECONDS)}); "
            "approve it when it is due"
        )
    if seconds > LONGEST_GRANT_SECONDS and not request.standing:
        raise Refused(
            f"{show_duration(seconds)} is too long for one request (at most {show_duration(LONGEST_GRANT_SECONDS)}); "
            "for more, ask for a standing approval: dflash-ops guard standing request"
        )


def certify(
    request: Request, decision: Decision, head: str, seconds: int, key: SigningKey, host: Host, keys: Sequence[Path]
) -> Iterator[Path]:
    """Have the public half of each of ``keys`` signed, one for each action of the plan, and yield the certificates.

    They lie beside the keys. Raises ``Refused`` when one is not signed, or when all took longer than they are valid.
    """
    with signing.ready_for(key, len(keys)) as ready:
        for public, action, serial in zip(keys, request.plan.actions, decision.serials, strict=True):
            terms = Terms(
                request_id=request.id,
                head=head,
                digest=action.digest(),
                serial=serial,
                source_addresses=host.source_addresses,
                not_before=int(decision.time) - CLOCK_SKEW_SECONDS,
                not_after=int(decision.time) + seconds,
                enforcement=form(host),
            )
            certificate = signing.sign(public, terms, ready)
            if certificates.read(certificate, key.public_key).terms != terms:
                raise Refused("ssh-keygen signed something else than it was asked to; nothing was approved")
            yield certificate
    if decision.time + seconds <= time.time():
        raise Refused("signing took longer than the approval was to be valid; approve it again")
