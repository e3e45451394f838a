"""Which blocks a step trains on: anchors drawn anew for every sample and epoch, and what each slot is graded on."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.training.batch import Features
from dflash.training.randomness import generator


@dataclass(frozen=True)
class Blocks:
    """n blocks in each of N rows; all positions are row indices.

    ``anchors`` [N, n] int64, ascending, -1 for a filler at the end; ``starts`` [N, n] int64 the first position of the
    anchor's document. For slots 1 … B-1: ``places`` [N, n, B-1] int64 the position of the label, clamped into the row;
    ``right`` [N, n, B-1] int64 the token there; ``scored`` [N, n, B-1] bool whether it counts.
    """

    anchors: Tensor
    starts: Tensor
    places: Tensor
    right: Tensor
    scored: Tensor


def valid_anchors(features: Features) -> Tensor:
    """Positions a [N, S] bool that may be anchors: a and a + 1 are labels of one document, a ≤ S - 2.

    The anchor is a token the target wrote, as in serving, and the first slot of every block is scored.
    """
    mask, starts = features.loss_mask, features.starts
    valid = torch.zeros_like(mask)
    valid[:, :-1] = mask[:, :-1] & mask[:, 1:] & (starts[:, :-1] == starts[:, 1:])
    return valid


def draw_blocks(features: Features, config: DrafterConfig, *, num_anchors: int, seed: int, epoch: int) -> Blocks:
    """Exactly ``num_anchors`` blocks a row: masks and shapes stay the same whatever the samples hold.

    Each document draws one uniform score for each of its positions, keyed by (seed, epoch, sample), and a row takes its
    valid positions of smallest score: for a lone document a uniform choice without replacement, and the same choice
    whichever rank, row or batch it is in. A row with fewer valid positions is filled up with -1.
    """
    valid = valid_anchors(features).cpu()
    scores = torch.full(valid.shape, torch.inf, dtype=torch.float64)
    for row, span, sample in documents(features):
        drawn = generator(seed, epoch, sample, "anchors")
        scores[row, span] = torch.rand(span.stop - span.start, generator=drawn, dtype=torch.float64)
    scores.masked_fill_(~valid, torch.inf)
    best = scores.topk(min(num_anchors, scores.shape[1]), largest=False)
    chosen = torch.where(best.values.isinf(), scores.shape[1], best.indices).sort(dim=1).values
    anchors = torch.full((len(scores), num_anchors), -1)
    anchors[:, : chosen.shape[1]] = chosen.masked_fill(chosen == scores.shape[1], -1)
    return blocks_at(features, config, anchors.to(features.ids.device))


def blocks_at(features: Features, config: DrafterConfig, anchors: Tensor) -> Blocks:
    """The blocks at ``anchors`` [N, n]. Slot k is scored iff a + k is a label within the row and the same document."""
    length = features.ids.shape[1]
    starts = features.starts.gather(1, anchors.clamp(min=0)).masked_fill(anchors < 0, 0)
    at = anchors[..., None] + torch.arange(1, config.block_size, device=anchors.device)
    places = at.clamp(min=min(1, length - 1), max=length - 1)
    flat = places.flatten(1)
    inside = (anchors[..., None] >= 0) & (at < length)
    same = features.starts.gather(1, flat).view_as(places) == starts[..., None]
    label = features.loss_mask.gather(1, flat).view_as(places)
    return Blocks(anchors, starts, places, features.ids.gather(1, flat).view_as(places), inside & same & label)


def documents(features: Features) -> Iterator[tuple[int, slice, int]]:
    """(row, positions, sample) of every document; padding behind the last one, a document of its own, is left out."""
    starts = features.starts.cpu()
    for row, samples in enumerate(features.samples):
        first, lengths = torch.unique_consecutive(starts[row], return_counts=True)
        for begin, length, sample in zip(first.tolist(), lengths.tolist(), samples, strict=False):
            yield row, slice(begin, begin + length), sample
