"""What the trained pairs must show: the number of the replay is right, and it is high only where it should be."""

from pathlib import Path
from statistics import median

import pytest
import torch

from dflash.batch import Text
from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.naive import draft_logits
from dflash.target import Target
from tests.dflash.greedy import greedy_texts, tau, tiny_prompts, walk
from tests.fixtures.drafter_training import new_drafter
from tests.tiny import Pair

COARSE_LENGTHS = sorted({*range(100, 401, 50), *(edge + d for edge in (128, 256, 384) for d in (-1, 0, 1))})


@pytest.fixture(params=["hybrid", "dense"])
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def pair(kind: str, request: pytest.FixtureRequest) -> Pair:
    pair: Pair = request.getfixturevalue(f"tiny_{kind}")
    return pair


def test_walk_equals_a_loop_over_the_naive_forward(pair: Pair) -> None:
    target = Target.load(pair.target, kernel="torch")
    checkpoint = read_checkpoint(pair.drafter)
    texts = greedy_texts(target, checkpoint.config.target_layer_ids, tiny_prompts(pair, target, 6), 48)
    rounds = walk(build_drafter(checkpoint, device="cpu", dtype=torch.float32), target, texts)
    embed = target.embed(torch.arange(target.vocab_size))
    head = target.model.get_output_embeddings().weight

    for text in texts:
        walked = [(one.anchor, one.drafted, one.advance) for one in rounds if one.prompt == text.id]
        looped, anchor = [], text.prompt_length
        while anchor < len(text.tokens) - 1:
            weights, raw = checkpoint.weights, checkpoint.raw_config
            logits = draft_logits(weights, raw, embed, head, text.taps, text.tokens, anchor)
            drafted = logits.argmax(-1).tolist()
            left = text.tokens[anchor + 1 :]
            right = 0
            while right < min(len(drafted), len(left)) and drafted[right] == left[right]:
                right += 1
            advance = min(right + 1, len(left))
            looped.append((anchor, tuple(drafted), advance))
            anchor += advance
        assert walked == looped, text.id


def test_reference_drafters_are_good_and_random_ones_are_not(kind: str, pair: Pair) -> None:
    target = Target.load(pair.target, kernel="torch")
    checkpoint = read_checkpoint(pair.drafter)
    texts = greedy_texts(target, checkpoint.config.target_layer_ids, tiny_prompts(pair, target, 12), 64)

    assert tau(walk(build_drafter(checkpoint, device="cpu", dtype=torch.float32), target, texts)) > 4.0
    assert tau(walk(new_drafter(kind).eval(), target, texts)) < 1.1


def test_training_checkpoints_grow_with_their_steps(tiny_hybrid: Pair, training_checkpoints: Path) -> None:
    target = Target.load(tiny_hybrid.target, kernel="torch")
    checkpoints = [read_checkpoint(training_checkpoints / f"step_{step}.pt") for step in (100, 200, 400)]
    texts = greedy_texts(target, checkpoints[0].config.target_layer_ids, tiny_prompts(tiny_hybrid, target, 16), 64)
    taus = [tau(walk(build_drafter(one, device="cpu", dtype=torch.float32), target, texts)) for one in checkpoints]

    assert [one.step for one in checkpoints] == [100, 200, 400]
    assert 1.3 < taus[0] < taus[1] < taus[2]


@pytest.mark.parametrize(
    ("lengths", "texts"),
    [
        pytest.param(COARSE_LENGTHS, 8, id="coarse", marks=pytest.mark.slow),
        pytest.param(range(100, 401), 16, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_no_prompt_length_stands_out(tiny_hybrid: Pair, lengths: list[int], texts: int) -> None:
    """Engines have lost most of their acceptance at single prompt lengths, where a kernel's tail was wrong.

    The same greedy texts are cut at every length, so each one is measured on nearly the text of its neighbours, by
    a pass of the target over exactly that many tokens. No length is off the median of its neighbourhood by a quarter.
    """
    target = Target.load(tiny_hybrid.target, kernel="torch")
    checkpoint = read_checkpoint(tiny_hybrid.drafter)
    drafter = build_drafter(checkpoint, device="cpu", dtype=torch.float32)
    prompts = {id: ids[:96] for id, ids in tiny_prompts(tiny_hybrid, target, texts).items() if len(ids) >= 96}
    whole = greedy_texts(target, checkpoint.config.target_layer_ids, prompts, 368)

    taus = {}
    for length in lengths:
        ids = torch.tensor([text.tokens[: length + 64] for text in whole])
        taps = target.taps(ids, checkpoint.config.target_layer_ids).taps
        cut = [Text(text.id, row.tolist(), length, tap) for text, row, tap in zip(whole, ids, taps, strict=True)]
        taus[length] = tau(walk(drafter, target, cut))
    for length, own in taus.items():
        near = median(other for at, other in taus.items() if abs(at - length) <= 32)
        assert abs(own / near - 1) < 0.25, f"prompt length {length}: τ {own:.2f}, its neighbours' median {near:.2f}"
