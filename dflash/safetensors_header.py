"""The header of a safetensors file: read by byte ranges, and written for a file that is about to be streamed."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.records import ITEM_SIZES, ByteReader, CheckpointError, DamagedError, Record, TensorRecord, read_ranges

ALIASES = "dflash.aliases"
"""Key of ``__metadata__`` whose JSON maps the name of a tied tensor to that under which its bytes are stored."""
TRAINING = "dflash.training"
"""Key of ``__metadata__`` whose JSON is what a checkpoint says of its own training beside its tensors."""

_MOST_HEADER = 32 << 20
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Header:
    """``tensors`` by name, tied ones under each of theirs; ``sha256`` is of the header's bytes, its length included."""

    tensors: dict[str, TensorRecord]
    metadata: dict[str, str]
    sha256: str


def read_header(reader: ByteReader) -> Header:
    """The header of ``reader``; :class:`DamagedError` where it is malformed or does not describe the whole file."""
    if reader.size < 10:
        raise DamagedError(f"{reader.name} is not a safetensors file, or is cut short: it has {reader.size} bytes")
    (prefix,) = read_ranges(reader, [(0, 8)])
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= min(_MOST_HEADER, reader.size - 8):
        raise DamagedError(
            f"{reader.name} is not a safetensors file, or is cut short: its header would be {length} bytes"
        )
    (text,) = read_ranges(reader, [(8, length)])
    try:
        entries = json.loads(text)
        metadata = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
        tensors = {name: _tensor(reader, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{reader.name}: the safetensors header is malformed; copy the file again") from None
    _require_gapless(reader, tensors, 8 + length)
    return Header(tensors | _tied(reader, tensors, metadata), metadata, hashlib.sha256(prefix + text).hexdigest())


def write_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds ``(name, dtype, shape)`` one behind the other, padded to 8 bytes.

    Sort them by falling item size: each then begins where its dtype may.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * ITEM_SIZES[dtype]
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def training_told(metadata: Mapping[str, str]) -> dict[str, Any]:
    """What the checkpoint that a file was made of said of its training; empty where nothing legible is there."""
    try:
        told = json.loads(metadata.get(TRAINING, "{}"))
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor whose elements lie in the order of its axes."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _tensor(reader: ByteReader, name: str, entry: Mapping[str, Any], base: int) -> TensorRecord:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{reader.name}: tensor {name} is {entry['dtype']}, expected one of {', '.join(_DTYPES)}")
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(name)
    if begin > end or end - begin != math.prod(shape) * ITEM_SIZES[dtype]:
        raise ValueError(name)
    return TensorRecord(dtype, shape, row_major(shape), 0, Record(name, base + begin, end - begin, None))


def _require_gapless(reader: ByteReader, tensors: Mapping[str, TensorRecord], end: int) -> None:
    for record in sorted((tensor.record for tensor in tensors.values()), key=lambda one: (one.start, one.length)):
        if record.start != end:
            raise DamagedError(
                f"{reader.name}: tensor {record.name} does not begin where the one before ends; copy it again"
            )
        end += record.length
    if end != reader.size:
        raise DamagedError(
            f"{reader.name} has {reader.size} bytes, its header describes {end}: it is cut short or damaged"
        )


def _tied(
    reader: ByteReader, tensors: Mapping[str, TensorRecord], metadata: Mapping[str, str]
) -> dict[str, TensorRecord]:
    if ALIASES not in metadata:
        return {}
    try:
        aliases = dict(json.loads(metadata[ALIASES]))
        if aliases.keys() & tensors.keys():
            raise ValueError
        return {name: tensors[stored] for name, stored in aliases.items()}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{reader.name}: {ALIASES} names no tensors of the file; copy it again") from None
