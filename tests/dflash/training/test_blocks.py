"""Anchors: which positions may be one, that they are keyed by sample, and what each slot is graded on."""

from dataclasses import replace

import torch

from dflash.config import DrafterConfig
from dflash.training.batch import Features
from dflash.training.blocks import Blocks, blocks_at, draw_blocks, valid_anchors
from tests.dflash.test_config import changed

CONFIG = DrafterConfig.from_dict(changed(block_size=4), source="test")


def features(
    masks: list[str], starts: list[list[int]] | None = None, samples: list[list[int]] | None = None
) -> Features:
    """Rows from strings of ``x`` (a label) and ``.``; token ids count up, so that they say where they stand."""
    loss_mask = torch.tensor([[character == "x" for character in mask] for mask in masks])
    ids = torch.arange(loss_mask.numel()).view(loss_mask.shape)
    begins = torch.zeros_like(ids) if starts is None else torch.tensor(starts)
    return Features(ids, loss_mask, begins, torch.zeros(*ids.shape, 4), samples or [[row] for row in range(len(masks))])


def drawn(rows: Features, num_anchors: int, *, seed: int = 0, epoch: int = 0) -> Blocks:
    return draw_blocks(rows, CONFIG, num_anchors=num_anchors, seed=seed, epoch=epoch)


def test_an_anchor_and_the_token_behind_it_are_labels() -> None:
    valid = valid_anchors(features(["..xx.xxx.x"]))
    assert valid[0].nonzero()[:, 0].tolist() == [2, 5, 6]


def test_the_last_anchor_is_the_token_before_the_last() -> None:
    assert valid_anchors(features(["xxxx"]))[0].tolist() == [True, True, True, False]


def test_an_anchor_and_its_first_slot_are_of_one_document() -> None:
    valid = valid_anchors(features(["xxxxxx"], starts=[[0, 0, 0, 3, 3, 3]]))
    assert valid[0].nonzero()[:, 0].tolist() == [0, 1, 3, 4]


def test_slots_are_graded_on_labels_of_their_document_within_the_row() -> None:
    rows = features(["xxxxxx.xxx"], starts=[[0, 0, 0, 0, 4, 4, 4, 4, 4, 4]])
    blocks = blocks_at(rows, CONFIG, torch.tensor([[0, 2, 4, 8, -1]]))
    assert blocks.scored[0].tolist() == [
        [True, True, True],
        [True, False, False],  # a border after position 3
        [True, False, True],  # position 6 is no label
        [True, False, False],  # the row ends
        [False, False, False],  # a filler
    ]
    assert blocks.starts.tolist() == [[0, 0, 4, 4, 0]]
    assert torch.equal(blocks.right[0][blocks.scored[0]], blocks.places[0][blocks.scored[0]])
    assert blocks.places[0, 0].tolist() == [1, 2, 3]


def test_anchors_are_valid_distinct_ascending_and_filled_up() -> None:
    rows = features(["." * 5 + "x" * 30 + "..", "." * 30 + "xxx...."])
    blocks = drawn(rows, 8)
    assert blocks.anchors.shape == (2, 8)
    first = blocks.anchors[0].tolist()
    assert first == sorted(set(first))
    assert all(valid_anchors(rows)[0, anchor] for anchor in first)
    assert blocks.anchors[1].tolist() == [30, 31, -1, -1, -1, -1, -1, -1]


def test_a_row_without_an_anchor_is_all_fillers() -> None:
    blocks = drawn(features([".x.x.x....", "xxxxxxxxxx"]), 3)
    assert blocks.anchors[0].tolist() == [-1, -1, -1]
    assert not blocks.scored[0].any()
    assert (blocks.anchors[1] >= 0).all()


def test_more_anchors_than_positions_are_fillers() -> None:
    assert drawn(features(["xxx"]), 9).anchors.tolist() == [[0, 1] + [-1] * 7]


def test_anchors_change_with_seed_epoch_and_sample() -> None:
    rows = features(["x" * 200])
    base = drawn(rows, 16).anchors
    assert torch.equal(drawn(rows, 16).anchors, base)
    assert not torch.equal(drawn(rows, 16, seed=1).anchors, base)
    assert not torch.equal(drawn(rows, 16, epoch=1).anchors, base)
    assert not torch.equal(drawn(replace(rows, samples=[[5]]), 16).anchors, base)


def test_every_position_is_as_likely_an_anchor() -> None:
    rows = features(["x" * 21])
    counts = torch.zeros(21)
    for epoch in range(400):
        counts[drawn(rows, 5, epoch=epoch).anchors[0]] += 1
    assert counts[20] == 0
    assert (counts[:20] - 100).abs().max() < 40  # binomial: a standard deviation of 8.7


def test_a_samples_anchors_do_not_depend_on_row_batch_or_padding() -> None:
    mask = "." * 3 + "x" * 40
    alone = drawn(features([mask], samples=[[7]]), 12).anchors[0]
    beside = features(["x" * 60, mask + "." * 17], samples=[[1], [7]])
    assert torch.equal(drawn(beside, 12).anchors[1], alone)
    padded = replace(beside, starts=torch.tensor([[0] * 60, [0] * 43 + [43] * 17]))
    assert torch.equal(drawn(padded, 12).anchors[1], alone)


def test_packed_documents_compete_with_the_scores_they_draw_alone() -> None:
    """Of a row's anchors those in a document are its own of smallest score, moved to where the document lies."""
    row = features(["x" * 50 + "." * 2 + "x" * 30], starts=[[0] * 50 + [50] * 32], samples=[[3, 9]])
    packed = drawn(row, 14).anchors[0]
    inside = {3: packed[packed < 50], 9: packed[packed >= 50] - 50}
    alone = {3: features(["x" * 50], samples=[[3]]), 9: features(["." * 2 + "x" * 30], samples=[[9]])}
    for sample, anchors in inside.items():
        assert len(anchors) > 0
        assert torch.equal(drawn(alone[sample], len(anchors)).anchors[0], anchors)
