"""Checks of the training as its checkpoint tells it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash import checks
from dflash.checkpoints import DrafterCheckpoint, read_checkpoint
from dflash.checks import Evidence
from dflash.metric_replay import read_replay
from dflash.recipes import Recipe
from tests.dflash.checks.bench import Bench
from tests.dflash.pairs import write_drafter, write_target

PAPER = {"loss": "ce", "gamma": 4.0, "block_size": 8}
KL = Recipe(loss="kl", gamma=4.0, temperature=2.0, block_size=6)
CE = Recipe(loss="ce", gamma=4.0, block_size=6)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = tmp_path_factory.mktemp("training")
    target, drafter = write_target(directory / "target"), write_drafter(directory / "drafter")
    return Bench.of(target, drafter, [[*range(2, 20)], [*range(30, 40)]], directory, new_tokens=26)


@pytest.fixture
def checkpoint(tmp_path: Path) -> DrafterCheckpoint:
    return read_checkpoint(write_drafter(tmp_path / "drafter", block_size=8))


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        (PAPER, "pass", "the paper's recipe"),
        (PAPER | {"name": "paper"}, "pass", "the paper's recipe"),
        (PAPER | {"gamma": 7.0}, "fail", "gamma is 7 instead of 4"),
        (PAPER | {"gamma": None}, "fail", "gamma is none instead of 4"),
        (PAPER | {"block_size": 16}, "fail", "block_size is 16 instead of 8"),
        (
            {"loss": "composite", "kl_weight": 0.7, "temperature": 2.0, "gamma": 10.0, "block_size": 8},
            "fail",
            "loss is composite instead of ce; gamma is 10 instead of 4",
        ),
        ({"name": "d-pace", "loss": "dpace", "alpha": 0.5, "block_size": 8}, "warn", "'d-pace', as it says"),
        (
            {
                "name": "composite",
                "loss": "composite",
                "kl_weight": 0.7,
                "temperature": 2.0,
                "gamma": 10.0,
                "block_size": 8,
            },
            "warn",
            "'composite', as it says; the paper's is loss ce, gamma 4, block_size 8",
        ),
        (
            {
                "name": "composite",
                "loss": "composite",
                "kl_weight": 0.5,
                "temperature": 2.0,
                "gamma": 10.0,
                "block_size": 8,
            },
            "fail",
            "kl_weight is 0.5 instead of 0.7",
        ),
        ({"name": "d-pace", "loss": "ce", "gamma": 4.0, "block_size": 8}, "fail", "loss is ce instead of dpace"),
        (PAPER | {"name": "mine"}, "warn", "no recipe 'mine' is known"),
        ({"loss": "kl", "gamma": 4.0, "block_size": 8}, "fail", "temperature is missing"),
        ({"loss": "hard", "gamma": 4.0, "block_size": 8}, "fail", "recipe.loss"),
        ("hard cross-entropy, gamma 4", "skipped", "says only 'hard cross-entropy, gamma 4'"),
        (None, "skipped", "says nothing about its recipe"),
    ],
)
def test_the_recipe_is_the_papers_or_the_one_that_is_named(
    checkpoint: DrafterCheckpoint, said: Any, status: str, words: str
) -> None:
    check = checks.recipe(replace(checkpoint, manifest={"recipe": said}))
    assert (check.status, check.limit) == (status, check.limit)
    assert words in check.explanation


def test_a_manifest_that_is_not_what_the_batch_was_trained_by_is_found(bench: Bench) -> None:
    for said, status in ((KL, "fail"), (CE, "warn")):  # blocks of 6 have no recipe in the paper
        told = bench.with_batch(CE).with_checkpoint(manifest={"recipe": said.model_dump(exclude_none=True)})
        check = checks.CHECKS["recipe"](told.evidence())
        assert check.status == status
        assert ("loss is ce instead of kl" in check.explanation) is (status == "fail")


def test_an_old_checkpoints_word_on_its_recipe_is_repeated(checkpoint: DrafterCheckpoint) -> None:
    check = checks.recipe(replace(checkpoint, training={"recipe": "hard CE"}))
    assert (check.status, check.limit) == ("skipped", "loss ce, gamma 4, block_size 8")
    assert "'hard CE'" in check.explanation


def evidence(bench: Bench, recipe: Recipe) -> Evidence:
    return bench.with_batch(recipe).evidence()


def test_metrics_of_the_trainer_come_out_again(bench: Bench) -> None:
    for recipe in (CE, KL):
        check = checks.CHECKS["training-metric-replay"](evidence(bench, recipe))
        assert check.status == "pass", check.explanation
        assert check.measured == 0.0
        assert "loss" in check.explanation


@pytest.mark.parametrize("metric", ["loss", "accuracy", "streak1", "streak8"])
def test_each_metric_is_compared(bench: Bench, metric: str) -> None:
    found = evidence(bench, CE)
    batch = read_replay(found.checkpoint.metric_replay)  # type: ignore[arg-type]
    for change, status in ((0.5e-5, "pass"), (1e-4, "fail"), (float("nan"), "fail")):
        moved = replace(batch, metrics=batch.metrics | {metric: batch.metrics[metric] + change})
        check = checks.training_metric_replay(found.drafter, found.vocabulary, found.loaded_target, moved)
        assert check.status == status, (metric, change, check.explanation)
    assert check.explanation.startswith(f"{metric} does not come out")
    half = replace(batch, dtype="bfloat16", metrics=batch.metrics | {metric: batch.metrics[metric] + 0.015})
    assert checks.training_metric_replay(found.drafter, found.vocabulary, None, half).status == "pass"


def test_a_batch_of_another_drafter_fails_before_it_is_computed(bench: Bench) -> None:
    found = evidence(bench, CE)
    batch = read_replay(found.checkpoint.metric_replay)  # type: ignore[arg-type]
    other = replace(batch, taps=batch.taps[..., :64])
    check = checks.training_metric_replay(found.drafter, found.vocabulary, None, other)
    assert (check.status, check.measured) == ("fail", "block 6, taps 64 wide")


def test_without_the_loaded_target_a_soft_loss_is_not_compared_and_says_so(bench: Bench) -> None:
    found = evidence(bench, KL)
    batch = read_replay(found.checkpoint.metric_replay)  # type: ignore[arg-type]
    moved = replace(batch, metrics=batch.metrics | {"loss": 99.0})
    check = checks.training_metric_replay(found.drafter, found.vocabulary, None, moved)
    assert check.status == "pass"
    assert "the loss is not verified" in check.explanation
    assert checks.clean_targets(None, found.vocabulary, batch).status == "skipped"


def test_labels_that_nobody_softened_are_not_verified(bench: Bench) -> None:
    check = checks.CHECKS["clean-targets"](evidence(bench, CE))
    assert check.status == "skipped"
    assert "there are no soft labels in this recipe (loss ce" in check.explanation


def test_what_the_checkpoint_lacks_is_said(bench: Bench, tmp_path: Path) -> None:
    bare = bench.evidence()
    for name in ("hidden-state-fingerprint", "tap-statistics", "clean-targets", "training-metric-replay"):
        check = checks.CHECKS[name](bare)
        assert (check.status, check.explanation[:13]) == ("skipped", "not verified:")
        assert "the checkpoint carries no" in check.explanation
    (tmp_path / "replay.safetensors").write_bytes(b"torn")
    torn = bench.with_checkpoint(metric_replay=tmp_path / "replay.safetensors").evidence()
    check = checks.CHECKS["training-metric-replay"](torn)
    assert (check.status, "cannot be read" in check.explanation) == ("skipped", True)


def test_recorded_tokens_are_asked_of_a_cut_vocabulary(bench: Bench) -> None:
    assert checks.recorded_token_ids(bench.checkpoint) == set()
    both = bench.with_batch(CE).with_checkpoint(probe=bench.with_probe().checkpoint.probe)
    wanted = {token for tokens, _ in bench.written for token in tokens}
    assert checks.recorded_token_ids(both.checkpoint) == wanted | {0}


@pytest.mark.parametrize(
    ("overlapping", "status", "words"),
    [
        (None, "skipped", "--training-data"),
        ([], "pass", "none of 5 prompts"),
        (["a", "b"], "warn", "a, b: in the training data, so left out; every figure rests on the other 5"),
        (list("abcdefg"), "warn", "a, b, c, d, e and 2 more"),
    ],
)
def test_prompts_out_of_the_training_data_are_named(overlapping: list[str] | None, status: str, words: str) -> None:
    check = checks.prompt_overlap(overlapping, 5)
    assert check.status == status
    assert words in check.explanation


def test_every_check_has_the_name_it_is_asked_by_and_holds_on_a_clean_pair(bench: Bench) -> None:
    found = checks.all_checks(
        bench.with_batch(CE).with_checkpoint(probe=bench.with_probe().checkpoint.probe).evidence()
    )
    assert [check.name for check in found] == list(checks.CHECKS)
    assert {check.name: check.explanation for check in found if check.status in ("fail", "warn")} == {}
    assert set(checks.NEED_TARGET) <= set(checks.CHECKS)
    assert torch.is_grad_enabled()
