"""Training recipes by name: the loss, its decay over the slots, the block size. Imports no torch.

The paper's recipe (arXiv 2602.06036 §4, as SpecForge and TorchSpec implement it) is hard cross-entropy with
w_k = exp(-(k-1)/γ) and γ = 7, 5, 4 for blocks of 16, 10, 8. The others are known alternatives: a trainer that means one
of them names it in the manifest (``recipe.name``); one that names none is held to the paper's.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from dflash.errors import DFlashError

Loss = Literal["ce", "kl", "composite", "dpace"]

PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""γ of the paper by block size."""
_COMPARED = ("loss", "gamma", "block_size", "temperature", "kl_weight", "alpha")


class RecipeError(DFlashError):
    """A recipe lacks a field, has an unknown one, or contradicts itself."""


class TrainedRule(BaseModel):
    """What a drafter layer saw in training: causal inside the block or not, window in tokens or None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    causal: bool
    window: PositiveInt | None


class Recipe(BaseModel):
    """What a trainer minimises; ``gamma`` None weighs every slot alike.

    ``temperature`` belongs to ``kl`` and ``composite``, ``kl_weight`` to ``composite`` (the rest is hard
    cross-entropy), ``alpha`` to ``dpace``. ``layer_rules`` are the masks of the drafter's layers, first to last.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str | None = None
    loss: Loss
    block_size: PositiveInt
    gamma: PositiveFloat | None = None
    temperature: PositiveFloat | None = None
    kl_weight: float | None = Field(default=None, ge=0, le=1)
    alpha: float | None = Field(default=None, ge=0, le=1)
    layer_rules: tuple[TrainedRule, ...] | None = None

    @property
    def soft_labels(self) -> bool:
        """Whether the loss looks at the target's distribution and not at its tokens alone."""
        return self.loss in ("kl", "composite")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, source: str) -> "Recipe":
        """Read a manifest's ``recipe``. Raises :class:`RecipeError` that names ``source`` and the field."""
        try:
            recipe = cls.model_validate(dict(raw))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise RecipeError(
                f"{source}: recipe.{place}: {first['msg']}; a recipe says loss, block_size, gamma and, with soft "
                f"labels, temperature and kl_weight"
            ) from None
        needed = {"kl": ("temperature",), "composite": ("temperature", "kl_weight"), "dpace": ("alpha",), "ce": ()}
        for name in needed[recipe.loss]:
            if getattr(recipe, name) is None:
                raise RecipeError(f"{source}: recipe.{name} is missing; the loss {recipe.loss} needs it")
        return recipe


def paper(block_size: int) -> Recipe | None:
    """The paper's recipe for blocks of ``block_size``; None for a size the paper gives no γ for."""
    gamma = PAPER_GAMMA.get(block_size)
    return None if gamma is None else Recipe(name="paper", loss="ce", gamma=gamma, block_size=block_size)


def known(name: str, block_size: int) -> Recipe | None:
    """The recipe that goes by ``name`` for blocks of ``block_size``; None where there is none.

    ``forward-kl``: the target's whole distribution instead of its tokens (ModelOpt's ``logit_distillation``).
    ``d-pace``: weights from the drafter's own confidence (arXiv 2605.18810, speculators' default), which replace γ.
    ``composite``: 70 % KL at T = 2 and 30 % hard cross-entropy with γ = 10, known to draft worse than the paper's.
    """
    if name == "paper":
        return paper(block_size)
    if name == "forward-kl" and block_size in PAPER_GAMMA:
        gamma = PAPER_GAMMA[block_size]
        return Recipe(name=name, loss="kl", gamma=gamma, temperature=1.0, block_size=block_size)
    if name == "composite":
        return Recipe(name=name, loss="composite", gamma=10.0, temperature=2.0, kl_weight=0.7, block_size=block_size)
    if name == "d-pace":
        return Recipe(name=name, loss="dpace", alpha=0.5, block_size=block_size)
    return None


def differences(recipe: Recipe, expected: Recipe) -> list[str]:
    """One phrase for each field in which ``recipe`` is not ``expected``, empty if it is."""
    return [
        f"{field} is {_said(getattr(recipe, field))} instead of {_said(getattr(expected, field))}"
        for field in _COMPARED
        if getattr(recipe, field) != getattr(expected, field)
    ]


def describe(recipe: Recipe) -> str:
    """The recipe in a line, as a report shows it."""
    fields = ((field, getattr(recipe, field)) for field in _COMPARED)
    return ", ".join(f"{field} {_said(value)}" for field, value in fields if value is not None)


def _said(value: float | int | str | None) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
