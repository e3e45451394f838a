"""Random numbers by name."""

import torch

from dflash.training.randomness import generator


def numbers(*key: int | str, seed: int = 0) -> list[float]:
    return torch.rand(4, generator=generator(seed, *key)).tolist()


def test_equal_keys_draw_equal_numbers() -> None:
    assert numbers(1, 2, "anchors") == numbers(1, 2, "anchors")


def test_every_part_of_a_key_counts() -> None:
    keys = [(1, 2, "anchors"), (1, 2, "noise"), (2, 1, "anchors"), (12, "anchors"), (1, 2)]
    drawn = [numbers(*key) for key in keys] + [numbers(1, 2, "anchors", seed=1)]
    assert len({tuple(one) for one in drawn}) == len(drawn)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    numbers(1)
    assert torch.equal(torch.rand(2), expected)
