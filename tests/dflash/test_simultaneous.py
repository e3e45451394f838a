"""Several differences at once: intervals that hold together."""

import numpy as np
import pytest

from dflash.metrics import Totals, compare
from dflash.simultaneous import Prompts, simultaneous

IDS = [f"p{place}" for place in range(100)]


def drafter(random: np.random.Generator, spread: float = 0.2) -> Totals:
    tau = 4 * np.exp(random.normal(0, spread, len(IDS)))
    return {id: (255, max(1, round(255 / one))) for id, one in zip(IDS, tau, strict=True)}


def test_one_difference_is_about_that_of_the_paired_bootstrap() -> None:
    random = np.random.default_rng(0)
    ours, theirs = drafter(random), drafter(random)
    prompts = Prompts(IDS)
    (found,) = simultaneous(prompts.resample(ours), [prompts.resample(theirs)], level=0.95)
    plain = compare(ours, theirs, seed=1)
    assert plain.ci95 is not None
    assert found.difference == pytest.approx(plain.difference)
    assert (found.low, found.high) == pytest.approx(plain.ci95, abs=0.02)


def test_intervals_widen_with_what_they_have_to_hold_for() -> None:
    random = np.random.default_rng(0)
    prompts = Prompts(IDS)
    ours, *others = [prompts.resample(drafter(random)) for _ in range(41)]
    (alone,) = simultaneous(ours, others[:1], level=0.95)
    among = simultaneous(ours, others, level=0.95)[0]
    assert among.difference == alone.difference
    assert (among.high - among.low) > 1.3 * (alone.high - alone.low)
    same = simultaneous(ours, [others[0]] * 40, level=0.95)[0]
    assert (same.low, same.high) == pytest.approx((alone.low, alone.high))


def test_together_they_miss_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(5)
    missed = 0
    for _ in range(60):
        prompts = Prompts(IDS, draws=400)
        ours, *others = [prompts.resample(drafter(random)) for _ in range(21)]
        missed += any(one.low > 0 or one.high < 0 for one in simultaneous(ours, others, level=0.9))
    # 10 % of 60, and four standard deviations of that
    assert missed <= 15


def test_the_same_drafter_differs_by_exactly_nothing() -> None:
    prompts = Prompts(IDS)
    one = drafter(np.random.default_rng(0))
    (found,) = simultaneous(prompts.resample(one), [prompts.resample(dict(one))], level=0.95)
    assert (found.difference, found.low, found.high) == (0.0, 0.0, 0.0)
    assert simultaneous(prompts.resample(one), [], level=0.95) == []


def test_a_prompt_that_a_drafter_lacks_is_an_error() -> None:
    with pytest.raises(KeyError):
        Prompts(IDS).resample({"p0": (255, 60)})
