"""Preflight: a sound trainer passes every check, and each planted fault fails the check that is there to find it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from dflash import drafter as drafter_module
from dflash import masks
from dflash.config import ConfigError, DrafterConfig
from dflash.hidden_states import LoadedTaps
from dflash.recipes import Recipe
from dflash.report import Check
from dflash.target import Target, TargetMismatchError
from dflash.training import head_loss as head_loss_module
from dflash.training import objective, preflight
from dflash.training.batch import Features, FeatureSource, Sample
from dflash.training.features import OnlineFeatures
from dflash.training.objective import TrainingModel
from dflash.training.plan import MemoryEstimate, Plan
from dflash.training.preflight import (
    PreflightError,
    UnknownCheckError,
    preflight_checks,
    require,
    require_fit,
    stated_recipe,
    write_preflight,
)
from tests.dflash.checks.mutate import mutate
from tests.fixtures.corpus import documents
from tests.fixtures.drafter_training import drafter_config, new_drafter
from tests.tiny import Pair

PAPER = Recipe(loss="ce", gamma=4.0, block_size=8)
KL = Recipe(name="forward-kl", loss="kl", gamma=4.0, temperature=1.0, block_size=8)
OLD = Recipe(name="composite", loss="composite", gamma=10.0, temperature=2.0, kl_weight=0.7, block_size=8)


@pytest.fixture(scope="module")
def target(tiny_dense: Pair) -> Target:
    return Target.load(tiny_dense.target)


@pytest.fixture(scope="module")
def samples(target: Target) -> list[Sample]:
    stream = documents(11)
    made = []
    for index, length in enumerate((60, 44, 52)):
        ids: list[int] = []
        while len(ids) < length:
            ids += target.tokenizer(next(stream))["input_ids"]
        made.append(Sample(index, torch.tensor(ids[:length]), torch.arange(length) >= 6))
    return made


def found(
    target: Target,
    rows: Sequence[Sequence[Sample]],
    *,
    recipe: Recipe = PAPER,
    config: DrafterConfig | None = None,
    source: FeatureSource | None = None,
    compute: torch.dtype = torch.float32,
    loaded: bool = True,
    noise: float = 0.0,
    max_length: int = 512,
    only: Sequence[str] = tuple(preflight.CHECKS),
) -> dict[str, Check]:
    """The checks of a trainer's parts by name; ``only`` some of them, which are then the only ones computed."""
    drafter = new_drafter("dense") if config is None else drafter_module.Drafter(config)
    model = TrainingModel(drafter, compute_dtype=compute, attention="dense")
    layers = drafter.config.target_layer_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "CHECKS", {name: preflight.CHECKS[name] for name in only})
        checks = preflight_checks(
            model=model,
            vocabulary=target,
            target=target if loaded else None,
            facts=LoadedTaps(target).facts,
            source=source or OnlineFeatures(target, layers, soft=recipe.soft_labels),
            rows=rows,
            recipe=recipe,
            max_length=max_length,
            noise=noise,
            chunk_tokens=64,
            seed=0,
        )
    return {check.name: check for check in checks}


def statuses(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.status for name, check in checks.items() if check.status != "pass"}


@pytest.mark.parametrize(
    ("packed", "recipe"), [(False, KL), (True, PAPER)], ids=["a row each, soft labels", "packed, hard labels"]
)
def test_a_sound_run_passes_every_check(packed: bool, recipe: Recipe, target: Target, samples: list[Sample]) -> None:
    rows = [samples] if packed else [[sample] for sample in samples]
    checks = found(target, rows, recipe=recipe, noise=0.1)
    expected = {"clean-targets": "skipped"} if recipe is PAPER else {"recipe": "warn"}
    assert statuses(checks) == expected
    require(list(checks.values()), ())


def test_a_sound_run_in_bfloat16_passes_every_check(tiny_dense: Pair, samples: list[Sample]) -> None:
    target = Target.load(tiny_dense.target, dtype=torch.bfloat16)
    checks = found(target, [[samples[1]]], recipe=KL, compute=torch.bfloat16)
    assert statuses(checks) == {"recipe": "warn"}


