"""Every figure of a report, as pure functions over the rounds of a walk.

Words. A block has slots 0…B-1: slot 0 is the anchor, the last known token; slot k stands for position anchor + k. A
round is one draft and one verification. ``accepted`` is the number of leading right slots, the *bonus* is the target's
own token behind them, and ``advance``, 1…B, is what the round emits: accepted + 1.

The end of a completion. The last round may reach over the end (token limit or EOS). It counts as a round. With R tokens
left behind the anchor only slots 1…R have a right token: the others are ``None`` in ``right`` and ``rank_of_right`` and
count in no statistic by position, in no numerator and no denominator. When all R are accepted the bonus lies beyond the
end, the advance is R instead of R + 1, and the round is ``cut``. So a completion's advances add up to its tokens less
the first one, which the prefill gave, and τ = (tokens - 1) / rounds holds exactly.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dflash.errors import DFlashError
from dflash.report import Comparison, Metrics, Speedup, Tau, Verdict

SEED = 20260206
"""Of whatever is drawn in a measurement, so that two of them draw alike."""
STREAK_WIDTHS = (1, 2, 4, 8, 16, 64)
DDTREE_NODES = (8, 16, 64, 128, 256, 512)
FEWEST_PROMPTS = 64
"""Fewer prompts give no verdict: between prompts τ varies by half, so an interval of few is narrow by luck."""
BOOTSTRAP_DRAWS = 10_000


class NoRoundsError(DFlashError):
    """There is nothing to measure: no completion has a second token."""


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification; the three lists have B - 1 entries, for slots 1…B-1."""

    prompt: str
    anchor: int
    drafted: tuple[int, ...]
    right: tuple[int | None, ...]
    rank_of_right: tuple[int | None, ...]
    accepted: int
    advance: int
    cut: bool

    def to_dict(self) -> dict[str, object]:
        """The round as a line of ``rounds.jsonl``."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TreeRound:
    """A round of a draft tree: ``accepted`` nodes of the right path, and what it emits with the bonus, 1…B."""

    prompt: str
    anchor: int
    accepted: int
    advance: int


def judge(prompt: str, anchor: int, drafted: Sequence[int], ranks: Sequence[int], following: Sequence[int]) -> Round:
    """Verify a block: ``following`` are the tokens of the completion behind the anchor, at least one.

    ``ranks[k]`` is the rank of the right token of slot k + 1 in the drafter's order, 0 for its best; entries of slots
    beyond the end are ignored.
    """
    slots = len(drafted)
    inside = min(slots, len(following))
    accepted = 0
    while accepted < inside and drafted[accepted] == following[accepted]:
        accepted += 1
    advance = min(accepted + 1, len(following))
    beyond = (None,) * (slots - inside)
    return Round(
        prompt=prompt,
        anchor=anchor,
        drafted=tuple(drafted),
        right=(*following[:inside], *beyond),
        rank_of_right=(*ranks[:inside], *beyond),
        accepted=accepted,
        advance=advance,
        cut=advance <= accepted,
    )


def summarize(
    rounds: Sequence[Round],
    random_rounds: Sequence[Round],
    trees: Mapping[int, Sequence[TreeRound]],
    *,
    seed: int,
    lossless_prompts: int | None = None,
    times: tuple[float, float, float] | None = None,
) -> Metrics:
    """All figures of one drafter over a walk, and τ at random anchors (null when there are none).

    ``tokens`` counts what was walked, prefill tokens included; a completion of one token has no round and no part here.
    ``trees`` has each DDTree's own walk by its nodes; ``times`` are :func:`speedup`'s seconds. Raises
    :class:`NoRoundsError` on an empty walk.
    """
    if not rounds:
        raise NoRoundsError(
            "no completion is longer than one token, so no block was drafted; use other prompts or --ignore-eos"
        )
    return Metrics(
        tau=tau(by_prompt(rounds), seed=seed),
        rounds=len(rounds),
        tokens=sum(one.advance for one in rounds) + len({one.prompt for one in rounds}),
        cut_rounds=sum(one.cut for one in rounds),
        lossless_prompts=lossless_prompts,
        accepted_by_position=accepted_by_position(rounds),
        acceptance_by_position=acceptance_by_position(rounds),
        conditional_by_position=conditional_by_position(rounds),
        accuracy_by_position=accuracy_by_position(rounds),
        histogram=histogram(rounds),
        streak={str(width): mean_streak(rounds, width) for width in STREAK_WIDTHS},
        ddtree={str(nodes): tau_pooled(walked) for nodes, walked in trees.items()} or None,
        random_anchor_tau=tau_pooled(random_rounds) if random_rounds else None,
        speedup=speedup(tau_pooled(rounds), *times) if times else None,
    )


Totals = Mapping[str, tuple[int, int]]
"""Σ advance and number of rounds of each prompt that has one."""


def tau(totals: Totals, *, seed: int) -> Tau:
    """Pooled and macro τ with the pooled one's interval. Raises :class:`NoRoundsError` on no prompt."""
    if not totals:
        raise NoRoundsError("no prompt has a round; use other prompts or longer completions")
    advances, rounds = (sum(column) for column in zip(*totals.values(), strict=True))
    macro = float(np.mean([advance / count for advance, count in totals.values()]))
    return Tau(pooled=advances / rounds, macro=macro, ci95=interval(totals, seed=seed))


