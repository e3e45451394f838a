"""Drafter checkpoints as torch tensors, whatever layout they lie in (:data:`dflash.checkpoint_layout.Format`).

Only the drafter's tensors are read, under z-lab's names. Names and shapes are checked against the config before, finite
values after; the files are hashed and must not have changed meanwhile.
"""

import difflib
import hashlib
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
    step_in_name,
    weight_files,
)
from dflash.config import ConfigError, DrafterConfig, read_config_file
from dflash.drafter import Drafter
from dflash.formats import ReadConfig, our_name, read_config, unwrapped
from dflash.manifest import DRAFTER, PROBE, REPLAY, Manifest, read_manifest, require_sha256, verify
from dflash.recipes import Recipe, RecipeError, describe
from dflash.safetensors_header import training_told

ConfigSource = Literal["key config", "config.json beside", "--drafter-config", "reference"]

_TRAINING_KEYS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "loss": (int, float),
    "accuracy": (int, float),
    "streak1": (int, float),
    "streak8": (int, float),
    "kernel": (str,),
    "recipe": (str,),
}
# What a layout may lack and another config of the same drafter can supply.
_SUPPLIED = ("num_target_layers", "vocab_size")
_MASK_EMBEDDING = "mask_embedding.pt"
_HASH_CHUNK = 8 << 20


