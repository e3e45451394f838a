"""The order of rows: a permutation an epoch, shared out so that the number of ranks does not show."""

from collections import Counter

import pytest

from dflash.training.order import Order, Place


def _taken(order: Order, step: int) -> list[list[Place]]:
    return list(order.micro_batches(step))


def test_every_row_is_taken_once_an_epoch() -> None:
    order = Order(total=10, rows=2, accumulate=2, seed=3)
    assert order.steps_per_epoch == 3
    for epoch in range(2):
        places = [
            place
            for step in range(epoch * 3, epoch * 3 + 3)
            for batch in _taken(order, step)
            for place in batch
            if not place.blank
        ]
        assert Counter(place.row for place in places) == Counter(range(10))


def test_the_last_step_of_an_epoch_is_filled_with_blanks_to_the_same_shape() -> None:
    order = Order(total=5, rows=2, accumulate=2, seed=0)
    batches = _taken(order, 1)
    assert [len(batch) for batch in batches] == [2, 2]
    assert [place.blank for batch in batches for place in batch] == [False, True, True, True]


def test_epochs_differ_and_seeds_differ() -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        order = Order(total=50, rows=50, accumulate=1, seed=seed)
        return [place.row for place in _taken(order, epoch)[0]]

    assert rows(0, 0) != rows(0, 1)
    assert rows(0, 0) != rows(1, 0)
    assert rows(0, 1) == rows(0, 1)


@pytest.mark.parametrize("total", [16, 13])
def test_two_ranks_take_what_one_of_twice_the_rows_takes(total: int) -> None:
    one = Order(total=total, rows=4, accumulate=2, seed=7)
    two = [Order(total=total, rows=2, accumulate=2, seed=7, rank=rank, world=2) for rank in range(2)]
    for step in range(5):
        together = [first + second for first, second in zip(*(_taken(order, step) for order in two), strict=True)]
        assert together == _taken(one, step)


def test_a_step_is_a_function_of_its_number_alone() -> None:
    asked_in_order = Order(total=9, rows=2, accumulate=1, seed=5)
    wanted = [_taken(asked_in_order, step) for step in range(12)]
    assert _taken(Order(total=9, rows=2, accumulate=1, seed=5), 11) == wanted[11]
    backwards = Order(total=9, rows=2, accumulate=1, seed=5)
    assert [_taken(backwards, step) for step in reversed(range(12))] == wanted[::-1]


@pytest.mark.parametrize(("epochs", "most", "steps"), [(2, None, 6), (None, 100, 100), (2, 4, 4), (2, 100, 6)])
def test_a_run_ends_with_its_epochs_or_its_steps_whichever_comes_first(
    epochs: int | None, most: int | None, steps: int
) -> None:
    assert Order(total=5, rows=2, accumulate=1, seed=0).steps(epochs, most) == steps
