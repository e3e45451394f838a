"""``training_state.pt``: what a run needs beside the drafter's weights to go on as if it had never stopped.

Plain tensors by the parameters' names and plain values, so it is read without unpickling code, and a run that shards
its drafter can go on from one that did not.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from dflash.errors import DFlashError
from dflash.training.run_config import RunConfig

VERSION = 1


class TrainingStateError(DFlashError):
    """A training state cannot be read, or belongs to another drafter."""


@dataclass(frozen=True)
class Progress:
    """How far a run is. Rows, anchors and noise of a step follow from its number and the seed.

    ``step`` counts the steps taken, the ``skipped`` ones without a supervised slot among them, ``anchorless`` the rows
    in which no block could be drawn. ``epoch`` and ``row`` say where in the data that is: ``row`` rows of the epoch are
    done.
    """

    step: int = 0
    skipped: int = 0
    anchorless: int = 0
    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class Identity:
    """What a run is made of beside its config: a resumed one must find the same, wherever it lies."""

    target: str
    """Fingerprint of the target's files."""
    data: str
    """sha256 of the samples."""
    drafter: str
    """sha256 of the drafter's config."""
    world: int
    kernel: str | None = None
    """How linear attention was computed, also where ``target.kernel`` is auto; None where a state does not say."""
    prompts: str | None = None
    """sha256 of the held-out prompts; None without any."""


@dataclass(frozen=True)
class TrainingState:
    """``masters`` in float32 and ``optimizer`` (of each parameter, what AdamW keeps), whole and on the CPU."""

    progress: Progress
    identity: Identity
    run: RunConfig
    learning_rate: float
    total_steps: int
    masters: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    rng: Tensor

    @classmethod
    def gather(cls, drafter: nn.Module, optimizer: Optimizer, *, keep: bool, **about: Any) -> Self | None:
        """What ``drafter`` and ``optimizer`` hold; every rank must call it, and where shards are, gets the whole.

        None without ``keep``: eight copies of the state, one a rank, are more than a machine's memory has to give.
        """
        named = dict(drafter.named_parameters())
        masters = {name: _whole(parameter, keep) for name, parameter in named.items()}
        states = {
            name: {key: _whole(value, keep) for key, value in optimizer.state[parameter].items()}
            for name, parameter in named.items()
            if parameter in optimizer.state
        }
        if not keep:
            return None
        return cls(masters=masters, optimizer=states, rng=torch.get_rng_state(), **about)

    def restore_weights(self, drafter: nn.Module) -> None:
        """Put the masters into ``drafter``, before it is wrapped. Raises :class:`TrainingStateError`."""
        named = dict(drafter.named_parameters())
        if strange := sorted(set(named) ^ set(self.masters)):
            raise TrainingStateError(f"the training state and the drafter do not share {strange[0]}")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(self.masters[name])

    def restore_optimizer(self, drafter: nn.Module, optimizer: Optimizer) -> None:
        """Put its state into ``optimizer``, on the devices and in the shards that ``drafter`` has, wrapped by now.

        The random state of torch as well, though nothing here draws from it.
        """
        for name, parameter in drafter.named_parameters():
            if name in self.optimizer:
                # AdamW counts its steps on the CPU unless it is fused; a scalar is no shard of anything
                optimizer.state[parameter] = {
                    key: _like(value, parameter) if value.ndim else _counter(value, optimizer, parameter)
                    for key, value in self.optimizer[name].items()
                }
        torch.set_rng_state(self.rng)


def write_state(path: Path, state: TrainingState) -> None:
    """Write ``state``; the caller names a path that nobody reads yet and renames it."""
    raw = {
        "version": VERSION,
        "about": json.dumps(
            {
                "progress": asdict(state.progress),
                "identity": asdict(state.identity),
                "run": _as_written(state.run),
                "learning_rate": state.learning_rate,
                "total_steps": state.total_steps,
            }
        ),
        "masters": state.masters,
        "optimizer": state.optimizer,
        "rng": state.rng,
    }
    with path.open("wb") as file:
        torch.save(raw, file)
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path) -> TrainingState:
    """Read a training state without unpickling code. Raises :class:`TrainingStateError` that names the file."""
    try:
        raw: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        about = json.loads(raw["about"])
        if raw["version"] != VERSION:
            raise TrainingStateError(f"{path}: version {raw['version']}, this dflash reads {VERSION}; use that dflash")
        return TrainingState(
            progress=Progress(**about["progress"]),
            identity=Identity(**about["identity"]),
            run=RunConfig.from_dict(about["run"], source=str(path)),
            learning_rate=float(about["learning_rate"]),
            total_steps=int(about["total_steps"]),
            masters=raw["masters"],
            optimizer=raw["optimizer"],
            rng=raw["rng"].clone(),
        )
    except DFlashError:
        raise
    except Exception as error:  # torch.load raises whatever the bytes make its parts raise
        said = next(iter(str(error).splitlines()), "")
        raise TrainingStateError(f"{path}: is no training state ({type(error).__name__}: {said})") from None


def _as_written(run: RunConfig) -> dict[str, Any]:
    """All values, those that nobody gave too: a default may be another one when this is read."""
    raw = run.model_dump(mode="json")
    if run.evaluation is None:
        del raw["checkpoints"]["keep_best"]  # said in so many words it contradicts the missing section
    return raw


def whole_weights(drafter: nn.Module) -> dict[str, Tensor]:
    """The float32 masters of ``drafter``, whole, on its device; where they are sharded every rank must call it."""
    return {name: _gathered(parameter.detach()) for name, parameter in drafter.named_parameters()}


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor, keep: bool) -> Tensor:
    """A copy on the CPU that further training leaves alone; empty without ``keep``, this rank's part in it done."""
    whole = _gathered(tensor.detach())
    return whole.to("cpu", copy=True) if keep else torch.empty(0)


def _like(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy of ``tensor`` where and in the shards in which ``like`` lies."""
    copy = tensor.to(like.device, copy=True)
    return distribute_tensor(copy, like.device_mesh, like.placements) if isinstance(like, DTensor) else copy


def _counter(value: Tensor, optimizer: Optimizer, parameter: Tensor) -> Tensor:
    return value.to(parameter.device if optimizer.defaults.get("fused") else "cpu", copy=True)
