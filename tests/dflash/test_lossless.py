"""The rule of ``lossless`` on made-up logits, and the check on real decodings, clean and spoiled."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dflash.batch import Text
from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.decode import decode
from dflash.lossless import NEAR_TIE, Lossless, lossless, read_again
from dflash.sampling import Greedy
from dflash.target import Target
from tests.dflash.greedy import tiny_prompts
from tests.tiny import Pair

PROMPT = [50, 51]


def text(*completion: int, id: str = "p0") -> Text:
    return Text(id, [*PROMPT, *completion], len(PROMPT), torch.empty(0))


class Logits:
    """Logits of 60 tokens, 0 but for those given; remembers what it was asked behind."""

    def __init__(self, **best: float) -> None:
        self.row = torch.full((60,), -10.0)
        for token, logit in best.items():
            self.row[int(token[1:])] = logit
        self.asked: list[list[int]] = []

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self.asked.append(list(tokens))
        return self.row


def test_equal_completions_need_no_pass_of_the_target() -> None:
    logits = Logits()
    found = lossless([text(1, 2), text(3, id="p1")], [[1, 2], [3]], logits, exact=True)
    assert (found.check.status, found.prompts, found.check.measured) == ("pass", 2, 0)
    assert logits.asked == []


def test_float32_allows_no_difference_however_small_its_margin() -> None:
    found = lossless([text(1, 2, 3)], [[1, 7, 3]], Logits(_2=4.0, _7=4.0), exact=True)
    assert (found.check.status, found.check.measured, found.check.limit) == ("fail", 1, 0)
    assert found.near_ties == []
    assert "prompt p0 at token 1" in found.check.explanation


@pytest.mark.parametrize(("margin", "status"), [(0.0, "pass"), (NEAR_TIE, "pass"), (0.3125, "fail"), (2.0, "fail")])
def test_bfloat16_allows_a_first_difference_at_a_near_tie(margin: float, status: str) -> None:
    logits = Logits(_2=4.0 - margin, _7=4.0)
    found = lossless([text(1, 2, 3), text(9, id="p1")], [[1, 7, 8], [9]], logits, exact=False)
    assert logits.asked == [[*PROMPT, 1]]  # the common beginning, and nothing behind the first difference
    assert (found.check.status, found.check.measured, found.check.limit) == (status, margin, NEAR_TIE)
    assert found.prompts == 1
    [first] = found.near_ties if status == "pass" else found.differences
    assert (first.prompt, first.position, first.decoded, first.greedy, first.margin) == ("p0", 1, 2, 7, margin)
    assert ("stopped at a near-tie: prompt p0 at token 1" in found.check.explanation) == (status == "pass")


def test_a_token_that_is_no_candidate_is_no_near_tie_where_two_others_are() -> None:
    found = lossless([text(5)], [[7]], Logits(_7=4.0, _8=3.99, _5=1.0), exact=False)
    assert (found.check.status, found.check.measured) == ("fail", 3.0)


@pytest.mark.parametrize("decoded", [(1, 2), (1, 2, 3, 4)])
def test_an_end_elsewhere_is_a_difference(decoded: tuple[int, ...]) -> None:
    for exact in (True, False):
        found = lossless([text(*decoded)], [[1, 2, 3]], Logits(), exact=exact)
        assert (found.check.status, found.prompts, len(found.differences)) == ("fail", 0, 1)
        assert found.differences[0].margin is None


def test_a_decoding_that_was_stopped_is_compared_as_far_as_it_went() -> None:
    assert lossless([text(1, 2)], [[1, 2, 3]], Logits(), exact=True, stopped=True).prompts == 1
    assert lossless([text(1, 9)], [[1, 2, 3]], Logits(), exact=True, stopped=True).check.status == "fail"
    assert lossless([text(1, 2, 3, 4)], [[1, 2, 3]], Logits(), exact=True, stopped=True).check.status == "fail"


def decoded_losslessly(pair: Pair, dtype: torch.dtype, prompts: slice, new_tokens: int) -> Lossless:
    target = Target.load(pair.target, kernel="torch", dtype=dtype)
    drafter = build_drafter(read_checkpoint(pair.drafter), device="cpu", dtype=dtype)
    ids = list(tiny_prompts(pair, target, prompts.stop).items())[prompts]
    greedy = target.generate_greedy([prompt for _, prompt in ids], new_tokens, ignore_eos=True)
    decoding = decode(
        drafter,
        target,
        ids,
        max_new_tokens=new_tokens,
        end=frozenset(),
        sampler=Greedy(),
        max_blocks=None,
        progress=lambda done, total: None,
    )
    return lossless(decoding.texts, greedy, read_again(target), exact=dtype == torch.float32)


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_clean_decoding_in_float32_is_lossless(kind: str, request: pytest.FixtureRequest) -> None:
    found = decoded_losslessly(request.getfixturevalue(f"tiny_{kind}"), torch.float32, slice(1), 24)
    assert (found.check.status, found.prompts) == ("pass", 1)


def test_clean_decoding_in_bfloat16_differs_at_near_ties_only(tiny_hybrid: Pair) -> None:
    """Whether there is a near-tie is the processor's business; that nothing else differs is not."""
    found = decoded_losslessly(tiny_hybrid, torch.bfloat16, slice(2, 3), 24)
    assert found.check.status == "pass"
    assert found.prompts + len(found.near_ties) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
def test_recurrent_states_that_are_not_rolled_back_fail(
    tiny_hybrid: Pair, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.rollback._Net.restore", lambda net: None)
    monkeypatch.setattr("dflash.rollback._Net.replay", lambda net, cache, count: None)
    found = decoded_losslessly(tiny_hybrid, dtype, slice(1, 2), 12)
    assert found.check.status == "fail"
    assert found.differences[0].margin is not None
    assert found.differences[0].margin > NEAR_TIE
