"""What is recorded of a night's comparison, once a date, in the ledger."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from dflash.report import Verdict
from tasks.actions import escape

Kind = Literal["best", "reference", "day before"]
Outcome = Literal["compared", "nothing new", "not valid", "no checkpoint"]
Alarm = Literal["none", "raised", "continues"]

ALARMING: tuple[Kind, ...] = ("best", "day before")
"""A drafter that was never as good as the reference has not fallen."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Drafter(_Record):
    """One drafter of a night."""

    identity: str
    step: int | None
    source: str
    tau: float | None = None
    ci95: tuple[float, float] | None = None
    report: str | None = None

    @property
    def name(self) -> str:
        """What people call it, fit to be shown."""
        return escape(self.source) if self.step is None else f"step {self.step}"


class NightComparison(_Record):
    """The newest checkpoint minus one other drafter; ``interval`` holds together with the night's others."""

    kind: Kind
    name: str
    identity: str | None
    tau: float
    difference: float
    interval: tuple[float, float]
    verdict: Verdict
    fell: bool
    """The whole interval lies below -2 % of the other's τ."""


class Night(_Record):
    """What is recorded of one night; ``verdict`` is its line."""

    date: str
    outcome: Outcome
    verdict: str
    alarm: Alarm = "none"
    newest: Drafter | None = None
    comparisons: tuple[NightComparison, ...] = ()
    best: Drafter | None = None
    """The one with the highest τ, this night's newest included."""
    candidates: int = 0
    """How many drafters the best so far was chosen among."""
    prompts_sha256: str = ""
    notes: tuple[str, ...] = ()

    @property
    def judges(self) -> bool:
        """Whether it says anything of a fall."""
        return any(one.kind in ALARMING and one.verdict != "too few prompts" for one in self.comparisons)

    @property
    def down(self) -> bool:
        """The newest checkpoint is shown to be worse by more than the margin than what there was before."""
        return any(one.fell for one in self.comparisons if one.kind in ALARMING)
