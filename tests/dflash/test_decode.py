"""Decoding against the target's own greedy completions, the replay over them, and transformers' own verifier."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash import decode as decode_module
from dflash.batch import DraftError, Text
from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.decode import Decoding, Session, Stopwatch, VerifyError, decode
from dflash.drafter import Drafter
from dflash.metrics import Round
from dflash.sampling import Greedy, Sampler, make_sampler
from dflash.target import Target
from tests.dflash import test_against_transformers as peer
from tests.dflash.greedy import greedy_texts, tau, tiny_prompts, walk
from tests.tiny import Pair

PROMPTS, NEW_TOKENS = 2, 40


class Case:
    """A pair in float32 with a few prompts, their greedy texts and the replay's rounds over them."""

    def __init__(self, pair: Pair, new_tokens: int = NEW_TOKENS) -> None:
        self.target = Target.load(pair.target, kernel="torch")
        self.checkpoint = read_checkpoint(pair.drafter)
        self.drafter = build_drafter(self.checkpoint, device="cpu", dtype=torch.float32)
        self.prompts = tiny_prompts(pair, self.target, PROMPTS)
        self.texts = greedy_texts(self.target, self.drafter.config.target_layer_ids, self.prompts, new_tokens)

    def decode(
        self,
        *,
        drafter: Drafter | None = None,
        max_new_tokens: int = NEW_TOKENS,
        end: frozenset[int] = frozenset(),
        sampler: Sampler | None = None,
        max_blocks: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        prompts: int = PROMPTS,
    ) -> Decoding:
        return decode(
            drafter or self.drafter,
            self.target,
            list(self.prompts.items())[:prompts],
            max_new_tokens=max_new_tokens,
            end=end,
            sampler=sampler or Greedy(),
            max_blocks=max_blocks,
            progress=progress,
        )

    @cached_property
    def decoded(self) -> Decoding:
        return self.decode()

    def walked(self, texts: list[Text]) -> list[Round]:
        return walk(self.drafter, self.target, texts)


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.getfixturevalue(f"tiny_{request.param}"))


def shortened(text: Text, completion: int) -> Text:
    length = text.prompt_length + completion
    return replace(text, tokens=text.tokens[:length], taps=text.taps[:length])


def test_decoding_writes_the_greedy_completions_in_the_rounds_of_the_replay(case: Case) -> None:
    decoding = case.decoded
    assert [text.tokens for text in decoding.texts] == [text.tokens for text in case.texts]
    assert [text.prompt_length for text in decoding.texts] == [text.prompt_length for text in case.texts]
    assert decoding.rounds == case.walked(case.texts)
    assert len({one.advance for one in decoding.rounds}) > 4
    assert tau(decoding.rounds) > 2.5


def test_the_taps_of_the_texts_are_those_of_a_pass_over_all_tokens(case: Case) -> None:
    for text, whole in zip(case.decoded.texts, case.texts, strict=False):
        assert text.taps.shape == whole.taps.shape
        error = (text.taps - whole.taps).norm(dim=-1) / whole.taps.norm(dim=-1)
        assert float(error.max()) < 1e-4  # float32 in other shapes; another position's state is 1e-1 away and more


def test_rounds_equal_those_of_transformers_own_verifier(
    tiny_dense: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tiny_dense, 1)
    assistant = peer.as_assistant(case.checkpoint, tmp_path / "export")
    decoding = case.decode(max_new_tokens=peer.NEW_TOKENS, prompts=1)
    for text in decoding.texts:
        written, theirs = peer.decode(case.target, assistant, text.tokens[: text.prompt_length], monkeypatch)
        mine = [one for one in decoding.rounds if one.prompt == text.id]
        assert written == text.tokens, text.id
        assert [(one.anchor, one.advance) for one in mine] == [(one.anchor, one.advance) for one in theirs], text.id
        drafts = [one.drafted if its.drafted else () for one, its in zip(mine, theirs, strict=True)]
        assert drafts == [its.drafted for its in theirs], text.id


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_the_token_limit_cuts_the_last_round(case: Case, limit: int) -> None:
    decoding = case.decode(max_new_tokens=limit)
    expected = [shortened(text, limit) for text in case.texts]
    assert [text.tokens for text in decoding.texts] == [text.tokens for text in expected]
    assert decoding.rounds == case.walked(expected)
    assert [len(text.taps) for text in decoding.texts] == [len(text.tokens) for text in expected]
    assert sum(one.advance for one in decoding.rounds) == PROMPTS * (limit - 1)


