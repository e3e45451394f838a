"""Drafter checkpoints as torch tensors: a z-lab directory, or an old single file with its optimizer beside the weights.

Only the drafter's tensors are read. Names and shapes are checked against the config before, finite values after; the
file is hashed and must not have changed meanwhile.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dflash.checkpoint_layout import (
    CheckpointError,
    Format,
    NotACheckpointError,
    TensorFile,
    TensorRecord,
    read_record,
    read_safetensors_file,
    read_torch_file,
    reading,
    sniff,
)
from dflash.config import ConfigError, DrafterConfig
from dflash.drafter import Drafter

ConfigSource = Literal["key config", "config.json beside", "--drafter-config", "reference"]

_PREFIXES = ("module.", "_orig_mod.", "draft_model.")
_TRAINING_KEYS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "loss": (int, float),
    "accuracy": (int, float),
    "streak1": (int, float),
    "streak8": (int, float),
    "kernel": (str,),
    "recipe": (str,),
}
_HASH_CHUNK = 8 << 20


class TensorsError(CheckpointError):
    """The tensors are not those that the config describes; every one at fault is named."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose tensors are located but not read. ``tensors`` maps stripped names to file and place."""

    path: Path
    format: Format
    step: int | None
    config: DrafterConfig
    config_source: ConfigSource
    raw_config: dict[str, Any]
    training: dict[str, Any]
    files: tuple[TensorFile, ...]
    tensors: dict[str, tuple[TensorFile, TensorRecord]]

    def problems(self) -> list[str]:
        """What separates names, shapes and dtypes from the config's; empty if nothing does."""
        return tensor_problems(self.config, {name: record for name, (_, record) in self.tensors.items()})


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter as it was saved. ``weights`` keep the file's dtype; ``sha256`` is of the weights' file or files.

    ``training`` holds what the file says of its own training, under the names of ``report.json``.
    """

    path: Path
    format: Format
    step: int | None
    config: DrafterConfig
    config_source: ConfigSource
    raw_config: dict[str, Any]
    weights: dict[str, Tensor]
    sha256: str
    training: dict[str, Any]


def read_checkpoint(
    path: str | Path, *, drafter_config: Path | None = None, reference: Path | None = None
) -> DrafterCheckpoint:
    """Read the drafter at ``path``; see :func:`open_checkpoint` for where its config comes from.

    Raises a :class:`CheckpointError` or :class:`ConfigError` that names the file, tensor or key at fault.
    """
    opened = open_checkpoint(path, drafter_config=drafter_config, reference=reference)
    if problems := opened.problems():
        raise TensorsError(f"{opened.path}: {'; '.join(problems)}")
    weights = read_tensors(opened)
    if problems := value_problems(weights):
        raise TensorsError(f"{opened.path}: {'; '.join(problems)}")
    return DrafterCheckpoint(
        path=opened.path,
        format=opened.format,
        step=opened.step,
        config=opened.config,
        config_source=opened.config_source,
        raw_config=opened.raw_config,
        weights=weights,
        sha256=hash_files(opened),
        training=opened.training,
    )


def build_drafter(checkpoint: DrafterCheckpoint, *, device: torch.device | str, dtype: torch.dtype) -> Drafter:
    """The frozen drafter with the checkpoint's weights as ``dtype`` on ``device``."""
    with torch.device("meta"):
        drafter = Drafter(checkpoint.config)
    weights = {name: tensor.to(device, dtype) for name, tensor in checkpoint.weights.items()}
    drafter.load_state_dict(weights, assign=True)
    return drafter.requires_grad_(False).train(False)


