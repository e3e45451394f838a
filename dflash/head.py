"""What the target's head says of many positions, without all logits: a block of vocabulary rows at a time.

2 000 positions over 248 320 tokens are 2 GB of logits, and the comparisons made on them as much again. Nothing here
holds more than :data:`ELEMENTS` logits at once. A logit is compared only with logits out of the same product, computed
the same way: "is the best" then means equality, whatever the dtype rounds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ELEMENTS = 1 << 24
"""Logits held at once: 64 MiB in float32, and as much again in the dtype of the weights."""
BLOCK_ROWS = 1 << 14
"""Vocabulary rows in one product."""

HeadBlocks = Callable[[], Iterator[tuple[int, Tensor]]]
"""Walks the head once: the first token of each block, and its rows ``[v, H]`` on the device of the hidden states."""


@dataclass(frozen=True)
class Scan:
    """Per position ``[R]``: the best logit and its token (of equals the first), and the logit of the wanted token."""

    best: Tensor  # float32
    token: Tensor  # int64
    wanted: Tensor  # float32


def blocks_of(head: Tensor, device: torch.device | None = None) -> HeadBlocks:
    """``head`` [V, H] in blocks of :data:`BLOCK_ROWS`, moved to ``device`` one by one if that is another."""

    def walk() -> Iterator[tuple[int, Tensor]]:
        for start in range(0, len(head), BLOCK_ROWS):
            yield start, head[start : start + BLOCK_ROWS].to(device or head.device)

    return walk


def scan(hidden: Tensor, wanted: Tensor, blocks: HeadBlocks) -> Scan:
    """Best and wanted logits for normed ``hidden`` [R, H] and token ids ``wanted`` [R].

    NaN is the best there is, so that one in the head or in the states shows in :attr:`Scan.best`.
    """
    count, device = len(hidden), hidden.device
    best = torch.full((count,), -torch.inf, device=device)
    own = torch.full((count,), torch.nan, device=device)
    token = torch.zeros(count, dtype=torch.long, device=device)
    for start, rows, logits in _products(hidden, blocks):
        value, place = logits.max(dim=1)
        better = (value > best[rows]) | value.isnan()
        best[rows] = torch.where(better, value, best[rows])
        token[rows] = torch.where(better, place + start, token[rows])
        here = wanted[rows] - start
        inside = (here >= 0) & (here < logits.shape[1])
        found = logits.gather(1, here.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        own[rows] = torch.where(inside, found, own[rows])
    return Scan(best, token, own)


def best_and_ranks(hidden: Tensor, wanted: Tensor, blocks: HeadBlocks) -> tuple[Tensor, Tensor]:
    """Greedy tokens and ranks of the tokens ``wanted``, all ``[R]`` int64. Walks the head twice.

    Equal logits rank by id, as argmax takes the first: rank 0 is exactly "the greedy token".
    """
    found = scan(hidden, wanted, blocks)
    ranks = torch.zeros_like(wanted)
    for start, rows, logits in _products(hidden, blocks):
        value = found.wanted[rows, None]
        before = logits > value
        before |= (logits == value) & (
            torch.arange(start, start + logits.shape[1], device=logits.device) < wanted[rows, None]
        )
        ranks[rows] += before.sum(dim=1)
    return found.token, ranks


def _products(hidden: Tensor, blocks: HeadBlocks) -> Iterator[tuple[int, slice, Tensor]]:
    """Logits in float32 by block of the vocabulary and, within it, by rows of ``hidden``."""
    for start, block in blocks():
        step = max(1, ELEMENTS // len(block))
        for first in range(0, len(hidden), step):
            rows = slice(first, min(first + step, len(hidden)))
            yield start, rows, functional.linear(hidden[rows], block).float()
