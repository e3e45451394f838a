"""Which drafters a night compares, what their differences mean, and when there is an alarm."""

import functools
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.nightly_alarms import Course, alarms, told_within, unadjusted
from dflash.metrics import FEWEST_PROMPTS
from dflash.simultaneous import Prompts
from tasks.ledger_entries import Seen
from tasks.night_record import Night
from tasks.night_text import message, page
from tasks.nightly import DAY_SECONDS, Measured, choose, compare_night

NOW = 1_800_000_000.0
IDS = [f"p{place}" for place in range(128)]
EASE = np.exp(np.random.default_rng(1).normal(1.4, 0.4, len(IDS)))
"""What τ of a prompt is about."""


draw = functools.partial(Prompts, draws=1000)


def seen(step: int, *, age_hours: float, gone: bool = False) -> Seen:
    written = NOW - age_hours * 3600
    return Seen("kpro6", f"/c/step_{step}", f"id{step}", step, NOW, written, NOW if gone else None)


def measured(step: int, level: float = 1.0, *, key: str = "k", scatter: float = 0.02, prompts: int = 128) -> Measured:
    """A drafter that is ``level`` times as good as others."""
    random = np.random.default_rng(step)
    tau = EASE * level * np.exp(random.normal(0, scatter, len(IDS)))
    totals = {id: (255, max(1, round(255 / one))) for id, one in list(zip(IDS, tau, strict=True))[:prompts]}
    advances, rounds = (sum(column) for column in zip(*totals.values(), strict=True))
    reference = {id: (255, max(1, round(255 / (1.3 * one)))) for id, one in zip(IDS[:prompts], EASE, strict=False)}
    return Measured(
        identity=f"id{step}",
        step=step,
        source=f"kpro6:/c/step_{step}",
        report=f"/reports/{step}",
        key=key,
        tau=advances / rounds,
        ci95=None,
        totals=totals,
        reference=reference,
    )


def judged(levels: Sequence[float], *, scatter: float = 0.02) -> list[Night]:
    """A night for each level, every one with a checkpoint of its own."""
    before: list[Measured] = []
    nights: list[Night] = []
    for step, level in enumerate(levels, start=1):
        newest = measured(step, level, scatter=scatter)
        day = before[-1].identity if before else None
        date = f"2027-01-{step:02}"
        nights.append(compare_night(date, newest, before, day_before=day, previous=nights[::-1], draw=draw))
        before.append(newest)
    return nights


def kinds(night: Night) -> dict[str, str]:
    return {one.kind: one.name for one in night.comparisons}


def test_the_newest_is_compared_with_the_best_the_reference_and_that_of_a_day_before() -> None:
    before = [measured(1), measured(2, 1.2), measured(3, 1.1)]
    night = compare_night("2027-01-31", measured(4), before, day_before="id3", previous=[], draw=draw)
    assert kinds(night) == {"best": "step 2", "reference": "reference", "day before": "step 3"}
    assert {one.kind: one.verdict for one in night.comparisons} == dict.fromkeys(kinds(night), "worse")
    assert night.best is not None
    assert night.best.identity == "id2"
    assert night.candidates == 3


def test_the_choice_is_of_what_lies_there_or_is_measured() -> None:
    checkpoints = [
        seen(9, age_hours=1, gone=True),
        seen(8, age_hours=2),
        seen(7, age_hours=20),
        seen(6, age_hours=25, gone=True),
        seen(5, age_hours=30, gone=True),
        seen(4, age_hours=40),
    ]
    choice = choose(checkpoints, ["id5"], now=NOW)
    assert choice.newest is not None
    assert choice.newest.step == 8
    assert choice.day_before is not None
    assert choice.day_before.step == 5


def test_a_newest_that_is_a_day_old_has_no_day_before() -> None:
    choice = choose([seen(2, age_hours=24), seen(1, age_hours=50)], [], now=NOW)
    assert choice.newest is not None
    assert choice.day_before is None
    assert choose([], [], now=NOW).newest is None
    assert DAY_SECONDS == 24 * 3600


def test_what_was_measured_another_way_is_not_compared() -> None:
    night = compare_night(
        "d", measured(2), [measured(1, 1.5, key="other target")], day_before="id1", previous=[], draw=draw
    )
    assert kinds(night) == {"reference": "reference"}
    assert any("measured another way" in note for note in night.notes)


