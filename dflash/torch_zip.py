"""The zip that ``torch.save`` writes, by byte ranges: its directory, its records, and what its pickle describes.

Read as strictly as torch writes it: nothing compressed, nothing behind the end, no two records that share a byte. What
another reader could understand differently is refused.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash.inert_pickle import PLAIN, Call, Opaque, interpret
from dflash.records import (
    ITEM_SIZES,
    ByteReader,
    DamagedError,
    NotACheckpointError,
    Record,
    TensorRecord,
    read_bytes,
    read_ranges,
)

MAGIC = b"PK\x03\x04"

_MOST_DIRECTORY = 32 << 20
_TAIL = 1 << 16
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_IN_EXTRA_16, _IN_EXTRA_32 = 0xFFFF, 0xFFFFFFFF
_NEWEST_VERSION = 63
_ENCRYPTED = 1

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
# What training scripts keep beside the weights (random states, arguments, paths): read past, never needed.
_OPAQUE = {
    ("_codecs", "encode"),
    ("argparse", "Namespace"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "device"),
}
_UNTYPED = "bytes"
_MOST_AXES = 64


@dataclass(frozen=True)
class Entry:
    """One line of the directory. The record lies between its local header, at ``header``, and ``limit``.

    ``crc32`` is None in a file that was saved without checksums.
    """

    name: str
    header: int
    length: int
    crc32: int | None
    limit: int


@dataclass(frozen=True)
class Directory:
    """The directory of a zip: ``sha256`` is of its bytes, which hold every CRC if the file was saved with any."""

    entries: Mapping[str, Entry]
    sha256: str

    @property
    def checked(self) -> bool:
        """Whether its records have checksums: ``torch.save`` leaves them at 0 where that was switched off."""
        return any(entry.crc32 is not None for entry in self.entries.values())

    def unplaced(self) -> dict[str, Record]:
        """A record for each entry that begins at its local header: enough to tell them apart, not to read them."""
        return {name: Record(name, entry.header, entry.length, entry.crc32) for name, entry in self.entries.items()}


def read_directory(reader: ByteReader, *, tail: int = _TAIL) -> Directory:
    """The directory at the end of ``reader``; one question where the last ``tail`` bytes hold it, else two.

    Raises :class:`DamagedError` for a file that is cut short or whose records share bytes, and
    :class:`NotACheckpointError` for members that torch would not write.
    """
    start, count, data = _directory_bytes(reader, tail)
    found: list[tuple[str, int, int, int]] = []
    at = 0
    while at < len(data):
        entry, at = _entry(reader, data, at)
        found.append(entry)
    if len(found) != count:
        raise _cut(reader)
    return Directory(_apart(reader, found, start), hashlib.sha256(data).hexdigest())


def place(reader: ByteReader, directory: Directory, names: Iterable[str]) -> dict[str, Record]:
    """Where the bytes of the records ``names`` lie, by their local headers, all asked for at once.

    The padding in a local header, with which torch aligns what follows, is not in the directory.
    """
    entries = [directory.entries[name] for name in names]
    lengths = [_LOCAL.size + len(entry.name.encode()) for entry in entries]
    headers = read_ranges(
        reader, [(entry.header, length) for entry, length in zip(entries, lengths, strict=True)] if entries else []
    )
    placed = {}
    for entry, header in zip(entries, headers, strict=True):
        magic, _, _, method, *_, name_length, extra_length = _LOCAL.unpack(header[: _LOCAL.size])
        start = entry.header + _LOCAL.size + name_length + extra_length
        if (
            magic != MAGIC
            or method
            or header[_LOCAL.size :] != entry.name.encode()
            or start + entry.length > entry.limit
        ):
            raise DamagedError(
                f"{reader.name}: no record where the directory says {entry.name} is; copy the file again"
            )
        placed[entry.name] = Record(entry.name, start, entry.length, entry.crc32)
    return placed


def root_of(reader: ByteReader, directory: Directory) -> str:
    """The folder that all records of a ``torch.save`` file lie in, with its slash."""
    pickles = [name for name in directory.entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise NotACheckpointError(f"{reader.name} is a zip but not a torch.save file: it has no <name>/data.pkl")
    return pickles[0].removesuffix("data.pkl")


def read_content(reader: ByteReader, directory: Directory, records: Mapping[str, Record]) -> Any:
    """What was saved, with a :class:`TensorRecord` for each tensor, whose record is that of ``records``."""
    root = root_of(reader, directory)
    wanted = [name for name in (f"{root}data.pkl", f"{root}byteorder") if name in directory.entries]
    placed = place(reader, directory, wanted)
    if len(wanted) == 2 and read_bytes(reader, placed[wanted[1]]) != b"little":
        raise NotACheckpointError(
            f"{reader.name} was saved on a big-endian machine; save it again on a little-endian one"
        )
    source = f"{reader.name}: data.pkl"
    tensors = _Tensors(reader.name, root, records)
    return interpret(read_bytes(reader, placed[wanted[0]]), tensors.names(), source=source, persistent=tensors.storage)


def _directory_bytes(reader: ByteReader, asked: int) -> tuple[int, int, bytes]:
    """Where the directory begins, how many entries it should have, and its bytes."""
    tail_start = max(0, reader.size - asked)
    (tail,) = read_ranges(reader, [(tail_start, reader.size - tail_start)])
    if len(tail) < _END.size:
        raise _cut(reader)
    magic, disk, first_disk, here, count, length, start, comment = _END.unpack(tail[-_END.size :])
    end = reader.size - _END.size
    if magic != b"PK\x05\x06" or disk or first_disk or here != count or comment:
        raise _cut(reader)
    locator = tail[-_END.size - _LOCATOR.size : -_END.size]
    if locator.startswith(b"PK\x06\x07"):
        end -= _LOCATOR.size + _END64.size
        _, _, at, disks = _LOCATOR.unpack(locator)
        if end < tail_start or at != end or disks > 1:
            raise _cut(reader)
        magic, _, _, _, disk, first_disk, here, count, length, start = _END64.unpack(
            tail[end - tail_start : end - tail_start + _END64.size]
        )
        if magic != b"PK\x06\x06" or disk or first_disk or here != count:
            raise _cut(reader)
    elif count == _IN_EXTRA_16 or _IN_EXTRA_32 in (length, start):
        raise _cut(reader)
    if start + length != end:
        raise _cut(reader)
    if length > _MOST_DIRECTORY:
        raise DamagedError(
            f"{reader.name}: its directory would have {length} bytes, {_MOST_DIRECTORY} are read at most"
        )
    if start >= tail_start:
        return start, count, tail[start - tail_start : start - tail_start + length]
    (data,) = read_ranges(reader, [(start, length)])
    return start, count, data


def _entry(reader: ByteReader, data: bytes, at: int) -> tuple[tuple[str, int, int, int], int]:
    """Name, local header, length and CRC of the entry at ``at`` of the directory, and where the next one begins."""
    if at + _ENTRY.size > len(data):
        raise _cut(reader)
    (
        magic,
        _,
        needed,
        flags,
        method,
        _,
        _,
        crc,
        stored,
        size,
        name_length,
        extra_length,
        comment,
        disk,
        _,
        _,
        header,
    ) = _ENTRY.unpack(data[at : at + _ENTRY.size])
    name_end = at + _ENTRY.size + name_length
    extra = data[name_end : name_end + extra_length]
    after = name_end + extra_length + comment
    if magic != b"PK\x01\x02" or needed & 0xFF > _NEWEST_VERSION or disk or after > len(data):
        raise _cut(reader)
    try:
        name = data[at + _ENTRY.size : name_end].decode()
    except UnicodeDecodeError:
        raise _cut(reader) from None
    large = _zip64_numbers(extra)
    numbers = []
    for number in (size, stored, header):
        if number == _IN_EXTRA_32:
            if not large:
                raise _cut(reader)
            number = large.pop(0)
        numbers.append(number)
    if method or flags & _ENCRYPTED or numbers[0] != numbers[1]:
        raise NotACheckpointError(f"{reader.name}: member {name} is compressed or encrypted, torch.save does neither")
    return (name, numbers[2], numbers[0], crc), after


def _zip64_numbers(extra: bytes) -> list[int]:
    """The 8-byte numbers that stand in the extra field for those that are too large for their place."""
    while len(extra) >= 4:
        kind, length = struct.unpack("<HH", extra[:4])
        if kind == 1:
            body = extra[4 : 4 + length]
            return [int.from_bytes(body[at : at + 8], "little") for at in range(0, len(body) - len(body) % 8, 8)]
        extra = extra[4 + length :]
    return []


def _apart(reader: ByteReader, found: list[tuple[str, int, int, int]], end: int) -> dict[str, Entry]:
    """The entries by name, each with the limit that the next one's header is; those that overlap are refused."""
    entries: dict[str, Entry] = {}
    limit = end
    checked = any(crc for *_, crc in found)
    for name, header, length, crc in sorted(found, key=lambda one: one[1], reverse=True):
        if name in entries:
            raise NotACheckpointError(f"{reader.name}: member {name} is there twice, torch.save does not do that")
        if header + _LOCAL.size + len(name.encode()) + length > limit:
            raise DamagedError(
                f"{reader.name}: record {name} reaches into the next one or beyond the end of the file; it is cut "
                f"short or damaged"
            )
        entries[name] = Entry(name, header, length, crc if checked else None, limit)
        limit = header
    return {name: entries[name] for name, *_ in found}


