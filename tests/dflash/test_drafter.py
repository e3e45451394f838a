"""The fast forward pass against the naive one, and against what must not reach it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash import naive
from dflash.config import DrafterConfig
from dflash.drafter import Drafter, rotary
from dflash.masks import layer_masks
from tests.dflash.test_config import changed

SLIDING_AND_FULL = changed(sliding_window=6)
VARIANTS = {
    "sliding causal and full": SLIDING_AND_FULL,
    "all full": changed(layer_types=["full_attention"] * 3, sliding_window=None),
    "sliding bidirectional": changed(is_causal=False, sliding_window=11),
    "window narrower than the block": changed(sliding_window=3),
    "window narrower than the block, bidirectional": changed(is_causal=False, sliding_window=3),
    "another rotary base": changed(rope_theta=1e6),
    "one tap, no grouping": changed(num_key_value_heads=4, nested={"target_layer_ids": [5]}),
}
TEXT = 24


def random_drafter(raw: dict[str, Any], seed: int = 0) -> Drafter:
    """Weights large enough that every part of the sum matters."""
    torch.manual_seed(seed)
    drafter = Drafter(DrafterConfig.from_dict(raw, source="test"))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.normal_(0, 0.3) if parameter.dim() == 2 else parameter.uniform_(0.5, 1.5)
            assert name in drafter.config.tensor_shapes()
    return drafter


def vocabulary(drafter: Drafter) -> tuple[Tensor, Tensor]:
    rows = drafter.config.vocab_size, drafter.config.hidden_size
    return torch.randn(rows), torch.randn(rows)


def blocks_of(drafter: Drafter, embed: Tensor, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [N, n·B, H] and positions [N, n·B] of the blocks at ``anchors`` [N, n]."""
    size = drafter.config.block_size
    ids = torch.full((*anchors.shape, size), drafter.config.mask_token_id)
    ids[..., 0] = tokens.gather(1, anchors)
    positions = anchors[..., None] + torch.arange(size)
    return embed[ids.flatten(1)], positions.flatten(1)


def hidden_states(drafter: Drafter, embed: Tensor, taps: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
    context = drafter.context_kv(drafter.project_context(taps), torch.arange(taps.shape[1]))
    blocks, positions = blocks_of(drafter, embed, tokens, anchors)
    hidden: Tensor = drafter(blocks, positions, context, layer_masks(drafter.config, anchors, taps.shape[1]))
    return hidden


@pytest.mark.parametrize("raw", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_blocks_in_a_batch_equal_the_naive_forward(raw: dict[str, Any]) -> None:
    drafter = random_drafter(raw)
    embed, head = vocabulary(drafter)
    taps, tokens = torch.randn(2, TEXT, drafter.config.tap_width), torch.randint(0, 50, (2, TEXT))
    anchors = torch.tensor([[1, 9, 23], [0, 9, 14]])
    hidden = hidden_states(drafter, embed, taps, tokens, anchors).unflatten(1, (3, -1))
    for row, block in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        slow = naive.draft_logits(
            drafter.state_dict(), raw, embed, head, taps[row], tokens[row].tolist(), int(anchors[row, block])
        )
        torch.testing.assert_close(hidden[row, block, 1:] @ head.T, slow, rtol=1e-4, atol=1e-4)
        assert slow.argmax(-1).tolist() == (hidden[row, block, 1:] @ head.T).argmax(-1).tolist()


@torch.no_grad()
def test_padding_behind_a_shorter_text_changes_nothing() -> None:
    drafter = random_drafter(SLIDING_AND_FULL)
    embed, _ = vocabulary(drafter)
    taps, tokens = torch.randn(1, TEXT, drafter.config.tap_width), torch.randint(0, 50, (1, TEXT))
    anchors = torch.tensor([[10]])
    cut = hidden_states(drafter, embed, taps[:, :11], tokens, anchors)
    torch.testing.assert_close(hidden_states(drafter, embed, taps, tokens, anchors), cut)


def test_no_gradient_from_the_anchor_on_nor_from_another_block() -> None:
    drafter = random_drafter(SLIDING_AND_FULL)
    embed, head = vocabulary(drafter)
    taps = torch.randn(1, TEXT, drafter.config.tap_width, requires_grad=True)
    tokens, anchors = torch.randint(0, 50, (1, TEXT)), torch.tensor([[6, 15]])
    context = drafter.context_kv(drafter.project_context(taps), torch.arange(TEXT))
    blocks, positions = blocks_of(drafter, embed, tokens, anchors)
    blocks.requires_grad_()
    hidden = drafter(blocks, positions, context, layer_masks(drafter.config, anchors, TEXT))
    first_block = (hidden[:, : drafter.config.block_size] @ head.T).square().sum()
    at_taps, at_blocks = torch.autograd.grad(first_block, (taps, blocks))
    assert at_taps[:, :6].abs().amin(dim=1).max() > 0
    assert torch.equal(at_taps[:, 6:], torch.zeros_like(at_taps[:, 6:]))
    size = drafter.config.block_size
    assert at_blocks[:, :size].abs().max() > 0
    assert torch.equal(at_blocks[:, size:], torch.zeros_like(at_blocks[:, size:]))


def test_rotary_frequencies_stay_float32_in_a_bfloat16_drafter() -> None:
    drafter = random_drafter(SLIDING_AND_FULL)
    taps = torch.randn(1, 4, drafter.config.tap_width)
    far = torch.arange(4) + 30_000
    (keys, _), *_ = drafter.context_kv(drafter.project_context(taps), far)
    low = drafter.to(torch.bfloat16)
    (rounded, _), *_ = low.context_kv(low.project_context(taps.bfloat16()), far)
    torch.testing.assert_close(rounded.float(), keys, rtol=0.1, atol=0.1)
    assert all(part.dtype == torch.float32 for part in rotary(far, 16, 10_000.0))


def test_state_dict_is_exactly_the_checkpoint() -> None:
    drafter = random_drafter(SLIDING_AND_FULL)
    assert {name: tuple(t.shape) for name, t in drafter.state_dict().items()} == drafter.config.tensor_shapes()
