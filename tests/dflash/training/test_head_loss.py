"""The loss in chunks against autograd through whole logits, and against the evaluator's code for a recorded batch."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from dflash.losses import slot_losses, slot_losses_and_gradients, slot_weights
from dflash.metric_replay import TrainedBatch, batch_metrics
from dflash.recipes import Recipe
from dflash.training.blocks import Blocks
from dflash.training.head_loss import LossSums, head_loss
from tests.dflash.training.rows import Bench

B = 8
RECIPES = {
    "ce": Recipe(loss="ce", gamma=4.0, block_size=B),
    "kl": Recipe(loss="kl", gamma=4.0, temperature=1.0, block_size=B),
    "kl at 2": Recipe(loss="kl", gamma=4.0, temperature=2.0, block_size=B),
    "composite": Recipe(loss="composite", gamma=10.0, temperature=2.0, kl_weight=0.7, block_size=B),
    "dpace": Recipe(loss="dpace", alpha=0.3, block_size=B),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


@dataclass
class CountedWords:
    """A vocabulary that remembers how many rows of logits it was asked for at once."""

    head: Tensor
    rows: list[int] = field(default_factory=list)

    def embed(self, ids: Tensor) -> Tensor:
        raise AssertionError("the loss embeds nothing")

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return hidden @ self.head.T


def sums(bench: Bench, hidden: Tensor, recipe: Recipe, *, chunk_tokens: int = 5) -> LossSums:
    teacher = bench.features.hidden
    return head_loss(hidden, bench.blocks, recipe, bench.words, teacher=teacher, chunk_tokens=chunk_tokens)


def whole(bench: Bench, hidden: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Σ w·m·loss with autograd's gradient and Σ w·m, from logits that exist whole."""
    assert bench.features.hidden is not None
    rows = torch.arange(len(hidden))[:, None, None]
    teacher = bench.words.logits(bench.features.hidden[rows, bench.blocks.places - 1])
    losses = slot_losses(recipe, bench.words.logits(hidden), bench.blocks.right, teacher)
    weights = slot_weights(recipe, losses, bench.blocks.scored)
    return (weights * losses).sum(), weights.sum()


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@recipes
def test_sums_and_gradient_are_those_of_whole_logits(recipe: Recipe, chunk_tokens: int) -> None:
    bench = Bench.of()
    hidden = bench.hidden().detach().requires_grad_()
    found = sums(bench, hidden, recipe, chunk_tokens=chunk_tokens)
    (3 * found.numerator).backward()
    numerator, weight = whole(bench, hidden, recipe)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(3 * numerator, hidden)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.numerator, numerator)
    torch.testing.assert_close(found.weight, weight)
    assert not hidden.grad[~bench.blocks.scored].any() or recipe.loss == "dpace"


@recipes
def test_gradients_in_closed_form_are_autograds(recipe: Recipe) -> None:
    logits, teacher = torch.randn(2, 9, 30, generator=torch.Generator().manual_seed(0)) * 4
    right = torch.arange(9)
    logits.requires_grad_()
    expected = slot_losses(recipe, logits, right, teacher)
    losses, gradients = slot_losses_and_gradients(recipe, logits.detach().clone(), right, teacher)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-5, atol=1e-6)


def test_closed_forms_stay_finite_where_a_logit_dwarfs_the_others() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, 1e4, 1e4]])
    for recipe in RECIPES.values():
        losses, gradients = slot_losses_and_gradients(recipe, logits.clone(), torch.tensor([2, 0]), logits.flip(1))
        assert losses.isfinite().all()
        assert gradients.isfinite().all()


@recipes
def test_figures_are_those_the_evaluator_computes_from_the_recorded_batch(recipe: Recipe) -> None:
    bench = Bench.of(packed=False)
    features = bench.features
    with torch.no_grad():
        found = sums(bench, bench.hidden(), recipe)
    taps, anchors = features.taps, bench.blocks.anchors
    batch = TrainedBatch(features.ids, features.loss_mask, anchors, taps, {}, recipe, "none", "float32", "")
    metrics = batch_metrics(bench.drafter, bench.words, batch, features.hidden)
    assert float(found.numerator / found.weight) == pytest.approx(metrics["loss"], rel=1e-5)
    assert float(found.correct.sum() / found.scored.sum()) == pytest.approx(metrics["accuracy"])
    assert float(found.streak1 / found.blocks) == pytest.approx(metrics["streak1"])
    assert float(found.streak8 / found.blocks) == pytest.approx(metrics["streak8"])
    assert metrics["streak8"] > 0


