"""What every reader of a checkpoint's files shares: tensors as byte ranges, the bytes by ranges, and the errors.

Imports no torch, so that a machine that only moves checkpoints can find tensors in them.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from dflash.errors import DFlashError, one_line

ITEM_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
_MESSAGE_HEAD, _MESSAGE_TAIL = 5000, 1000
"""Characters of a message that are kept: a path can have 4096."""


class CheckpointError(DFlashError):
    """A checkpoint cannot be read, or is not what it should be.

    Its message is one printable line of bounded length, whatever names stand in the file.
    """

    def __init__(self, message: str) -> None:
        cut = f"{message[:_MESSAGE_HEAD]} … {message[-_MESSAGE_TAIL:]}"
        super().__init__(one_line(message if len(message) <= len(cut) else cut))


class NotACheckpointError(CheckpointError):
    """The path is missing, or holds none of the known formats."""

    state_name = "NotACheckpoint"


class DamagedError(CheckpointError):
    """The file is cut short, or its bytes are not those that were written."""

    state_name = "CheckpointDamaged"


class UnsafePickleError(CheckpointError):
    """The file's pickle names something outside the allow-list; loading it elsewhere could run code."""

    state_name = "CheckpointUnsafe"


class ChangedError(CheckpointError):
    """The file changed while it was read: it is still being written."""

    state_name = "CheckpointChanged"


@dataclass(frozen=True)
class Record:
    """``length`` bytes at ``start`` of the file; ``crc32`` where the format stores one."""

    name: str
    start: int
    length: int
    crc32: int | None


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: ``stride`` and ``offset`` count elements of ``record``, which tied tensors share."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    record: Record


class ByteReader(Protocol):
    """One file of ``size`` bytes, read by ranges; ``name`` is what messages call it."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def read(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        """The bytes of all ``(offset, length)``, one after the other; fewer where the file ends before."""
        ...


@dataclass(frozen=True)
class OpenFile:
    """A file of this machine as a :class:`ByteReader`."""

    path: Path
    file: BinaryIO
    size: int

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        pieces = []
        for offset, length in ranges:
            self.file.seek(offset)
            pieces.append(self.file.read(length))
        return b"".join(pieces)


def read_ranges(reader: ByteReader, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of each range; :class:`DamagedError` where one reaches beyond the end of the file.

    All are asked for at once, because each question to a far host takes a round trip.
    """
    for offset, length in ranges:
        if offset < 0 or length < 0 or offset + length > reader.size:
            raise DamagedError(
                f"{reader.name} has {reader.size} bytes, {length} at {offset} were expected: it is cut short or damaged"
            )
    data = reader.read(ranges)
    if len(data) != sum(length for _, length in ranges):
        raise DamagedError(f"{reader.name} ended while it was read: it is cut short or still being written")
    taken, pieces = 0, []
    for _, length in ranges:
        pieces.append(data[taken : taken + length])
        taken += length
    return pieces


def read_bytes(reader: ByteReader, record: Record) -> bytes:
    """The bytes of ``record``, checked against its CRC; :class:`DamagedError` names it."""
    (data,) = read_ranges(reader, [(record.start, record.length)])
    require_crc(reader.name, record, zlib.crc32(data))
    return data


def require_crc(name: str, record: Record, found: int) -> None:
    """:class:`DamagedError` unless the bytes of ``record``, with the CRC ``found``, are those that were written."""
    if record.crc32 is not None and found != record.crc32:
        raise DamagedError(f"{name}: record {record.name} does not match its checksum; copy the file again")
