"""What stops ``dflash train`` before it has begun, and before anything that takes long."""

from typing import Any

import pytest

from dflash.errors import DFlashError
from dflash.training import preparation, trackers
from dflash.training.claim import OutputInUseError, sole_writer
from dflash.training.resume import ResumeError
from dflash.training.target_states import require_packable
from tests.dflash.pairs import write_prompts
from tests.dflash.training.runs import TinyRun, made, quick, run

__all__ = ["made", "quick", "run"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"attention": "flex"}}, r"parallel\.attention is flex, and the device is cpu"),
        ({"evaluation": {"prompts": "nowhere.jsonl"}}, r"evaluation\.prompts: nowhere\.jsonl is not there"),
        ({"data": {"files": ["/"]}}, r"data\.files: / is no file"),
        ({"drafter": {"init": "nowhere"}}, r"drafter\.init: nowhere is not there"),
        ({"features": {"packing": True}, "target": {"kernel": "torch"}}, r"features\.packing puts several documents"),
        ({"tracking": {"mlflow": "runs"}}, r"tracking\.mlflow is set and the package mlflow .* not installed"),
    ],
)
def test_what_is_cheap_to_tell_is_told_before_what_takes_long(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], message: str
) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("had begun")

    monkeypatch.setattr(preparation, "load_samples", too_late)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    if "features" in sections:  # what a hybrid target says; this one is dense
        monkeypatch.setattr(preparation, "require_packable", lambda _, path: require_packable("torch", path=path))
    else:
        monkeypatch.setattr(preparation.Target, "load", too_late)
    with pytest.raises(DFlashError, match=message):
        run.changed(**sections).train()


def test_another_run_in_the_same_output_is_refused(run: TinyRun) -> None:
    with sole_writer(run.output), pytest.raises(OutputInUseError, match="another run writes into"):
        run.train()


def test_other_prompts_under_the_same_name_are_refused(run: TinyRun) -> None:
    prompts = run.output.parent / "prompts.jsonl"
    write_prompts(prompts, count=1)
    evaluation = {"prompts": str(prompts), "eval_interval": 9, "max_new_tokens": 4, "ignore_eos": True}
    measured = run.changed(evaluation=evaluation, optimizer={"max_steps": 1})
    measured.train()
    write_prompts(prompts, count=2)
    with pytest.raises(ResumeError, match=r"evaluation\.prompts is not the same"):
        measured.train()
