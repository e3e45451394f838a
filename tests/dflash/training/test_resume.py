"""What of a config may change when a run goes on, and what would make it another run."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest

from dflash.training.resume import ResumeError, require_same_run
from dflash.training.run_config import RunConfig
from dflash.training.training_state import Identity

RAW: dict[str, Any] = {
    "output": "out",
    "target": {"path": "target"},
    "drafter": {"config": "config.json"},
    "data": {"files": ["a.jsonl"]},
    "optimizer": {"num_epochs": 6, "rows": 4},
    "evaluation": {"prompts": "prompts.jsonl"},
}
IDENTITY = Identity(target="t", data="d", drafter="r", world=2)


def _changed(key: str, value: Any) -> RunConfig:
    raw = copy.deepcopy(RAW)
    place = raw
    *sections, last = key.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    return RunConfig.from_dict(raw, source="run.yaml")


def _resume(now: RunConfig, identity: Identity = IDENTITY) -> list[str]:
    began = RunConfig.from_dict(RAW, source="run.yaml")
    return require_same_run(began, now, identity_then=IDENTITY, identity_now=identity, source="out/step_9")


def test_the_same_config_goes_on_without_a_word() -> None:
    assert _resume(RunConfig.from_dict(copy.deepcopy(RAW), source="run.yaml")) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output", "elsewhere"),
        ("tracking.log_interval", 1),
        ("tracking.wandb", "project"),
        ("checkpoints.save_interval", 7),
        ("checkpoints.keep_last", 1),
        ("checkpoints.on_full_disk", "continue"),
        ("evaluation.eval_interval", 3),
        ("evaluation", None),
        ("preflight.allow", ["kernel"]),
        ("data.cache", "cache"),
        ("target.path", "moved"),
        ("data.files", ["moved.jsonl"]),
        ("drafter.config", "moved.json"),
    ],
)
def test_what_does_not_touch_the_weights_may_change(key: str, value: Any) -> None:
    (note,) = _resume(_changed(key, value))
    assert note.startswith(key)
    assert "changed since out/step_9" in note


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1),
        ("target.dtype", "float32"),
        ("target.kernel", "torch"),
        ("drafter.dtype", "float32"),
        ("drafter.init", "weights"),
        ("data.max_length", 100),
        ("data.thinking", True),
        ("features.packing", True),
        ("objective.loss", "kl"),
        ("objective.gamma", 3.0),
        ("objective.num_anchors", 64),
        ("objective.noise", 0.1),
        ("optimizer.learning_rate", 1e-3),
        ("optimizer.num_epochs", 7),
        ("optimizer.max_grad_norm", 2.0),
        ("evaluation.prompts", "others.jsonl"),
        ("evaluation.max_new_tokens", 16),
    ],
)
def test_what_makes_another_run_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ResumeError, match=re.escape(f"out/step_9 belongs to another run: {key} was ")) as raised:
        _resume(_changed(key, value))
    assert "drafter.init: out/step_9" in str(raised.value)


@pytest.mark.parametrize("what", ["target", "data", "drafter"])
def test_another_content_under_the_same_path_is_refused(what: str) -> None:
    with pytest.raises(ResumeError, match=f"{what} (is|are) not the same"):
        _resume(RunConfig.from_dict(RAW, source="run.yaml"), replace(IDENTITY, **{what: "other"}))


def test_rows_may_be_shared_out_differently_as_long_as_a_step_takes_as_many() -> None:
    notes = _resume(_changed("optimizer.rows", 8), replace(IDENTITY, world=1))
    assert any("to rounding, not to the last bit" in note for note in notes)
    with pytest.raises(ResumeError, match="a step took 8 rows and would take 4"):
        _resume(RunConfig.from_dict(RAW, source="run.yaml"), replace(IDENTITY, world=1))
    with pytest.raises(ResumeError, match="a step took 8 rows and would take 16"):
        _resume(_changed("optimizer.accumulate", 2))


@pytest.mark.parametrize(("key", "value"), [("parallel.strategy", "fsdp"), ("objective.chunk_tokens", 16)])
def test_another_order_of_the_same_sums_is_said(key: str, value: Any) -> None:
    notes = _resume(_changed(key, value))
    assert any(f"{key}: losses go on to rounding" in note for note in notes)


@pytest.mark.parametrize(
    ("what", "named"), [("kernel", "linear attention was computed by"), ("prompts", "its content")]
)
def test_another_kernel_and_other_prompts_are_refused_once_they_are_known(what: str, named: str) -> None:
    now = RunConfig.from_dict(RAW, source="run.yaml")
    began = replace(IDENTITY, **{what: "one"})
    with pytest.raises(ResumeError, match=named):
        require_same_run(
            now, now, identity_then=began, identity_now=replace(IDENTITY, **{what: "two"}), source="out/step_9"
        )
    assert require_same_run(now, now, identity_then=began, identity_now=IDENTITY, source="out/step_9") == []
