"""Samplers on made-up logits; what they emit in a whole decoding is tested in test_decode.py."""

import pytest
import torch

from dflash import sampling
from dflash.errors import UsageError
from dflash.sampling import Greedy, Rejection, TargetMatch, make_sampler, match, probabilities, reject, residual

ROWS = 40_000


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_drafts_stand_up_to_the_first_that_the_target_did_not_choose():
    drafted = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 9]])
    chosen = torch.tensor([[1, 2, 3, 4]]).expand(4, -1)
    verdict = match(drafted, chosen)
    assert verdict.accepted.tolist() == [3, 1, 0, 2]
    assert verdict.token.tolist() == [4, 2, 1, 3]


def test_the_residual_is_what_p_has_above_q():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.1, 0.2, 0.7]])
    q = torch.tensor([[0.2, 0.6, 0.2], [0.2, 0.3, 0.5], [0.0, 0.0, 0.0]])
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.1, 0.2, 0.7]])  # p itself where nothing is left
    torch.testing.assert_close(residual(p, q), expected)


def test_a_draft_stands_with_probability_p_over_q():
    p = torch.tensor([0.1, 0.6, 0.3]).expand(ROWS, 2, 3)
    q = torch.tensor([0.5, 0.3, 0.2]).expand(ROWS, 1, 3)
    for token, chance in ((0, 0.2), (1, 1.0), (2, 1.0)):
        verdict = reject(torch.full((ROWS, 1), token), q, p, seeded())
        assert verdict.accepted.double().mean() == pytest.approx(chance, abs=0.01)
    rejected = reject(torch.zeros(ROWS, 1, dtype=torch.long), q, p, seeded())
    again = rejected.token[rejected.accepted == 0].bincount(minlength=3) / (rejected.accepted == 0).sum()
    torch.testing.assert_close(again, torch.tensor([0.0, 0.75, 0.25]), atol=0.01, rtol=0)


def test_nothing_behind_a_rejected_draft_stands():
    p = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])[None]
    q = torch.full((1, 2, 2), 0.5)
    assert reject(torch.tensor([[0, 1]]), q, p, seeded()).accepted.tolist() == [0]
    assert reject(torch.tensor([[1, 1]]), q, p, seeded()).accepted.tolist() == [2]


def test_the_bonus_behind_a_whole_block_comes_from_p():
    p = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).expand(ROWS, 2, 2)
    q = p[:, :1]
    drafted = torch.multinomial(q[:, 0], 1, generator=seeded(1))
    verdict = reject(drafted, q, p, seeded())
    assert bool((verdict.accepted == 1).all())  # p = q rejects nothing
    assert verdict.token.double().mean() == pytest.approx(0.8, abs=0.01)


def test_probabilities_are_float32_whatever_the_logits_are():
    logits = torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16)
    assert probabilities(logits, 0.5).dtype == torch.float32
    torch.testing.assert_close(probabilities(logits, 2.0), torch.softmax(torch.tensor([0.5, 1.0, 2.0]), 0))


def test_samplers_draft_as_their_names_say():
    logits = torch.zeros(1, 3, 50)
    logits[..., 7] = 1e-3
    assert make_sampler("target-match", temperature=1.0).draft(logits).tolist() == [[7, 7, 7]]
    assert Greedy().draft(logits).tolist() == [[7, 7, 7]]
    assert make_sampler("rejection", temperature=1.0).draft(logits).tolist() != [[7, 7, 7]]


def test_the_seed_decides_and_the_temperature_counts():
    logits = torch.randn(200, 30, generator=seeded())

    def drawn(**changes):
        return make_sampler("rejection", **({"temperature": 1.0, "seed": 3} | changes)).sample(logits).tolist()

    assert drawn() == drawn() != drawn(seed=4)
    assert drawn(temperature=1e-4) == logits.argmax(-1).tolist() != drawn()


def test_samplers_are_made_by_name():
    kinds = {"rejection": Rejection, "target-match": TargetMatch}
    for name, kind in kinds.items():
        sampler = make_sampler(name, temperature=0.7)
        assert isinstance(sampler, kind)
        assert (sampler.name, sampler.temperature) == (name, 0.7)
        assert make_sampler(name, temperature=0) == Greedy()


@pytest.mark.parametrize(
    ("name", "temperature", "says"),
    [("rejection", -1.0, "temperature -1.0 is negative"), ("greedy", 0.5, "greedy sampler has temperature 0, not 0.5")],
)
def test_a_temperature_that_does_not_fit_is_refused(name, temperature, says):
    with pytest.raises(UsageError, match=says):
        make_sampler(name, temperature=temperature)


def test_rejection_looks_its_residual_up_where_a_test_can_spoil_it(monkeypatch):
    p, q = torch.tensor([0.0, 1.0]).expand(1, 2, 2), torch.tensor([1.0, 0.0]).expand(1, 1, 2)
    monkeypatch.setattr(sampling, "residual", lambda p, q: q)
    assert reject(torch.zeros(1, 1, dtype=torch.long), q, p, seeded()).token.tolist() == [0]
