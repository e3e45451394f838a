import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from dflash.config import DrafterConfig
from dflash.masks import LayerRule, block_mask_mod, dense_mask, flex_masks, layer_masks
from tests.dflash.test_config import changed

B, S = 4, 12
ANCHORS = torch.tensor([[2, 7, 12], [0, 5, 5]])
STARTS = torch.tensor([[0, 4, 4], [0, 0, 5]])
RULES = [LayerRule(causal, window) for causal in (False, True) for window in (None, 6, 3)]


def expected(rule: LayerRule, anchors: list[int], starts: list[int]) -> torch.Tensor:
    """Written out block by block from the rule in words."""
    mask = torch.zeros(len(anchors) * B, S + len(anchors) * B, dtype=torch.bool)
    for (block, anchor), slot in itertools.product(enumerate(anchors), range(B)):
        row = mask[block * B + slot]
        oldest = 0 if rule.window is None else anchor + slot - (rule.window - 1)
        for position in range(max(starts[block], oldest), anchor):
            row[position] = True
        for other in range(slot + 1 if rule.causal else B):
            row[S + block * B + other] = rule.window is None or abs(slot - other) < rule.window
    return mask


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_dense_mask_is_the_rule_in_words(rule: LayerRule) -> None:
    mask = dense_mask(rule, ANCHORS, B, S)
    for row, anchors in enumerate(ANCHORS.tolist()):
        assert torch.equal(mask[row, 0], expected(rule, anchors, [0, 0, 0]))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_context_begins_with_the_anchors_own_text(rule: LayerRule) -> None:
    mask = dense_mask(rule, ANCHORS, B, S, STARTS)
    for row, (anchors, starts) in enumerate(zip(ANCHORS.tolist(), STARTS.tolist(), strict=True)):
        assert torch.equal(mask[row, 0], expected(rule, anchors, starts))


def test_no_starts_are_starts_at_the_rows_beginning() -> None:
    for rule in RULES:
        zeros = torch.zeros_like(ANCHORS)
        assert torch.equal(dense_mask(rule, ANCHORS, B, S, zeros), dense_mask(rule, ANCHORS, B, S))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_flex_attention_makes_the_same_mask_from_the_same_predicate(rule: LayerRule) -> None:
    queries = ANCHORS.shape[1] * B
    mod = block_mask_mod(rule, ANCHORS, B, S, STARTS)
    flex = create_mask(mod, len(ANCHORS), 1, queries, S + queries, device="cpu")
    assert torch.equal(flex, dense_mask(rule, ANCHORS, B, S, STARTS))


def test_flex_masks_leave_out_tiles_without_a_visible_key_and_no_other() -> None:
    """One mask a layer; its sparse tiles are those the dense mask has something in."""
    config = DrafterConfig.from_dict(changed(sliding_window=40), source="test")
    length = 384
    anchors = torch.arange(130, 226).view(2, 48)  # rows of 48 blocks: three tiles of queries, six of keys
    starts = torch.tensor([[0], [128]]).expand_as(anchors)
    dense = layer_masks(config, anchors, length, starts)
    for sparse, mask in zip(flex_masks(config, anchors, length, starts), dense, strict=True):
        tiles = mask[:, 0].unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).any(4).any(2)
        assert torch.equal(sparse.to_dense()[:, 0].bool(), tiles)
        assert not tiles.all()


def test_context_excludes_the_anchor() -> None:
    mask = dense_mask(LayerRule(causal=False, window=None), torch.tensor([[5]]), B, S)
    assert mask[0, 0, :, 4].all()
    assert not mask[0, 0, :, 5:S].any()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_block_without_context_still_sees_itself(rule: LayerRule) -> None:
    mask = dense_mask(rule, torch.tensor([[0]]), B, S)
    assert not mask[..., :S].any()
    assert mask.any(dim=-1).all()
