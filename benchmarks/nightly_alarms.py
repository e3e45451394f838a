"""How often the nightly comparison cries wolf, and how soon it cries when there is a wolf.

Years of nights are simulated and judged by the same function that judges the real ones
(:func:`tasks.nightly.compare_night`): every night a new checkpoint on the same 128 prompts. Checkpoints differ from
each other on every prompt by a spread (share of that prompt's τ) that averages out over all prompts there could be, so
without a change none is truly better; how much of a night's differences the next night's still has is the ``memory``.

    python -m benchmarks.nightly_alarms [--years 200]

prints, for each spread and memory, in what share of the years there were more than two alarms; then, for a true fall of
some percent in the middle of a month, how often it is told within three nights. Beside both stands what a comparison
with the best so far gives when it is taken as if it had not been chosen.
"""

import argparse
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np

from dflash.simultaneous import Prompts
from tasks import nightly
from tasks.nightly import Measured, Night, compare_night

PROMPTS = 128
TOKENS = 256
DRAWS = 1000
"""A tenth of what a real night takes: enough for the share of the years, and a tenth of the time."""
SPREADS = (0.05, 0.1, 0.2, 0.4)
MEMORIES = (0.0, 0.9)
FALLS = (0.03, 0.05, 0.08, 0.12)


@dataclass(frozen=True)
class Course:
    """A run of nights: how checkpoints scatter, and a true fall by ``fall`` from the night ``falls_at`` on."""

    spread: float
    memory: float = 0.0
    nights: int = 365
    fall: float = 0.0
    falls_at: int = 0


def nights(course: Course, seed: int) -> Iterator[Night]:
    """Every night of one run, judged as it comes."""
    measured: list[Measured] = []
    past: list[Night] = []
    draw = functools.lru_cache(maxsize=2)(functools.partial(Prompts, draws=DRAWS))

    def kept(ids: Iterable[str]) -> Prompts:
        return draw(frozenset(ids))

    for number, newest in enumerate(_checkpoints(course, seed)):
        before = measured[-1].identity if measured else None
        night = compare_night(str(number), newest, measured, day_before=before, previous=past[::-1], draw=kept)
        measured.append(newest)
        past.append(night)
        yield night


def alarms(course: Course, seed: int) -> int:
    """How many alarms one run gives."""
    return sum(night.alarm == "raised" for night in nights(course, seed))


def told_within(course: Course, seed: int, patience: int = 3) -> bool:
    """Whether the fall is told within ``patience`` nights of it, its own night included."""
    judged = list(nights(course, seed))[course.falls_at : course.falls_at + patience]
    return any(night.alarm != "none" for night in judged)


def _checkpoints(course: Course, seed: int) -> Iterator[Measured]:
    random = np.random.default_rng(seed)
    of_prompt = np.exp(random.normal(np.log(4.5), 0.45, PROMPTS))  # between prompts τ varies by half
    own = random.normal(0, course.spread, PROMPTS)
    names = [f"p{place}" for place in range(PROMPTS)]
    reference = _totals(names, of_prompt * np.exp(random.normal(0, course.spread, PROMPTS)))
    for number in range(course.nights):
        fresh = random.normal(0, course.spread, PROMPTS)
        own = course.memory * own + np.sqrt(1 - course.memory**2) * fresh
        level = 1 - course.fall if course.fall and number >= course.falls_at else 1.0
        totals = _totals(names, of_prompt * level * np.exp(own - course.spread**2 / 2))
        advances, rounds = (sum(column) for column in zip(*totals.values(), strict=True))
        yield Measured(
            identity=str(number),
            step=number,
            source=f"host:/step_{number}",
            report="",
            key="",
            tau=advances / rounds,
            ci95=None,
            totals=totals,
            reference=reference,
        )


def _totals(names: list[str], tau: np.ndarray) -> dict[str, tuple[int, int]]:
    rounds = np.maximum(1, np.round((TOKENS - 1) / np.clip(tau, 1.0, 16.0))).astype(int)
    return {name: (TOKENS - 1, int(count)) for name, count in zip(names, rounds, strict=True)}


def unadjusted() -> "mock._patch[object]":
    """The comparison with the best so far as if it had not been chosen among many."""
    families = nightly._families

    def alone(others: list[Measured], newest: Measured, day_before: str | None) -> object:
        found = families(others, newest, day_before)
        return [(kind, ([members[place]], 0)) for kind, (members, place) in found]

    return mock.patch.object(nightly, "_families", alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--years", type=int, default=200)
    years = parser.parse_args().years
    print(f"no true change, 365 nights, {years} years: share with more than two alarms (mean number of alarms)")
    for spread in SPREADS:
        for memory in MEMORIES:
            course = Course(spread, memory)
            counts = [alarms(course, seed) for seed in range(years)]
            with unadjusted():
                plain = [alarms(course, seed) for seed in range(max(1, years // 10))]
            print(
                f"  spread {spread:4.0%} memory {memory}: {_share(counts)}   chosen taken as unchosen: {_share(plain)}",
                flush=True,
            )
    print(f"a true fall after 60 nights, {years} runs: share told within three nights of it")
    for spread in SPREADS[:3]:
        told = [
            np.mean([told_within(Course(spread, 0.0, 63, fall, 60), seed) for seed in range(years)]) for fall in FALLS
        ]
        figures = ", ".join(f"{fall:.0%}: {share:.0%}" for fall, share in zip(FALLS, told, strict=True))
        print(f"  spread {spread:4.0%}: {figures}", flush=True)


def _share(counts: list[int]) -> str:
    return f"{np.mean(np.array(counts) > 2):5.1%} ({np.mean(counts):.2f})"


if __name__ == "__main__":
    main()