def _cut(reader: ByteReader) -> DamagedError:
    return DamagedError(
        f"{reader.name} starts as a checkpoint but has no end ({reader.size} bytes): it is cut short or still being "
        f"written"
    )


@dataclass(frozen=True)
class _Storage:
    dtype: str
    record: Record


class _Tensors:
    """The names of a torch pickle, and its storages by the keys of their records."""

    def __init__(self, source: str, root: str, records: Mapping[str, Record]) -> None:
        self._source, self._root, self._records = source, root, records
        self._dtypes: dict[str, str] = {}

    def names(self) -> dict[tuple[str, str], Any]:
        return {
            **PLAIN,
            **{name: Call(lambda *ignored: Opaque()) for name in _OPAQUE},
            **{("torch", name): dtype for name, dtype in _STORAGES.items()},
            **{("torch", dtype): dtype for dtype in ITEM_SIZES},
            ("torch.storage", "UntypedStorage"): _UNTYPED,
            ("torch", "Size"): Call(lambda sizes=(): tuple(sizes)),
            ("torch._utils", "_rebuild_tensor_v2"): Call(self._rebuild),
            ("torch._utils", "_rebuild_tensor_v3"): Call(self._rebuild_untyped),
            ("torch._utils", "_rebuild_parameter"): Call(lambda tensor, *ignored: tensor),
        }

    def storage(self, identifier: Any) -> _Storage:
        kind, dtype, key, _location, elements = identifier
        # nothing of a hostile pickle is hashed or shown before it is known to be flat
        if not isinstance(dtype, str) or not isinstance(key, str) or type(elements) is not int:
            raise self._malformed("a storage is not described as torch does")
        record = self._records.get(f"{self._root}data/{key}")
        if kind != "storage" or record is None:
            raise self._malformed(f"storage {key} has no record")
        size = 1 if dtype == _UNTYPED else ITEM_SIZES[dtype]
        if record.length != elements * size or self._dtypes.setdefault(key, dtype) != dtype:
            raise self._malformed(f"storage {key} has {record.length} bytes for {elements} elements of {dtype}")
        return _Storage(dtype, record)

    def _rebuild(self, storage: Any, offset: Any, shape: Any, stride: Any, *_ignored: object) -> TensorRecord:
        if not isinstance(storage, _Storage) or not _flat(offset, shape, stride):
            raise self._malformed("a tensor is not described as torch does")
        tensor = TensorRecord(storage.dtype, tuple(shape), tuple(stride), offset, storage.record)
        if storage.dtype == _UNTYPED or not _within(tensor):
            raise self._malformed(f"a tensor of shape {tensor.shape} reaches outside its storage {storage.record.name}")
        return tensor

    def _rebuild_untyped(
        self, storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: object
    ) -> TensorRecord:
        if not isinstance(storage, _Storage) or storage.dtype != _UNTYPED or not isinstance(dtype, str):
            raise self._malformed("a tensor is not described as torch does")
        return self._rebuild(_Storage(dtype, storage.record), offset, shape, stride)

    def _malformed(self, what: str) -> DamagedError:
        return DamagedError(f"{self._source}: {what}; copy the file again")


def _flat(offset: Any, shape: Any, stride: Any) -> bool:
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or not len(shape) == len(stride) <= _MOST_AXES:
        return False
    return all(type(number) is int and 0 <= number < 1 << 63 for number in (offset, *shape, *stride))


def _within(tensor: TensorRecord) -> bool:
    last = tensor.offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return 0 in tensor.shape or (last + 1) * ITEM_SIZES[tensor.dtype] <= tensor.record.length