class TensorsError(CheckpointError):
    """The tensors are not those that the config describes; every one at fault is named."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose tensors are located but not read. ``tensors`` maps z-lab's names to file and place.

    ``notes`` say what its layout leaves open or states otherwise; ``manifest`` and ``sealed``, the same checked, belong
    to a ``step_N/``, whose sizes and config were verified when it was opened.
    """

    path: Path
    format: Format
    step: int | None
    config: DrafterConfig
    config_source: ConfigSource
    raw_config: dict[str, Any]
    training: dict[str, Any]
    files: tuple[TensorFile, ...]
    tensors: dict[str, tuple[TensorFile, TensorRecord]]
    notes: tuple[str, ...] = ()
    manifest: dict[str, Any] | None = None
    sealed: Manifest | None = None

    def problems(self) -> list[str]:
        """What separates names, shapes and dtypes from the config's; empty if nothing does."""
        return tensor_problems(self.config, {name: record for name, (_, record) in self.tensors.items()})


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter as it was saved. ``weights`` keep the file's dtype; ``sha256`` is of the weights' file or files.

    ``training`` holds what the file says of its own training, under the names of ``report.json``; ``raw_config`` is in
    z-lab's layout. Of a ``step_N/`` there are its ``manifest`` as written and, where they are, the files of the
    ``probe`` and of the batch whose metrics the trainer recorded.
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
    notes: tuple[str, ...] = ()
    manifest: dict[str, Any] | None = None
    probe: Path | None = None
    metric_replay: Path | None = None


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
        notes=opened.notes,
        manifest=opened.manifest,
        probe=_part(opened, PROBE),
        metric_replay=_part(opened, REPLAY),
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

    The config is the file's own ``config``, else ``config.json`` beside or in it, else ``drafter_config``, else that
    of the ``reference`` directory; the latter two also supply a field that a directory's layout has no key for. A
    ``drafter_config`` that contradicts the checkpoint's own config is an error.
    """
    path = Path(path)
    kind = sniff(path)
    manifest: dict[str, Any] | None = None
    sealed: Manifest | None = None
    if kind == "pt":
        files: tuple[TensorFile, ...] = (read_torch_file(path),)
        content = _checkpoint_dict(files[0])
        beside = path.with_name("config.json")
        states = [content["model_state_dict"]]
    else:
        _refuse_mask_embedding(path)
        if kind == "step":
            sealed, manifest = read_manifest(path)
            verify(path, sealed)
        files = tuple(read_safetensors_file(shard) for shard in weight_files(path, kind))
        content = manifest or training_told(files[0].metadata)
        beside = path / "config.json"
        states = [file.content for file in files]
    tensors = _named(path, kind, list(zip(files, states, strict=True)))
    fc = tensors.get("fc.weight")
    fc_width = fc[1].shape[1] if fc is not None and len(fc[1].shape) == 2 else None
    found, source = _resolve_config(path, kind, content, beside, drafter_config, reference, fc_width)
    training = _training(content)
    return Opened(
        path=path,
        format=kind,
        step=training.get("step", step_in_name(path)),
        config=found.config,
        config_source=source,
        raw_config=found.raw,
        training=training,
        files=files,
        tensors=tensors,
        notes=found.notes,
        manifest=manifest,
        sealed=sealed,
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
    """sha256 of the weights' file, or of the files of a directory one after the other in the order of their names.

    :class:`DamagedError` where the manifest of a ``step_N/`` says another one.
    """
    digest = hashlib.sha256()
    for layout in opened.files:
        with reading(layout.path), layout.path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
        layout.require_unchanged()
    if opened.sealed is not None:
        require_sha256(opened.path / DRAFTER, digest.hexdigest(), opened.sealed)
    return digest.hexdigest()


def _checkpoint_dict(layout: TensorFile) -> Mapping[str, Any]:
    content = layout.content
    if not isinstance(content, Mapping) or not isinstance(content.get("model_state_dict"), Mapping):
        found = f"keys {_some([str(key) for key in content])}" if isinstance(content, Mapping) else "no dictionary"
        raise NotACheckpointError(f"{layout.path} holds {found}, expected model_state_dict beside optimizer_state_dict")
    return content


def _named(
    path: Path, kind: Format, states: Sequence[tuple[TensorFile, Mapping[str, Any]]]
) -> dict[str, tuple[TensorFile, TensorRecord]]:
    """z-lab's names, without what DDP, ``torch.compile`` and a trainer's own module put before them."""
    tensors: dict[str, tuple[TensorFile, TensorRecord]] = {}
    for file, state in states:
        for full_name, value in state.items():
            if not isinstance(value, TensorRecord):
                raise TensorsError(f"{path}: model_state_dict has {full_name}, which is not a tensor")
            name = our_name(kind, unwrapped(str(full_name)))
            if name is None:
                continue
            if name in tensors:
                raise TensorsError(f"{path}: {name} is there twice once prefixes are stripped ({full_name}); keep one")
            tensors[name] = (file, value)
    return tensors


def _refuse_mask_embedding(path: Path) -> None:
    if (path / _MASK_EMBEDDING).exists():
        raise TensorsError(
            f"{path} has {_MASK_EMBEDDING}, a mask of its own that vLLM puts in place of the target's row; only "
            f"drafters that use the target's embedding of mask_token_id are computed here"
        )


def _part(opened: Opened, name: str) -> Path | None:
    """A file of a ``step_N/`` that its manifest lists and that was brought along."""
    path = opened.path / name
    return path if opened.sealed is not None and name in opened.sealed.files and path.is_file() else None


Candidate = tuple[dict[str, Any], ConfigSource, str]
"""A raw config, where it comes from, and how errors name it."""


def _resolve_config(
    path: Path,
    kind: Format,
    content: Mapping[str, Any],
    beside: Path,
    drafter_config: Path | None,
    reference: Path | None,
    fc_width: int | None,
) -> tuple[ReadConfig, ConfigSource]:
    own = _own_config(path, kind, content, beside)
    given: Candidate | None = None
    if drafter_config is not None:
        given = (read_config_file(drafter_config), "--drafter-config", str(drafter_config))
    borrowed: Candidate | None = None
    if reference is not None and (given is None if own is None else kind in ("speculators", "transformers")):
        borrowed = _config_of_reference(reference)
    supplied: dict[str, Any] = {}
    for candidate in (borrowed, given):
        if candidate is not None:
            supplied |= {name: candidate[0][name] for name in _SUPPLIED if candidate[0].get(name) is not None}
    if own is not None:
        raw, source, named = own
        found = read_config(kind, raw, source=named, given=supplied, fc_width=fc_width)
        # A file with nothing but what this layout lacks supplies that and contradicts nothing.
        if given is not None and not given[0].keys() <= set(_SUPPLIED):
            _require_agreement(found.config, named, given)
        return found, source
    taken = given or borrowed
    if taken is None:
        raise ConfigError(
            f"{path}: no config (no key config in it, no config.json beside it); hidden_size, num_attention_heads, "
            f"num_key_value_heads, head_dim, rms_norm_eps, rope_theta, block_size, num_target_layers, "
            f"dflash_config.mask_token_id and dflash_config.target_layer_ids are missing; give --drafter-config FILE"
        )
    return read_config("zlab", taken[0], source=taken[2], given={}), taken[1]


def _own_config(path: Path, kind: Format, content: Mapping[str, Any], beside: Path) -> Candidate | None:
    config = content.get("config")
    # A trainer's own settings under the same key say nothing about the drafter.
    if kind == "pt" and isinstance(config, Mapping) and ("dflash_config" in config or "hidden_size" in config):
        return dict(config), "key config", f"{path} (key config)"
    return (read_config_file(beside), "config.json beside", str(beside)) if beside.is_file() else None


def _config_of_reference(reference: Path) -> Candidate:
    """The reference drafter's config in z-lab's layout, whatever its own is."""
    named = reference / "config.json"
    raw = read_config_file(named)
    kind = sniff(reference)
    if kind in ("speculators", "transformers", "torchspec"):
        raw = read_config(kind, raw, source=str(named), given={}).config.to_dict()
    return raw, "reference", str(named)


def _require_agreement(ours: DrafterConfig, named: str, given: Candidate) -> None:
    theirs = DrafterConfig.from_dict(given[0], source=given[2]).model_dump()
    for name, value in ours.model_dump().items():
        if theirs[name] != value:
            raise ConfigError(f"{named} says {name} {value}, {given[2]} says {theirs[name]}; leave the wrong one out")


def _training(content: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers and names that a trainer saved at the top level or under ``metrics``."""
    nested = content.get("metrics")
    places = (nested if isinstance(nested, Mapping) else {}, content)
    return _recipe_in_a_line(content) | {
        key: place[key]
        for place in places
        for key, types in _TRAINING_KEYS.items()
        if isinstance(place.get(key), types) and not isinstance(place[key], bool)
    }


def _recipe_in_a_line(content: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's recipe as a report shows it; one that says nonsense is left to its check."""
    said = content.get("recipe")
    if not isinstance(said, Mapping):
        return {}
    try:
        return {"recipe": describe(Recipe.from_dict(said, source="manifest"))}
    except RecipeError:
        return {}


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
