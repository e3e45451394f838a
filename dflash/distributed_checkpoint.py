"""Checkpoints that ``torch.distributed.checkpoint`` writes: a directory of ``.distcp`` files and their ``.metadata``.

``.metadata`` is a pickle that says which bytes of which file are which part of which tensor; each such item is a
``torch.save`` file of its own, inside of the larger one. The pickle is read by :mod:`dflash.inert_pickle`. It is
written last, so a directory that has it is whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from dflash.inert_pickle import PLAIN, Call, Instance, Opaque, instances, interpret
from dflash.records import ITEM_SIZES, ByteReader, DamagedError, TensorRecord, read_ranges
from dflash.torch_zip import place, read_content, read_directory

METADATA = ".metadata"

_EDGE = 4096
"""Bytes at either end of an item, which hold all of it but its tensor."""
_LONGEST = 64
"""Axes of a tensor, or keys on the way to it."""
_CHECKPOINT = "torch.distributed.checkpoint"
_NAMES: Mapping[tuple[str, str], Any] = {
    **PLAIN,
    **instances(
        f"{_CHECKPOINT}.metadata",
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    **instances("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING", "TensorProperties"),
    **instances(f"{_CHECKPOINT}.filesystem", "_StorageInfo", "_StoragePrefix"),
    **{("torch", dtype): dtype for dtype in ITEM_SIZES},
    ("torch", "Size"): Call(lambda sizes=(): tuple(sizes)),
    ("torch.serialization", "_get_layout"): Call(lambda *ignored: Opaque()),
    ("pathlib", "PosixPath"): Call(lambda *ignored: Opaque()),
    ("pathlib._local", "PosixPath"): Call(lambda *ignored: Opaque()),
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A ``torch.save`` stream of ``length`` bytes at ``offset`` of ``file``."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """The part of a tensor that begins at ``offsets``, of shape ``sizes``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of all ranks, in ``chunks`` in the order of their offsets."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DistributedLayout:
    """Tensors and other objects by their full names, and the keys that led to each in the dict that was saved."""

    tensors: Mapping[str, ShardedTensor]
    objects: Mapping[str, Item]
    paths: Mapping[str, tuple[str, ...]]


def read_metadata(data: bytes, source: str) -> DistributedLayout:
    """What the bytes of ``.metadata`` say; :class:`DamagedError` with ``source`` where they are malformed."""
    metadata = interpret(data, _NAMES, source=source)
    try:
        return _layout(metadata)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{source} does not describe a checkpoint ({error}); copy the directory again") from None


def read_items(reader: ByteReader, items: Sequence[Item]) -> list[Any]:
    """What each item of one file holds: a tensor's :class:`TensorRecord` counts from the start of the file.

    Their ends are asked for all at once; only an item that holds more than a tensor needs further questions.
    """
    edges = [_edges(item) for item in items]
    pieces = iter(read_ranges(reader, [edge for both in edges for edge in both]))
    return [
        _read_item(_Window(reader, item, tuple((edge[0], next(pieces)) for edge in both)))
        for item, both in zip(items, edges, strict=True)
    ]


def _edges(item: Item) -> list[tuple[int, int]]:
    if item.length <= 2 * _EDGE:
        return [(item.offset, item.length)]
    return [(item.offset, _EDGE), (item.offset + item.length - _EDGE, _EDGE)]


def _read_item(window: "_Window") -> Any:
    directory = read_directory(window, tail=_EDGE)
    content = read_content(window, directory, directory.unplaced())
    if not isinstance(content, TensorRecord):
        return content
    name = content.record.name
    record = place(window, directory, [name])[name]
    start = window.item.offset + record.start
    return replace(content, record=replace(record, start=start, name=f"{name} of the item at {window.item.offset}"))


@dataclass(frozen=True)
class _Window:
    """An item as a file of its own; ``known`` are bytes at offsets of the whole file that need not be asked for."""

    reader: ByteReader
    item: Item
    known: tuple[tuple[int, bytes], ...]

    @property
    def name(self) -> str:
        return f"{self.reader.name}, item at {self.item.offset}"

    @property
    def size(self) -> int:
        return self.item.length

    def read(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        return b"".join(self._one(self.item.offset + offset, length) for offset, length in ranges)

    def _one(self, offset: int, length: int) -> bytes:
        for begin, data in self.known:
            if begin <= offset and offset + length <= begin + len(data):
                return data[offset - begin : offset - begin + length]
        return read_ranges(self.reader, [(offset, length)])[0]


def _layout(metadata: Any) -> DistributedLayout:
    state = _state(metadata, "Metadata")
    items = _items(state["storage_data"])
    tensors: dict[str, ShardedTensor] = {}
    objects: dict[str, Item] = {}
    for name, described in state["state_dict_metadata"].items():
        if isinstance(described, Instance) and described.kind == "BytesStorageMetadata":
            objects[_text(name)] = items[name, None]
        else:
            tensors[_text(name)] = _tensor(name, _state(described, "TensorStorageMetadata"), items)
    # one list can stand at many places of a pickle, where it would be walked anew each time
    if sum(len(tensor.chunks) for tensor in tensors.values()) + len(objects) > len(items):
        _malformed("an item belongs to two tensors")
    planned = state.get("planner_data")
    paths = {
        _text(name): tuple(str(_scalar(part)) for part in _short(path))
        for name, path in (planned.items() if isinstance(planned, dict) else ())
        if path
    }
    return DistributedLayout(tensors, objects, paths)


def _items(stored: Any) -> dict[tuple[str, tuple[int, ...] | None], Item]:
    items = {}
    for index, info in stored.items():
        where, what = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if what.get("transform_descriptors"):
            _malformed("its items are compressed, which is not read")
        offsets = where.get("offset")
        key = _text(where["fqn"]), None if offsets is None else _sizes(offsets)
        file = _text(what["relative_path"])
        if file.startswith("/") or ".." in file.split("/"):
            _malformed("an item lies outside of the directory")
        items[key] = Item(file, *_sizes((what["offset"], what["length"])))
    return items


def _tensor(
    name: str, state: Mapping[str, Any], items: Mapping[tuple[str, tuple[int, ...] | None], Item]
) -> ShardedTensor:
    shape, properties = _sizes(state["size"]), state["properties"]
    if not isinstance(properties, Instance):
        _malformed("a tensor has no properties")
    told = properties.state
    dtype = told["dtype"] if isinstance(told, dict) else told[0]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        _malformed("a tensor has no dtype that is read")
    chunks = []
    if not isinstance(state["chunks"], list) or len(state["chunks"]) > len(items):
        _malformed("an item belongs to two chunks")
    for chunk in state["chunks"]:
        described = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(described["offsets"]), _sizes(described["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            _malformed("a chunk has other axes than its tensor")
        chunks.append(Chunk(offsets, sizes, items[name, offsets]))
    return ShardedTensor(dtype, shape, tuple(sorted(chunks, key=lambda chunk: chunk.offsets)))


def _state(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Instance) or value.kind != kind or not isinstance(value.state, dict):
        _malformed(f"no {kind} where one belongs")
    return value.state


def _sizes(value: Any) -> tuple[int, ...]:
    if not all(type(one) is int and 0 <= one < 1 << 63 for one in _short(value)):
        _malformed("sizes are no tuple of numbers")
    return _short(value)


def _short(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or len(value) > _LONGEST:
        _malformed("no short tuple where one belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _malformed("a name is not text")
    return value


def _scalar(value: Any) -> str | int:
    if not isinstance(value, str | int):
        _malformed("a key is neither text nor a number")
    return value


def _malformed(what: str) -> NoReturn:
    raise ValueError(what)
