"""One row of what the guard's doctor found."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One row: what was tried, what came of it and what that means."""

    name: str
    status: Status
    measured: str
    explanation: str
