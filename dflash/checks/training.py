"""Checks of the training as its checkpoint tells it: the recipe, the labels, the metrics, the data."""

from collections.abc import Sequence

import torch

from dflash.batch import Vocabulary
from dflash.checkpoints import DrafterCheckpoint
from dflash.checks.evidence import stated_recipe
from dflash.checks.verdict import skipped, verdict
from dflash.drafter import Drafter
from dflash.metric_replay import TrainedBatch, batch_metrics, label_noise, last_hidden
from dflash.recipes import PAPER_GAMMA, RecipeError, describe, differences, known, paper
from dflash.report import Check
from dflash.target import Target

METRIC_LIMIT = 1e-5
BFLOAT16_METRIC_LIMIT = 0.02
NOISE_LIMIT = 1e-4
BFLOAT16_NOISE_LIMIT = 0.01
_SHOWN = 5


def recipe(checkpoint: DrafterCheckpoint, batch: TrainedBatch | str = "") -> Check:
    """Loss, γ and block size are those of the recipe, the paper's unless the manifest names another known one.

    The recipe that the recorded ``batch`` was trained by must be the manifest's as well.
    """
    name, size = "recipe", checkpoint.config.block_size
    try:
        found = stated_recipe(checkpoint)
    except RecipeError as error:
        return verdict(name, False, None, _expected(size), str(error))
    if isinstance(found, str):
        return skipped(name, _expected(size), found)
    if isinstance(batch, TrainedBatch) and (otherwise := differences(batch.recipe, found)):
        return verdict(
            name,
            False,
            describe(batch.recipe),
            describe(found),
            f"the recorded batch was not trained by the manifest's recipe: {'; '.join(otherwise)}; the manifest does "
            f"not say what the trainer did",
        )
    expected = known(found.name or "paper", size)
    if expected is None:
        return verdict(
            name,
            "warn",
            describe(found),
            None,
            f"no recipe {found.name or 'paper'!r} is known for blocks of {size} (the paper has "
            f"{', '.join(map(str, PAPER_GAMMA))}); compare loss and γ by hand",
        )
    if wrong := differences(found, expected):
        return verdict(
            name,
            False,
            describe(found),
            describe(expected),
            f"{'; '.join(wrong)}: the drafter was not trained by the recipe {expected.name!r}; train it again, or name "
            f"the recipe that is meant in the trainer's config",
        )
    if expected.name != "paper":
        told = f"; the paper's is {_expected(size)}" if _expected(size) else ""
        return verdict(
            name,
            "warn",
            describe(found),
            describe(expected),
            f"trained by the recipe {expected.name!r}, as it says{told}",
        )
    return verdict(name, True, describe(found), describe(expected), "the drafter was trained by the paper's recipe")


def clean_targets(target: Target | None, vocabulary: Vocabulary, batch: TrainedBatch | str) -> Check:
    """The soft labels that the trainer's step used are those the target gives without noise.

    Measured is the mean over slots of half the absolute difference of the probabilities of the stored tokens, a lower
    bound of the total variation distance.
    """
    name = "clean-targets"
    if isinstance(batch, str):
        return skipped(name, NOISE_LIMIT, batch)
    limit = NOISE_LIMIT if batch.dtype == "float32" and _is_float32(target) else BFLOAT16_NOISE_LIMIT
    if not batch.recipe.soft_labels:
        return skipped(name, limit, f"there are no soft labels in this recipe ({describe(batch.recipe)})")
    if batch.soft is None:
        return skipped(name, limit, "the recorded batch has no soft labels; record them as the training step made them")
    if target is None:
        return skipped(
            name,
            limit,
            "the target was not loaded whole, and labels need its last layer; measure once without --cache and "
            "--offload",
        )
    noise = label_noise(vocabulary, batch, last_hidden(target, batch.ids), vocab_size=target.vocab_size)
    passed = noise <= limit
    return verdict(
        name,
        passed,
        noise,
        limit,
        f"the soft labels of the {batch.recipe.loss} loss are the target's own"
        if passed
        else f"the soft labels of the {batch.recipe.loss} loss are not the target's own for the same tokens: noise was "
        f"added before its logits were taken; take the logits first, from clean embeddings and states",
    )


def training_metric_replay(
    drafter: Drafter, vocabulary: Vocabulary, target: Target | None, batch: TrainedBatch | str
) -> Check:
    """The trainer's metrics on its own recorded batch come out again, computed by the evaluator's code.

    Measured is the largest difference of loss, accuracy, top-1 and top-8 streak, relative to the trainer's figure or
    to one, whichever is larger.
    """
    name = "training-metric-replay"
    if isinstance(batch, str):
        return skipped(name, METRIC_LIMIT, batch)
    exact = batch.dtype == "float32" and drafter.fc.weight.dtype == torch.float32
    limit = METRIC_LIMIT if exact else BFLOAT16_METRIC_LIMIT
    size, width = drafter.config.block_size, drafter.config.tap_width
    if batch.recipe.block_size != size or batch.taps.shape[-1] != width:
        return verdict(
            name,
            False,
            f"block {batch.recipe.block_size}, taps {batch.taps.shape[-1]} wide",
            f"block {size}, taps {width} wide",
            "the recorded batch is of another drafter than the config describes",
        )
    teacher = last_hidden(target, batch.ids) if batch.recipe.soft_labels and target is not None else None
    ours = batch_metrics(drafter, vocabulary, batch, teacher)
    said = batch.metrics
    errors = {metric: abs(ours[metric] - said[metric]) / max(1.0, abs(said[metric])) for metric in ours}
    worst = max(errors, key=lambda metric: errors[metric] if errors[metric] == errors[metric] else float("inf"))
    passed = errors[worst] <= limit
    compared = ", ".join(f"{metric} {ours[metric]:.6g} here, {batch.metrics[metric]:.6g} there" for metric in ours)
    if "loss" not in ours:
        compared += "; the loss is not verified, for its soft labels need the target loaded whole"
    return verdict(
        name,
        passed,
        errors[worst],
        limit,
        f"the trainer's figures come out again: {compared}; if fresh prompts are bad, the training is"
        if passed
        else f"{worst} does not come out as the trainer had it: {compared}; drafter, mask, positions, labels or loss "
        f"differ between training and here, so the evaluation is wrong, or the batch was recorded with noise: look "
        f"which check beside this one fails, and record without noise, after the step",
    )


def prompt_overlap(overlapping: Sequence[str] | None, kept: int) -> Check:
    """No prompt shares a run of 13 words with the training data (:mod:`dflash.overlap`).

    ``overlapping`` are the ids of those that do and were left out of the measurement, ``kept`` counts the others.
    """
    name = "prompt-overlap"
    if overlapping is None:
        return skipped(
            name, 0, "no training data was given; give --training-data FILE, the texts or their hashed 13-word runs"
        )
    if not overlapping:
        return verdict(name, True, 0, 0, f"none of {kept} prompts shares a run of 13 words with the training data")
    named = ", ".join(overlapping[:_SHOWN]) + (f" and {len(overlapping) - _SHOWN} more" if overlapping[_SHOWN:] else "")
    return verdict(
        name,
        "warn",
        len(overlapping),
        0,
        f"{named}: in the training data, so left out; every figure rests on the other {kept} prompts",
    )


def _is_float32(target: Target | None) -> bool:
    return target is None or target.dtype == torch.float32


def _expected(block_size: int) -> str | None:
    expected = paper(block_size)
    return None if expected is None else describe(expected)
