"""A recorded batch's metrics against a plain loop over its blocks, and what the file keeps."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash import naive
from dflash.metric_replay import (
    MetricReplayError,
    TrainedBatch,
    batch_metrics,
    label_noise,
    last_hidden,
    read_replay,
    soft_labels,
    write_replay,
)
from dflash.recipes import Recipe
from tests.dflash.checks.bench import Bench
from tests.dflash.pairs import write_drafter, write_target

CE = Recipe(loss="ce", gamma=4.0, block_size=6)
KL = Recipe(loss="kl", gamma=5.0, temperature=2.0, block_size=6)
COMPOSITE = Recipe(loss="composite", gamma=10.0, temperature=2.0, kl_weight=0.7, block_size=6)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = tmp_path_factory.mktemp("batch")
    target, drafter = write_target(directory / "target"), write_drafter(directory / "drafter")
    return Bench.of(target, drafter, [[*range(2, 20)], [*range(30, 40)]], directory, new_tokens=26)


def planted(bench: Bench, batch: TrainedBatch) -> TrainedBatch:
    """The batch with labels among the drafter's best, so that streaks of all lengths occur."""
    weights = bench.target.model.state_dict()
    embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    ids = batch.ids.clone()
    for row, anchors in enumerate(batch.anchors.tolist()):
        for place, anchor in enumerate(at for at in anchors if at >= 0):
            checkpoint, tokens = bench.checkpoint, ids[row].tolist()
            logits = naive.draft_logits(
                checkpoint.weights, checkpoint.raw_config, embed, head, batch.taps[row], tokens, anchor
            )
            ranks = [0] * (place % 4) + [3, 0, 9, 0]
            for slot in range(1, min(5, len(tokens) - anchor)):  # slot 5 is the next block's anchor
                ids[row, anchor + slot] = logits[slot - 1].argsort(descending=True)[ranks[slot - 1]]
    return replace(batch, ids=ids)


def by_hand(bench: Bench, batch: TrainedBatch) -> dict[str, float]:
    """Every block on its own through the naive forward; labels, weights and ranks slot by slot."""
    weights, target = bench.target.model.state_dict(), bench.target
    embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    recipe = batch.recipe
    above = below = right = scored = streak1 = streak8 = blocks = 0.0
    for row, ids in enumerate(batch.ids.tolist()):
        teacher = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for anchor in batch.anchors[row].tolist():
            if anchor < 0:
                continue
            blocks += 1
            logits = naive.draft_logits(
                bench.checkpoint.weights, bench.checkpoint.raw_config, embed, head, batch.taps[row], ids, anchor
            )
            lead1 = lead8 = True
            for slot in range(1, recipe.block_size):
                place = anchor + slot
                if place >= len(ids) or not batch.loss_mask[row, place]:
                    break  # a streak ends at the first slot that does not count
                hard = -float(logits[slot - 1].log_softmax(0)[ids[place]])
                rank = int((logits[slot - 1] > logits[slot - 1][ids[place]]).sum())
                loss = hard
                if recipe.temperature:
                    ours = (logits[slot - 1] / recipe.temperature).log_softmax(0)
                    theirs = (teacher[place - 1] / recipe.temperature).log_softmax(0)
                    soft = recipe.temperature**2 * float((theirs.exp() * (theirs - ours)).sum())
                    share = 1.0 if recipe.kl_weight is None else recipe.kl_weight
                    loss = share * soft + (1 - share) * hard
                weight = math.exp(-(slot - 1) / (recipe.gamma or math.inf))
                above, below = above + weight * loss, below + weight
                right, scored = right + (rank == 0), scored + 1
                lead1, lead8 = lead1 and rank < 1, lead8 and rank < 8
                streak1, streak8 = streak1 + lead1, streak8 + lead8
    return {
        "loss": above / below,
        "accuracy": right / scored,
        "streak1": streak1 / blocks,
        "streak8": streak8 / blocks,
    }


@pytest.mark.parametrize("recipe", [CE, KL, COMPOSITE], ids=lambda recipe: recipe.loss)
@torch.no_grad()
def test_metrics_are_those_of_a_loop_over_the_blocks(bench: Bench, recipe: Recipe) -> None:
    batch = planted(bench, bench.batch(recipe))
    assert int((batch.anchors < 0).sum()) == 2
    found = batch_metrics(bench.drafter, bench.target, batch, last_hidden(bench.target, batch.ids))
    assert found == pytest.approx(by_hand(bench, batch), rel=1e-5)
    assert 0.5 < found["streak1"] < found["streak8"]


