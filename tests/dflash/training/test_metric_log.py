"""The metrics of a run on disk and in TensorBoard, over interruptions of every kind."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from dflash.training.metric_log import METRICS, MetricLog, MetricLogError, read_metrics
from dflash.training.run_config import RunConfig
from dflash.training.trackers import TENSORBOARD, TrackerError


def config(output: Path, **tracking: object) -> RunConfig:
    raw = {
        "output": str(output),
        "target": {"path": "target"},
        "drafter": {"config": "config.json"},
        "data": {"files": ["data.jsonl"]},
        "optimizer": {"max_steps": 10},
        "tracking": {"tensorboard": False} | tracking,
    }
    return RunConfig.from_dict(raw, source="test")


def log(output: Path, resumed_at: int | None = None, **tracking: object) -> MetricLog:
    run = config(output, **tracking)
    return MetricLog.open(output, run.tracking, run=run, resumed_at=resumed_at)


def steps(output: Path) -> list[object]:
    return [line["step"] for line in read_metrics(output / METRICS)]


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with log(tmp_path) as metrics:
        metrics.write(1, {"loss": 2.5}, "train")
        metrics.write(1, {"tau": 1.25}, "eval")
        assert read_metrics(tmp_path / METRICS) == [
            {"step": 1, "kind": "train", "loss": 2.5},
            {"step": 1, "kind": "eval", "tau": 1.25},
        ]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with log(tmp_path) as metrics:
        metrics.write(1, {"loss": float("nan"), "norm": float("inf")}, "train")
    assert "NaN" not in (tmp_path / METRICS).read_text()
    assert read_metrics(tmp_path / METRICS) == [{"step": 1, "kind": "train", "loss": None, "norm": None}]


def test_resuming_drops_the_lines_of_steps_that_are_made_again(tmp_path: Path) -> None:
    with log(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.write(step, {"loss": float(step)}, "train")
    with log(tmp_path, resumed_at=3) as metrics:
        metrics.write(4, {"loss": 40.0}, "train")
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path / METRICS)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]


def test_resuming_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    with log(tmp_path) as metrics:
        metrics.write(1, {"loss": 1.0}, "train")
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 2, "kind": "tr')
    assert steps(tmp_path) == [1]
    with log(tmp_path, resumed_at=2) as metrics:
        metrics.write(3, {"loss": 3.0}, "train")
    assert steps(tmp_path) == [1, 3]


def test_beginning_anew_sets_the_old_lines_aside(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0):
        with log(tmp_path) as metrics:
            metrics.write(1, {"loss": loss}, "train")
    aside = [tmp_path / f"metrics.{number}.jsonl" for number in (1, 2)]
    assert [read_metrics(path)[0]["loss"] for path in [*aside, tmp_path / METRICS]] == [1.0, 2.0, 3.0]


def test_a_full_disk_costs_a_line_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = os.write

    def full(file: int, content: bytes) -> int:
        if content.startswith(b'{"step": 2') or content.startswith(b'{"step": 3'):
            return write(file, content[:5])  # the disk takes a part, and the next call says why
        if content[:1] != b"{":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content)

    with log(tmp_path) as metrics:
        monkeypatch.setattr("dflash.training.metric_log.os.write", full)
        for step in range(1, 5):
            metrics.write(step, {"loss": 1.0}, "train")
    assert steps(tmp_path) == [1, 4]
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricLogError, match="file"):
        log(tmp_path / "file" / "output")


def test_a_package_that_is_missing_is_named_with_the_extra_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(TrackerError, match=rf"tracking\.{package} is set .*\[{package}\]"):
            log(tmp_path / package, **{package: "project"})


class Broken:
    """A service that is away."""

    name = "service"

    def write(self, step: int, values: dict[str, float]) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("no route")


def test_a_service_that_is_away_costs_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricLog(tmp_path / METRICS, [Broken()]) as metrics:
        metrics.write(1, {"loss": 1.0}, "train")
        metrics.write(2, {"loss": 1.0}, "train")
    assert steps(tmp_path) == [1, 2]
    assert capsys.readouterr().err.count("no route") == 1


def test_tensorboard_shows_every_step_once_after_a_resumption(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with log(tmp_path, tensorboard=True) as metrics:
        for step in range(1, 6):
            metrics.write(step, {"loss": float(step)}, "train")
    with log(tmp_path, resumed_at=3, tensorboard=True) as metrics:
        metrics.write(4, {"loss": 40.0}, "train")
    events = EventAccumulator(str(tmp_path / TENSORBOARD))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]


@pytest.mark.slow
def test_wandb_takes_the_values_under_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with log(tmp_path, wandb="dflash") as metrics:
        metrics.write(1, {"loss": 2.5}, "train")
    begun = json.loads((tmp_path / "tracking.json").read_text())["wandb"]
    with log(tmp_path, resumed_at=1, wandb="dflash") as metrics:
        metrics.write(2, {"loss": 1.5}, "train")
    assert json.loads((tmp_path / "tracking.json").read_text())["wandb"] == begun
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{begun}"))) >= 1


@pytest.mark.slow
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with log(tmp_path, mlflow="dflash") as metrics:
        metrics.write(1, {"loss": 2.5}, "train")
    with log(tmp_path, resumed_at=1, mlflow="dflash") as metrics:
        metrics.write(2, {"loss": 1.5}, "train")
    client = mlflow.MlflowClient()
    run_id = json.loads((tmp_path / "tracking.json").read_text())["mlflow"]
    history = client.get_metric_history(run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 2.5), (2, 1.5)]
    run = client.get_run(run_id)
    assert run.data.params["optimizer.max_steps"] == "10"
    assert run.info.status == "FINISHED"
