"""Differences of τ from one drafter to several, with intervals that hold all at once. Imports no torch.

Whoever compares a drafter with the best of many has compared it with all of them: the best is partly the luckiest, and
an interval for that one comparison alone takes its luck for a loss. The intervals here are those of Hothorn, Bretz and
Westfall (Biometrical Journal 50, 2008), by bootstrap: every draw takes the same prompts for all drafters, and the half
width is the quantile of the *largest* studentised deviation among the comparisons. It grows with their number, and less
where the drafters resemble each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.metrics import BOOTSTRAP_DRAWS, SEED, Totals

Draws = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """Pooled τ minus the other's, and the ends of its interval."""

    difference: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Resampled:
    """One drafter's pooled τ over all prompts, and over each draw of them ([draws])."""

    tau: float
    drawn: Draws


class Prompts:
    """The draws of prompts that every drafter of a comparison is measured on."""

    def __init__(self, ids: Iterable[str], *, seed: int = SEED, draws: int = BOOTSTRAP_DRAWS) -> None:
        self.ids = tuple(sorted(ids))
        count = len(self.ids)
        random = np.random.default_rng(seed)
        self._weights = random.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
        self._known: dict[int, tuple[Totals, Resampled]] = {}

    def resample(self, totals: Totals) -> Resampled:
        """What ``totals``, which have all prompts, come to; kept for the next time that these very ones are asked for.

        Raises ``KeyError`` for a prompt they lack.
        """
        kept = self._known.get(id(totals))
        if kept is not None and kept[0] is totals:
            return kept[1]
        counted = np.array([totals[id] for id in self.ids], dtype=np.float64)
        advances, rounds = (self._weights @ counted).T
        whole = counted.sum(axis=0)
        resampled = Resampled(float(whole[0] / whole[1]), advances / rounds)
        self._known[id(totals)] = (totals, resampled)
        return resampled


def simultaneous(ours: Resampled, others: Sequence[Resampled], *, level: float) -> list[Difference]:
    """``ours`` minus each of ``others``: with probability ``level`` every interval covers its true difference.

    A drafter that is the same on every prompt differs by exactly nothing.
    """
    if not others:
        return []
    differences = np.array([ours.tau - other.tau for other in others])
    deviations = ours.drawn - np.stack([other.drawn for other in others]) - differences[:, None]
    errors = deviations.std(axis=1)
    differing = errors > 0
    largest = np.abs(deviations[differing] / errors[differing, None]).max(axis=0, initial=0.0)
    widths = float(np.quantile(largest, level)) * errors
    return [
        Difference(float(difference), float(difference - width), float(difference + width))
        for difference, width in zip(differences, widths, strict=True)
    ]
