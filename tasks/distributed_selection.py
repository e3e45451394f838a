"""What of a directory of ``torch.distributed.checkpoint`` has to move: the model's items out of all ranks' files."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from dflash.checkpoint_layout import CheckpointError, DamagedError, TensorRecord
from dflash.distributed_checkpoint import METADATA, DistributedLayout, Item, ShardedTensor, read_items, read_metadata
from dflash.manifest import CONFIG
from dflash.safetensors_header import TRAINING
from tasks.checkpoint_content import config_in, drafters, scalars_in
from tasks.packing import Chosen, NotContiguousError, copied, literal, pack
from tasks.repack import OutputFile
from tasks.sources import Reading

_MODEL_KEYS = ("model_state_dict", "model", "state_dict", "app")
# What lies beside a model that was saved without a key of its own, as torchtitan does.
_BESIDE_A_MODEL = frozenset(
    {"optimizer", "optim", "optimizers", "lr_scheduler", "scheduler", "train_state", "dataloader"}
)
_MOST_OBJECTS = 256


def select_distributed(
    reading: Reading, name: str, what: Literal["drafter", "model", "all"], narrow: bool
) -> tuple[tuple[OutputFile, ...], str]:
    """The files to make of the directory, and its identity: a digest of ``.metadata`` and the files' sizes and times.

    The model's tensors become one safetensors file ``name``; ranks that sharded a tensor along its first axis are put
    together on the way. Raises :class:`NotContiguousError` for another axis, :class:`DamagedError` for items that are
    not what ``.metadata`` says.
    """
    text = reading.whole(METADATA)
    layout = read_metadata(text, f"{reading.place}/{METADATA}")
    told = [(file, state.size, state.mtime_ns) for file, state in sorted(reading.look.items())]
    identity = f"dcp:{hashlib.sha256(text + json.dumps(told).encode()).hexdigest()}"
    _require_inside(reading, layout)
    if what == "all":
        return tuple(copied(file, state.size) for file, state in reading.look.items()), identity
    tensors = _of_the_model(reading.place, layout)
    if what == "drafter":
        tensors = drafters(reading.place, tensors)
    objects = _told(reading, layout)
    items = [chunk.item for tensor in tensors.values() for chunk in tensor.chunks]
    held = _read(reading, items)
    chosen = [_chosen(reading.place, full, tensor, held) for full, tensor in tensors.items()]
    training = scalars_in(objects)
    metadata = {"format": "pt"} | ({TRAINING: json.dumps(training)} if training else {})
    config = config_in(f"{reading.place}/{METADATA}", objects)
    if config is not None:
        beside: tuple[OutputFile, ...] = (literal(CONFIG, config),)
    else:
        beside = (copied(CONFIG, reading.look[CONFIG].size),) if CONFIG in reading.look else ()
    return (pack(name, chosen, metadata=metadata, narrow=narrow), *beside), identity


def _require_inside(reading: Reading, layout: DistributedLayout) -> None:
    """No item may reach beyond its file, and none may share a byte with another."""
    items = [chunk.item for tensor in layout.tensors.values() for chunk in tensor.chunks]
    ends: dict[str, int] = {}
    for item in sorted((*items, *layout.objects.values()), key=lambda item: (item.file, item.offset)):
        if item.offset < ends.get(item.file, 0):
            raise DamagedError(f"{reading.place}/{item.file}: two items share the bytes at {item.offset}")
        ends[item.file] = item.offset + item.length
    for file, end in ends.items():
        size = reading.file(file).size
        if end > size:
            raise DamagedError(
                f"{reading.place}/{file} has {size} bytes, {METADATA} describes {end}: it is cut short or still being "
                f"written"
            )


def _of_the_model(place: str, layout: DistributedLayout) -> dict[str, ShardedTensor]:
    """Its tensors by their names in the model: without the key that the model was saved under."""
    paths = {full: layout.paths.get(full) or tuple(full.split(".")) for full in layout.tensors}
    first = {path[0] for path in paths.values()}
    key = next((key for key in _MODEL_KEYS if key in first), None)
    if key == "app":  # the Stateful of torch's own tutorial: {"app": {"model": …, "optim": …}}
        named = {full: path[2:] for full, path in paths.items() if path[:2] == ("app", "model")}
    elif key is not None:
        named = {full: path[1:] for full, path in paths.items() if path[0] == key}
    else:
        named = {full: path for full, path in paths.items() if path[0] not in _BESIDE_A_MODEL}
    tensors = {".".join(path): layout.tensors[full] for full, path in named.items() if path}
    if not tensors:
        raise CheckpointError(f"{place} holds {', '.join(sorted(first)[:8]) or 'nothing'}, expected tensors of a model")
    if len(tensors) != len(named):
        raise CheckpointError(f"{place}: two tensors of the model have one name")
    return tensors


def _told(reading: Reading, layout: DistributedLayout) -> dict[str, Any]:
    """The objects that are no tensors, nested again: those of the config, and what stands at the top level."""
    wanted = {
        full: item
        for full, item in layout.objects.items()
        if len(layout.paths.get(full, (full,))) == 1 or layout.paths[full][0] in ("config", "metrics")
    }
    if len(wanted) > _MOST_OBJECTS:
        return {}
    held = _read(reading, wanted.values())
    told: dict[str, Any] = {}
    for full, item in wanted.items():
        *above, last = layout.paths.get(full, (full,))
        inner = told
        for key in above:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise DamagedError(f"{reading.place}/{METADATA}: {full} lies inside of what is no dictionary")
        inner[last] = held[item]
    return told


def _read(reading: Reading, items: Iterable[Item]) -> dict[Item, Any]:
    by_file: dict[str, list[Item]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    return {
        item: content
        for file, those in by_file.items()
        for item, content in zip(those, read_items(reading.file(file), those), strict=True)
    }


def _chosen(place: str, name: str, tensor: ShardedTensor, held: Mapping[Item, Any]) -> Chosen:
    parts: list[tuple[str, TensorRecord]] = []
    row = 0
    for chunk in tensor.chunks:
        content = held[chunk.item]
        if not isinstance(content, TensorRecord) or (content.dtype, content.shape) != (tensor.dtype, chunk.sizes):
            raise DamagedError(f"{place}: the item of {name} is not the {tensor.dtype}{list(chunk.sizes)} it should be")
        if chunk.offsets[1:] != (0,) * (len(tensor.shape) - 1) or chunk.sizes[1:] != tensor.shape[1:]:
            raise NotContiguousError(
                f"{place}: {name} is sharded along another axis than its first; put the checkpoint together there, or "
                f"relay all of it"
            )
        if tensor.shape and chunk.offsets[0] != row:
            raise DamagedError(f"{place}: the shards of {name} leave out or repeat row {row}")
        row += chunk.sizes[0] if tensor.shape else 0
        if 0 not in chunk.sizes:
            parts.append((chunk.item.file, content))
    if sum(math.prod(part.shape) for _, part in parts) != math.prod(tensor.shape) or not tensor.chunks:
        raise DamagedError(f"{place}: the shards of {name} are not all of it")
    if not parts:
        parts = [(tensor.chunks[0].item.file, held[tensor.chunks[0].item])]
    return Chosen(name, tensor.shape, tuple(parts))
