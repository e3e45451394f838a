import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from dflash.masks import LayerRule, block_mask_mod, dense_mask

B, S = 4, 12
ANCHORS = torch.tensor([[2, 7, 12], [0, 5, 5]])
RULES = [LayerRule(causal, window) for causal in (False, True) for window in (None, 6, 3)]


def expected(rule: LayerRule, anchors: list[int]) -> torch.Tensor:
    """Written out block by block from the rule in words."""
    mask = torch.zeros(len(anchors) * B, S + len(anchors) * B, dtype=torch.bool)
    for (block, anchor), slot in itertools.product(enumerate(anchors), range(B)):
        row = mask[block * B + slot]
        oldest = 0 if rule.window is None else anchor + slot - (rule.window - 1)
        for position in range(max(0, oldest), anchor):
            row[position] = True
        for other in range(slot + 1 if rule.causal else B):
            row[S + block * B + other] = rule.window is None or abs(slot - other) < rule.window
    return mask


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_dense_mask_is_the_rule_in_words(rule: LayerRule) -> None:
    mask = dense_mask(rule, ANCHORS, B, S)
    for row, anchors in enumerate(ANCHORS.tolist()):
        assert torch.equal(mask[row, 0], expected(rule, anchors))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_flex_attention_makes_the_same_mask_from_the_same_predicate(rule: LayerRule) -> None:
    queries = ANCHORS.shape[1] * B
    mod = block_mask_mod(rule, ANCHORS, B, S)
    flex = create_mask(mod, len(ANCHORS), 1, queries, S + queries, device="cpu")
    assert torch.equal(flex, dense_mask(rule, ANCHORS, B, S))


def test_context_excludes_the_anchor() -> None:
    mask = dense_mask(LayerRule(causal=False, window=None), torch.tensor([[5]]), B, S)
    assert mask[0, 0, :, 4].all()
    assert not mask[0, 0, :, 5:S].any()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_block_without_context_still_sees_itself(rule: LayerRule) -> None:
    mask = dense_mask(rule, torch.tensor([[0]]), B, S)
    assert not mask[..., :S].any()
    assert mask.any(dim=-1).all()