def test_without_the_target_what_only_it_can_tell_is_not_verified(target: Target, samples: list[Sample]) -> None:
    only = ["tap-source", "clean-targets", "training-metric-replay"]
    checks = found(target, [samples], recipe=KL, loaded=False, only=only)
    assert statuses(checks) == {"tap-source": "skipped", "clean-targets": "skipped"}
    assert "the loss is not verified" in checks["training-metric-replay"].explanation


def test_rows_without_an_anchor_are_not_verified_and_stop_nothing(target: Target, samples: list[Sample]) -> None:
    silent = [replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)) for sample in samples]
    checks = found(target, [silent])
    assert {name for name, check in checks.items() if check.status == "skipped"} == {
        "tap-source",
        "clean-targets",
        "context-strictly-before-anchor",
        "blocks-apart",
        "position-ids",
        "gqa",
        "independent-forward",
        "training-metric-replay",
    }
    require(list(checks.values()), ())


@dataclass(frozen=True)
class Spoiled:
    """A feature source with a fault in it."""

    source: FeatureSource
    spoil: Callable[[Features], Features]

    def features(self, rows: Sequence[Sequence[Sample]]) -> Features:
        return self.spoil(self.source.features(rows))


def noisy_labels(features: Features) -> Features:
    assert features.hidden is not None
    noise = 0.2 * torch.randn(features.hidden.shape, generator=torch.Generator().manual_seed(0))
    return replace(features, hidden=features.hidden + noise)


