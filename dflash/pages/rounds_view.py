"""What a page shows of rounds: each prompt's walk in few bytes, and where and how narrowly the drafts went wrong."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash.metrics import Round
from dflash.report import PromptResult

RANK_BINS = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 63), (64, None))
"""Ranks of the right token, 0 for the drafter's best, as the misses are counted by."""


@dataclass(frozen=True)
class Miss:
    """A pair of tokens, drafted and right, at which rounds ended; ``rank`` is the median one of the right token."""

    drafted: int
    right: int
    count: int
    rank: int


def walk(prompt: PromptResult, rounds: Sequence[Round]) -> dict[str, Any]:
    """The completion's tokens, and of each round ``[advance, accepted, drafted, ranks]``.

    What was drafted is kept from the first wrong slot on, since the slots before it are the completion's own. Ranks end
    with the completion.
    """
    return {
        "ids": prompt.token_ids,
        "rounds": [
            [
                one.advance,
                one.accepted,
                list(one.drafted[one.accepted :]),
                [rank for rank in one.rank_of_right if rank is not None],
            ]
            for one in rounds
        ],
    }


def first_wrong(rounds: Sequence[Round]) -> list[tuple[int, int, int]]:
    """(drafted, right, rank of right) of the slot that ended each round that a wrong draft ended."""
    found = []
    for one in rounds:
        if one.accepted < len(one.drafted):
            right, rank = one.right[one.accepted], one.rank_of_right[one.accepted]
            if right is not None and rank is not None:
                found.append((one.drafted[one.accepted], right, rank))
    return found


def misses_by_rank(rounds: Sequence[Round]) -> list[tuple[str, int]]:
    """Rounds that a wrong draft ended, by the place of the right token among the drafter's candidates (1 = its best).

    A drawn draft can be wrong where the drafter's best is right; those rounds have a bin of their own, if there are
    any.
    """
    ranks = [rank for *_, rank in first_wrong(rounds)]
    bins = [("1", sum(rank == 0 for rank in ranks))] if 0 in ranks else []
    for low, high in RANK_BINS:
        label = f"{low + 1}" if low == high else f"{low + 1}–{high + 1}" if high is not None else f"{low + 1}+"
        bins.append((label, sum(low <= rank and (high is None or rank <= high) for rank in ranks)))
    return bins


def commonest_misses(rounds: Sequence[Round], most: int) -> list[Miss]:
    """The pairs of drafted and right token that ended the most rounds."""
    wrong = first_wrong(rounds)
    counted = Counter((drafted, right) for drafted, right, _ in wrong)
    ranks = defaultdict(list)
    for drafted, right, rank in wrong:
        ranks[drafted, right].append(rank)
    return [
        Miss(drafted, right, count, sorted(ranks[drafted, right])[count // 2])
        for (drafted, right), count in sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:most]
    ]
