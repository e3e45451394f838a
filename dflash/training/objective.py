"""The trainer's forward pass: taps and anchors in, hidden states of the mask slots out.

What is wrapped by DDP or FSDP is :class:`TrainingModel`. Its parameters are the drafter's and nothing else: embedding
and head are the target's, frozen, and stay outside.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dflash.batch import Vocabulary
from dflash.config import DrafterConfig
from dflash.drafter import Drafter
from dflash.masks import Mask, flex_masks, layer_masks
from dflash.training.batch import Features
from dflash.training.blocks import Blocks, documents
from dflash.training.randomness import generator

TILE = 128
"""Flex attention's tile."""
_DRAWN_TOGETHER = 16
"""torch's normal numbers on the CPU come in groups of this many; rows of whole groups do not depend on later rows."""


class TrainingModel(nn.Module):
    """A drafter whose float32 weights are the optimizer's masters, computing in ``compute_dtype``.

    The weights are cast anew at every pass, so the forward is bit for bit the one that a drafter loaded in
    ``compute_dtype`` makes, and what is evaluated and served is what is trained. Gradients arrive in float32.
    ``attention``: "dense" masks for SDPA, "flex" for CUDA (its backward exists there only).
    """

    def __init__(self, drafter: Drafter, *, compute_dtype: torch.dtype, attention: Literal["dense", "flex"]) -> None:
        super().__init__()
        self.drafter = drafter
        self.compute_dtype = compute_dtype
        self.attention = attention
        # In a tuple, which nn.Module does not look into: the drafter is registered once, under its own name.
        self._pass = (_BlockPass(drafter),)

    def forward(self, taps: Tensor, blocks: Blocks, starts: Tensor, block_embeddings: Tensor) -> Tensor:
        """Hidden states [N, n, B-1, H] of slots 1 … B-1 for the target's head, in the compute dtype.

        ``taps`` [N, S, K·H] with whatever noise was asked for; ``starts`` [N, S] as of
        :class:`~dflash.training.batch.Features`; ``block_embeddings`` [N, n·B, H] of :func:`block_embeddings`.
        """
        config, length = self.drafter.config, taps.shape[1]
        padding = compiled_length(length) - length if self.attention == "flex" else 0
        masks_of = flex_masks if self.attention == "flex" else layer_masks
        # A filler's anchor -1 is before every position: it sees its own slots and nothing else.
        masks = masks_of(config, blocks.anchors, length + padding, blocks.starts)
        context_positions = F.pad(torch.arange(length, device=taps.device) - starts, (0, padding))
        slots = torch.arange(config.block_size, device=taps.device)
        positions = (blocks.anchors.clamp(min=0) - blocks.starts)[..., None] + slots
        dtype = self.compute_dtype
        inputs = (taps.to(dtype), context_positions, block_embeddings.to(dtype), positions.flatten(1), masks)
        hidden: Tensor = self._run(*inputs)
        # No view: FSDP hangs the gradients' exchange on what leaves here.
        return hidden.view(*positions.shape, -1)[:, :, 1:].contiguous()

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the drafter's layers in place (``torch.compile``); masks are made outside, from the predicate."""
        self._pass[0].compile(*args, **options)

    def _run(self, *inputs: Any) -> Tensor:
        weights = dict(self.drafter.named_parameters())
        if all(weight.dtype == self.compute_dtype for weight in weights.values()):
            hidden: Tensor = self._pass[0](*inputs)
        else:
            cast = {f"drafter.{name}": weight.to(self.compute_dtype) for name, weight in weights.items()}
            hidden = functional_call(self._pass[0], cast, inputs)
        return hidden


def compiled_length(length: int) -> int:
    """What a context of ``length`` is padded to for flex attention: a power of two, at least a tile.

    A mask is compiled for its context's length, and the compiler gives up after eight of them; up to 4096 there are
    six. Padding is never visible, and tiles without a visible key are not computed.
    """
    return max(TILE, 1 << (length - 1).bit_length())


class _BlockPass(nn.Module):
    """The drafter over rows of blocks, as one module, so that it can be called with other weights than its own."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self,
        taps: Tensor,
        context_positions: Tensor,
        block_embeddings: Tensor,
        positions: Tensor,
        masks: Sequence[Mask],
    ) -> Tensor:
        context = self.drafter.project_context(taps)
        context = F.pad(context, (0, 0, 0, context_positions.shape[1] - taps.shape[1]))
        kv = self.drafter.context_kv(context, context_positions)
        hidden: Tensor = self.drafter(block_embeddings, positions, kv, masks)
        return hidden


@torch.no_grad()
def block_embeddings(vocabulary: Vocabulary, blocks: Blocks, ids: Tensor, config: DrafterConfig) -> Tensor:
    """The target's embeddings [N, n·B, H] of [anchor, MASK, …, MASK] for each block over the tokens ``ids`` [N, S]."""
    tokens = torch.full((*blocks.anchors.shape, config.block_size), config.mask_token_id, device=ids.device)
    tokens[..., 0] = ids.gather(1, blocks.anchors.clamp(min=0))
    return vocabulary.embed(tokens.flatten(1))


@torch.no_grad()
def with_noise(taps: Tensor, features: Features, sigma: float, seed: int, epoch: int) -> Tensor:
    """``taps`` [N, S, K·H] plus Gaussian noise of standard deviation ``sigma``, keyed by (seed, epoch, sample).

    The result is the input of ``fc`` and of nothing else: labels, soft ones too, come from the clean ``features``.
    """
    if sigma == 0:
        return taps
    width = -(-taps.shape[-1] // _DRAWN_TOGETHER) * _DRAWN_TOGETHER
    noisy = taps.clone()
    for row, span, sample in documents(features):
        drawn = generator(seed, epoch, sample, "noise", device=taps.device)
        noise = torch.randn(span.stop - span.start, width, generator=drawn, device=taps.device)
        noisy[row, span] += (sigma * noise[:, : taps.shape[-1]]).to(taps.dtype)
    return noisy
