"""Which night a moment belongs to, by the wall clock."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from dflash.errors import UsageError
from tasks.night_time import NightTime

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, *, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold).timestamp()


def test_a_run_after_midnight_is_the_last_nights_until_the_next_is_due() -> None:
    late = NightTime.of_cron("30 23 * * *", "Europe/Berlin")
    assert late.date(at("2027-01-31T23:29")) == "2027-01-30"
    assert late.date(at("2027-01-31T23:30")) == "2027-01-31"
    assert late.date(at("2027-02-01T00:10")) == "2027-01-31"


def test_missed_nights_are_one() -> None:
    night = NightTime.of_cron("30 2 * * *", "Europe/Berlin")
    late_runs = [at("2027-02-04T09:00"), at("2027-02-04T09:05"), at("2027-02-05T02:29")]
    assert {night.date(moment) for moment in late_runs} == {"2027-02-04"}


@pytest.mark.parametrize("cron", ["30 1 * * *", "30 2 * * *", "0 3 * * *"])
@pytest.mark.parametrize("change", ["2027-03-28", "2027-10-31"])
def test_the_change_of_the_clock_makes_no_night_too_few_and_none_too_many(cron: str, change: str) -> None:
    night = NightTime.of_cron(cron, "Europe/Berlin")
    noon = at(f"{change}T12:00")
    minutes = [night.date(noon + 60 * minute) for minute in range(-48 * 60, 48 * 60)]
    dates = sorted(set(minutes))
    first = datetime.fromisoformat(dates[0]).date().toordinal()
    assert [datetime.fromisoformat(one).date().toordinal() for one in dates] == list(range(first, first + len(dates)))
    assert night.date(noon) == change


def test_the_hour_that_comes_twice_is_one_night() -> None:
    night = NightTime.of_cron("30 2 * * *", "Europe/Berlin")
    both = [at("2027-10-31T02:30", fold=fold) for fold in (0, 1)]
    assert both[1] - both[0] == 3600
    assert [night.date(moment) for moment in both] == ["2027-10-31"] * 2


def test_a_night_due_in_the_hour_that_is_skipped_is_due_behind_it() -> None:
    night = NightTime.of_cron("30 2 * * *", "Europe/Berlin")
    assert night.date(at("2027-03-28T01:59")) == "2027-03-27"
    assert night.date(at("2027-03-28T03:30")) == "2027-03-28"


@pytest.mark.parametrize("cron", ["* 2 * * *", "30 2-5 * * *", "61 2 * * *", "30 24 * * *", "nightly"])
def test_a_schedule_without_one_time_of_day_is_refused(cron: str) -> None:
    with pytest.raises(UsageError, match="minute and hour as in"):
        NightTime.of_cron(cron)


def test_an_unknown_zone_is_refused() -> None:
    for zone in ("Europe/Atlantis", "../../etc/passwd", ""):
        with pytest.raises(UsageError, match="no time zone"):
            NightTime.of_cron("30 2 * * *", zone)