def test_a_fall_is_an_alarm_on_the_second_night_and_no_new_one_after_it() -> None:
    nights = judged([1, 1, 1, 0.85, 0.85, 0.85, 1, 0.85])
    assert [night.down for night in nights] == [False, False, False, True, True, True, False, True]
    assert [night.alarm for night in nights] == ["none"] * 4 + ["raised", "continues", "none", "none"]
    assert nights[3].verdict.startswith("fell, an alarm if")
    assert nights[4].verdict.startswith("ALARM, fell on two nights running: step 5 τ ")


def test_nights_that_say_nothing_neither_raise_an_alarm_nor_end_one() -> None:
    first, second = judged([1, 1, 0.85])[-1], measured(9, 0.85)
    silent = Night(date="d", outcome="nothing new", verdict="")
    before = [measured(1), measured(2)]
    night = compare_night("e", second, before, day_before=None, previous=[silent, first], draw=draw)
    assert night.alarm == "raised"
    good = judged([1, 1, 1])[-1]
    assert compare_night("e", second, before, day_before=None, previous=[silent, good], draw=draw).alarm == "none"


def test_a_drafter_that_was_never_as_good_as_the_reference_is_no_alarm() -> None:
    nights = judged([1, 1, 1])
    reference = [one for night in nights for one in night.comparisons if one.kind == "reference"]
    assert [one.fell for one in reference] == [True] * 3
    assert not any(night.down for night in nights)


def test_a_loss_within_the_margin_is_worse_and_no_fall() -> None:
    night = judged([1, 0.988], scatter=0.001)[-1]
    assert {one.kind: (one.verdict, one.fell) for one in night.comparisons if one.kind != "reference"} == {
        "best": ("worse", False),
        "day before": ("worse", False),
    }


def test_few_prompts_give_no_verdict_and_no_alarm() -> None:
    few = FEWEST_PROMPTS - 1
    night = compare_night(
        "d", measured(2, 0.5, prompts=few), [measured(1, prompts=few)], day_before=None, previous=[], draw=draw
    )
    assert {one.verdict for one in night.comparisons} == {"too few prompts"}
    assert not night.down
    assert not night.judges


def test_a_reference_that_changes_is_noted() -> None:
    first = judged([1])[-1]
    drifted = first.comparisons[0].model_copy(update={"tau": first.comparisons[0].tau * 1.05})
    night = compare_night(
        "d",
        measured(2),
        [measured(1)],
        day_before=None,
        previous=[first.model_copy(update={"comparisons": (drifted,)})],
    )
    assert any("though it does not change" in note for note in night.notes)


def test_the_first_night_says_that_there_is_nothing_before() -> None:
    night = compare_night("d", measured(1), [], day_before=None, previous=[], draw=draw)
    assert night.verdict.startswith("no fall shown: step 1 τ ")
    assert "reference" in night.verdict
    assert any("a day before" in note for note in night.notes)


def test_the_message_begins_with_what_matters() -> None:
    subject, body = message(judged([1, 1, 0.8, 0.8])[-1])
    assert subject == "DFlash 2027-01-04: ALARM, fell on two nights running"
    assert body.splitlines()[0].startswith("ALARM, fell on two nights running: step 4 τ ")
    assert "best now: step " in body
    assert "report: /reports/4" in body


def test_the_page_shows_every_comparison_and_breaks_on_no_name() -> None:
    before = measured(1)
    odd = Measured(**{**vars(before), "step": None, "source": "kpro6:/c/a|b\n# c"})
    shown = page(compare_night("d", measured(2), [odd], day_before=None, previous=[], draw=draw))
    rows = [line for line in shown.splitlines() if line.startswith("| best so far")]
    assert len(rows) == 1
    assert "a\\|b\\x0a# c" in rows[0]


def test_the_best_of_many_is_no_false_alarm_and_would_be_one_as_if_unchosen() -> None:
    course = Course(spread=0.4, nights=150)
    assert alarms(course, seed=2) == 0
    with unadjusted():
        assert alarms(course, seed=2) > 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("spread", "memory"), [(0.2, 0.0), (0.2, 0.9), (0.4, 0.0)])
def test_a_year_without_a_change_has_at_most_two_alarms_in_95_percent_of_years(spread: float, memory: float) -> None:
    years = [alarms(Course(spread, memory), seed) for seed in range(30)]
    assert sum(count > 2 for count in years) <= 1, years


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_fall_of_five_percent_is_told_within_three_nights() -> None:
    assert sum(told_within(Course(0.05, nights=63, fall=0.05, falls_at=60), seed) for seed in range(20)) >= 18
