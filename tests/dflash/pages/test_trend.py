"""The course of a run: which reports belong together, which step is best, and which is a regression."""

import json
import os
import re
from pathlib import Path

import pytest

from dflash.pages import trend_page
from dflash.report import TrainingInfo
from dflash.trend import NoReportsError, read_trend, training_tau
from tests.dflash.pages.reports import made, words, write


def step(
    folder: Path, number: int, *, better: int = 0, prompts: int = 64, valid: bool = True, **settings: object
) -> None:
    """A report of step ``number`` over prompts of different lengths in ``folder/step_<number>``."""
    texts = {f"prompt {place}": words(20 + place % 7) for place in range(prompts)}
    report, _ = made(texts, better=better)
    checkpoint = report.checkpoint.model_copy(update={"step": number, "path": f"runs/step_{number}"})
    report = report.model_copy(
        update={
            "checkpoint": checkpoint,
            "valid": valid,
            "invalid_because": [] if valid else ["kernel"],
            "settings": report.settings.model_copy(update=settings),
            "training": TrainingInfo(step=number, loss=1 / number, streak1=2.5),
        }
    )
    write(folder / f"step_{number}", report)


def test_the_best_step_and_those_worse_than_the_best_before_them_are_marked(tmp_path: Path) -> None:
    for number, better in ((100, 0), (200, 3), (300, 1), (400, 4)):
        step(tmp_path, number, better=better)
    (series,) = read_trend(tmp_path).series
    points = {point.step: point for point in series.points}
    assert [number for number, point in points.items() if point.best] == [400]
    assert [number for number, point in points.items() if point.regression] == [300]
    assert points[300].against_step == 200
    assert points[300].against is not None
    assert points[300].against.difference == pytest.approx(points[300].tau.pooled - points[200].tau.pooled)
    assert points[100].against is None
    assert series.headline().startswith(f"best: step 400, τ {points[400].tau.pooled:.3f} [")


def test_a_fall_over_few_prompts_is_no_regression(tmp_path: Path) -> None:
    for number, better in ((100, 3), (200, 0)):
        step(tmp_path, number, better=better, prompts=12)
    (series,) = read_trend(tmp_path).series
    assert series.points[1].against is not None
    assert series.points[1].against.verdict == "too few prompts"
    assert not series.points[1].regression


def test_a_report_that_is_not_valid_is_neither_best_nor_what_others_are_held_against(tmp_path: Path) -> None:
    step(tmp_path, 100, better=1)
    step(tmp_path, 200, better=5, valid=False)
    step(tmp_path, 300, better=2)
    (series,) = read_trend(tmp_path).series
    assert [point.best for point in series.points] == [False, False, True]
    assert series.points[1].against is None
    assert series.points[2].against_step == 100
    page = trend_page(read_trend(tmp_path), "run")
    struck = re.findall(r'<del class="unbelieved">([^<]*)</del>', page)
    assert f"{series.points[1].tau.pooled:.3f}" in struck
    assert f"{series.points[2].tau.pooled:.3f}" not in struck


def test_reports_that_measured_something_else_are_a_series_of_their_own(tmp_path: Path) -> None:
    step(tmp_path, 100)
    step(tmp_path, 200)
    step(tmp_path, 300, better=5, max_new_tokens=4096)
    long, short = read_trend(tmp_path).series
    assert [point.step for point in long.points] == [100, 200]
    assert [point.step for point in short.points] == [300]
    assert "at most 4096 tokens" in short.title
    page = trend_page(read_trend(tmp_path), "run")
    assert "Series 2" in page


def test_what_cannot_be_used_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    step(tmp_path, 100)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "report.json").write_text('{"schema": 2, "created"')
    report, _ = made({"a": words(20)})
    nameless = report.checkpoint.model_copy(update={"step": None, "path": "final"})
    write(tmp_path / "nameless", report.model_copy(update={"checkpoint": nameless}))
    trend = read_trend(tmp_path)
    assert len(trend.series) == 1
    assert len(trend.problems) == 2
    assert "is not JSON" in trend.problems[0]
    assert "has no step" in trend.problems[1]
    page = trend_page(trend, "run")
    assert "is not JSON" in page


def test_the_step_may_stand_in_the_name(tmp_path: Path) -> None:
    report, _ = made({"a": words(20)})
    named = report.checkpoint.model_copy(update={"step": None, "path": "/x/step_1200.pt"})
    write(tmp_path, report.model_copy(update={"checkpoint": named}))
    assert read_trend(tmp_path).series[0].points[0].step == 1200


def test_nothing_to_show_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(NoReportsError, match="run dflash evaluate"):
        read_trend(tmp_path)
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(NoReportsError, match="has schema None"):
        read_trend(tmp_path)
    with pytest.raises(NoReportsError, match="is no folder"):
        read_trend(tmp_path / "absent")


def test_hidden_folders_hold_no_reports(tmp_path: Path) -> None:
    step(tmp_path, 100)
    step(tmp_path / ".partial", 200)
    assert len(read_trend(tmp_path).series[0].points) == 1


def test_training_counts_no_bonus_token_and_the_trend_adds_it() -> None:
    assert training_tau(TrainingInfo(streak1=2.58)) == pytest.approx(3.58)
    assert training_tau(TrainingInfo()) is None
    assert training_tau(None) is None


def test_the_commands_write_the_page_its_pictures_and_json(run_dflash, tmp_path: Path) -> None:
    for number, better in ((100, 0), (200, 3), (300, 1)):
        step(tmp_path / "run", number, better=better)
    done = run_dflash("report", "trend", tmp_path / "run", "--plots", tmp_path / "plots")
    assert done.returncode == 0, done.err
    assert "regression" in done.out
    assert done.out.splitlines()[-3:] == [
        str(tmp_path / "run" / "trend.html"),
        str(tmp_path / "plots" / "trend.png"),
        str(tmp_path / "plots" / "trend.svg"),
    ]
    assert (tmp_path / "plots" / "trend.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "plots" / "trend.svg").read_text()
    assert all(said in drawn for said in ("τ in tokens per round", "training step", "worse than the best before it"))
    told = json.loads(run_dflash("report", "trend", tmp_path / "run", "--json").out)
    assert [point["regression"] for point in told["series"][0]["points"]] == [False, False, True]
    elsewhere = tmp_path / "pages" / "trend.html"
    (tmp_path / "run" / "step_100" / "report.html").write_text("a page")
    assert run_dflash("report", "trend", tmp_path / "run", "--output", elsewhere).returncode == 0
    assert 'href="./../run/step_100/report.html"' in elsewhere.read_text()


def test_a_folder_whose_name_is_no_utf8_is_linked_and_told(run_dflash, tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"run-\xff")
    step(run, 100)
    step(run / os.fsdecode(b"\xfe"), 200)
    (run / os.fsdecode(b"\xfe") / "step_200" / "report.html").write_text("a page")
    (run / os.fsdecode(b"\xfd")).mkdir()
    (run / os.fsdecode(b"\xfd") / "report.json").write_text("{")
    done = run_dflash("report", "trend", run, "--json", "--output", tmp_path / "trend.html")
    assert done.returncode == 0, done.err
    assert [point["step"] for point in json.loads(done.out)["series"][0]["points"]] == [100, 200]
    assert 'href="./run-%FF/%FE/step_200/report.html"' in (tmp_path / "trend.html").read_text()
