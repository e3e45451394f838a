"""Two reports on the same prompts: the difference, its interval, and whether it means anything. Imports no torch."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

from dflash.errors import DFlashError
from dflash.metrics import FEWEST_PROMPTS, Totals, compare
from dflash.report import LARGEST_BLOCK, Comparison, Report


class NotComparableError(DFlashError):
    """The two reports measure different things, so their difference would say nothing about the drafters."""


class PromptDifference(BaseModel):
    """τ of one prompt in both reports; ``same_completion`` is whether both walked the same tokens."""

    model_config = ConfigDict(frozen=True)

    id: str
    ours: float | None
    theirs: float | None
    same_completion: bool


class ReportComparison(BaseModel):
    """The answer of ``dflash compare``: the first report minus the second."""

    model_config = ConfigDict(frozen=True)

    ours: str
    theirs: str
    comparison: Comparison
    notes: list[str]
    prompts: list[PromptDifference]

    def headline(self) -> str:
        """One line: the verdict and the difference behind it."""
        one = self.comparison
        interval = "" if one.ci95 is None else f" [{one.ci95[0]:+.3f}, {one.ci95[1]:+.3f}]"
        few = f", {FEWEST_PROMPTS} are needed for a verdict" if one.verdict == "too few prompts" else ""
        return f"{one.verdict}: τ {one.difference:+.3f}{interval} over {one.prompts} prompts{few}"


# What must be equal, as people would say it, and where it stands. Another drafter is the only difference wanted.
_MUST_AGREE: tuple[tuple[str, Callable[[Report], Any]], ...] = (
    ("prompt sets", lambda report: (report.settings.prompts_sha256, _ids(report))),
    ("modes", lambda report: report.settings.mode),
    ("targets", lambda report: report.target.fingerprint),
    ("block sizes", lambda report: report.settings.block_size),
    ("samplers", lambda report: f"{report.settings.sampler} at temperature {report.settings.temperature:g}"),
    ("thinking modes", lambda report: report.settings.thinking),
    ("completion lengths", lambda report: report.settings.max_new_tokens),
    ("ends of a completion (--ignore-eos)", lambda report: report.settings.ignore_eos),
    ("limits of rounds (--max-blocks)", lambda report: report.settings.max_blocks),
)
_SHOULD_AGREE: tuple[tuple[str, Callable[[Report], Any]], ...] = (
    ("kernel", lambda report: report.target.kernel),
    ("dtype", lambda report: report.target.dtype),
    ("writer of the completions", lambda report: report.settings.completions),
    ("versions of torch", lambda report: report.versions.get("torch")),
)


def compare_reports(ours: Report, theirs: Report) -> ReportComparison:
    """``ours`` minus ``theirs`` with a paired bootstrap over prompts. Raises :class:`NotComparableError`."""
    for name, report in (("first", ours), ("second", theirs)):
        if not report.valid:
            raise NotComparableError(
                f"the {name} report is not valid ({', '.join(report.invalid_because)}), so its τ must not be compared"
            )
    for what, of in _MUST_AGREE:
        if of(ours) != of(theirs):
            raise NotComparableError(
                f"the reports have different {what}{_shown(of(ours), of(theirs))}; measure both the same way"
            )
    other = {one.id: one for one in theirs.prompts}
    prompts = [
        PromptDifference(
            id=one.id, ours=one.tau, theirs=other[one.id].tau, same_completion=one.token_ids == other[one.id].token_ids
        )
        for one in ours.prompts
    ]
    notes = [f"{what}: {of(ours)} and {of(theirs)}" for what, of in _SHOULD_AGREE if of(ours) != of(theirs)]
    different = sum(not one.same_completion for one in prompts)
    if different:
        notes.append(f"{different} of {len(prompts)} prompts have different completions in the two reports")
    return ReportComparison(
        ours=_name(ours),
        theirs=_name(theirs),
        comparison=compare(totals(ours), totals(theirs), seed=ours.settings.seed),
        notes=notes,
        prompts=prompts,
    )


def comparison_key(report: Report) -> str:
    """sha256 of all that must be equal: reports with the same key can be compared."""
    agreed = [(what, str(of(report))) for what, of in _MUST_AGREE]
    return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()


def totals(report: Report) -> Totals:
    """Σ advance and rounds of every prompt that has a round."""
    return {one.id: (round(one.tau * one.rounds), one.rounds) for one in report.prompts if one.tau is not None}


def reference_totals(report: Report) -> Totals:
    """The same of the reference drafter, which walked the same completions; empty where the report does not say.

    Both emit the same tokens of a prompt, so the reference's τ gives its rounds. With a limit of rounds each drafter
    gets as far as it gets, and this is empty.
    """
    if report.settings.max_blocks is not None:
        return {}
    return {
        one.id: (round(one.tau * one.rounds), round(one.tau * one.rounds / one.reference_tau))
        for one in report.prompts
        if one.tau is not None and one.reference_tau is not None and one.reference_tau > 1 / LARGEST_BLOCK
    }


def _ids(report: Report) -> list[str]:
    return [one.id for one in report.prompts]


def _name(report: Report) -> str:
    step = "" if report.checkpoint.step is None else f" step {report.checkpoint.step}"
    return f"{report.checkpoint.path}{step}"


def _shown(ours: Any, theirs: Any) -> str:
    """The two values where they are short enough to help."""
    text = f" ({ours} and {theirs})"
    return text if len(text) < 80 else ""
