"""Checks of what a drafter reads, what its layers see, and whether its slots stand right."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash import checks
from dflash.batch import Text
from dflash.checkpoints import DrafterCheckpoint, read_checkpoint
from dflash.config import DrafterConfig
from dflash.metrics import Round, judge
from tests.dflash.pairs import DRAFTER, write_drafter

CAUSAL = {"causal": True, "window": 9}
FULL = {"causal": False, "window": None}
RECIPE = {"loss": "ce", "gamma": 4.0, "block_size": 6}


def config_with(taps: list[int], **changes: Any) -> DrafterConfig:
    nested: Any = DRAFTER["dflash_config"]
    raw = DRAFTER | {"num_target_layers": 64, "dflash_config": nested | {"target_layer_ids": taps}} | changes
    return DrafterConfig.from_dict(raw, source="test")


FIVE = config_with([1, 16, 31, 46, 61])


@pytest.fixture
def checkpoint(tmp_path: Path) -> DrafterCheckpoint:
    return read_checkpoint(write_drafter(tmp_path / "drafter"))


@pytest.mark.parametrize(
    ("taps", "reference", "status", "words"),
    [
        ([1, 16, 31, 46, 61], FIVE, "pass", "the same target layers"),
        ([1, 16, 31, 46], FIVE, "fail", "tap 61 is missing"),
        ([1, 16, 30, 46, 61], FIVE, "fail", "tap 31 is missing and tap 30 is extra"),
        ([1, 16, 31, 46, 61], None, "pass", "for 5 taps of 64 layers"),
        ([1, 16, 31, 61], None, "fail", "tap 46 is missing compared with the rule for 5 taps"),
        ([5, 19, 33, 47, 61], None, "warn", "--reference"),
    ],
)
def test_taps_are_those_of_the_reference_or_the_rule(
    taps: list[int], reference: DrafterConfig | None, status: str, words: str
) -> None:
    check = checks.taps_as_reference(config_with(taps), reference)
    assert check.status == status
    assert words in check.explanation


def with_recipe(checkpoint: DrafterCheckpoint, **entries: Any) -> DrafterCheckpoint:
    return replace(checkpoint, manifest={"recipe": RECIPE | entries})


def test_layers_see_what_they_saw_in_training(checkpoint: DrafterCheckpoint) -> None:
    check = checks.causality(with_recipe(checkpoint, layer_rules=[CAUSAL, FULL]), None)
    assert (check.status, check.measured) == ("pass", "causal 9, bidirectional")
    for rules in ([FULL, FULL], [CAUSAL | {"window": 10}, FULL], [CAUSAL]):
        check = checks.causality(with_recipe(checkpoint, layer_rules=rules), None)
        assert check.status == "fail"
        assert "training, as the manifest has it" in check.explanation


def test_without_a_manifest_the_reference_may_be_laid_out_otherwise(checkpoint: DrafterCheckpoint) -> None:
    assert checks.causality(checkpoint, checkpoint.config).status == "pass"
    full = config_with([1, 3, 5], layer_types=["full_attention"] * 2)
    assert checks.causality(checkpoint, full).status == "warn"
    assert checks.causality(with_recipe(checkpoint, layer_rules=[CAUSAL, FULL]), full).status == "pass"
    unknown = checks.causality(checkpoint, None)
    assert (unknown.status, unknown.explanation[:12]) == ("skipped", "not verified")


@pytest.mark.parametrize(("positions", "status"), [(24, "pass"), (23, "warn"), (20, "warn"), (19, "fail")])
def test_positions_reach_to_the_end_of_the_last_block(positions: int, status: str) -> None:
    """A text of 20 tokens has its last anchor at 18; the block of 6 there reaches to position 23."""
    text = Text("a", list(range(20)), 4, torch.zeros(20, 1))
    check = checks.max_position(config_with([1, 3], max_position_embeddings=positions), [text])
    assert (check.status, check.measured) == (status, 24)


def blocks(slots_right: list[float], count: int = 40) -> list[Round]:
    """Whole blocks in which slot k is right with probability ``slots_right[k - 1]``, independently of the others."""
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(count, len(slots_right), generator=generator) < torch.tensor(slots_right)
    following = list(range(1, len(slots_right) + 2))
    return [
        judge("a", 0, [k + 1 if hit else 99 for k, hit in enumerate(row)], [0] * len(row), following)
        for row in right.tolist()
    ]


@pytest.mark.parametrize(
    ("slots_right", "status"),
    [
        ([0.9, 0.7, 0.5, 0.3], "pass"),
        ([0.5, 0.5, 0.5, 0.5], "pass"),
        ([0.0, 0.0, 0.0, 0.0], "pass"),
        ([0.1, 0.9, 0.7, 0.5], "fail"),
        ([0.1, 0.1, 0.1, 0.8], "fail"),
    ],
)
def test_slot_one_is_the_best_within_noise(slots_right: list[float], status: str) -> None:
    assert checks.slot_profile(blocks(slots_right)).status == status


def test_slots_of_too_few_blocks_are_not_verified() -> None:
    for rounds in ([], blocks([0.1, 0.9], count=15), blocks([0.5])):
        check = checks.slot_profile(rounds)
        assert check.status == "skipped"
        assert check.explanation.startswith("not verified")
