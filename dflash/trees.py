"""DDTree: the N most probable drafts of a block as one tree, and how far along the right text it reaches.

The drafter gives each slot its own distribution, so a prefix of length d has probability q = Π q_i, and the tree of N
prefixes with the highest q has the largest expected acceptance of all trees of N nodes (arXiv 2604.12989, algorithm as
in the authors' code). Nodes are found best first; the root is the anchor, is given, and does not count. The same order
serves every N: the tree of N nodes is the first N.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BEYOND = np.iinfo(np.int64).max
"""The number of a prefix that is in no tree of the budget."""

TIE = 1e-9
"""Log-probabilities closer than this are equal: logits are float32, so what is less is the rounding of sums here."""


class Node(NamedTuple):
    """A prefix: its last token is the ``rank``-th best (from 0) of slot ``depth`` (from 1); ``parent`` 0 is the root.

    ``parent`` is the number, from 1, of the node it continues in the order of insertion.
    """

    depth: int
    rank: int
    parent: int
    log_prob: float


def best_first(log_probs: Sequence[Sequence[float]], budget: int) -> Iterator[Node]:
    """The first ``budget`` nodes in order of falling probability.

    ``log_probs`` holds for each of the B-1 slots the log-probabilities of its best tokens, falling; of V tokens
    min(N, V) are enough. Of equally probable prefixes the shorter comes first.
    """
    heap = [(-log_probs[0][0], 1, 0, 0)]
    for number in range(1, budget + 1):
        if not heap:
            return
        cost, depth, rank, parent = heapq.heappop(heap)
        yield Node(depth, rank, parent, -cost)
        slot = log_probs[depth - 1]
        if rank + 1 < len(slot):
            heapq.heappush(heap, (cost + slot[rank] - slot[rank + 1], depth, rank + 1, parent))
        if depth < len(log_probs):
            heapq.heappush(heap, (cost - log_probs[depth][0], depth + 1, 0, number))


def right_paths(log_probs: NDArray[np.float32], ranks: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """[R, B-1]: the numbers that :func:`best_first` gives to the prefixes of the right text, for R blocks at once.

    ``log_probs`` [R, B-1, min(budget, V)], falling along the last axis; ``ranks`` [R, B-1] of the right tokens, any
    rank beyond the last axis for none. Numbers over ``budget`` are :data:`BEYOND`. DDTree(N) accepts as many drafts
    as a row has numbers ≤ N.

    A prefix's number is one more than the count of more probable prefixes, so instead of growing each tree these are
    counted, for all blocks together, level by level, down to the last right prefix that the budget reaches.
    """
    blocks, slots, width = log_probs.shape
    wide = log_probs.astype(np.float64)
    best = np.cumsum(wide[:, :, 0], axis=1)
    losses = wide[:, :, :1] - wide
    found = np.minimum.accumulate(ranks < width, axis=1)
    right = np.cumsum(np.take_along_axis(wide, np.minimum(ranks, width - 1)[..., None], axis=2)[..., 0], axis=1)
    # Whatever the ties: a prefix comes behind its own ancestors and their better siblings.
    ahead = np.cumsum(np.minimum(ranks, width) + 1, axis=1)
    numbers = np.full((blocks, slots), BEYOND)
    reach = np.minimum(found.sum(axis=1), _reach(best, losses, right, budget))
    while len(open_ := np.flatnonzero(reach)):
        last = reach[open_] - 1
        owner, scores, fits = _more_probable(best[open_], losses[open_], right[open_, last] + TIE, budget)
        counts = np.stack(
            [
                np.bincount(owner[scores > right[open_, slot][owner] + TIE], minlength=len(open_))
                for slot in range(slots)
            ],
            axis=1,
        )
        order = np.maximum(counts + 1, ahead[open_])
        order[np.arange(slots) > last[:, None]] = BEYOND
        settled = fits & (order[np.arange(len(open_)), last] <= budget)
        numbers[open_[settled]] = order[settled]
        reach[open_] = np.where(settled, 0, last)
    return numbers


def _reach(
    best: NDArray[np.float64], losses: NDArray[np.float64], right: NDArray[np.float64], budget: int
) -> NDArray[np.int64]:
    """[R]: a bound on the right prefixes that ``budget`` nodes can hold.

    Of the prefixes that leave the most probable text at their last slot alone, fewer than ``budget`` may be better.
    """
    leaving = (best[:, :, None] - losses).reshape(len(best), -1)
    place = leaving.shape[1] - budget
    if place < 0:
        return np.full(len(best), best.shape[1])
    worst = np.partition(leaving, place, axis=1)[:, place, None]
    return np.asarray((right >= worst - TIE).sum(axis=1))


def _more_probable(
    best: NDArray[np.float64], losses: NDArray[np.float64], limit: NDArray[np.float64], budget: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Block and score of every prefix, of any length, with a log-probability over ``limit`` [R]; and who has few.

    ``best`` [R, B-1] is the most probable prefix of each length, ``losses`` [R, B-1, k] what a token costs against the
    best of its slot, rising. The last array [R] is false for a block with ``budget`` such prefixes or more; of that
    not all are given.
    """
    rows, slots, width = losses.shape
    apart = losses.max(initial=0.0) + 1.0  # one sorted array for all rows of a slot, each with a range of its own
    owner, spent = np.arange(rows), np.zeros(rows)
    owners, scores, total = [], [], np.zeros(rows, np.int64)
    for slot in range(slots):
        keys = (losses[:, slot] + np.arange(rows)[:, None] * apart).ravel()
        room = np.clip(best[owner, slot] - spent - limit[owner], 0.0, apart - 0.5)
        children = np.searchsorted(keys, room + owner * apart) - owner * width
        total += np.bincount(owner, weights=children, minlength=rows).astype(np.int64)
        children[total[owner] >= budget] = 0
        parent = np.repeat(np.arange(len(owner)), children)
        rank = np.arange(len(parent)) - np.repeat(np.cumsum(children) - children, children)
        owner, spent = owner[parent], spent[parent] + losses[owner[parent], slot, rank]
        owners.append(owner)
        scores.append(best[owner, slot] - spent)
    return np.concatenate(owners), np.concatenate(scores), total < budget