PREDICATE = (masks, "block_mask_mod")
FORWARD = (TrainingModel, "forward")
TILES = "(1, queries.shape[1] // keys.shape[1], 1, 1)"
CONTEXT, APART, NAIVE, REPLAY = (
    "context-strictly-before-anchor",
    "blocks-apart",
    "independent-forward",
    "training-metric-replay",
)
MUTANTS = {
    "the anchor's own state is seen": (*PREDICATE, "key < anchor", "key <= anchor", [CONTEXT, NAIVE]),
    "all of the row's past is seen": (
        *PREDICATE,
        "before & (key >= starts[row, query_block])",
        "before",
        [CONTEXT, NAIVE, REPLAY],
    ),
    "blocks see each other": (*PREDICATE, "key_block == query_block", "key_block <= query_block", [APART, NAIVE]),
    "a block's positions are one late": (*FORWARD, "+ slots", "+ slots + 1", ["position-ids", NAIVE, REPLAY]),
    "positions are counted from the row's start": (
        *FORWARD,
        "blocks.anchors.clamp(min=0) - blocks.starts",
        "blocks.anchors.clamp(min=0)",
        [NAIVE, REPLAY],
    ),
    "heads are tiled": (
        drafter_module,
        "attend",
        "queries, keys, values, attn_mask=mask",
        f"queries, keys.repeat{TILES}, values.repeat{TILES}, attn_mask=mask",
        ["gqa", NAIVE],
    ),
    "slots that do not count are counted": (
        head_loss_module,
        "head_loss",
        "correct=((ranks == 0) & blocks.scored)",
        "correct=(ranks == ranks)",
        [REPLAY],
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_the_trainers_code_is_found(
    name: str, target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, function, old, new, finders = MUTANTS[name]
    mutate(monkeypatch, owner, function, old, new)
    monkeypatch.setattr(preflight, "head_loss", head_loss_module.head_loss)
    assert statuses(found(target, [samples], only=finders)) == dict.fromkeys(finders, "fail")


def test_noise_before_the_soft_labels_is_found(target: Target, samples: list[Sample]) -> None:
    source = Spoiled(OnlineFeatures(target, [1, 3, 5], soft=True), noisy_labels)
    checks = found(target, [samples], recipe=KL, source=source, only=["clean-targets"])
    assert checks["clean-targets"].status == "fail"
    assert "noise was added before its logits were taken" in checks["clean-targets"].explanation


def test_noise_that_stays_in_the_features_is_found(
    target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, objective, "with_noise", "noisy = taps.clone()", "noisy = taps")
    monkeypatch.setattr(preflight, "with_noise", objective.with_noise)
    assert statuses(found(target, [samples], noise=0.1, only=["tap-source"])) == {"tap-source": "fail"}


def test_states_of_other_layers_are_found(target: Target, samples: list[Sample]) -> None:
    source = OnlineFeatures(target, [2, 4, 6], soft=False)
    assert statuses(found(target, [samples], source=source, only=["tap-source"])) == {"tap-source": "fail"}


def test_the_faulty_recipe_is_named(target: Target, samples: list[Sample]) -> None:
    raw = drafter_config("dense")
    raw["dflash_config"]["target_layer_ids"] = [1, 3]
    config = DrafterConfig.from_dict(raw, source="test")
    checks = found(
        target,
        [samples],
        config=config,
        recipe=OLD.model_copy(update={"name": None}),
        only=["recipe", "taps-as-reference"],
    )
    assert "tap 5 is missing" in checks["taps-as-reference"].explanation
    assert "gamma is 10 instead of 4" in checks["recipe"].explanation
    with pytest.raises(PreflightError, match=r"preflight\.allow") as error:
        require(list(checks.values()), ["recipe"])
    assert "taps-as-reference" in str(error.value)
    assert "gamma is 10" not in str(error.value)
    require(list(checks.values()), ["recipe", "taps-as-reference"])


def test_a_text_longer_than_the_drafters_positions_is_found(target: Target, samples: list[Sample]) -> None:
    assert statuses(found(target, [samples], max_length=4096, only=["max-position"])) == {"max-position": "fail"}


def test_what_was_found_is_kept_beside_the_run(tmp_path: Path) -> None:
    allowed = Check(name="recipe", status="fail", measured="γ 10", limit="γ 4", explanation="another γ")
    require([allowed], ["recipe"])
    memory = MemoryEstimate(target=1, optimizer=2, weights=3, activations=4, logits=5)
    planned = Plan.model_construct(target="tiny", memory=memory)
    write_preflight(tmp_path / "run", planned, [allowed])
    kept = json.loads((tmp_path / "run" / "preflight.json").read_text(encoding="utf-8"))
    assert kept["checks"] == [allowed.model_dump(mode="json")]
    assert kept["plan"]["target"] == "tiny"


def test_a_check_that_there_is_not_cannot_be_allowed() -> None:
    sound = Check(name="gqa", status="pass", measured=1, limit=1, explanation="")
    with pytest.raises(UnknownCheckError, match=r"causality is no check; there are gqa"):
        require([sound], ["causality"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocab_size": 513}, TargetMismatchError, "vocab_size is 513, the target .* has 512 rows"),
        ({"hidden_size": 64}, TargetMismatchError, "hidden_size is 64, the target .* has 128"),
        ({"taps": [1, 3, 7]}, (TargetMismatchError, ConfigError), "7"),
        ({"mask": 0}, ConfigError, "mask"),
    ],
    ids=["vocabulary", "hidden size", "tap on the last block", "mask that ends a text"],
)
def test_a_drafter_of_another_target_is_refused(
    change: dict[str, object], error: type[Exception], message: str, target: Target
) -> None:
    raw = drafter_config("dense")
    raw["dflash_config"]["target_layer_ids"] = change.pop("taps", [1, 3, 5])
    raw["dflash_config"]["mask_token_id"] = change.pop("mask", 510)
    with pytest.raises(error, match=message):
        require_fit(
            DrafterConfig.from_dict(raw | change, source="config.json"), LoadedTaps(target).facts, source="config.json"
        )


def test_the_recipe_of_a_manifest_says_what_each_layer_sees(target: Target) -> None:
    config = DrafterConfig.from_dict(drafter_config("hybrid"), source="test")
    said = stated_recipe(PAPER, config)
    assert Recipe.from_dict(said, source="test").layer_rules is not None
    assert [rule["window"] for rule in said["layer_rules"]] == [64, None]