def test_what_is_masked_or_padded_does_not_count(bench: Bench) -> None:
    batch = bench.batch(CE)
    half = batch.loss_mask.clone()
    half[:, ::2] = False
    masked = replace(batch, loss_mask=half)
    assert batch_metrics(bench.drafter, bench.target, masked, None) != batch.metrics
    longer = replace(
        batch,
        ids=torch.nn.functional.pad(batch.ids, (0, 7), value=9),
        loss_mask=torch.nn.functional.pad(batch.loss_mask, (0, 7)),
        taps=torch.nn.functional.pad(batch.taps, (0, 0, 0, 7), value=5.0),
    )
    assert batch_metrics(bench.drafter, bench.target, longer, None) == pytest.approx(batch.metrics, rel=1e-5)
    filled = replace(batch, anchors=torch.nn.functional.pad(batch.anchors, (0, 3), value=-1))
    assert batch_metrics(bench.drafter, bench.target, filled, None) == pytest.approx(batch.metrics, rel=1e-5)


def test_without_a_teacher_only_a_hard_loss_is_computed(bench: Bench) -> None:
    assert "loss" not in batch_metrics(bench.drafter, bench.target, bench.batch(KL), None)
    assert "loss" in batch_metrics(bench.drafter, bench.target, bench.batch(CE), None)


@torch.no_grad()
def test_soft_labels_are_the_targets_own_distribution(bench: Bench) -> None:
    batch = bench.batch(KL)
    teacher = last_hidden(bench.target, batch.ids)
    labels = soft_labels(bench.target, batch, teacher, vocab_size=64)
    logits = bench.target.model(input_ids=batch.ids, use_cache=False).logits
    row, block = 1, 2
    anchor = int(batch.anchors[row, block])
    for slot in range(1, 6):
        clean = (logits[row, anchor + slot - 1] / 2).log_softmax(0)
        expected = clean.topk(16)
        assert labels.ids[row, block, slot - 1].tolist() == expected.indices.tolist()
        torch.testing.assert_close(labels.logprobs[row, block, slot - 1], expected.values)
    assert label_noise(bench.target, replace(batch, soft=labels), teacher, vocab_size=64) < 1e-6
    shifted = replace(labels, logprobs=labels.logprobs + math.log(1.1))
    kept = labels.logprobs.exp().sum(-1)
    noise = label_noise(bench.target, replace(batch, soft=shifted), teacher, vocab_size=64)
    assert noise == pytest.approx(0.05 * float(kept.mean()), rel=0.1)


def test_what_is_written_is_read(bench: Bench, tmp_path: Path) -> None:
    batch = bench.batch(COMPOSITE)
    write_replay(tmp_path / "replay.safetensors", batch)
    again = read_replay(tmp_path / "replay.safetensors")
    for name in ("ids", "loss_mask", "anchors", "taps"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
    assert again.soft is not None
    assert batch.soft is not None
    assert torch.equal(again.soft.ids, batch.soft.ids)
    assert torch.equal(again.soft.logprobs, batch.soft.logprobs)
    assert (again.metrics, again.recipe, again.dtype) == (batch.metrics, batch.recipe, batch.dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: replace(batch, metrics={}), "KeyError 'loss'; the file is no complete replay"),
        (lambda batch: replace(batch, anchors=batch.anchors + 99), "are not positions of the texts"),
        (lambda batch: replace(batch, loss_mask=batch.loss_mask[:, 1:]), "disagree"),
        (lambda batch: replace(batch, recipe=KL.model_copy(update={"block_size": 9})), r"are not \[N, n, 8, k\]"),
        (lambda batch: replace(batch, recipe=KL.model_copy(update={"temperature": None})), "temperature is missing"),
    ],
)
def test_a_batch_that_contradicts_itself_is_named(bench: Bench, tmp_path: Path, change: object, message: str) -> None:
    write_replay(tmp_path / "replay.safetensors", change(bench.batch(KL)))  # type: ignore[operator]
    with pytest.raises(MetricReplayError, match=message):
        read_replay(tmp_path / "replay.safetensors")


def test_a_probe_is_no_batch(bench: Bench) -> None:
    path = bench.with_probe().checkpoint.probe
    assert path is not None
    with pytest.raises(MetricReplayError, match="is dflash-probe version 1, expected dflash-replay version 1"):
        read_replay(path)
