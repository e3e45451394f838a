"""Rounds of the replay against transformers' own DFlash verifier: it decodes with caches and shares no code with us."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from dflash.checkpoints import DrafterCheckpoint, build_drafter, read_checkpoint
from dflash.config import DrafterConfig, LayerType
from dflash.export import export
from dflash.target import Target
from tests.dflash.greedy import greedy_texts, tiny_prompts, walk
from tests.tiny import Pair

PROMPTS = 12
NEW_TOKENS = 96


@dataclass(frozen=True)
class PeerRound:
    """A round of the peer: where its last known token stands, what it drafted, and how many tokens it emitted.

    With a single token left to write it drafts nothing: the target's step alone is the round.
    """

    anchor: int
    drafted: tuple[int, ...]
    advance: int


Decoded = tuple[list[int], list[PeerRound]]
"""Prompt and completion, and the rounds that wrote it; the first token of the completion is the prefill's."""


def test_rounds_equal_those_of_transformers_own_verifier(
    tiny_dense: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(tiny_dense.target, dtype=torch.float32)
    checkpoint = read_checkpoint(tiny_dense.drafter)
    ours, theirs = both_sides(checkpoint, tiny_dense, target, PROMPTS, tmp_path, monkeypatch)
    assert len(ours) == PROMPTS
    assert ours == theirs


@pytest.mark.parametrize(
    ("layer_types", "window"),
    [
        (("sliding_attention", "full_attention"), 24),
        pytest.param(("sliding_attention", "sliding_attention"), 24, marks=pytest.mark.slow),
        pytest.param(("full_attention", "sliding_attention"), 5, marks=pytest.mark.slow, id="narrower than a block"),
    ],
)
def test_windows_are_those_of_transformers_own_class(
    tiny_dense: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layer_types: tuple[LayerType, ...],
    window: int,
) -> None:
    target = Target.load(tiny_dense.target, dtype=torch.float32)
    plain = read_checkpoint(tiny_dense.drafter)
    sizes = plain.config.model_dump() | {"layer_types": layer_types, "sliding_window": window}
    checkpoint = replace(plain, config=DrafterConfig.model_validate(sizes))
    ours, theirs = both_sides(checkpoint, tiny_dense, target, 2, tmp_path, monkeypatch)
    assert ours == theirs


def both_sides(
    checkpoint: DrafterCheckpoint,
    pair: Pair,
    target: Target,
    count: int,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[dict[str, Decoded], dict[str, Decoded]]:
    """Tokens and rounds of ``count`` prompts by id: of our replay, and of the peer's generation."""
    assistant = as_assistant(checkpoint, directory / "export")
    prompts = tiny_prompts(pair, target, count)
    texts = greedy_texts(target, checkpoint.config.target_layer_ids, prompts, NEW_TOKENS)
    walked = walk(build_drafter(checkpoint, device="cpu", dtype=torch.float32), target, texts)
    ours, theirs = {}, {}
    for text in texts:
        written, rounds = decode(target, assistant, text.tokens[: text.prompt_length], monkeypatch)
        own = [one for one in walked if one.prompt == text.id]
        silent = {one.anchor for one in rounds if not one.drafted}
        drafts = [() if one.anchor in silent else one.drafted for one in own]
        ours[text.id] = (
            text.tokens,
            [PeerRound(one.anchor, draft, one.advance) for one, draft in zip(own, drafts, strict=True)],
        )
        theirs[text.id] = (written, rounds)
    return ours, theirs


def decode(
    target: Target, assistant: MuseGlimmerAssistantModel, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[PeerRound]]:
    """Prompt and completion as the peer decodes them, and its rounds.

    The rounds are what its candidate generator is asked and answers: once before the prefill, where it drafts nothing,
    and then once a round with all tokens so far.
    """
    asked: list[tuple[int, tuple[int, ...]]] = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self: DFlashTokenCandidateGenerator, input_ids: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
        candidates, logits = original(self, input_ids, **kwargs)
        known = input_ids.shape[1]
        asked.append((known, tuple(candidates[0, known:].tolist())))
        return candidates, logits

    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, speculation_type="dflash")
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
        patch.setattr(target.model.generation_config, "eos_token_id", None)
        ids = torch.tensor([prompt])
        output = target.model.generate(ids, generation_config=settings, assistant_model=assistant)
    written = output[0].tolist()
    known = [length for length, _ in asked[1:]] + [len(written)]
    rounds = [PeerRound(at - 1, drafted, known[i + 1] - at) for i, (at, drafted) in enumerate(asked[1:])]
    return written, rounds


def as_assistant(checkpoint: DrafterCheckpoint, directory: Path) -> MuseGlimmerAssistantModel:
    """The drafter as the peer loads its export from ``directory``."""
    export(checkpoint, "transformers", directory, dtype="float32")
    model, said = MuseGlimmerAssistantModel.from_pretrained(directory, output_loading_info=True)
    assert not any(said.values()), said
    return model.eval()