def open_checkpoint(path: str | Path, *, drafter_config: Path | None = None, reference: Path | None = None) -> Opened:
    """Locate the drafter's tensors and its config, reading neither optimizer nor weights.

    The config is the file's own ``config``, else ``config.json`` beside it, else ``drafter_config``, else that of the
    ``reference`` directory. A ``drafter_config`` that contradicts the checkpoint's own config is an error.
    """
    path = Path(path)
    kind = sniff(path)
    if kind == "zlab":
        files = tuple(read_safetensors_file(shard) for shard in sorted(path.glob("*.safetensors")))
        content: Mapping[str, Any] = {}
        beside = path / "config.json"
        states = [file.content for file in files]
    else:
        files = (read_torch_file(path),)
        content = _checkpoint_dict(files[0])
        beside = path.with_name("config.json")
        states = [content["model_state_dict"]]
    raw_config, source, named = _resolve_config(path, content, beside, drafter_config, reference)
    training = _training(content)
    return Opened(
        path=path,
        format=kind,
        step=training.get("step", _step_in_name(path)),
        config=DrafterConfig.from_dict(raw_config, source=named),
        config_source=source,
        raw_config=raw_config,
        training=training,
        files=files,
        tensors=_strip_prefixes(path, list(zip(files, states, strict=True))),
    )


def tensor_problems(config: DrafterConfig, tensors: Mapping[str, TensorRecord]) -> list[str]:
    """One sentence a fault: missing, extra, renamed (both names), misshaped or non-float tensors."""
    expected = config.tensor_shapes()
    missing = [name for name in expected if name not in tensors]
    extra = sorted(name for name in tensors if name not in expected)
    problems = []
    for name in list(missing):
        alike = [other for other in extra if tensors[other].shape == expected[name]]
        if guess := difflib.get_close_matches(name, alike, n=1):
            problems.append(f"{guess[0]} was found where {name} was expected: renamed?")
            missing.remove(name)
            extra.remove(guess[0])
    if missing:
        problems.append(f"missing {_some(missing)}")
    if extra:
        problems.append(f"unexpected {_some(extra)}")
    for name in expected:
        if name in tensors and tensors[name].shape != expected[name]:
            problems.append(_shape_problem(config, name, tensors[name].shape, expected[name]))
    not_float = [name for name in expected if name in tensors and "float" not in tensors[name].dtype]
    if not_float:
        problems.append(f"{not_float[0]} is {tensors[not_float[0]].dtype}, expected a floating-point dtype")
    return problems


def value_problems(weights: Mapping[str, Tensor]) -> list[str]:
    """The tensors that hold NaN or infinite values."""
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    return (
        [f"NaN or infinite values in {_some(broken)}; the training diverged or the file is damaged"] if broken else []
    )


def read_tensors(opened: Opened) -> dict[str, Tensor]:
    """The tensors in the file's dtype, contiguous; a record that tied tensors share is read once."""
    weights: dict[str, Tensor] = {}
    for layout in opened.files:
        storages: dict[str, Tensor] = {}
        with reading(layout.path), layout.path.open("rb") as file:
            for name, (owner, tensor) in opened.tensors.items():
                if owner is not layout:
                    continue
                if tensor.record.name not in storages:
                    data = read_record(layout.path, file, tensor.record)
                    storages[tensor.record.name] = torch.frombuffer(data, dtype=torch.uint8)
                storage = storages[tensor.record.name].view(getattr(torch, tensor.dtype))
                weights[name] = storage.as_strided(tensor.shape, tensor.stride, tensor.offset).contiguous()
        layout.require_unchanged()
    return weights


def hash_files(opened: Opened) -> str:
    """sha256 of the weights' file, or of the files of a directory one after the other in the order of their names."""
    digest = hashlib.sha256()
    for layout in opened.files:
        with reading(layout.path), layout.path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
        layout.require_unchanged()
    return digest.hexdigest()


def _checkpoint_dict(layout: TensorFile) -> Mapping[str, Any]:
    content = layout.content
    if not isinstance(content, Mapping) or not isinstance(content.get("model_state_dict"), Mapping):
        found = f"keys {_some([str(key) for key in content])}" if isinstance(content, Mapping) else "no dictionary"
        raise NotACheckpointError(f"{layout.path} holds {found}, expected model_state_dict beside optimizer_state_dict")
    return content


