"""τ of a drafter in training is τ as the evaluator finds it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.drafter import Drafter
from dflash.evaluate import PHASES, measure
from dflash.progress import Phases
from dflash.prompts import ThinkingError
from dflash.request import Request
from dflash.target import Target
from dflash.training.run_config import EvaluationSection
from dflash.training.validation import HeldOut, HeldOutError
from tests.tiny import Pair

PROMPTS, TOKENS = 4, 24


@pytest.fixture(scope="module")
def target(tiny_hybrid: Pair) -> Target:
    return Target.load(tiny_hybrid.target, kernel="torch")


@pytest.fixture(scope="module")
def drafter(tiny_hybrid: Pair) -> Drafter:
    return build_drafter(read_checkpoint(tiny_hybrid.drafter), device="cpu", dtype=torch.float32)


def section(prompts: Path, **settings: object) -> EvaluationSection:
    chosen = {"prompts": prompts, "num_prompts": PROMPTS, "max_new_tokens": TOKENS, "ignore_eos": True} | settings
    return EvaluationSection.model_validate(chosen)


def test_tau_is_what_an_evaluation_finds(
    tiny_hybrid: Pair, target: Target, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.evaluate.DDTREE_NODES", ())  # trees and checks are slow, and no part of this
    monkeypatch.setattr("dflash.checks.all_checks", lambda evidence: [])
    taps = drafter.config.target_layer_ids
    held_out = HeldOut.prepare(section(tiny_hybrid.prompts), target, taps, thinking=None, directory=tmp_path / "kept")
    truth = held_out.measure(drafter, target)
    request = Request(
        target=tiny_hybrid.target,
        checkpoint=tiny_hybrid.drafter,
        prompts=tiny_hybrid.prompts,
        output=tmp_path / "report",
        num_prompts=PROMPTS,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        dtype="float32",
        kernel="torch",
        device="cpu",
    )
    report, rounds = measure(request, Phases(PHASES["replay"]))
    found = report.metrics
    assert (truth.tau_pooled, truth.tau_macro, truth.ci95) == (found.tau.pooled, found.tau.macro, found.tau.ci95)
    assert truth.random_anchor_tau == found.random_anchor_tau
    assert list(truth.accuracy) == found.accuracy_by_position
    assert (truth.rounds, truth.tokens, truth.prompts) == (found.rounds, found.tokens, PROMPTS)
    assert truth.rounds == len(rounds)
    assert truth.tau_pooled > 2  # a trained drafter: agreeing on nothing would say little
    assert truth.values()["tau"] == truth.tau_pooled
    assert truth.values()["accuracy_1"] == truth.accuracy[0]


def test_a_resumed_run_measures_on_the_same_texts_without_the_target(
    tiny_hybrid: Pair, target: Target, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(**settings: object) -> HeldOut:
        taps = drafter.config.target_layer_ids
        chosen = section(tiny_hybrid.prompts, num_prompts=3, max_new_tokens=16, **settings)
        return HeldOut.prepare(chosen, target, taps, thinking=None, directory=tmp_path)

    def refuse(self: Target, prompts: Sequence[Sequence[int]], *_: object, **__: object) -> list[list[int]]:
        assert not prompts, "the target wrote again what was kept"
        return []

    first = prepare()
    monkeypatch.setattr(Target, "generate_greedy", refuse)
    monkeypatch.setattr(Target, "taps", lambda *_, **__: pytest.fail("the target read again what was kept"))
    second = prepare()
    assert [text.tokens for text in second.texts] == [text.tokens for text in first.texts]
    assert all(torch.equal(now.taps, then.taps) for now, then in zip(second.texts, first.texts, strict=True))
    assert second.prompts_sha256 == first.prompts_sha256
    with pytest.raises(AssertionError, match="wrote again"):
        prepare(ignore_eos=False)


def test_chats_go_by_the_training_datas_mode_of_thinking(target: Target, tmp_path: Path) -> None:
    prompts = tmp_path / "chats.jsonl"
    chat = {"id": "one", "messages": [{"role": "user", "content": "Write a function to add a block."}]}
    prompts.write_text(json.dumps(chat) + "\n")
    chosen = section(prompts, num_prompts=None, max_new_tokens=4)
    with pytest.raises(ThinkingError):
        HeldOut.prepare(chosen, target, [1], thinking=None, directory=tmp_path / "kept")

    def prompt(own: bool | None, data: bool) -> list[int]:
        asked = chosen.model_copy(update={"thinking": own})
        [text] = HeldOut.prepare(asked, target, [1], thinking=data, directory=tmp_path / "kept").texts
        return text.tokens[: text.prompt_length]

    assert prompt(None, True) == prompt(True, False)
    assert prompt(None, False) == prompt(False, True)
    assert prompt(None, True) != prompt(None, False)


def test_prompts_that_end_at_once_are_refused(tiny_hybrid: Pair, target: Target, tmp_path: Path) -> None:
    chosen = section(tiny_hybrid.prompts, num_prompts=2, max_new_tokens=1)
    with pytest.raises(HeldOutError, match="no block could be drafted"):
        HeldOut.prepare(chosen, target, [1], thinking=None, directory=tmp_path)