def speedup(pooled: float, draft: float, verify: float, step: float) -> Speedup:
    """τ · step / (draft + verify), all in seconds on one machine, batch 1."""
    return Speedup(draft=draft, verify=verify, step=step, expected=pooled * step / (draft + verify))


def tau_pooled(rounds: Sequence[Round] | Sequence[TreeRound]) -> float:
    """Σ advance / rounds over all prompts together, 1…B."""
    return sum(one.advance for one in rounds) / len(rounds)


def by_prompt(rounds: Iterable[Round]) -> dict[str, tuple[int, int]]:
    """Σ advance and number of rounds of each prompt that has one."""
    totals: dict[str, tuple[int, int]] = {}
    for one in rounds:
        advance, count = totals.get(one.prompt, (0, 0))
        totals[one.prompt] = (advance + one.advance, count + 1)
    return totals


def interval(totals: Totals, *, seed: int) -> tuple[float, float] | None:
    """95 % percentile interval of the pooled τ, bootstrapped over prompts; ``None`` below two prompts."""
    if len(totals) < 2:
        return None
    return _middle_95(_bootstrap(list(totals.values()), seed))


def compare(ours: Totals, theirs: Totals, *, seed: int) -> Comparison:
    """Pooled τ minus the other's over the same prompts; every bootstrap draw takes the same prompts for both.

    Raises :class:`NoRoundsError` where no prompt has a round in both.
    """
    ours = {prompt: totals for prompt, totals in ours.items() if prompt in theirs}
    pairs = [(totals, theirs[prompt]) for prompt, totals in ours.items()]
    if not pairs:
        raise NoRoundsError("no prompt has a round with both drafters: there is nothing to compare; use other prompts")
    difference = _pooled([one for one, _ in pairs]) - _pooled([other for _, other in pairs])
    ci95 = None
    if len(pairs) >= 2:
        ci95 = _middle_95(_bootstrap([one for one, _ in pairs], seed) - _bootstrap([other for _, other in pairs], seed))
    return Comparison(difference=difference, ci95=ci95, prompts=len(pairs), verdict=_verdict(ci95, len(pairs)))


def _verdict(ci95: tuple[float, float] | None, prompts: int) -> Verdict:
    if ci95 is None or prompts < FEWEST_PROMPTS:
        return "too few prompts"
    return "better" if ci95[0] > 0 else "worse" if ci95[1] < 0 else "no difference shown"


def _pooled(totals: Sequence[tuple[int, int]]) -> float:
    return sum(advance for advance, _ in totals) / sum(count for _, count in totals)


