"""Where metrics go besides their file: TensorBoard, Weights & Biases, MLflow; each imported only when it is asked for.

A resumed run goes on in the run that each of them has: their ids lie in ``tracking.json`` of the output. TensorBoard
hides what it had of steps that are made again, and MLflow shows a step's last value; Weights & Biases takes no step
twice, so there the steps are a metric of their own and those made again stand twice. Imports no torch by itself.
"""

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from dflash.errors import DFlashError
from dflash.training.run_config import RunConfig, TrackingSection

IDS = "tracking.json"
TENSORBOARD = "tensorboard"


class TrackerError(DFlashError):
    """Tracking that the config asks for cannot be started: a package is missing, or its service refuses."""


class Tracker(Protocol):
    """Takes the metrics of a step; what it raises is the caller's to survive."""

    name: str

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(output: Path, tracking: TrackingSection, *, run: RunConfig, resumed_at: int | None) -> list[Tracker]:
    """Those that ``tracking`` names. Raises :class:`TrackerError` that names the key and the mend."""
    ids = _read_ids(output) if resumed_at is not None else {}
    trackers: list[Tracker] = []
    if tracking.tensorboard:
        trackers.append(TensorBoard.open(output, resumed_at))
    if tracking.wandb is not None:
        trackers.append(WeightsAndBiases.open(output, tracking.wandb, run, ids))
    if tracking.mlflow is not None:
        trackers.append(MLflow.open(tracking.mlflow, run, ids))
    if ids:
        _write_ids(output, ids)
    return trackers


def require_packages(tracking: TrackingSection) -> None:
    """:class:`TrackerError` unless what ``tracking`` names is installed; nothing is imported or started for it."""
    asked = (
        (tracking.tensorboard, "tensorboard", "tracking.tensorboard", "model"),
        (tracking.wandb is not None, "wandb", "tracking.wandb", "wandb"),
        (tracking.mlflow is not None, "mlflow", "tracking.mlflow", "mlflow"),
    )
    for wanted, package, key, extra in asked:
        if wanted and importlib.util.find_spec(package) is None:
            raise _missing(package, key, extra, "it is not installed")


class TensorBoard:
    """Event files under ``<output>/tensorboard``."""

    name = "tensorboard"

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    @classmethod
    def open(cls, output: Path, resumed_at: int | None) -> Self:
        """``purge_step`` hides what an earlier process wrote of the steps to come."""
        module = _package("torch.utils.tensorboard", "tracking.tensorboard", "model", distribution="tensorboard")
        first = 0 if resumed_at is None else resumed_at + 1
        return cls(module.SummaryWriter(str(output / TENSORBOARD), purge_step=first))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project that the config names; ``WANDB_MODE=offline`` keeps it under the output."""

    name = "wandb"

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def open(cls, output: Path, project: str, run: RunConfig, ids: dict[str, str]) -> Self:
        wandb = _package("wandb", "tracking.wandb", "wandb")
        try:
            started = wandb.init(
                project=project,
                id=ids.get("wandb"),
                resume="allow",
                name=output.name,
                dir=str(output),
                config=run.model_dump(mode="json"),
            )
            started.define_metric("step")
            started.define_metric("*", step_metric="step")
        except Exception as error:  # its own classes, the network's, the file system's
            raise TrackerError(f"tracking.wandb: {project!r} could not be started ({_first_line(error)})") from None
        ids["wandb"] = str(started.id)
        return cls(started)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment that the config names, on the server of ``MLFLOW_TRACKING_URI``."""

    name = "mlflow"

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    @classmethod
    def open(cls, experiment: str, run: RunConfig, ids: dict[str, str]) -> Self:
        mlflow = _package("mlflow", "tracking.mlflow", "mlflow")
        try:
            client = mlflow.MlflowClient()
            if "mlflow" not in ids:
                known = client.get_experiment_by_name(experiment)
                place = client.create_experiment(experiment) if known is None else known.experiment_id
                ids["mlflow"] = client.create_run(place, run_name=run.output.name).info.run_id
                for name, value in _flat(run.model_dump(mode="json")).items():
                    client.log_param(ids["mlflow"], name, value)
            else:
                client.update_run(ids["mlflow"], status="RUNNING")
        except Exception as error:  # its own classes, the network's, the data base's
            raise TrackerError(f"tracking.mlflow: {experiment!r} could not be started ({_first_line(error)})") from None
        return cls(client, ids["mlflow"])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _package(module: str, key: str, extra: str, *, distribution: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(distribution or module, key, extra, str(error)) from None


def _missing(package: str, key: str, extra: str, why: str) -> TrackerError:
    return TrackerError(
        f"{key} is set and the package {package} cannot be imported ({why}); pip install 'dflash-pipeline[{extra}]', "
        f"or leave {key} out"
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _read_ids(output: Path) -> dict[str, str]:
    try:
        ids = json.loads((output / IDS).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TrackerError(f"{output / IDS}: cannot be read ({error}); remove it, and new runs are begun") from None
    return {str(name): str(id) for name, id in ids.items()} if isinstance(ids, dict) else {}


def _write_ids(output: Path, ids: Mapping[str, str]) -> None:
    partial = output / f".{IDS}.partial"
    partial.write_text(json.dumps(dict(ids)) + "\n", encoding="utf-8")
    os.replace(partial, output / IDS)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