def test_an_end_token_inside_a_committed_slice_ends_the_text_there(case: Case) -> None:
    """The end token is a draft that was accepted between others: what follows it in the slice must go."""
    anchor, slot, text = next(
        (one.anchor, slot, text)
        for text in case.texts
        for one in case.walked([text])
        for slot in range(2, one.accepted)
        if text.tokens[one.anchor + slot] not in text.tokens[text.prompt_length : one.anchor + slot]
    )
    end = text.tokens[anchor + slot]
    ends = []
    for one in case.texts:
        completion = one.tokens[one.prompt_length :]
        ends.append(completion.index(end) + 1 if end in completion else len(completion))
    expected = [shortened(one, length) for one, length in zip(case.texts, ends, strict=True)]
    seen: list[tuple[int, int]] = []
    decoding = case.decode(end=frozenset({end}), progress=lambda done, total: seen.append((done, total)))

    assert [one.tokens for one in decoding.texts] == [one.tokens for one in expected]
    assert decoding.rounds == case.walked(expected)
    assert any(one.cut for one in decoding.rounds)
    assert seen[-1] == (sum(ends), sum(ends))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_max_blocks_bounds_the_rounds_of_each_prompt(case: Case) -> None:
    decoding = case.decode(max_blocks=3)
    walked = case.walked(case.texts)
    for text, whole in zip(decoding.texts, case.texts, strict=True):
        mine = [one for one in decoding.rounds if one.prompt == text.id]
        theirs = [one for one in walked if one.prompt == text.id][:3]
        places = ("anchor", "drafted", "accepted", "advance")
        assert [[getattr(one, name) for name in places] for one in mine] == [
            [getattr(one, name) for name in places] for one in theirs
        ]
        written = 1 + sum(one.advance for one in mine)
        assert text.tokens == whole.tokens[: whole.prompt_length + written]
        assert text.taps.shape[0] == len(text.tokens)


def test_each_committed_token_is_projected_once_and_the_anchor_not_yet(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    projected: list[int] = []
    seen: list[tuple[int, int]] = []
    project, forward = case.drafter.project_context, case.drafter.forward

    def counted(taps: Tensor) -> Tensor:
        projected.append(taps.shape[1])
        return project(taps)

    def watched(blocks: Tensor, positions: Tensor, context_kv: Any, masks: Any) -> Tensor:
        seen.append((int(positions[0, 0]), context_kv[0][0].shape[2]))
        return forward(blocks, positions, context_kv, masks)

    monkeypatch.setattr(case.drafter, "project_context", counted)
    monkeypatch.setattr(case.drafter, "forward", watched)
    rounds = case.decode(prompts=1).rounds
    advances = [one.advance for one in rounds[:-1]]
    assert projected == [case.texts[0].prompt_length, *advances]
    assert seen == [(one.anchor, one.anchor) for one in rounds]  # as many keys as there are tokens before the anchor


def test_equal_logits_rank_by_id_as_the_draft_is_chosen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "logits", lambda target, hidden: torch.zeros(*hidden.shape[:-1], 512))
    decoding = case.decode(prompts=1, max_blocks=2)
    assert {token for one in decoding.rounds for token in one.drafted} == {0}
    session = Session(case.drafter, case.target, "p", case.texts[0].tokens, room=8)
    right = torch.tensor([7, 0, 3, 511, 2, 1, 9])
    assert session.ranks(torch.zeros(7, 128), right).tolist() == right.tolist()


def test_a_drafter_that_is_not_finite_is_named_with_prompt_and_place(tiny_dense: Pair) -> None:
    case = Case(tiny_dense, 1)
    with torch.no_grad():
        case.drafter.norm.weight[3] = float("nan")
    name, prompt = next(iter(case.prompts.items()))
    with pytest.raises(DraftError, match=f"prompt {name}: .* position {len(prompt)} is not finite"):
        case.decode()


def test_a_target_that_is_not_finite_is_named(tiny_dense: Pair) -> None:
    case = Case(tiny_dense, 1)
    with torch.no_grad():
        case.target.model.get_submodule("model.norm").weight[3] = float("inf")
    prompt = next(iter(case.prompts))
    with pytest.raises(VerifyError, match=f"prompt {prompt}: the target's logits .* weight model.norm.weight"):
        case.decode()


def test_sampled_decoding_is_seeded_and_its_rounds_add_up(case: Case) -> None:
    def decoded(name: Any, seed: int) -> Decoding:
        sampler = make_sampler(name, temperature=3.0, seed=seed)
        return case.decode(sampler=sampler, prompts=1, max_new_tokens=8)

    for name in ("rejection", "target-match"):
        first = decoded(name, 0)
        assert first.texts[0].tokens == decoded(name, 0).texts[0].tokens != decoded(name, 1).texts[0].tokens
        assert first.texts[0].tokens != shortened(case.texts[0], 8).tokens
        assert sum(one.advance for one in first.rounds) == 7
        for one, following in zip(first.rounds, first.rounds[1:], strict=False):
            assert one.anchor + one.advance == following.anchor


def test_times_are_counted_and_the_first_of_each_kind_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 200.0, 203.0, 300.0, 305.0, 400.0, 407.0])
    monkeypatch.setattr(decode_module.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    for name in ("verify", "verify", "verify", "draft"):
        with watch.time(name):
            pass
    times = watch.times()
    assert (times.verify, times.verifications) == (4.0, 3)
    assert (times.draft, times.drafts) == (7.0, 1)
    assert (times.step, times.steps) == (None, 0)


def test_drafts_verifications_and_plain_steps_are_timed(case: Case) -> None:
    decoding = case.decode(prompts=2, max_blocks=3)
    times = decoding.times
    assert times.drafts == times.verifications == len(decoding.rounds) == 6
    assert times.steps == 2 * decode_module.STEPS
    assert all(seconds is not None and seconds > 0 for seconds in (times.draft, times.verify, times.step))


def test_one_prompts_decoding_does_not_depend_on_the_others(case: Case) -> None:
    assert case.decode(prompts=1).rounds == [one for one in case.decoded.rounds if one.prompt == case.texts[0].id]
