"""What the experiment's README says is what its results say."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXPERIMENT = Path(__file__).parents[3] / "docs" / "experiments" / "v4-vs-v5"


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", EXPERIMENT / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(taus: dict[str, list[float]], ci95: tuple[float, float], **changes: Any) -> dict[str, Any]:
    runs = [
        {
            "version": version,
            "seed": seed,
            "tau": {"pooled": tau, "macro": tau, "ci95": [tau - 0.1, tau + 0.1]},
            "training": {"streak1": 1.5},
            "valid": version == "v5",
            "invalid_because": ["taps-as-reference"] if version == "v4" else [],
            "checks": [
                {
                    "name": "taps-as-reference",
                    "status": "fail" if version == "v4" else "pass",
                    "explanation": "tap 5 is missing; add it" if version == "v4" else "the taps follow the rule",
                },
                {"name": "recipe", "status": "warn", "explanation": "no recipe is known"},
            ],
        }
        for version, own in taus.items()
        for seed, tau in enumerate(own, start=1)
    ]
    settings = {"samples": 512, "steps": 300, "rows": 8, "anchors": 16, "noise": 2.0, "label_noise": 0.1}
    found = {
        "settings": settings | {"prompts": 64, "new_tokens": 96, "taps": {"v4": [1, 2, 3, 4], "v5": [1, 2, 3, 4, 5]}},
        "versions": {"python": "3.11", "torch": "2.13"},
        "preflight_refusal": "the run was not started",
        "runs": runs,
        "pooled": {version: sum(own) / len(own) for version, own in taus.items()},
        "comparison": {"difference": sum(ci95) / 2, "ci95": list(ci95), "prompts": 64, "verdict": ""},
        "seconds": 600,
    }
    return found | changes


@pytest.mark.parametrize(
    ("taus", "ci95", "said", "seeds"),
    [
        ({"v4": [2.0, 2.1], "v5": [2.5, 2.6]}, (0.3, 0.7), "drafts better", "No seed of one reaches the other's"),
        ({"v4": [2.5, 2.6], "v5": [2.0, 2.1]}, (-0.7, -0.3), "drafts worse here", "No seed of one reaches"),
        ({"v4": [2.0, 2.6], "v5": [2.1, 2.5]}, (-0.1, 0.1), "no difference is shown", "The seeds of the two overlap"),
    ],
    ids=["better", "worse", "no difference"],
)
def test_the_text_says_what_was_measured(
    taus: dict[str, list[float]], ci95: tuple[float, float], said: str, seeds: str, render: ModuleType
) -> None:
    text = render.readme(results(taus, ci95))
    assert said in text
    assert seeds in text
    assert f"| 1 | {taus['v4'][0]:.3f} [" in text
    assert "| `taps-as-reference` | four of five taps | **fail**: tap 5 is missing | pass: the taps follow" in text
    assert "**not valid**: taps-as-reference | valid |" in text
    assert "The verdicts are the same for every seed." in text


def test_a_seed_with_another_verdict_is_named(render: ModuleType) -> None:
    found = results({"v4": [2.0, 2.1], "v5": [2.5, 2.6]}, (0.3, 0.7))
    found["runs"][1]["invalid_because"] = []
    assert "Of v4 the verdict is another for seed 2" in render.readme(found)


@pytest.mark.parametrize("path", sorted(EXPERIMENT.glob("results.json")))
def test_the_committed_readme_is_made_from_the_committed_results(path: Path, render: ModuleType) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_name("README.md").read_text(encoding="utf-8") == render.readme(found)
