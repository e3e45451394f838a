"""What a checkpoint is and what is wrong with it, gathered instead of raised at the first fault."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dflash.checkpoint_layout import DamagedError
from dflash.checkpoints import ConfigSource, Opened, hash_files, open_checkpoint, read_tensors, value_problems


class TensorInfo(BaseModel):
    """One tensor of the drafter."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Inspection(BaseModel):
    """The answer of ``dflash inspect``; ``problems`` is empty for a checkpoint that can be evaluated.

    ``notes`` are no faults: what the layout leaves open or means otherwise than z-lab's.
    """

    model_config = ConfigDict(frozen=True)

    path: str
    format: str
    step: int | None
    parameters: int
    tensors: list[TensorInfo]
    config: dict[str, Any]
    config_source: ConfigSource
    training: dict[str, Any]
    notes: list[str] = []
    problems: list[str]


def inspect_checkpoint(
    path: str | Path, *, drafter_config: Path | None = None, reference: Path | None = None
) -> Inspection:
    """Read the checkpoint as an evaluation would and list every fault of its tensors.

    Where there is no layout or no config to judge by, the :class:`~dflash.checkpoint_layout.CheckpointError` or
    :class:`~dflash.config.ConfigError` is raised as it is.
    """
    opened = open_checkpoint(path, drafter_config=drafter_config, reference=reference)
    shapes = opened.config.tensor_shapes()
    # A tensor of another shape may be a few bytes that stride over terabytes.
    fitting = {name: place for name, place in opened.tensors.items() if place[1].shape == shapes.get(name)}
    return Inspection(
        path=str(opened.path),
        format=opened.format,
        step=opened.step,
        parameters=sum(math.prod(record.shape) for _, record in opened.tensors.values()),
        tensors=[
            TensorInfo(name=name, shape=record.shape, dtype=record.dtype)
            for name, (_, record) in opened.tensors.items()
        ],
        config=opened.config.to_dict(),
        config_source=opened.config_source,
        training=opened.training,
        notes=list(opened.notes),
        problems=_damage(opened) + opened.problems() + value_problems(read_tensors(replace(opened, tensors=fitting))),
    )


def _damage(opened: Opened) -> list[str]:
    """That the weights are not those the manifest of a ``step_N/`` was written for."""
    if opened.sealed is None:
        return []
    try:
        hash_files(opened)
    except DamagedError as error:
        return [str(error)]
    return []
