"""The nightly comparison: which drafters, what their differences mean, and when somebody has to look.

Compared are the newest checkpoint with the best so far, with the reference, and with the newest of a day before, on the
same prompts. Two things would make a false alarm of luck, and both are in the intervals: a night makes several
comparisons, so each holds at 1 - 0.05 / their number; and the best so far was chosen among many by the same prompts, so
its interval holds for all of them at once (:mod:`dflash.simultaneous`). One night below the margin is still no alarm,
two running are. Pure functions: nothing here reads a clock, a file or a host.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflash.metrics import FEWEST_PROMPTS, Totals
from dflash.report import Verdict
from dflash.simultaneous import Difference, Prompts, Resampled, simultaneous
from tasks.ledger_entries import Seen
from tasks.night_record import Alarm, Drafter, Kind, Night, NightComparison
from tasks.night_text import verdict_line

CONFIDENCE = 0.95
"""That a night's intervals hold, all together."""
MARGIN = 0.02
"""Share of τ below which a loss counts."""
DAY_SECONDS = 86_400.0
DRIFT = 0.01
"""Share by which the reference may differ from itself a night before, when its completions were written again."""


@dataclass(frozen=True)
class Measured:
    """A checkpoint's valid report in the nightly suite, as far as a comparison needs it."""

    identity: str
    step: int | None
    source: str
    report: str
    key: str
    """Reports of one key can be compared, see :func:`dflash.compare.comparison_key`."""
    tau: float
    ci95: tuple[float, float] | None
    totals: Totals
    reference: Totals
    """The reference drafter's, from the same report; empty where it does not say."""
    prompts_sha256: str = ""


@dataclass(frozen=True)
class Choice:
    """Which checkpoints a night has to have measured."""

    newest: Seen | None
    day_before: Seen | None


def choose(checkpoints: Iterable[Seen], measured: Iterable[str], *, now: float) -> Choice:
    """The newest of ``checkpoints`` (newest first) and the newest of those that were there a day before ``now``.

    One that does not lie there any more counts only when it is ``measured`` (identities). A newest that is a day old
    already has no day before: it would be compared with itself.
    """
    known = set(measured)
    usable = [one for one in checkpoints if one.gone is None or one.identity in known]
    newest = usable[0] if usable else None
    older = (one for one in usable[1:] if (one.written or one.seen) <= now - DAY_SECONDS)
    if newest is None or (newest.written or newest.seen) <= now - DAY_SECONDS:
        return Choice(newest, None)
    return Choice(newest, next(older, None))


def compare_night(
    date: str,
    newest: Measured,
    measured: Sequence[Measured],
    *,
    day_before: str | None,
    previous: Sequence[Night],
    draw: Callable[[Iterable[str]], Prompts] = Prompts,
) -> Night:
    """The night's comparisons of ``newest`` with what was ``measured`` before, and whether they are an alarm.

    ``day_before`` is an identity among those measured; ``previous`` are the nights before, the last one first. ``draw``
    makes the draws of the prompts that all have a round in.
    """
    others = [one for one in measured if one.key == newest.key and one.identity != newest.identity]
    notes = _left_out(newest, measured)
    families = _families(others, newest, day_before)
    if day_before is None or not any(kind == "day before" for kind, _ in families):
        notes.append("no other checkpoint was there a day before")
    if not newest.reference:
        notes.append("the report names no reference drafter, or not how it did on each prompt")
    comparisons = _comparisons(newest, families, draw) if families else ()
    notes += _drift(comparisons, previous)
    night = Night(
        date=date,
        outcome="compared",
        verdict="",
        newest=drafter_of(newest),
        comparisons=comparisons,
        best=drafter_of(best_of([*others, newest]) or newest),
        candidates=len(others),
        prompts_sha256=newest.prompts_sha256,
        notes=tuple(notes),
    )
    night = night.model_copy(update={"alarm": alarm(night, previous)})
    return night.model_copy(update={"verdict": verdict_line(night)})


