"""The loss through the target's frozen head, a chunk of slots at a time.

With 248 320 tokens and 512 blocks of 16 the logits of one text are 8 GB in float32, so they never exist whole. Head and
labels need no gradient, so a chunk's gradient with respect to the hidden states is taken as soon as its logits are
there, and the logits are dropped: no second forward pass, and memory of one chunk whatever the vocabulary. Slots that
are not scored cost nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash.batch import Vocabulary
from dflash.losses import slot_losses_and_gradients, slot_weights
from dflash.recipes import Recipe
from dflash.training.blocks import Blocks

STREAK_RANKS = (1, 8)
_COUNTED = 1 << 21
"""Logits compared at once when the better ones are counted."""


@dataclass(frozen=True)
class LossSums:
    """Sums over a micro-batch, float32 on the device: micro-batches and ranks add up before anything is divided.

    ``numerator`` Σ w·m·loss (with gradient) and ``weight`` Σ w·m, scalars. ``scored`` and ``correct`` [B-1]: slots that
    count, and those whose likeliest token is right. ``blocks``: blocks that are no fillers; ``streak1`` and
    ``streak8``: their leading scored slots whose right token is among the 1 or 8 likeliest.
    """

    numerator: Tensor
    weight: Tensor
    scored: Tensor
    correct: Tensor
    blocks: Tensor
    streak1: Tensor
    streak8: Tensor


def head_loss(
    hidden: Tensor,
    blocks: Blocks,
    recipe: Recipe,
    vocabulary: Vocabulary,
    *,
    teacher: Tensor | None,
    chunk_tokens: int,
) -> LossSums:
    """The recipe's sums for ``hidden`` [N, n, B-1, H]; ``chunk_tokens`` slots have logits at once.

    ``teacher`` [N, S, H] are the target's last hidden states, normed and clean, for a recipe with soft labels: those of
    slot k stand at its label's place - 1. Weights, losses and ties are those of :mod:`dflash.losses` and
    :func:`dflash.metric_replay.batch_metrics`.
    """
    sums = _HeadLoss.apply(hidden, blocks, recipe, vocabulary, teacher, chunk_tokens)  # type: ignore[no-untyped-call]
    numerator, weight, ranks = sums
    streaks = [((ranks < best) & blocks.scored).int().cumprod(-1).sum().float() for best in STREAK_RANKS]
    return LossSums(
        numerator=numerator,
        weight=weight,
        scored=blocks.scored.sum((0, 1)).float(),
        correct=((ranks == 0) & blocks.scored).sum((0, 1)).float(),
        blocks=(blocks.anchors >= 0).sum().float(),
        streak1=streaks[0],
        streak8=streaks[1],
    )


class _HeadLoss(torch.autograd.Function):
    """(hidden [N, n, B-1, H], …) → Σ w·m·loss, Σ w·m, ranks [N, n, B-1] of the right tokens (V where not scored)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        blocks: Blocks,
        recipe: Recipe,
        vocabulary: Vocabulary,
        teacher: Tensor | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, right, scored = hidden.detach().flatten(0, 2), blocks.right.flatten(), blocks.scored.flatten()
        weights = slot_weights(recipe, blocks.scored, blocks.scored).flatten() if recipe.loss != "dpace" else None
        labels = None if teacher is None or not recipe.soft_labels else _label_places(blocks, teacher)
        gradient = torch.zeros_like(states) if ctx.needs_input_grad[0] else None
        numerator, weight = states.new_zeros(2, dtype=torch.float32)
        ranks = torch.full_like(right, torch.iinfo(right.dtype).max)
        for rows in _chunks(recipe, blocks.scored, chunk_tokens):
            chunk = states[rows].requires_grad_(gradient is not None)
            theirs = (
                None if labels is None or teacher is None else vocabulary.logits(teacher.flatten(0, 1)[labels[rows]])
            )
            with torch.set_grad_enabled(gradient is not None):
                logits = vocabulary.logits(chunk)
            wide = logits.detach().float()
            ranks[rows] = _ranks(wide, right[rows])
            losses, at_logits = slot_losses_and_gradients(recipe, wide, right[rows], theirs)
            if weights is None:  # D-PACE: by the drafter's own confidence along each block, which chunks hold whole
                of_blocks = losses.view(-1, blocks.scored.shape[-1])
                each = slot_weights(recipe, of_blocks, scored[rows].view_as(of_blocks)).flatten()
            else:
                each = weights[rows]
            numerator += (each * losses).sum()
            weight += each.sum()
            if gradient is not None:
                at_logits = at_logits.mul_(each[:, None]).to(logits.dtype)
                (gradient[rows],) = torch.autograd.grad(logits, chunk, at_logits)
        ctx.save_for_backward(gradient)
        ctx.shape = hidden.shape
        ranks = ranks.view_as(blocks.right)
        ctx.mark_non_differentiable(weight, ranks)
        return numerator, weight, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, at_numerator: Tensor, *_: Any) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * at_numerator).view(ctx.shape), None, None, None, None, None


def _ranks(logits: Tensor, right: Tensor) -> Tensor:
    """:func:`dflash.batch.ranks_of` a slice of the vocabulary at a time: a count of booleans takes 8 bytes for each."""
    value, wanted = logits.gather(1, right[:, None]), right[:, None]
    ids = torch.arange(logits.shape[1], device=logits.device)
    ranks = torch.zeros_like(right)
    columns = max(1, _COUNTED // len(logits))
    for part, place in zip(torch.split(logits, columns, dim=1), torch.split(ids, columns), strict=True):
        ranks += ((part > value) | ((part == value) & (place < wanted))).sum(1)
    return ranks


def _chunks(recipe: Recipe, scored: Tensor, chunk_tokens: int) -> Iterator[Tensor]:
    """Flat slots that need logits, at most ``chunk_tokens`` at once (at least a block, where a loss needs it whole)."""
    slots = scored.shape[-1]
    if recipe.loss == "dpace":
        blocks = scored.any(-1).flatten().nonzero()[:, 0]
        places = blocks[:, None] * slots + torch.arange(slots, device=scored.device)
        return (part.flatten() for part in torch.split(places, max(1, chunk_tokens // slots)) if len(part))
    return (part for part in torch.split(scored.flatten().nonzero()[:, 0], chunk_tokens) if len(part))


def _label_places(blocks: Blocks, teacher: Tensor) -> Tensor:
    """Flat places [N·n·(B-1)] in ``teacher`` [N·S, H] of the states whose distribution is each slot's."""
    rows = torch.arange(len(blocks.places), device=teacher.device)[:, None, None]
    return (blocks.places - 1 + rows * teacher.shape[1]).flatten()
