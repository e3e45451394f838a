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


def test_rounds_equal_those_of_transformers_own_verifier(
    tiny_dense: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(tiny_dense.target, dtype=torch.float32)
    checkpoint = read_checkpoint(tiny_dense.drafter)
    require_equal_rounds(checkpoint, tiny_dense, target, PROMPTS, tmp_path, monkeypatch)


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
    require_equal_rounds(checkpoint, tiny_dense, target, 2, tmp_path, monkeypatch)


def require_equal_rounds(
    checkpoint: DrafterCheckpoint,
    pair: Pair,
    target: Target,
    count: int,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our replay and the peer's generation over ``count`` prompts go through the same rounds."""
    assistant = as_assistant(checkpoint, directory / "export")
    prompts = tiny_prompts(pair, target, count)
    texts = greedy_texts(target, checkpoint.config.target_layer_ids, prompts, NEW_TOKENS)
    ours = walk(build_drafter(checkpoint, device="cpu", dtype=torch.float32), target, texts)

    assert len(texts) == count
    for text in texts:
        written, theirs = decode(target, assistant, text.tokens[: text.prompt_length], monkeypatch)
        mine = [one for one in ours if one.prompt == text.id]
        assert written == text.tokens, f"{text.id}: the completions differ"
        assert [one.anchor for one in mine] == [one.anchor for one in theirs], f"{text.id}: the anchors differ"
        assert [one.advance for one in mine] == [one.advance for one in theirs], f"{text.id}: the advances differ"
        drafts = [one.drafted if peer.drafted else () for one, peer in zip(mine, theirs, strict=True)]
        assert drafts == [peer.drafted for peer in theirs], f"{text.id}: the drafts differ"
        assert sum(one.advance for one in theirs) == NEW_TOKENS - 1  # the prefill writes the first token


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
