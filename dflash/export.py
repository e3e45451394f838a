"""A drafter written as a directory that engines and libraries load: z-lab's, speculators' or transformers' layout.

The tensors are the checkpoint's, bit for bit, unless another dtype is asked for. The directory appears whole or not at
all: it is written under a temporary name beside its own and renamed.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dflash.checkpoints import DrafterCheckpoint
from dflash.config import ConfigError
from dflash.formats import ExportFormat, their_name, write_config
from dflash.manifest import file_sha256
from dflash.output import whole_directory

Dtype = Literal["auto", "float32", "bfloat16"]
_EXPONENT_AND_MANTISSA = {torch.float32: (8, 23), torch.bfloat16: (8, 7), torch.float16: (5, 10)}


class ExportedFile(BaseModel):
    """One file of an export."""

    name: str
    size: int
    sha256: str


class Export(BaseModel):
    """What ``dflash export`` wrote. ``notes`` are what whoever serves it should know."""

    model_config = ConfigDict(frozen=True)

    path: str
    format: ExportFormat
    source: str
    source_format: str
    source_sha256: str
    step: int | None
    dtype: str
    files: list[ExportedFile]
    config: dict[str, Any]
    notes: list[str]


def export(
    checkpoint: DrafterCheckpoint,
    format: ExportFormat,
    output: Path,
    *,
    dtype: Dtype = "auto",
    verifier: str | None = None,
) -> Export:
    """Write ``checkpoint`` to the directory ``output``, which must not exist or be empty.

    ``dtype`` auto keeps each tensor as it is. ``verifier`` is the target's name or directory, which speculators' layout
    has a place for. :class:`~dflash.config.ConfigError` where the layout cannot express the drafter,
    :class:`~dflash.output.OutputError` where the directory cannot be written.
    """
    dtypes = {tensor.dtype if dtype == "auto" else getattr(torch, dtype) for tensor in checkpoint.weights.values()}
    said = _name(next(iter(dtypes)) if len(dtypes) == 1 else checkpoint.weights["fc.weight"].dtype)
    try:
        config, notes = write_config(format, checkpoint.config, dtype=said, verifier=verifier)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path} as {format}: {error}") from None
    weights = {
        their_name(format, name): tensor if dtype == "auto" else tensor.to(getattr(torch, dtype))
        for name, tensor in checkpoint.weights.items()
    }
    with whole_directory(output) as partial:
        _save(weights, partial / "model.safetensors")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        files = [
            ExportedFile(name=file.name, size=file.stat().st_size, sha256=file_sha256(file))
            for file in sorted(partial.iterdir())
        ]
    return Export(
        path=str(output),
        format=format,
        source=str(checkpoint.path),
        source_format=checkpoint.format,
        source_sha256=checkpoint.sha256,
        step=checkpoint.step,
        dtype=said,
        files=files,
        config=config,
        notes=[*checkpoint.notes, *notes, *_rounding(checkpoint, dtype)],
    )


def _save(weights: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(_unshared(weights), path, metadata={"format": "pt"})
    except SafetensorError as error:  # how it tells what the file system says
        raise OSError(str(error)) from None


def _unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values, each tensor with memory of its own: safetensors does not write tied ones twice."""
    seen: set[int] = set()
    alone: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        alone[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return alone


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rounding(checkpoint: DrafterCheckpoint, dtype: Dtype) -> list[str]:
    """That the asked dtype cannot hold what the checkpoint's does."""
    if dtype == "auto":
        return []
    room = _EXPONENT_AND_MANTISSA[getattr(torch, dtype)]
    wider = {
        tensor.dtype
        for tensor in checkpoint.weights.values()
        if any(has > fits for has, fits in zip(_EXPONENT_AND_MANTISSA.get(tensor.dtype, (11, 52)), room, strict=True))
    }
    return [f"rounded from {' and '.join(sorted(map(_name, wider)))} to {dtype}"] if wider else []
