"""Losses against torch's own functions and against the formulas written out slot by slot."""

import math

import pytest
import torch
import torch.nn.functional as F

from dflash.losses import (
    composite,
    cross_entropy,
    decay_weights,
    dpace_weights,
    kl_divergence,
    reduce,
    slot_losses,
)
from dflash.recipes import Recipe

SLOTS, VOCABULARY = 5, 11
CE = Recipe(loss="ce", gamma=4.0, block_size=SLOTS + 1)
COMPOSITE = Recipe(loss="composite", gamma=10.0, temperature=2.0, kl_weight=0.7, block_size=SLOTS + 1)


@pytest.fixture
def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits and a teacher's [2, 3, 5, 11], and the right tokens [2, 3, 5]."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 2, 3, SLOTS, VOCABULARY, generator=generator)
    return logits, teacher, torch.randint(VOCABULARY, (2, 3, SLOTS), generator=generator)


def test_slots_decay_as_in_the_paper() -> None:
    torch.testing.assert_close(decay_weights(3, 7.0), torch.tensor([1.0, math.exp(-1 / 7), math.exp(-2 / 7)]))
    assert decay_weights(4, None).tolist() == [1.0] * 4


def test_slot_losses_are_torchs(drawn: tuple[torch.Tensor, ...]) -> None:
    logits, teacher, right = drawn
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(SLOTS)).tolist():
        ours, theirs, token = logits[tuple(place)], teacher[tuple(place)], right[tuple(place)]
        hard = F.cross_entropy(ours, token)
        soft = 4 * F.kl_div((ours / 2).log_softmax(0), (theirs / 2).softmax(0), reduction="sum")
        torch.testing.assert_close(cross_entropy(logits, right)[tuple(place)], hard)
        torch.testing.assert_close(kl_divergence(logits, teacher, 2.0)[tuple(place)], soft)
        torch.testing.assert_close(composite(logits, right, teacher)[tuple(place)], 0.7 * soft + 0.3 * hard)


def test_a_drafter_that_is_its_teacher_has_no_divergence(drawn: tuple[torch.Tensor, ...]) -> None:
    logits, _, _ = drawn
    assert kl_divergence(logits, logits, 2.0).abs().max() < 1e-6
    assert kl_divergence(logits + 3, logits, 2.0).abs().max() < 1e-5


def test_the_mean_is_over_scored_slots_and_carries_the_weights(drawn: tuple[torch.Tensor, ...]) -> None:
    logits, _, right = drawn
    losses, scored = cross_entropy(logits, right), torch.rand(2, 3, SLOTS) < 0.6
    above = below = 0.0
    for row, block, slot in scored.nonzero().tolist():
        weight = math.exp(-slot / 4)
        above += weight * float(losses[row, block, slot])
        below += weight
    assert float(reduce(CE, losses, scored)) == pytest.approx(above / below, rel=1e-6)
    assert float(reduce(CE, losses, torch.zeros_like(scored))) == 0.0


def test_what_is_not_scored_has_no_gradient(drawn: tuple[torch.Tensor, ...]) -> None:
    logits, teacher, right = drawn
    logits.requires_grad_()
    scored = torch.ones(2, 3, SLOTS, dtype=torch.bool)
    scored[1, 2, 3] = False
    reduce(COMPOSITE, slot_losses(COMPOSITE, logits, right, teacher), scored).backward()
    assert logits.grad is not None
    assert logits.grad[1, 2, 3].abs().max() == 0
    assert (logits.grad.abs().amax(-1)[scored] > 0).all()


def test_the_recipe_chooses_the_loss(drawn: tuple[torch.Tensor, ...]) -> None:
    logits, teacher, right = drawn
    kl = Recipe(loss="kl", gamma=4.0, temperature=2.0, block_size=SLOTS + 1)
    torch.testing.assert_close(slot_losses(CE, logits, right, None), cross_entropy(logits, right))
    torch.testing.assert_close(slot_losses(kl, logits, right, teacher), kl_divergence(logits, teacher, 2.0))
    torch.testing.assert_close(slot_losses(COMPOSITE, logits, right, teacher), composite(logits, right, teacher))
    with pytest.raises(ValueError, match="needs the target's logits"):
        slot_losses(COMPOSITE, logits, right, None)


def test_dpace_weighs_a_slot_by_what_follows_if_it_is_reached() -> None:
    losses = torch.tensor([[0.0, math.log(2), math.log(4)]], requires_grad=True)
    scored = torch.tensor([[True, True, False]])
    confidence = [1.0, 0.75, 0.625]  # (q + 1) / 2 of q = 1, 1/2, 1/4
    reached = [confidence[0], confidence[0] * confidence[1], 0.0]
    weights = dpace_weights(losses, scored, 0.5)
    assert not weights.requires_grad
    assert weights.tolist() == [[pytest.approx(sum(reached)), pytest.approx(reached[1]), 0.0]]
    recipe = Recipe(loss="dpace", alpha=0.5, block_size=4)
    expected = reached[1] * math.log(2) / (sum(reached) + reached[1])
    assert float(reduce(recipe, losses, scored).detach()) == pytest.approx(expected)
