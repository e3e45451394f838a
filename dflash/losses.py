"""What a trainer minimises over the slots of its blocks, as pure functions; the metric replay computes it once more.

``…`` stands for any leading shape, usually [N, n] for n blocks in each of N texts; the last axis of a loss or weight
holds slots 1 … B-1 (slot 0 is the anchor and is never scored). Every result is float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.recipes import Recipe


def decay_weights(slots: int, gamma: float | None, *, device: torch.device | str = "cpu") -> Tensor:
    """w_k = exp(-(k-1)/γ) for k = 1 … ``slots``, [slots] (arXiv 2602.06036 §4.2); ones without γ."""
    ones = torch.ones(slots, device=device)
    return ones if gamma is None else torch.exp(-torch.arange(slots, device=device) / gamma)


def cross_entropy(logits: Tensor, right: Tensor) -> Tensor:
    """Hard cross-entropy [...] of ``logits`` [..., V] with the text's own tokens ``right`` [...]."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), right.flatten(), reduction="none")
    return losses.view(right.shape)


def kl_divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² · KL(softmax(teacher/T) ‖ softmax(logits/T)) [...] over the last axis of two [..., V].

    ``teacher`` are the target's logits for the same position: those of slot k come from position anchor + k - 1. T²
    keeps the gradient's size independent of T (Hinton et al., arXiv 1503.02531 §2.1).
    """
    ours = F.log_softmax(logits.float() / temperature, dim=-1)
    theirs = F.log_softmax(teacher.float() / temperature, dim=-1)
    return temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1)


def composite(
    logits: Tensor, right: Tensor, teacher: Tensor, *, temperature: float = 2.0, kl_weight: float = 0.7
) -> Tensor:
    """``kl_weight`` · KL at ``temperature`` + the rest · hard cross-entropy [...], as of the two functions above."""
    soft = kl_divergence(logits, teacher, temperature)
    return kl_weight * soft + (1 - kl_weight) * cross_entropy(logits, right)


def dpace_weights(losses: Tensor, scored: Tensor, alpha: float = 0.5) -> Tensor:
    """Slot weights [..., B-1] from the drafter's own confidence, without gradient (D-PACE, arXiv 2605.18810).

    ``losses`` are hard cross-entropies, ``scored`` bool, both [..., B-1]. With q = exp(-loss) and
    q̃ = (1-α)q + α, the chance to get as far as slot j is C_j = Π_{i≤j} q̃_i and its weight Σ_{m≥j} C_m over scored
    slots.
    """
    confidence = (1 - alpha) * torch.exp(-losses.detach()) + alpha
    reached = confidence.cumprod(-1) * scored
    return reached.flip(-1).cumsum(-1).flip(-1)


def slot_losses(recipe: Recipe, logits: Tensor, right: Tensor, teacher: Tensor | None) -> Tensor:
    """The recipe's unweighted loss of each slot [...]; ``teacher`` [..., V] is read where it asks for soft labels."""
    if not recipe.soft_labels:
        return cross_entropy(logits, right)
    if teacher is None or recipe.temperature is None:
        raise ValueError(f"the loss {recipe.loss} needs the target's logits and a temperature")
    if recipe.loss == "kl":
        return kl_divergence(logits, teacher, recipe.temperature)
    assert recipe.kl_weight is not None  # Recipe.from_dict has seen to it
    return composite(logits, right, teacher, temperature=recipe.temperature, kl_weight=recipe.kl_weight)


def slot_losses_and_gradients(
    recipe: Recipe, logits: Tensor, right: Tensor, teacher: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`slot_losses` [R] and their gradients with respect to ``logits`` [R, V], float32, which are overwritten.

    In closed form, because autograd would hold four copies of the logits. ``right`` [R], ``teacher`` [R, V].
    """
    if not recipe.soft_labels:
        return _cross_entropy_in_place(logits, right)
    if teacher is None or recipe.temperature is None:
        raise ValueError(f"the loss {recipe.loss} needs the target's logits and a temperature")
    soft, at_soft = _kl_with_gradient(logits, teacher, recipe.temperature)
    if recipe.loss == "kl":
        return soft, at_soft
    assert recipe.kl_weight is not None  # Recipe.from_dict has seen to it
    hard, at_hard = _cross_entropy_in_place(logits, right)
    gradient = at_soft.mul_(recipe.kl_weight).add_(at_hard, alpha=1 - recipe.kl_weight)
    return recipe.kl_weight * soft + (1 - recipe.kl_weight) * hard, gradient


def _cross_entropy_in_place(logits: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(logits) - onehot(right), in the place of ``logits``."""
    wanted = right[:, None]
    best = logits.amax(1, keepdim=True)
    value = logits.gather(1, wanted) - best
    powers = logits.sub_(best).exp_()
    total = powers.sum(1, keepdim=True)
    gradient = powers.div_(total).scatter_add_(1, wanted, torch.full_like(value, -1))
    return (total.log() - value)[:, 0], gradient


def _kl_with_gradient(logits: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """T² · KL and T · (softmax(logits/T) - softmax(teacher/T))."""
    ours = F.log_softmax(logits / temperature, dim=-1)
    theirs = F.log_softmax(teacher.float() / temperature, dim=-1)
    likely = theirs.exp()
    losses = temperature**2 * torch.linalg.vecdot(likely, theirs.sub_(ours))
    return losses, ours.exp_().sub_(likely).mul_(temperature)


def slot_weights(recipe: Recipe, losses: Tensor, scored: Tensor) -> Tensor:
    """w·m [..., B-1] of the recipe, without gradient; m is ``scored``, ``losses`` are read for D-PACE alone."""
    if recipe.loss == "dpace":
        weights = dpace_weights(losses, scored, 0.5 if recipe.alpha is None else recipe.alpha)
    else:
        weights = decay_weights(scored.shape[-1], recipe.gamma, device=scored.device).expand(scored.shape)
    return weights * scored


def reduce(recipe: Recipe, losses: Tensor, scored: Tensor) -> Tensor:
    """The recipe's loss, a scalar: Σ w·m·loss / Σ w·m over ``losses`` and ``scored``, both [..., B-1].

    m is ``scored``; the denominator carries the weights as in the paper, SpecForge and TorchSpec (speculators divides
    by Σ m). 0 where nothing is scored.
    """
    weights = slot_weights(recipe, losses, scored)
    return (weights * losses).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
