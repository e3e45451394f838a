"""Checkpoints as small as they can be, of every kind that says in another way that it is whole; no torch is needed."""

import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dflash.manifest import CONFIG, DRAFTER, seal

CONFIG_TEXT = '{"architectures": ["DFlashDraftModel"], "hidden_size": 2, "dflash_config": {"target_layer_ids": [1]}}'


def step(folder: Path, number: int, *, whole: bool = True) -> Path:
    """A ``step_N/`` as our trainer writes it; without its manifest unless it is ``whole``."""
    directory = folder / f"step_{number}"
    directory.mkdir(parents=True)
    weights(directory / DRAFTER, number)
    (directory / CONFIG).write_text(CONFIG_TEXT)
    if whole:
        seal(directory, step=number, metrics={})
    return directory


def zlab(folder: Path, name: str, number: int = 1) -> Path:
    """A directory that nothing seals."""
    directory = folder / name
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text(CONFIG_TEXT)
    weights(directory / "model.safetensors", number)
    return directory


def weights(file: Path, number: int = 1) -> Path:
    """One safetensors file whose content depends on ``number``."""
    save_file({"fc.weight": np.full((2, 2), number, np.float32)}, file)
    return file


def written(path: Path, seconds: float) -> Path:
    """``path`` and what is in it as if it had been written then."""
    for one in (*path.rglob("*"), path):
        os.utime(one, (seconds, seconds))
    return path
