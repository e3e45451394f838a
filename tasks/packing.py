"""The files that a selection makes: tensors packed into one safetensors file, a torch zip with holes, a copy."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dflash.records import ITEM_SIZES, ByteReader, CheckpointError, Record, TensorRecord, read_ranges
from dflash.safetensors_header import ALIASES, row_major, write_header
from dflash.torch_zip import Directory
from tasks.repack import OutputFile, Piece

LARGEST_GATHERED = 32 << 20
"""Bytes of a record whose tensors do not lie in order: it is held in memory while they are put in order."""
MOST_COPIES = 4
_NARROWED = frozenset({"float64", "float32", "float16"})


class NotContiguousError(CheckpointError):
    """Elements do not lie in the order of their tensor's axes, and their record is too large to be put in order."""


@dataclass(frozen=True)
class Chosen:
    """A tensor of the output; the rows of its ``parts``, each in a file, one after the other, are its rows."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, TensorRecord], ...]

    @classmethod
    def whole(cls, name: str, file: str, tensor: TensorRecord) -> "Chosen":
        return cls(name, tensor.shape, ((file, tensor),))

    @property
    def dtype(self) -> str:
        return self.parts[0][1].dtype


def pack(
    name: str, chosen: Iterable[Chosen], *, metadata: Mapping[str, str] | None = None, narrow: bool = False
) -> OutputFile:
    """A safetensors file of ``chosen``, whose size and header are known before any tensor is read.

    Tied tensors are stored once, their other names kept as aliases. ``narrow`` makes bfloat16 of wider floats. A record
    is read whole even where only some of it is wanted: its checksum is over all of it. Raises
    :class:`NotContiguousError`.
    """
    stored: dict[tuple[tuple[str, TensorRecord], ...], Chosen] = {}
    aliases: dict[str, str] = {}
    for tensor in chosen:
        first = stored.setdefault(tensor.parts, tensor)
        if first is not tensor:
            aliases[tensor.name] = first.name
    ordered = sorted(stored.values(), key=lambda tensor: _order(tensor, narrow))
    told = dict(metadata or {}) | ({ALIASES: json.dumps(aliases)} if aliases else {})
    header = write_header([(tensor.name, _stored_as(tensor.dtype, narrow), tensor.shape) for tensor in ordered], told)
    pieces: list[Piece] = []
    place = len(header)
    parts = (part for tensor in ordered for part in tensor.parts if 0 not in part[1].shape)
    for (file, record), group in groupby(parts, key=lambda part: (part[0], part[1].record)):
        made = _of_record(file, record, [tensor for _, tensor in group], place, narrow)
        place += sum(piece.size for piece in made)
        pieces += made
    return OutputFile(name, place, ((0, header),), tuple(pieces))


def mirror(
    name: str,
    reader: ByteReader,
    file: str,
    directory: Directory,
    placed: Mapping[str, Record],
    kept: Collection[str],
) -> OutputFile:
    """A torch zip like ``reader``, byte by byte, with holes where the records outside of ``kept`` have their bytes.

    The local headers of those stay: without them ``torch.load`` finds no record at all. ``placed`` are all records.
    """
    pieces: list[Piece] = []
    at = 0
    lost: list[tuple[int, int]] = []
    for entry in sorted(directory.entries.values(), key=lambda entry: entry.header):
        record = placed[entry.name]
        if entry.name not in kept:
            lost.append((entry.header, record.start - entry.header))
            at = entry.limit
            continue
        for begin, length, checked in (
            (at, record.start - at, None),
            (record.start, record.length, record),
            (record.start + record.length, entry.limit - record.start - record.length, None),
        ):
            if length:
                pieces.append(Piece(file, begin, length, begin, length, checked))
        at = entry.limit
    pieces.append(Piece(file, at, reader.size - at, at, reader.size - at))
    headers = read_ranges(reader, lost) if lost else []
    literals = tuple((begin, data) for (begin, _), data in zip(lost, headers, strict=True))
    return OutputFile(name, reader.size, literals, tuple(pieces))


def copied(file: str, size: int, *, sha256: str | None = None) -> OutputFile:
    """A file as it is, under its own name."""
    return OutputFile(file, size, (), (Piece(file, 0, size, 0, size),) if size else (), sha256)


def literal(name: str, data: bytes) -> OutputFile:
    """A file whose bytes are known."""
    return OutputFile(name, len(data), ((0, data),))


def _order(tensor: Chosen, narrow: bool) -> tuple[int, str, int, int]:
    """Falling item size, so that each begins where its dtype may; then as they lie in the source."""
    file, first = tensor.parts[0]
    return -ITEM_SIZES[_stored_as(tensor.dtype, narrow)], file, first.record.start, first.offset


def _stored_as(dtype: str, narrow: bool) -> str:
    return "bfloat16" if narrow and dtype in _NARROWED else dtype


def _of_record(file: str, record: Record, tensors: Sequence[TensorRecord], place: int, narrow: bool) -> list[Piece]:
    """What to read of one record for ``tensors``, which all have its dtype, and where it goes."""
    dtype = tensors[0].dtype
    narrowed = dtype if narrow and dtype in _NARROWED else None
    factor = ITEM_SIZES[_stored_as(dtype, narrow)]
    pieces: list[Piece] = []
    begun, at = place, 0

    def add(length: int, size: int) -> None:
        nonlocal at, place
        if length:
            told = narrowed if size else None
            pieces.append(Piece(file, record.start + at, length, place, size, record, told))
        at, place = at + length, place + size

    for tensor in tensors:
        begin, length = tensor.offset * ITEM_SIZES[dtype], math.prod(tensor.shape) * ITEM_SIZES[dtype]
        if begin < at or not _in_order(tensor):
            return [_gathered(file, record, tensors, begun, narrowed, factor)]
        add(begin - at, 0)
        add(length, math.prod(tensor.shape) * factor)
    add(record.length - at, 0)
    return pieces


def _in_order(tensor: TensorRecord) -> bool:
    plain = row_major(tensor.shape)
    return all(
        size == 1 or step == expected for size, step, expected in zip(tensor.shape, tensor.stride, plain, strict=True)
    )


def _gathered(
    file: str, record: Record, tensors: Sequence[TensorRecord], place: int, narrow: str | None, factor: int
) -> Piece:
    elements = sum(math.prod(tensor.shape) for tensor in tensors)
    if record.length > LARGEST_GATHERED or elements * ITEM_SIZES[tensors[0].dtype] > MOST_COPIES * record.length:
        raise NotContiguousError(
            f"{file}: the tensors of record {record.name} ({record.length} bytes) do not lie in the order of their "
            f"axes, or overlap; save them with .contiguous(), or relay the file as it is"
        )
    return Piece(file, record.start, record.length, place, elements * factor, record, narrow, tuple(tensors))
