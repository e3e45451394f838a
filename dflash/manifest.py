"""The manifest of a training checkpoint ``step_N/``: written last, so a directory that has one is whole.

Imports no torch: a machine that only moves checkpoints reads and verifies them with this.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from dflash.checkpoint_layout import DamagedError, read_safetensors_file, reading

MANIFEST = "manifest.json"
DRAFTER = "drafter.safetensors"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PROBE = "probe.safetensors"
REPLAY = "replay.safetensors"
SCHEMA = 1

_CHUNK = 8 << 20


class FileEntry(BaseModel):
    """One file of the directory as it was when the manifest was written."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: NonNegativeInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """``manifest.json``. ``metrics`` and ``recipe`` are the trainer's own words and stay as they were written."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    schema_: int = Field(SCHEMA, alias="schema")
    step: NonNegativeInt
    files: dict[str, FileEntry]
    metrics: dict[str, Any] = {}
    recipe: dict[str, Any] | str | None = None
    config_sha256: str
    """:func:`config_digest` of config.json."""


def config_digest(config: Mapping[str, Any]) -> str:
    """sha256 of ``config`` as canonical JSON: equal for two configs that differ only in layout on disk."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def seal(
    directory: Path, *, step: int, metrics: Mapping[str, Any], recipe: Mapping[str, Any] | str | None = None
) -> Manifest:
    """Complete a ``step_N/`` whose other files are written: the weights' index, then the manifest, both on disk.

    The index is what lets z-lab's layout be read as is: without it loaders take every ``*.safetensors`` of a directory
    for weights, the probe and the replay batch too.
    """
    weights = read_safetensors_file(directory / DRAFTER)
    total = sum(record.length for record in weights.records.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(weights.content, DRAFTER)}
    _write_durably(directory / INDEX, index)
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    files = {
        path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    raw = {
        "schema": SCHEMA,
        "step": step,
        "files": files,
        "metrics": dict(metrics),
        "recipe": dict(recipe) if isinstance(recipe, Mapping) else recipe,
        "config_sha256": config_digest(config),
    }
    manifest = Manifest.model_validate(raw)
    _write_durably(directory / MANIFEST, raw)
    return manifest


def read_manifest(directory: Path) -> tuple[Manifest, dict[str, Any]]:
    """The manifest of ``directory``, and its JSON as it stands; :class:`DamagedError` says what is wrong with it."""
    path = directory / MANIFEST
    with reading(path):
        text = path.read_bytes()
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, path: str) -> tuple[Manifest, dict[str, Any]]:
    """The manifest that ``text`` is, as :func:`read_manifest`; ``path`` is what errors call it."""
    try:
        raw = json.loads(text)
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DamagedError(f"{path}: {where or 'content'}: {first['msg']}; copy the directory again") from None
    except (ValueError, RecursionError):
        raise DamagedError(f"{path} is not readable JSON; copy the directory again") from None
    if manifest.schema_ > SCHEMA:
        raise DamagedError(f"{path} has schema {manifest.schema_}, this version reads up to {SCHEMA}; update dflash")
    for needed in (DRAFTER, CONFIG):
        if needed not in manifest.files:
            raise DamagedError(f"{path} lists no {needed}; it was not written by a trainer that finished this step")
    return manifest, raw


def verify(directory: Path, manifest: Manifest) -> None:
    """Sizes of all listed files that are here, and the content of config.json; :class:`DamagedError` names the file.

    Files that an evaluation does not need may be left behind by whoever moves a checkpoint; the drafter may not. Its
    hash is compared by whoever reads it (:mod:`dflash.checkpoints`).
    """
    for name, entry in manifest.files.items():
        path = directory / name
        if Path(name).name != name:
            raise DamagedError(f"{directory / MANIFEST} lists {name!r}, expected names of files in the directory")
        with reading(path):  # a name can be longer than the file system takes
            there = path.exists()
        if not there:
            if name in (DRAFTER, CONFIG):
                raise DamagedError(f"{path} is missing, the manifest lists it; copy the directory again")
            continue
        with reading(path):
            size = path.stat().st_size
        if size != entry.size:
            raise DamagedError(f"{path} has {size} bytes, the manifest says {entry.size}; copy the directory again")
    config = directory / CONFIG
    with reading(config):
        found = file_sha256(config)
    require_sha256(config, found, manifest)
    try:
        digest = config_digest(json.loads(config.read_bytes()))
    except (ValueError, RecursionError):
        raise DamagedError(f"{config} is not readable JSON; copy the directory again") from None
    if digest != manifest.config_sha256:
        raise DamagedError(
            f"{directory / MANIFEST} says config_sha256 {manifest.config_sha256}, config.json has {digest}: "
            f"the step was sealed with another config"
        )


def require_sha256(path: Path, found: str, manifest: Manifest) -> None:
    """:class:`DamagedError` unless ``found`` is what the manifest says of ``path``."""
    expected = manifest.files[path.name].sha256
    if found != expected:
        raise DamagedError(f"{path} has sha256 {found}, the manifest says {expected}; copy the file again")


def file_sha256(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _write_durably(path: Path, content: Mapping[str, Any]) -> None:
    """Under a temporary name, on disk, then renamed: a reader sees all of it or nothing."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