def alarm(night: Night, previous: Sequence[Night]) -> Alarm:
    """Whether ``night`` and the last night before it that compared anything are both below the margin.

    Nights on which there was nothing new, nothing valid, or nobody to compare say nothing and are passed over: the same
    checkpoint twice is not evidence twice. An alarm is raised once and continues until a night is not below.
    """
    before = next((one for one in previous if one.judges), None)
    if not night.down or before is None or not before.down:
        return "none"
    return "raised" if before.alarm == "none" else "continues"


def drafter_of(one: Measured) -> Drafter:
    """What a night records of a drafter."""
    return Drafter(
        identity=one.identity, step=one.step, source=one.source, tau=one.tau, ci95=one.ci95, report=one.report
    )


def best_of(measured: Iterable[Measured]) -> Measured | None:
    """The one with the highest pooled τ; of equal ones the first."""
    return max(measured, key=lambda one: one.tau, default=None)


# One comparison, or several of which one is shown: the drafter to show, and all that its interval has to hold for.
_Family = tuple[Kind, tuple[list[Measured], int]]


def _families(others: list[Measured], newest: Measured, day_before: str | None) -> list[_Family]:
    families: list[_Family] = []
    best = best_of(others)
    if best is not None:
        families.append(("best", (others, others.index(best))))
    if newest.reference:
        families.append(("reference", ([newest], 0)))
    earlier = [one for one in others if one.identity == day_before]
    if earlier:
        families.append(("day before", (earlier, 0)))
    return families


def _comparisons(
    newest: Measured, families: list[_Family], draw: Callable[[Iterable[str]], Prompts]
) -> tuple[NightComparison, ...]:
    every = {one.identity: one for _, (members, _) in families for one in members}
    walked = [newest.totals, *(one.totals for one in every.values())]
    walked += [newest.reference] if newest.reference else []
    shared = set.intersection(*(set(totals) for totals in walked))
    if not shared:
        return ()
    prompts = draw(shared)
    ours = prompts.resample(newest.totals)
    resampled = {identity: prompts.resample(one.totals) for identity, one in every.items()}
    level = 1 - (1 - CONFIDENCE) / len(families)
    found = []
    for kind, (members, place) in families:
        if kind == "reference":
            theirs = [prompts.resample(newest.reference)]
        else:
            theirs = [resampled[one.identity] for one in members]
        difference = simultaneous(ours, theirs, level=level)[place]
        found.append(_comparison(kind, members[place], theirs[place], difference, len(shared)))
    return tuple(found)


def _comparison(kind: Kind, other: Measured, theirs: Resampled, found: Difference, prompts: int) -> NightComparison:
    enough = prompts >= FEWEST_PROMPTS
    verdict: Verdict = "better" if found.low > 0 else "worse" if found.high < 0 else "no difference shown"
    return NightComparison(
        kind=kind,
        name="reference" if kind == "reference" else drafter_of(other).name,
        identity=None if kind == "reference" else other.identity,
        tau=theirs.tau,
        difference=found.difference,
        interval=(found.low, found.high),
        verdict=verdict if enough else "too few prompts",
        fell=enough and found.high < -MARGIN * theirs.tau,
    )


def _left_out(newest: Measured, measured: Sequence[Measured]) -> list[str]:
    other = sum(one.key != newest.key for one in measured)
    if not other:
        return []
    return [f"{other} earlier reports measured another way (target, prompts or settings) and are not compared"]


def _drift(comparisons: Sequence[NightComparison], previous: Sequence[Night]) -> list[str]:
    """That the reference, which does not change, measures otherwise than it did."""
    now = next((one.tau for one in comparisons if one.kind == "reference"), None)
    taus = (one.tau for night in previous for one in night.comparisons if one.kind == "reference")
    before = next(taus, None)
    if now is None or before is None or abs(now - before) <= DRIFT * before:
        return []
    return [
        f"the reference's τ went from {before:.3f} to {now:.3f} though it does not change: completions, kernel or "
        "reference are others than before; compare the two reports before believing a difference"
    ]
