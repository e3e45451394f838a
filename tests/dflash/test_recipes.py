"""Recipes: the paper's table, the named alternatives, and what a manifest may say."""

from typing import Any

import pytest

from dflash.recipes import Recipe, RecipeError, describe, differences, known, paper


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_the_papers_gamma_goes_with_the_block_size(block_size: int, gamma: float) -> None:
    recipe = paper(block_size)
    assert recipe is not None
    assert (recipe.loss, recipe.gamma, recipe.soft_labels) == ("ce", gamma, False)


def test_other_block_sizes_and_names_are_not_known() -> None:
    assert paper(12) is None
    assert known("mine", 16) is None
    assert known("forward-kl", 12) is None


def test_named_alternatives() -> None:
    kl, dpace = known("forward-kl", 16), known("d-pace", 12)
    assert kl is not None
    assert dpace is not None
    assert (kl.loss, kl.gamma, kl.soft_labels) == ("kl", 7.0, True)
    assert (dpace.loss, dpace.alpha, dpace.gamma) == ("dpace", 0.5, None)
    composite = Recipe(name="composite", loss="composite", gamma=10.0, temperature=2.0, kl_weight=0.7, block_size=12)
    assert known("composite", 12) == composite


def test_every_difference_is_told() -> None:
    wrong = Recipe(loss="composite", gamma=10.0, block_size=16, temperature=2.0, kl_weight=0.7)
    expected = paper(16)
    assert expected is not None
    assert differences(expected, expected) == []
    assert differences(wrong, expected) == [
        "loss is composite instead of ce",
        "gamma is 10 instead of 7",
        "temperature is 2 instead of none",
        "kl_weight is 0.7 instead of none",
    ]
    assert describe(wrong) == "loss composite, gamma 10, block_size 16, temperature 2, kl_weight 0.7"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"gamma": 7}, "m: recipe.loss: Field required"),
        ({"loss": "ce", "block_size": 16, "gama": 7}, "recipe.gama: Extra inputs"),
        ({"loss": "ce", "block_size": 16, "gamma": 0}, "recipe.gamma"),
        ({"loss": "kl", "block_size": 16}, "recipe.temperature is missing"),
        ({"loss": "composite", "block_size": 16, "temperature": 2}, "recipe.kl_weight is missing"),
        ({"loss": "dpace", "block_size": 16}, "recipe.alpha is missing"),
        ({"loss": "ce", "block_size": 16, "layer_rules": [{"causal": True}]}, "recipe.layer_rules.0.window"),
    ],
)
def test_nonsense_is_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict(raw, source="m")
