"""Documents in rows: none lost, none cut, none too long, the same everywhere."""

import random

import pytest
import torch

from dflash.training import packing
from dflash.training.batch import Features
from dflash.training.blocks import valid_anchors
from dflash.training.packing import PackingError, first_fit, lay_out
from tests.dflash.training.documents import documents, rows_of


def drawn_lengths(count: int, most: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randint(1, most) for _ in range(count)]


def test_every_document_is_in_one_row_and_no_row_is_too_long() -> None:
    lengths = drawn_lengths(500, 100)
    rows = first_fit(lengths, 128)
    assert sorted(place for row in rows for place in row) == list(range(500))
    assert max(sum(lengths[place] for place in row) for row in rows) <= 128
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_rows_are_nearly_full() -> None:
    lengths = drawn_lengths(500, 100)
    assert sum(lengths) / (128 * len(first_fit(lengths, 128))) > 0.93


def test_a_document_goes_into_the_first_row_with_room() -> None:
    assert first_fit([6, 7, 4, 3, 5, 10], 10) == [[0, 2], [1, 3], [4], [5]]


def test_a_row_closes_when_too_many_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "OPEN_ROWS", 2)
    assert first_fit([6, 7, 8, 2, 3], 10) == [[0], [1, 3], [2], [4]]


def test_a_full_row_is_not_an_open_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "OPEN_ROWS", 2)
    assert first_fit([5, 10, 10, 5], 10) == [[0, 3], [1], [2]]


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(PackingError, match=r"a sample has 11 tokens, and a packed row has 10; .* data\.max_length"):
        first_fit([3, 11], 10)


def test_unpacked_rows_hold_one_document_of_any_length() -> None:
    samples = documents([4, 30, 7], vocabulary=50)
    rows = rows_of(samples, [2, 0, 1], length=10, packing=False)
    assert [[one.index for one in row] for row in rows] == [[2], [0], [1]]


def test_packed_rows_keep_the_order_asked_for() -> None:
    samples = documents([4, 6, 7, 3], vocabulary=50)
    rows = rows_of(samples, [3, 2, 1, 0], length=10, packing=True)
    assert [[one.index for one in row] for row in rows] == [[3, 2], [1, 0]]


def test_a_layout_says_where_each_document_lies_and_padding_is_one_of_its_own() -> None:
    samples = documents([3, 2, 4], vocabulary=50)
    layout = lay_out([[samples[0], samples[1]], [samples[2]]])
    assert layout.ids.tolist() == [
        [*samples[0].ids.tolist(), *samples[1].ids.tolist()],
        [*samples[2].ids.tolist(), 0],
    ]
    assert layout.loss_mask.tolist() == [[False, True, True, True, True], [False, True, True, True, False]]
    assert layout.starts.tolist() == [[0, 0, 0, 3, 3], [0, 0, 0, 0, 4]]
    assert layout.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert layout.lengths == [5, 4]
    assert layout.samples == [[0, 1], [2]]
    assert [layout.borders(row).tolist() for row in range(2)] == [[0, 3, 5], [0, 4]]


def test_no_anchor_has_its_first_slot_in_another_document_or_in_the_padding() -> None:
    samples = documents([3, 2, 4], vocabulary=50)
    layout = lay_out([[samples[0], samples[1]], [samples[2]]])
    features = Features(layout.ids, layout.loss_mask, layout.starts, torch.zeros(2, 5, 1), layout.samples)
    assert valid_anchors(features).tolist() == [[False, True, False, True, False], [False, True, True, False, False]]
