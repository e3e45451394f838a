"""A run's config: what is refused, and with which words; what an objective says of itself."""

from pathlib import Path
from typing import Any

import pytest

from dflash.recipes import Recipe, known, paper
from dflash.training.run_config import ObjectiveSection, RunConfig, RunConfigError

ROOT = Path(__file__).parents[3]


def least(**changes: Any) -> dict[str, Any]:
    """The least that a run must say, with ``changes`` of whole sections."""
    return {
        "output": "runs/a",
        "target": {"path": "target"},
        "drafter": {"config": "drafter.json"},
        "data": {"files": ["text.jsonl"]},
        "optimizer": {"max_steps": 10},
    } | changes


@pytest.mark.parametrize("name", ["tiny.yaml", "qwen3.6-27b.yaml"])
def test_the_shipped_configs_are_read(name: str) -> None:
    assert RunConfig.read(ROOT / "configs" / name).objective.loss == "ce"


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    run = RunConfig.from_dict(least(output="~/runs/a", target={"path": "~/target"}), source="run.yaml")
    assert (run.output, run.target.path) == (Path("/home/me/runs/a"), "/home/me/target")


def test_the_large_config_is_the_papers_recipe() -> None:
    run = RunConfig.read(ROOT / "configs" / "qwen3.6-27b.yaml")
    section = run.optimizer
    assert (section.learning_rate, section.warmup_ratio, section.schedule) == (6e-4, 0.04, "cosine")
    assert (section.max_grad_norm, section.num_epochs, section.weight_decay) == (1.0, 6, 0.0)
    assert (run.data.max_length, run.objective.num_anchors) == (3072, 512)
    assert run.objective.recipe(16).gamma == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimiser": {"max_steps": 1}}, "optimiser is not known; did you mean optimizer?"),
        ({"optimizer": {"max_steps": 1, "lr": 1e-3}}, "optimizer.lr is not known; known there: learning_rate"),
        ({"evaluation": {"prompts": "p", "eval_intervall": 5}}, "evaluation.eval_intervall is not known; did you mean"),
        ({"optimizer": {}}, "optimizer: give num_epochs or max_steps"),
        ({"optimizer": {"max_steps": 1, "betas": [0.9, 1.5]}}, "optimizer.betas.1 is 1.5: Input should be less than 1"),
        ({"optimizer": {"max_steps": 0}}, "optimizer.max_steps is 0: Input should be greater than 0"),
        ({"data": {}}, "data: give files or datasets"),
        ({"data": {"files": "a.jsonl"}}, "data.files is 'a.jsonl', expected a list; write it in brackets: [a.jsonl]"),
        (
            {"data": {"files": ["a"], "max_length": 9, "min_loss_tokens": 10}},
            "data: min_loss_tokens 10 is more than the",
        ),
        ({"features": {"mode": "offline"}}, "features: mode offline reads taps from directory"),
        ({"features": {"directory": "taps"}}, "features: mode offline reads taps from directory"),
        ({"objective": {"kl_weight": 0.5}}, "objective: kl_weight belongs to the loss composite, this one is ce"),
        ({"objective": {"loss": "composite", "alpha": 0.5}}, "objective: alpha belongs to the loss dpace"),
        ({"objective": {"loss": "dpace", "gamma": 4}}, "objective: gamma and the loss dpace exclude each other"),
        ({"objective": {"gamma": float("nan")}}, "objective.gamma is nan: Input should be a finite number"),
        ({"checkpoints": {"keep_best": True}}, "checkpoints.keep_best goes by τ, and there is no evaluation section"),
        ({"target": {}}, "target.path is missing; add it"),
        ({"target": "models/Qwen"}, "target is 'models/Qwen': Input should be a valid dictionary"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_key_with_the_mend(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RunConfigError) as refused:
        RunConfig.from_dict(least(**changes), source="run.yaml")
    assert f"run.yaml: {said}" in str(refused.value)


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(RunConfigError, match=r"seed is -1: .*greater than or equal to 0.*lr is not known"):
        RunConfig.from_dict(least(optimizer={"max_steps": 1, "lr": 1}, seed=-1), source="run.yaml")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("a: [", "is not YAML"), ("[1]", "expected sections"), ("", "expected")],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(RunConfigError, match=said) as refused:
        RunConfig.read(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(("size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_gamma_follows_from_the_block_size(size: int, gamma: float) -> None:
    found = ObjectiveSection().recipe(size)
    assert found == paper(size).model_copy(update={"name": None})
    assert found.gamma == gamma


def test_a_block_size_that_the_paper_does_not_have_must_say_its_gamma() -> None:
    with pytest.raises(RunConfigError, match=r"objective.gamma is not given.*blocks of 12"):
        ObjectiveSection().recipe(12)
    assert ObjectiveSection(gamma=6).recipe(12).gamma == 6


@pytest.mark.parametrize(("loss", "name"), [("kl", "forward-kl"), ("composite", "composite"), ("dpace", "d-pace")])
def test_other_losses_go_by_the_name_of_a_known_recipe(loss: str, name: str) -> None:
    found = ObjectiveSection.model_validate({"loss": loss}).recipe(8)
    assert found == known(name, 8)


def test_a_composite_of_other_weights_is_held_to_its_name() -> None:
    assert ObjectiveSection(loss="composite", kl_weight=0.5).recipe(8) == Recipe(
        name="composite", loss="composite", gamma=10.0, temperature=2.0, kl_weight=0.5, block_size=8
    )