@recipes
def test_a_slot_that_does_not_count_ends_the_streak_though_its_token_is_right(recipe: Recipe) -> None:
    scored = torch.tensor([True, True, False, True, True, True, True]).expand(1, 3, B - 1)
    right = torch.arange(3 * (B - 1)).view(1, 3, B - 1)
    at = torch.arange(3).expand(1, 3)
    blocks = Blocks(anchors=at, starts=at * 0, places=right + 1, right=right, scored=scored)
    words = CountedWords(torch.eye(32))
    teacher = torch.zeros(1, 32, 32)
    found = head_loss(torch.eye(32)[right], blocks, recipe, words, teacher=teacher, chunk_tokens=1000)
    assert (float(found.blocks), float(found.streak1), float(found.streak8)) == (3, 6, 6)
    assert found.correct.tolist() == found.scored.tolist() == [3, 3, 0, 3, 3, 3, 3]


@recipes
def test_no_more_logits_exist_at_once_than_asked_for_and_none_for_slots_that_do_not_count(recipe: Recipe) -> None:
    bench = Bench.of(scored=0.6)
    counted = CountedWords(bench.words.head)
    head_loss(bench.hidden(), bench.blocks, recipe, counted, teacher=bench.features.hidden, chunk_tokens=2 * (B - 1))
    assert max(counted.rows) <= 2 * (B - 1)
    needed = int(bench.blocks.scored.sum())
    if recipe.loss == "dpace":
        needed = int(bench.blocks.scored.any(-1).sum()) * (B - 1)
    assert sum(counted.rows) == needed * (2 if recipe.soft_labels else 1)


@recipes
def test_a_batch_without_labels_has_no_loss_and_a_gradient_of_zeros(recipe: Recipe) -> None:
    bench = Bench.of(scored=0.0)
    found = sums(bench, bench.hidden(), recipe)
    found.numerator.backward()
    assert float(found.numerator.detach()) == float(found.weight) == float(found.scored.sum()) == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in bench.drafter.parameters())


@recipes
def test_sums_of_rows_add_up(recipe: Recipe) -> None:
    bench = Bench.of()
    hidden = bench.hidden().detach()
    together = sums(bench, hidden, recipe)

    def alone(row: int) -> LossSums:
        fields = {name: value[row : row + 1] for name, value in vars(bench.blocks).items()}
        assert bench.features.hidden is not None
        teacher = bench.features.hidden[row : row + 1]
        one = hidden[row : row + 1]
        return head_loss(one, Blocks(**fields), recipe, bench.words, teacher=teacher, chunk_tokens=5)

    first, second = alone(0), alone(1)
    for name, value in vars(together).items():
        torch.testing.assert_close(getattr(first, name) + getattr(second, name), value)


def test_a_slot_that_is_not_supervised_ends_a_streak_and_is_left_out_of_the_accuracy() -> None:
    """Hidden states that are the right tokens' own head rows: every slot is right, so only the supervision counts."""
    bench = Bench.of(scored=1.0, packed=False)
    slots = bench.blocks.scored.shape[-1]
    hidden = 10 * torch.nn.functional.normalize(bench.words.head, dim=-1)[bench.blocks.right]
    bench.words = replace(bench.words, head=torch.nn.functional.normalize(bench.words.head, dim=-1))
    scored = torch.zeros_like(bench.blocks.scored)
    scored[0, 0] = torch.arange(slots) != 2
    scored[0, 1] = True
    bench.blocks = replace(bench.blocks, scored=scored)
    found = sums(bench, hidden, RECIPES["ce"])
    assert float(found.streak1) == float(found.streak8) == 2 + slots
    assert float(found.blocks) == 7
    assert found.scored.tolist() == found.correct.tolist() == [2, 2, 1, 2, 2, 2, 2]


def test_of_equal_logits_the_lowest_id_is_the_drafts() -> None:
    bench = Bench.of(scored=1.0, packed=False)
    bench.words = replace(bench.words, head=torch.zeros_like(bench.words.head))
    hidden = bench.hidden().detach()
    bench.blocks = replace(bench.blocks, right=torch.zeros_like(bench.blocks.right))
    assert float(sums(bench, hidden, RECIPES["ce"]).correct.sum()) == float(bench.blocks.scored.sum())
    bench.blocks = replace(bench.blocks, right=torch.full_like(bench.blocks.right, 7))
    behind = sums(bench, hidden, RECIPES["ce"])
    assert float(behind.correct.sum()) == float(behind.streak1) == 0
    assert float(behind.streak8) > 0
    bench.blocks = replace(bench.blocks, right=torch.full_like(bench.blocks.right, 8))
    assert float(sums(bench, hidden, RECIPES["ce"]).streak8) == 0


@recipes
def test_bfloat16_states_get_a_bfloat16_gradient_near_the_float32_one(recipe: Recipe) -> None:
    bench = Bench.of()
    hidden = (bench.hidden().detach() / 4).requires_grad_()
    sums(bench, hidden, recipe).numerator.backward()
    low = hidden.detach().bfloat16().requires_grad_()
    found = sums(bench, low, recipe)
    found.numerator.backward()
    assert low.grad is not None
    assert hidden.grad is not None
    assert low.grad.dtype == torch.bfloat16
    assert found.numerator.dtype == found.weight.dtype == torch.float32
    difference = (low.grad.float() - hidden.grad).norm() / hidden.grad.norm()
    assert difference < 0.05
