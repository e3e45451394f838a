"""What a run puts into a checkpoint, and what it keeps of a step that went wrong."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash.drafter import Drafter
from dflash.errors import DFlashError
from dflash.manifest import CONFIG, DRAFTER, seal
from dflash.training.checkpointing import STATE
from dflash.training.preflight import stated_recipe
from dflash.training.preparation import Prepared
from dflash.training.recording import record
from dflash.training.step import MicroBatch, NotFiniteError, Steps
from dflash.training.training_state import TrainingState, whole_weights, write_state
from dflash.training.validation import Truth

NOT_FINITE = "not_finite"
"""Beside the checkpoints: batches whose loss was NaN, with the weights that made it so."""


class NotFiniteRunError(DFlashError):
    """The loss or its gradient was NaN or infinite; the batch is kept for replay."""


def current_drafter(prepared: Prepared, *, everywhere: bool = False) -> Drafter | None:
    """The drafter as its checkpoint will be read, in the dtype it is saved in; rank 0's unless ``everywhere``.

    Every rank must call this: where the masters are sharded, they are gathered.
    """
    weights = whole_weights(prepared.model.drafter)
    if not (prepared.ranks.main or everywhere):
        return None
    with torch.device("meta"):
        drafter = Drafter(prepared.drafter_config)
    dtype = getattr(torch, prepared.config.drafter.dtype)
    drafter.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    return drafter.requires_grad_(False).train(False)


def write_files(
    directory: Path,
    prepared: Prepared,
    *,
    drafter: Drafter,
    state: TrainingState | None,
    batch: MicroBatch,
    truth: Truth | None,
) -> dict[str, Any]:
    """All files of a checkpoint but its manifest, whose metrics are returned."""
    write_drafter(directory, drafter, prepared.raw_config)
    if state is not None:
        write_state(directory / STATE, state)
    figures = record(
        directory,
        drafter=drafter,
        vocabulary=prepared.vocabulary,
        target=prepared.facts,
        features=batch.features,
        blocks=batch.blocks,
        recipe=prepared.recipe,
        soft=None,
        probe=prepared.probe,
    )
    measured = {} if truth is None else {"tau": truth.tau_pooled, "tau_macro": truth.tau_macro}
    return {**figures, **measured, "kernel": prepared.facts.kernel, "data_sha256": prepared.identity.data}


def require_finite(step: int, figures: Mapping[str, Any]) -> None:
    """:class:`NotFiniteRunError` where the update of ``step`` has left a drafter that computes no numbers.

    Its ``figures`` are the first to tell: the loss of the step was taken before.
    """
    if any(isinstance(value, float) and not math.isfinite(value) for value in figures.values()):
        raise NotFiniteRunError(
            f"after its update the loss of step {step} on its own batch is not finite; step_{step} was not written, "
            f"and the checkpoints before it are as they were. A lower learning rate or other data is another run"
        )


def write_drafter(directory: Path, drafter: Drafter, raw_config: Mapping[str, Any]) -> None:
    """``drafter.safetensors`` and ``config.json`` in z-lab's layout, the config as it was given but for the dtype."""
    weights = {name: weight.detach().cpu().contiguous() for name, weight in drafter.state_dict().items()}
    save_file(weights, directory / DRAFTER, metadata={"format": "pt"})
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    text = json.dumps({**raw_config, "dtype": dtype}, indent=2)
    (directory / CONFIG).write_text(f"{text}\n", encoding="utf-8")


def recipe_of(prepared: Prepared) -> dict[str, Any]:
    """What a manifest says is minimised."""
    return stated_recipe(prepared.recipe, prepared.drafter_config)


def keep_for_replay(prepared: Prepared, steps: Steps, error: NotFiniteError) -> NotFiniteRunError:
    """Keep the micro-batches at fault beside the weights that made them so, in a checkpoint's layout."""
    drafter = current_drafter(prepared, everywhere=True)
    assert drafter is not None
    batches = list(steps.order.micro_batches(error.number))
    paths = []
    for place in error.places:
        batch = steps.micro_batch(error.number, batches[place])
        name = f"step_{error.number + 1}_rank_{prepared.ranks.rank}_batch_{place}"
        paths.append(_write_not_finite(prepared.config.output / NOT_FINITE / name, prepared, drafter, batch, error))
    where = f"in {', '.join(map(str, paths))}" if paths else "kept by the rank whose batch it was"
    return NotFiniteRunError(
        f"{error}; nothing was updated. The batch and the weights before it are {where}, laid out as a checkpoint that "
        f"dflash inspect and dflash doctor read. The same command goes on from the last checkpoint and meets the same "
        f"batch; a lower learning rate or other data is another run"
    )


def _write_not_finite(
    directory: Path, prepared: Prepared, drafter: Drafter, batch: MicroBatch, error: NotFiniteError
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    figures = write_files(directory, prepared, drafter=drafter, state=None, batch=batch, truth=None)
    said = {key: value for key, value in figures.items() if isinstance(value, str) or math.isfinite(value)}
    about = {
        "what": error.what,
        "samples": batch.features.samples,
        "epoch": batch.epoch,
        "seed": prepared.config.seed,
        "noise": prepared.config.objective.noise,
    }
    seal(directory, step=error.number, metrics=said | {"not_finite": about}, recipe=recipe_of(prepared))
    return directory