def _strip_prefixes(
    path: Path, states: Sequence[tuple[TensorFile, Mapping[str, Any]]]
) -> dict[str, tuple[TensorFile, TensorRecord]]:
    """Names without what DDP, ``torch.compile`` and a trainer's own module put before them."""
    tensors: dict[str, tuple[TensorFile, TensorRecord]] = {}
    for file, state in states:
        for full_name, value in state.items():
            name = str(full_name)
            while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
                name = name.removeprefix(prefix)
            if not isinstance(value, TensorRecord):
                raise TensorsError(f"{path}: model_state_dict has {full_name}, which is not a tensor")
            if name in tensors:
                raise TensorsError(f"{path}: {name} is there twice once prefixes are stripped ({full_name}); keep one")
            tensors[name] = (file, value)
    return tensors


def _resolve_config(
    path: Path, content: Mapping[str, Any], beside: Path, drafter_config: Path | None, reference: Path | None
) -> tuple[dict[str, Any], ConfigSource, str]:
    """The raw config, where it comes from, and how errors name it."""
    own = content.get("config")
    candidates: list[tuple[dict[str, Any], ConfigSource, str]] = []
    # A trainer's own settings under the same key say nothing about the drafter.
    if isinstance(own, Mapping) and ("dflash_config" in own or "hidden_size" in own):
        candidates.append((dict(own), "key config", f"{path} (key config)"))
    elif beside.is_file():
        candidates.append((_read_json(beside), "config.json beside", str(beside)))
    if drafter_config is not None:
        given: tuple[dict[str, Any], ConfigSource, str]
        given = (_read_json(drafter_config), "--drafter-config", str(drafter_config))
        if candidates:
            _require_agreement(candidates[0], given)
        candidates.append(given)
    if not candidates and reference is not None:
        candidates.append((_read_json(reference / "config.json"), "reference", str(reference / "config.json")))
    if not candidates:
        raise ConfigError(
            f"{path}: no config (no key config in it, no config.json beside it); hidden_size, num_attention_heads, "
            f"num_key_value_heads, head_dim, rms_norm_eps, rope_theta, block_size, num_target_layers, "
            f"dflash_config.mask_token_id and dflash_config.target_layer_ids are missing; give --drafter-config FILE"
        )
    return candidates[0]


def _require_agreement(
    own: tuple[dict[str, Any], ConfigSource, str], given: tuple[dict[str, Any], ConfigSource, str]
) -> None:
    ours = DrafterConfig.from_dict(own[0], source=own[2]).model_dump()
    theirs = DrafterConfig.from_dict(given[0], source=given[2]).model_dump()
    for name, value in ours.items():
        if theirs[name] != value:
            raise ConfigError(f"{own[2]} says {name} {value}, {given[2]} says {theirs[name]}; leave the wrong one out")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a drafter's config.json") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a drafter's config.json") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); expected a drafter's config.json") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object, expected a drafter's config.json")
    return raw


def _training(content: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers and names that a trainer saved at the top level or under ``metrics``."""
    nested = content.get("metrics")
    places = (nested if isinstance(nested, Mapping) else {}, content)
    return {
        key: place[key]
        for place in places
        for key, types in _TRAINING_KEYS.items()
        if isinstance(place.get(key), types) and not isinstance(place[key], bool)
    }


def _step_in_name(path: Path) -> int | None:
    match = re.search(r"step[_-]?(\d+)", path.stem)
    return int(match[1]) if match else None


def _shape_problem(config: DrafterConfig, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    hidden, taps = config.hidden_size, config.target_layer_ids
    if name == "fc.weight" and len(found) == 2 and found[0] == hidden and found[1] % hidden == 0:
        return (
            f"fc.weight is {found[0]}×{found[1]}, which takes {found[1] // hidden} taps of {hidden}, but the config "
            f"names {len(taps)} ({', '.join(map(str, taps))}), {expected[0]}×{expected[1]}: the drafter was trained on "
            f"{'fewer' if found[1] < expected[1] else 'more'} taps than its config says"
        )
    return f"{name} has shape {list(found)}, the config makes it {list(expected)}"


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
