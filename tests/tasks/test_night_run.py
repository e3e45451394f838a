"""A night's comparison on a real ledger, with everybody around it stood in for: once a date, whatever happens."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash.errors import DFlashError
from dflash.report import Report
from tasks import nights
from tasks.audit import Audit
from tasks.errors import Refused
from tasks.evaluation import EvaluationError, Suite
from tasks.ledger import Ledger, Seen
from tasks.night_record import Night
from tasks.night_run import Around, run_night
from tasks.nights import NightHeldError, SpentSuiteError
from tasks.ssh import ConnectionFailed
from tests import nightly_reports
from tests.guard_state import GuardState

NOW = 1_800_000_000.0
DAY = 86_400.0


class Team:
    """Everybody around the nights: what they were asked and told; evaluations are as good as ``level`` says."""

    def __init__(self, folder: Path) -> None:
        known = GuardState(folder / "guard")
        self.folder = folder
        self.inventory, self.audit = known.inventory, Audit(folder / "audit.jsonl")
        self.host = self.inventory.host("ct129")
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text('{"id": "a", "prompt": "x"}\n')
        self.ledger = Ledger.open(folder)
        self.levels: dict[int, float] = {}
        self.reports: dict[int, Report] = {}
        self.evaluated: list[int] = []
        self.told: list[Night] = []
        self.failing: Callable[[Seen], DFlashError | None] = lambda checkpoint: None

    @property
    def suite(self) -> Suite:
        return Suite(prompts=self.prompts)

    @property
    def around(self) -> Around:
        return Around(
            self.inventory,
            self.audit,
            self.ledger,
            lambda plan: None,
            self.evaluate,
            lambda night: self.told.append(night),
        )

    def save(self, step: int, level: float = 1.0, *, at: float) -> Seen:
        """A checkpoint that the watch saw."""
        seen = Seen("ct129", f"/c/step_{step}", f"id{step}", step, at, at)
        self.ledger.see(seen)
        self.levels[step] = level
        return seen

    def evaluate(self, checkpoint: Seen) -> tuple[Report, Path]:
        assert checkpoint.step is not None
        failure = self.failing(checkpoint)
        if failure is not None:
            raise failure
        attempt = self.ledger.begin(checkpoint.identity, self.suite.digest())
        made = self.reports.get(checkpoint.step) or nightly_reports.report(
            checkpoint.step, self.levels[checkpoint.step]
        )
        folder = nightly_reports.write(made, self.folder / "reports" / f"{checkpoint.step}-{attempt.number}")
        state = "evaluated" if made.valid else "invalid"
        assert self.ledger.finish(attempt, state, report=str(folder), tau=made.metrics.tau.pooled)
        self.evaluated.append(checkpoint.step)
        return made, folder

    def night(self, number: int, **changes: object) -> Night:
        """The comparison of the night so many days behind the first."""
        around = dataclasses.replace(self.around, **changes)  # type: ignore[arg-type]
        return run_night(around, self.suite, self.host, f"2027-02-{number + 1:02}", now=NOW + number * DAY)


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path))
    return Team(tmp_path)


def test_a_fall_of_two_nights_is_told_as_an_alarm(team: Team) -> None:
    verdicts = []
    for number, level in enumerate((1.0, 1.02, 0.8, 0.8)):
        team.save(number + 1, level, at=NOW + number * DAY - 3600)
        verdicts.append(team.night(number))
    assert [night.alarm for night in verdicts] == ["none", "none", "none", "raised"]
    assert team.told == verdicts
    assert team.evaluated == [1, 2, 3, 4]
    assert {one.kind: one.name for one in verdicts[-1].comparisons} == {
        "best": "step 2",
        "reference": "reference",
        "day before": "step 3",
    }


def test_a_date_is_compared_once(team: Team) -> None:
    team.save(1, at=NOW)
    first = team.night(0)
    team.save(2, at=NOW + 60)
    assert team.night(0) == first
    assert team.evaluated == [1]
    assert team.told == [first]


def test_the_checkpoint_of_a_day_before_is_evaluated_when_no_night_did(team: Team) -> None:
    team.save(1, at=NOW - 30 * 3600)
    team.save(2, at=NOW - 3600)
    night = team.night(0)
    assert team.evaluated == [2, 1]
    assert {one.kind for one in night.comparisons} == {"best", "reference", "day before"}


def test_one_of_a_day_before_that_fails_is_noted_and_the_night_goes_on(team: Team) -> None:
    team.save(1, at=NOW - 30 * 3600)
    team.save(2, at=NOW - 3600)
    team.failing = lambda checkpoint: EvaluationError("it did not load") if checkpoint.step == 1 else None
    night = team.night(0)
    assert night.outcome == "compared"
    assert any("could not be evaluated: it did not load" in note for note in night.notes)


def test_a_night_without_a_new_checkpoint_says_so_and_evaluates_nothing(team: Team) -> None:
    assert team.night(0).outcome == "no checkpoint"
    team.save(1, at=NOW)
    team.night(1)
    night = team.night(2)
    assert (night.outcome, night.alarm) == ("nothing new", "none")
    assert night.verdict == "nothing new: step 1 is still the newest, as on 2027-02-02"
    assert team.evaluated == [1]


def test_a_report_that_is_not_valid_is_told_and_never_the_best(team: Team) -> None:
    team.save(1, at=NOW)
    team.reports[1] = nightly_reports.report(1, 2.0, invalid="kernel")
    night = team.night(0)
    assert night.outcome == "not valid"
    assert night.verdict.startswith("not valid: kernel")
    assert team.told == [night]
    team.save(2, at=NOW + DAY)
    after = team.night(1)
    assert {one.kind for one in after.comparisons} == {"reference"}
    assert after.best is not None
    assert after.best.step == 2


def test_another_target_begins_the_comparison_anew(team: Team) -> None:
    team.save(1, at=NOW)
    team.night(0)
    team.save(2, at=NOW + DAY)
    team.reports[1] = nightly_reports.report(1, fingerprint="other")
    team.reports[2] = nightly_reports.report(2, fingerprint="other")
    night = team.night(1)
    # the one of a day before is measured again, so that there is something to compare with
    assert team.evaluated == [1, 2, 1]
    assert {one.kind: one.name for one in night.comparisons}["day before"] == "step 1"


@pytest.mark.parametrize("failure", [ConnectionFailed("ct129: no answer"), Refused("not approved")])
def test_a_night_that_could_not_be_is_not_recorded_and_done_by_its_next_run(team: Team, failure: DFlashError) -> None:
    team.save(1, at=NOW)
    team.failing = lambda checkpoint: failure
    with pytest.raises(type(failure)):
        team.night(0)
    assert team.told == []
    team.failing = lambda checkpoint: None
    assert team.night(0).outcome == "compared"


def test_a_night_that_could_not_be_told_counts(team: Team) -> None:
    team.save(1, at=NOW)

    def unreachable(night: Night) -> None:
        raise DFlashError("no mail server")

    with pytest.raises(DFlashError, match="no mail server"):
        team.night(0, tell=unreachable)
    assert team.night(0).outcome == "compared"
    assert team.told == []


def test_a_crash_before_it_is_recorded_tells_it_again(team: Team) -> None:
    team.save(1, at=NOW)

    def killed(night: Night) -> None:
        team.told.append(night)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        team.night(0, tell=killed)
    again = team.night(0)
    assert team.told == [again, again]
    assert team.evaluated == [1]


def test_two_processes_do_not_work_on_one_night(team: Team) -> None:
    team.save(1, at=NOW)
    with nights.held("2027-02-01", team.suite.digest()), pytest.raises(NightHeldError, match="another process"):
        team.night(0)
    assert team.night(0).outcome == "compared"


def test_nothing_is_chosen_by_prompts_that_confirmed_a_promotion(team: Team) -> None:
    from dflash.prompts import read_prompts

    team.save(1, at=NOW)
    team.audit.append("promotion", prompts=read_prompts(team.prompts).sha256)
    with pytest.raises(SpentSuiteError, match="confirmed a promotion"):
        team.night(0)
    assert team.evaluated == []


def test_a_report_that_was_removed_is_noted(team: Team) -> None:
    for number in range(2):
        team.save(number + 1, at=NOW + number * DAY)
        team.night(number)
    (team.folder / "reports" / "1-1" / "report.json").unlink()
    team.save(3, at=NOW + 2 * DAY)
    night = team.night(2)
    assert any("1 earlier reports cannot be read" in note for note in night.notes)
    assert {one.kind: one.name for one in night.comparisons}["best"] == "step 2"


def test_an_older_report_without_a_reference_is_compared_without_it(team: Team) -> None:
    team.save(1, at=NOW)
    made = nightly_reports.report(1)
    blind = [one.model_copy(update={"reference_tau": None}) for one in made.prompts]
    team.reports[1] = made.model_copy(update={"prompts": blind})
    night = team.night(0)
    assert night.comparisons == ()
    assert night.verdict.endswith("nothing to compare it with yet")
    assert any("names no reference drafter" in note for note in night.notes)


def test_nights_on_another_host_or_on_none_are_refused(team: Team) -> None:
    assert nights.night_host(team.inventory, None).name == "ct129"
    with pytest.raises(DFlashError, match="run on an inference host"):
        nights.night_host(team.inventory, "kpro6")
