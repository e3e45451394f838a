"""The state of one job, and how it follows from what its folder and its host show; pure.

``unreachable`` is a state of knowledge: it says nothing about the job and never that it has failed.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from dflash.errors import DFlashError
from tasks.gate import Entry, JobRecord

State = Literal["running", "exited", "vanished", "unreachable", "unknown job"]
OVER: tuple[State, ...] = ("exited", "vanished", "unknown job")

BEAT_SECONDS = 60.0
"""How old the heartbeat of a job that is kept may be; it beats every 10 s."""


@dataclass(frozen=True)
class JobStatus:
    """What is known of one job. Times are seconds since the epoch by the host's clock."""

    job: str
    state: State
    pid: int | None = None
    exit: int | None = None
    """Exit status, or minus the signal that ended it; None while it runs and where nothing recorded it."""
    started: float | None = None
    ended: float | None = None
    message: str = ""
    """What there is to know or do beyond the state, in one line."""
    argv: tuple[str, ...] = ()
    log_bytes: int | None = None
    """What ``output.log`` holds."""

    @property
    def command(self) -> tuple[str, ...]:
        """What was started, without the program of ours that stays with it (see :mod:`tasks.launching`)."""
        started = len(self.argv) > 5 and re.fullmatch(r".*/start-[0-9a-f]{12}\.py", self.argv[3])
        return self.argv[5:] if started else self.argv

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in OVER


def judge(known: JobStatus, birth: str, alive: JobRecord, heartbeat: Entry | None, here: float) -> JobStatus:
    """Whether a job without an exit file runs or has vanished; ``here`` is the clock of this machine.

    Its first process is what counts. Where that cannot be seen (other users' processes may be hidden), a heart that
    beats is enough: it is kept by a process that writes the exit down.
    """
    now = here if alive.now is None else alive.now
    beats = heartbeat is not None and abs(now - heartbeat.mtime_ns / 1e9) <= BEAT_SECONDS
    boot = birth.partition(":")[0]
    if alive.boot is not None and birth != "ended" and alive.boot != boot:
        return replace(
            known, state="vanished", message="the host was started anew since; to go on, launch the next --attempt"
        )
    if alive.lives:
        alone = "" if beats else "nothing watches over it any more, so how it ends will not be known"
        return replace(known, state="running", message=alone)
    if beats:
        return replace(known, state="running")
    return replace(
        known,
        state="vanished",
        message="its processes are gone and nothing wrote down how they ended (killed together, or by a lack of "
        "memory): look at the end of its log",
    )


def unreachable(job: str, error: DFlashError) -> JobStatus:
    """The status of a job whose host did not answer because of ``error``."""
    return JobStatus(job, "unreachable", message=f"nothing is known of the job now, it may well run: {error}")
