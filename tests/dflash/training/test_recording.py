"""What a checkpoint carries is what the doctor finds again, whatever rows the trainer trained on."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dflash import checks
from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.drafter import Drafter
from dflash.hidden_states import LoadedTaps
from dflash.manifest import PROBE, REPLAY
from dflash.metric_replay import SoftLabels, batch_metrics, last_hidden, read_replay, soft_labels
from dflash.probe import read_probe
from dflash.recipes import Recipe
from dflash.target import Target
from dflash.training import recording
from dflash.training.batch import Features, Sample
from dflash.training.blocks import Blocks, draw_blocks
from dflash.training.packing import lay_out
from dflash.training.recording import as_texts, probe_tokens, record, run_probe
from tests.fixtures.corpus import documents
from tests.tiny import Pair

PAPER = Recipe(name="paper", loss="ce", gamma=4.0, block_size=8)
KL = Recipe(name="forward-kl", loss="kl", gamma=4.0, temperature=1.0, block_size=8)
LENGTHS = (90, 40, 64)


@pytest.fixture(scope="module")
def target(tiny_dense: Pair) -> Target:
    return Target.load(tiny_dense.target)


@pytest.fixture(scope="module")
def drafter(tiny_dense: Pair) -> Drafter:
    return build_drafter(read_checkpoint(tiny_dense.drafter), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def samples(target: Target) -> list[Sample]:
    stream = documents(4)
    made = []
    for index, length in enumerate(LENGTHS):
        ids: list[int] = []
        while len(ids) < length:
            ids += target.tokenizer(next(stream))["input_ids"]
        mask = torch.arange(length) >= 8
        made.append(Sample(index, torch.tensor(ids[:length]), mask))
    return made


def features(target: Target, drafter: Drafter, rows: Sequence[Sequence[Sample]]) -> Features:
    """The states of each document by itself, laid into its row."""
    layout = lay_out(rows)
    layers = drafter.config.target_layer_ids
    taps = torch.zeros(*layout.ids.shape, drafter.config.tap_width)
    hidden = torch.zeros(*layout.ids.shape, drafter.config.hidden_size)
    for place, row in enumerate(rows):
        start = 0
        for sample in row:
            span = slice(start, start + len(sample.ids))
            taps[place, span] = target.taps(sample.ids[None], layers).taps[0]
            hidden[place, span] = last_hidden(target, sample.ids[None])[0]
            start = span.stop
    return Features(layout.ids, layout.loss_mask, layout.starts, taps, layout.samples, hidden)


def recorded(
    directory: Path,
    target: Target,
    drafter: Drafter,
    batch: Features,
    *,
    recipe: Recipe = PAPER,
    anchors: int = 6,
    soft: SoftLabels | None = None,
) -> tuple[dict[str, float], Blocks]:
    blocks = draw_blocks(batch, drafter.config, num_anchors=anchors, seed=1, epoch=0)
    figures = record(
        directory,
        drafter=drafter,
        vocabulary=target,
        target=target,
        features=batch,
        blocks=blocks,
        recipe=recipe,
        soft=soft,
        probe=None,
    )
    return figures, blocks


@pytest.mark.parametrize("packed", [False, True], ids=["a row each", "packed"])
def test_the_doctor_finds_the_figures_again(
    packed: bool, target: Target, drafter: Drafter, samples: list[Sample], tmp_path: Path
) -> None:
    rows = [samples] if packed else [[sample] for sample in samples]
    figures, blocks = recorded(tmp_path, target, drafter, features(target, drafter, rows), anchors=9)
    batch = read_replay(tmp_path / REPLAY)
    check = checks.training_metric_replay(drafter, target, target, batch)
    assert (check.status, batch.metrics) == ("pass", figures), check.explanation
    assert int((batch.anchors >= 0).sum()) == int((blocks.anchors >= 0).sum())
    assert 0 < figures["accuracy"] < 1


def test_packed_documents_are_recorded_as_texts_of_their_own(
    target: Target, drafter: Drafter, samples: list[Sample], tmp_path: Path
) -> None:
    packed = features(target, drafter, [samples])
    blocks = draw_blocks(packed, drafter.config, num_anchors=30, seed=1, epoch=0)
    apart = features(target, drafter, [[sample] for sample in samples])
    batch, hidden = as_texts(packed, blocks, recipe=PAPER, facts=LoadedTaps(target).facts, soft=None)
    assert torch.equal(batch.taps, apart.taps)
    assert hidden is not None
    assert apart.hidden is not None
    assert torch.equal(hidden, apart.hidden)
    for row, length in enumerate(LENGTHS):
        assert torch.equal(batch.ids[row, :length], samples[row].ids)
        assert int(batch.anchors[row].max()) <= length - 2


def test_soft_labels_are_those_of_the_features(
    target: Target, drafter: Drafter, samples: list[Sample], tmp_path: Path
) -> None:
    rows = features(target, drafter, [[sample] for sample in samples])
    figures, _ = recorded(tmp_path, target, drafter, rows, recipe=KL)
    batch = read_replay(tmp_path / REPLAY)
    assert checks.clean_targets(target, target, batch).status == "pass"
    assert checks.training_metric_replay(drafter, target, target, batch).status == "pass"
    assert figures["loss"] > 0


def test_noisy_labels_of_a_step_are_recorded_as_they_were(
    target: Target, drafter: Drafter, samples: list[Sample], tmp_path: Path
) -> None:
    rows = features(target, drafter, [samples])
    assert rows.hidden is not None
    clean, blocks = recorded(tmp_path, target, drafter, rows, recipe=KL, anchors=9)
    noise = 0.3 * torch.randn(rows.hidden.shape, generator=torch.Generator().manual_seed(0))
    step, _ = as_texts(rows, blocks, recipe=KL, facts=LoadedTaps(target).facts, soft=None)
    # of the packed row: one text with all of its blocks
    whole = type(step)(rows.ids, rows.loss_mask, blocks.anchors, rows.taps, {}, KL, "none", "float32", "")
    noisy = soft_labels(target, whole, rows.hidden + noise, vocab_size=target.vocab_size)
    figures, _ = recorded(tmp_path, target, drafter, rows, recipe=KL, anchors=9, soft=noisy)
    batch = read_replay(tmp_path / REPLAY)
    assert figures == clean  # figures are without noise
    assert batch.soft is not None
    assert checks.clean_targets(target, target, batch).status == "fail"
    kept = noisy.ids[0][(blocks.anchors[0] >= LENGTHS[0]) & (blocks.anchors[0] < LENGTHS[0] + LENGTHS[1])]
    assert torch.equal(batch.soft.ids[1, : len(kept)], kept)


def test_what_is_recorded_is_bounded(
    target: Target, drafter: Drafter, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = features(target, drafter, [[sample] for sample in samples])
    monkeypatch.setattr(recording, "MOST_DOCUMENTS", 2)
    recorded(tmp_path, target, drafter, rows)
    assert len(read_replay(tmp_path / REPLAY).ids) == 2
    monkeypatch.setattr(recording, "MOST_BYTES", 1)
    figures, _ = recorded(tmp_path, target, drafter, rows)
    alone = read_replay(tmp_path / REPLAY)
    assert len(alone.ids) == 1
    assert batch_metrics(drafter, target, alone, None) == pytest.approx(figures)


def test_without_an_anchor_there_is_nothing_to_replay(
    target: Target, drafter: Drafter, samples: list[Sample], tmp_path: Path
) -> None:
    silent = [Sample(0, samples[0].ids, torch.zeros_like(samples[0].loss_mask))]
    figures, _ = recorded(tmp_path, target, drafter, features(target, drafter, [silent]))
    assert figures == {}
    assert not (tmp_path / REPLAY).exists()


def test_the_probe_is_fixed_by_data_and_target(
    target: Target, drafter: Drafter, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = [token for sample in samples for token in sample.ids.tolist()]
    tokens = probe_tokens(samples)
    assert len(tokens) == 256
    assert tokens == (everything + everything)[:256]
    assert probe_tokens(samples, 5) == samples[0].ids[:5].tolist()
    monkeypatch.setattr(recording, "probe_tokens", lambda samples: tokens[:80])  # every one is a pass of its own
    probe = run_probe(target, samples, drafter.config.target_layer_ids)
    record(
        tmp_path,
        drafter=drafter,
        vocabulary=target,
        target=LoadedTaps(target).facts,
        features=features(target, drafter, [[samples[1]]]),
        blocks=draw_blocks(features(target, drafter, [[samples[1]]]), drafter.config, num_anchors=2, seed=0, epoch=0),
        recipe=PAPER,
        soft=None,
        probe=probe,
    )
    found = read_probe(tmp_path / PROBE)
    check = checks.hidden_state_fingerprint(LoadedTaps(target), drafter, target, found)
    assert check.status == "pass", check.explanation
