"""What stands in the ledger: checkpoints, attempts at them, and the watches that find them."""

from dataclasses import dataclass
from typing import Literal

State = Literal["seen", "relayed", "evaluated", "invalid", "failed", "superseded"]
OPEN: tuple[State, ...] = ("seen", "relayed")
"""The states of an attempt that has no result yet, in their order."""


@dataclass(frozen=True)
class Seen:
    """One complete checkpoint, where it lies and what its content is known by.

    ``identity`` is that of :class:`tasks.selection.Selection`; ``seen`` is the time of the look that found it whole.
    """

    host: str
    path: str
    identity: str
    step: int | None
    seen: float
    written: float | None = None
    """When its last byte was written, by its host's clock; the newest is the one that was written last."""
    gone: float | None = None
    """Since when it does not lie there any more."""


@dataclass(frozen=True)
class Attempt:
    """One evaluation of a checkpoint in a suite: on its way while ``state`` is ``seen`` or ``relayed``, else ended."""

    identity: str
    suite: str
    number: int
    state: State
    on: str | None
    job: str | None
    flow_run: str | None
    report: str | None
    tau: float | None
    ci95: tuple[float, float] | None
    message: str
    updated: float
    restarts: int = 0
    """How often its flow run had to be started again."""
    not_before: float | None = None
    """When it may be started again."""

    @property
    def is_open(self) -> bool:
        """Whether it has no result yet."""
        return self.state in OPEN


@dataclass(frozen=True)
class Watch:
    """What is known of the watch of one ``source`` (HOST:/folder)."""

    source: str
    state: str
    """``watching``, or the name of what keeps it from it: ``GrantEnded``, ``HostUnreachable``, …"""
    request: str | None = None
    """The request whose standing approval it reads under."""
    looked: float | None = None
    """When it last saw the folder."""
    message: str = ""
    since: float = 0.0
    """When it came into ``state``."""
