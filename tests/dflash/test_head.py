"""The head a block at a time, against all logits at once."""

import pytest
import torch

from dflash import head
from dflash.head import best_and_ranks, blocks_of, scan


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(head, "BLOCK_ROWS", 7)
    monkeypatch.setattr(head, "ELEMENTS", 21)


def random_case(ties: bool = False):
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(40, 8, generator=generator), torch.randn(11, 8, generator=generator)
    if ties:
        weight, hidden = weight.sign(), hidden.sign()
    return weight, hidden, torch.randint(0, 40, (11,), generator=generator)


@pytest.mark.parametrize("ties", [False, True])
def test_best_and_wanted_logits_are_those_of_the_whole_product(ties):
    weight, hidden, wanted = random_case(ties)
    found = scan(hidden, wanted, blocks_of(weight))
    logits = hidden @ weight.T
    torch.testing.assert_close(found.best, logits.amax(1))
    torch.testing.assert_close(found.wanted, logits.gather(1, wanted[:, None])[:, 0])
    assert torch.equal(found.token, logits.argmax(1))


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_count_the_better_and_of_equals_the_earlier(ties):
    weight, hidden, wanted = random_case(ties)
    drafted, ranks = best_and_ranks(hidden, wanted, blocks_of(weight))
    order = (hidden @ weight.T).argsort(dim=1, descending=True, stable=True)
    assert torch.equal(drafted, order[:, 0])
    assert torch.equal(order.gather(1, ranks[:, None])[:, 0], wanted)


def test_the_greedy_token_falls_short_by_exactly_nothing_in_bfloat16():
    weight, hidden, _ = random_case()
    weight, hidden = weight.bfloat16(), hidden.bfloat16()
    greedy = scan(hidden, torch.zeros(11, dtype=torch.long), blocks_of(weight)).token
    found = scan(hidden, greedy, blocks_of(weight))
    assert torch.equal(found.best, found.wanted)


@pytest.mark.parametrize("token", [3, 39])
def test_nan_in_the_head_shows(token):
    weight, hidden, wanted = random_case()
    weight[token, 2] = torch.nan
    assert bool(scan(hidden, wanted, blocks_of(weight)).best.isnan().all())
