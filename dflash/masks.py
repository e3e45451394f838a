"""Who sees whom in a block, written once: flex attention's mask and the dense mask are both made from it.

One row of a batch is one text of S positions with n blocks of B slots, or several texts end to end. Block b has anchor
a_b (the last known token); its slot k stands for position a_b + k. Queries are the blocks; keys are the context and
then the blocks themselves::

                    context, taps of positions 0 … S-1      block 0      block 1
                  ┌───────────────────────────────────────┬────────────┬────────────┐
      block 0     │ t < a_0, and within the window        │ itself     │ never      │
      slots 0…B-1 │                                       │            │            │
                  ├───────────────────────────────────────┼────────────┼────────────┤
      block 1     │ t < a_1, and within the window        │ never      │ itself     │
      slots 0…B-1 │                                       │            │            │
                  └───────────────────────────────────────┴────────────┴────────────┘
                    key index 0 … S-1                       S … S+B-1    S+B … S+2B-1

- Context is strictly before the anchor. The target's state at the anchor already knows the next token, so a block that
  saw it would be graded on an answer it was given; in serving that state does not exist yet.
- Context begins with the anchor's own text: in a row of several, at start_b ≤ t.
- Inside a block slots see each other both ways, or on a causal layer only up to themselves.
- A window W counts the query itself, as in the engines (``window_left = W - 1``): slot k sees context
  a+k-(W-1) ≤ t < a. W narrower than a block narrows the block as well.
- A slot always sees itself, so a row without visible context (anchor 0, or a filler block) is never empty.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash.config import DrafterConfig

Mask = Tensor | BlockMask
"""What a layer attends by: bool [N, 1, Q, K] for SDPA, or flex attention's sparse form of the same predicate."""
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``flex_attention``'s mask_mod: (row, head, query index, key index) → visible."""


@dataclass(frozen=True)
class LayerRule:
    """What differs between layers: in-block causality and the window W in tokens, None where all context is seen."""

    causal: bool
    window: int | None


def layer_rules(config: DrafterConfig) -> tuple[LayerRule, ...]:
    """The rule of each layer, first to last."""
    return tuple(
        LayerRule(causal, config.sliding_window if kind == "sliding_attention" else None)
        for causal, kind in zip(config.causal, config.layer_types, strict=True)
    )


def block_mask_mod(
    rule: LayerRule, anchors: Tensor, block_size: int, context_length: int, starts: Tensor | None = None
) -> MaskMod:
    """The predicate for ``anchors`` [N, n] over S = ``context_length`` context keys, elementwise on index tensors.

    ``starts`` [N, n] is where the text of each anchor begins in its row; 0 everywhere without it.
    """

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query_block = query // block_size
        anchor = anchors[row, query_block]
        query_position = anchor + query % block_size
        in_context = key < context_length
        block_key = (key - context_length).clamp(min=0)
        key_block = block_key // block_size
        key_position = torch.where(in_context, key, anchors[row, key_block] + block_key % block_size)
        before = key < anchor
        if starts is not None:
            before = before & (key >= starts[row, query_block])
        seen = torch.where(in_context, before, key_block == query_block)
        if rule.causal:
            seen = seen & (key_position <= query_position)
        if rule.window is not None:
            seen = seen & ((query_position - key_position).abs() < rule.window)
        return seen

    return visible


def dense_mask(
    rule: LayerRule, anchors: Tensor, block_size: int, context_length: int, starts: Tensor | None = None
) -> Tensor:
    """The same predicate as a bool tensor [N, 1, n·B, S + n·B]; True is visible, as SDPA takes it."""
    rows, blocks = anchors.shape
    queries = blocks * block_size
    visible = block_mask_mod(rule, anchors, block_size, context_length, starts)
    index = torch.arange(context_length + queries, device=anchors.device)
    row = torch.arange(rows, device=anchors.device)
    return visible(row[:, None, None, None], index[:1], index[:queries, None], index)


def layer_masks(
    config: DrafterConfig, anchors: Tensor, context_length: int, starts: Tensor | None = None
) -> tuple[Tensor, ...]:
    """One dense mask a layer for ``anchors`` [N, n]; layers with the same rule share one tensor."""
    rules = layer_rules(config)
    masks = {rule: dense_mask(rule, anchors, config.block_size, context_length, starts) for rule in set(rules)}
    return tuple(masks[rule] for rule in rules)


def flex_masks(
    config: DrafterConfig, anchors: Tensor, context_length: int, starts: Tensor | None = None
) -> tuple[BlockMask, ...]:
    """:func:`layer_masks` as flex attention takes them: tiles of which only the visible ones are computed."""
    rows, blocks = anchors.shape
    queries = blocks * config.block_size
    # Compiled, the predicate is evaluated tile by tile; otherwise the whole grid exists first, in 8-byte integers.
    create = _compiled_create_block_mask() if anchors.is_cuda else create_block_mask
    rules = layer_rules(config)
    masks = {
        rule: create(
            block_mask_mod(rule, anchors, config.block_size, context_length, starts),
            B=rows,
            H=None,
            Q_LEN=queries,
            KV_LEN=context_length + queries,
            device=anchors.device,
        )
        for rule in set(rules)
    }
    return tuple(masks[rule] for rule in rules)


@cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Made when it is first needed: the compiler takes seconds to import."""
    return torch.compile(create_block_mask)