def accepted_by_position(rounds: Sequence[Round]) -> list[int]:
    """[B-1]: rounds that accepted slot k, that is, in which slots 1…k were all right."""
    accepted = np.array([one.accepted for one in rounds])
    return [int(np.sum(accepted >= slot)) for slot in _slots(rounds)]


def acceptance_by_position(rounds: Sequence[Round]) -> list[float | None]:
    """[B-1]: accepted[k] / rounds, over the rounds whose slot k lies inside the completion; ``None`` without one."""
    inside = _inside(rounds).sum(axis=0)
    return [_share(part, whole) for part, whole in zip(accepted_by_position(rounds), inside, strict=True)]


def conditional_by_position(rounds: Sequence[Round]) -> list[float | None]:
    """[B-1]: accepted[k] / accepted[k-1], over the rounds whose slot k lies inside; accepted[0] is every round."""
    inside = _inside(rounds)
    accepted = np.array([one.accepted for one in rounds])
    reached = [int(np.sum(inside[:, slot - 1] & (accepted >= slot - 1))) for slot in _slots(rounds)]
    return [_share(part, whole) for part, whole in zip(accepted_by_position(rounds), reached, strict=True)]


def accuracy_by_position(rounds: Sequence[Round]) -> list[float | None]:
    """[B-1]: share of the rounds with slot k inside in which it is right, whatever came before it."""
    inside = _inside(rounds).sum(axis=0)
    right = right_slots(rounds).sum(axis=0)
    return [_share(part, whole) for part, whole in zip(right, inside, strict=True)]


def right_slots(rounds: Sequence[Round]) -> NDArray[np.bool_]:
    """[rounds, B-1]: the slot lies inside the completion and its draft is the right token."""
    pairs = ([drafted == right for drafted, right in zip(one.drafted, one.right, strict=True)] for one in rounds)
    return np.array(list(pairs), dtype=bool).reshape(len(rounds), -1)


def histogram(rounds: Sequence[Round]) -> list[int]:
    """[B]: rounds by advance 1…B; a cut round stands under what it emitted."""
    counts = np.bincount([one.advance for one in rounds], minlength=len(rounds[0].drafted) + 2)
    return [int(count) for count in counts[1:]]


def streak(one: Round, width: int) -> int:
    """Leading slots whose right token is among the drafter's ``width`` best: drafts only, no bonus, 0…B-1.

    It ends at the end of the completion. Width 1 is ``accepted`` unless the drafts were drawn, which need not be the
    drafter's best; wider ones are an oracle, never compared with τ.
    """
    length = 0
    for rank in one.rank_of_right:
        if rank is None or rank >= width:
            break
        length += 1
    return length


def mean_streak(rounds: Sequence[Round], width: int) -> float:
    """Mean top-``width`` streak over all rounds. For width 1 of greedy drafts: τ = streak + 1 - cut / rounds."""
    return sum(streak(one, width) for one in rounds) / len(rounds)


def _slots(rounds: Sequence[Round]) -> range:
    return range(1, len(rounds[0].drafted) + 1)


def _inside(rounds: Sequence[Round]) -> NDArray[np.bool_]:
    return np.array([[right is not None for right in one.right] for one in rounds], dtype=bool)


def _share(part: int, whole: int) -> float | None:
    return float(part) / float(whole) if whole else None


def _bootstrap(totals: Sequence[tuple[int, int]], seed: int) -> NDArray[np.float64]:
    """[draws]: pooled τ of each bootstrap sample; the same seed and number of prompts draw the same prompts."""
    advances, rounds = (_drawn(len(totals), seed) @ np.array(totals, dtype=np.float64)).T
    return np.asarray(advances / rounds, dtype=np.float64)


@lru_cache(maxsize=2)
def _drawn(prompts: int, seed: int) -> NDArray[np.float64]:
    """[draws, prompts]: how often each prompt is in each sample; kept, for drawing takes most of the time."""
    drawn = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=BOOTSTRAP_DRAWS)
    return drawn.astype(np.float64)


def _middle_95(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
