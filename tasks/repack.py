"""Bytes of a checkpoint on their way into the file that is made of them: ranges to read, and what becomes of each.

Everything is decided before the first byte moves: a :class:`Range` of the source makes exactly ``size`` bytes at
``place`` of the output, so ranges can travel in any order and on any number of streams, and a lost one can be fetched
again. What has a checksum in the source is checked on the way, over ranges that are cut in the middle of it, too.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dflash.records import ITEM_SIZES, DamagedError, Record, TensorRecord, require_crc

LARGEST_RANGE = 256 << 20
WIDEST_GAP = 64 << 10
"""Bytes between two wanted ones that are read and dropped rather than asked around: a question costs more."""
_BLOCK = 1 << 20

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Piece:
    """``length`` bytes of ``file`` from ``offset`` on, one at least, and the ``size`` bytes at ``place`` they become.

    ``size`` is 0 for bytes that are read for the checksum of their ``record`` only, or because they lie between others.
    ``narrow`` is the dtype of floats that become bfloat16. ``gather`` are the tensors that are put in order out of this
    piece, which is a whole record then.
    """

    file: str
    offset: int
    length: int
    place: int
    size: int
    record: Record | None = None
    narrow: str | None = None
    gather: tuple[TensorRecord, ...] = ()

    def split(self, length: int) -> "tuple[Piece, Piece]":
        """The first ``length`` bytes, and the others."""
        size = length if self.size else 0
        if self.narrow and self.size:
            size = length // ITEM_SIZES[self.narrow] * ITEM_SIZES["bfloat16"]
        return replace(self, length=length, size=size), replace(
            self,
            offset=self.offset + length,
            length=self.length - length,
            place=self.place + size,
            size=self.size - size,
        )


@dataclass(frozen=True)
class Range:
    """One read of the source: its ``pieces`` lie one behind the other, in ``file`` and in the output."""

    file: str
    offset: int
    length: int
    place: int
    size: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class OutputFile:
    """A file that is made: ``size`` bytes of which ``literals`` are known already, and zeros where nothing else is.

    ``sha256`` is what the checkpoint itself says the file's must be.
    """

    name: str
    size: int
    literals: tuple[tuple[int, bytes], ...] = ()
    pieces: tuple[Piece, ...] = ()
    sha256: str | None = None

    def ranges(self, most: int = LARGEST_RANGE) -> tuple[Range, ...]:
        """What to read for it, in the order of the output, no more than ``most`` bytes at once.

        Only a record whose tensors must be put in order is not cut.
        """
        return tuple(_ranges(self.pieces, most))


def _ranges(pieces: Sequence[Piece], most: int) -> Iterator[Range]:
    run: list[Piece] = []
    waiting = list(reversed(pieces))
    while waiting:
        piece = waiting.pop()
        gap = _gap(run[-1], piece) if run else 0
        covered = run[-1].offset + run[-1].length - run[0].offset + gap if run else 0
        taken = 0 if gap < 0 else _fitting(piece, most - covered)
        if run and not taken:
            yield _range(run)
            run = []
            waiting.append(piece)
            continue
        taken = taken or _smallest(piece)
        if gap:
            run.append(Piece(piece.file, piece.offset - gap, gap, piece.place, 0))
        if taken < piece.length:
            piece, rest = piece.split(taken)
            waiting.append(rest)
        run.append(piece)
    if run:
        yield _range(run)


def _fitting(piece: Piece, room: int) -> int:
    """How many bytes of ``piece`` can be read within ``room``, in steps of what cannot be cut."""
    return piece.length if piece.length <= room else max(0, room) // _smallest(piece) * _smallest(piece)


def _smallest(piece: Piece) -> int:
    if piece.gather:
        return piece.length
    return ITEM_SIZES[piece.narrow] if piece.narrow else 1


def _gap(before: Piece, after: Piece) -> int:
    """Bytes of the source between two pieces that one read can cover; -1 where it cannot."""
    gap = after.offset - before.offset - before.length
    together = before.file == after.file and before.place + before.size == after.place and 0 <= gap <= WIDEST_GAP
    return gap if together else -1


def _range(pieces: list[Piece]) -> Range:
    first, last = pieces[0], pieces[-1]
    return Range(
        first.file,
        first.offset,
        last.offset + last.length - first.offset,
        first.place,
        sum(piece.size for piece in pieces),
        tuple(pieces),
    )


@dataclass(frozen=True)
class Part:
    """The CRC of ``length`` bytes of a record of ``file``, from ``offset`` of the record on."""

    file: str
    record: str
    offset: int
    length: int
    crc32: int


class Repack:
    """Bytes of one range in, bytes of the output out."""

    def __init__(self, planned: Range) -> None:
        self._range = planned
        self._pieces = iter(planned.pieces)
        self._piece: Piece | None = None
        self._left = 0
        self._crc = 0
        self._kept = bytearray()
        self._parts: list[Part] = []
        self._next()

    def feed(self, data: Buffer) -> Iterator[Buffer]:
        """Yield what ``data``, which continues what was fed before, becomes; draw the iterator to its end.

        Views of ``data`` are among it: write them before its buffer is filled again.
        """
        view = memoryview(data)
        while view:
            if self._piece is None:
                raise DamagedError(f"{self._range.file}: more came than the {self._range.length} bytes asked for")
            chunk = view[: self._left]
            view = view[len(chunk) :]
            self._left -= len(chunk)
            self._crc = zlib.crc32(chunk, self._crc)
            yield from self._made(self._piece, chunk)
            if not self._left:
                self._close(self._piece)

    def finish(self) -> tuple[Part, ...]:
        """The CRCs of the records in the range; :class:`DamagedError` if not all of it was fed."""
        if self._piece is not None:
            raise DamagedError(f"{self._range.file}: it ended before the {self._range.length} bytes asked for")
        return tuple(self._parts)

    def _next(self) -> None:
        self._piece, self._crc = next(self._pieces, None), 0
        self._left = self._piece.length if self._piece else 0

    def _close(self, piece: Piece) -> None:
        if piece.record is not None:
            begin = piece.offset - piece.record.start
            self._parts.append(Part(piece.file, piece.record.name, begin, piece.length, self._crc))
        self._next()

    def _made(self, piece: Piece, chunk: memoryview) -> Iterator[Buffer]:
        if not piece.size:
            return
        if piece.gather:
            self._kept += chunk
            if not self._left:
                record, self._kept = self._kept, bytearray()
                for tensor in piece.gather:
                    yield from _gathered(record, tensor, narrow=piece.narrow)
        elif piece.narrow:
            self._kept += chunk
            whole = len(self._kept) - len(self._kept) % ITEM_SIZES[piece.narrow]
            yield narrowed(bytes(self._kept[:whole]), piece.narrow)
            del self._kept[:whole]
        else:
            yield chunk


@dataclass
class Checksums:
    """The records of some outputs that have a checksum, and what was read of them."""

    outputs: Sequence[OutputFile]
    _parts: dict[tuple[str, str], list[Part]] = field(default_factory=dict)

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._parts.setdefault((part.file, part.record), []).append(part)

    def verify(self) -> None:
        """:class:`DamagedError` names a record that was not read whole or does not match its checksum."""
        pieces = (piece for output in self.outputs for piece in output.pieces)
        records = {(piece.file, piece.record.name): piece.record for piece in pieces if piece.record is not None}
        for (file, name), record in records.items():
            end = crc = 0
            for part in sorted(set(self._parts.get((file, name), [])), key=lambda one: one.offset):
                if part.offset != end:
                    break
                crc = combine_crc32(crc, part.crc32, part.length) if end else part.crc32
                end += part.length
            if end != record.length:
                raise DamagedError(f"{file}: of record {name} {end} of {record.length} bytes were read; read it again")
            require_crc(file, record, crc)


def assembled(
    output: OutputFile, read: Callable[[str, int, int], bytes], *, most: int = LARGEST_RANGE
) -> Iterator[tuple[int, Buffer]]:
    """The bytes of ``output`` with their places, from one stream of reads ``(file, offset, length)`` in order.

    Raises :class:`DamagedError` at the end when a checksum does not match: keep nothing of it then.
    """
    yield from output.literals
    checksums = Checksums((output,))
    for planned in output.ranges(most):
        repack, place = Repack(planned), planned.place
        for begin in range(0, planned.length, _BLOCK):
            length = min(_BLOCK, planned.length - begin)
            for made in repack.feed(read(planned.file, planned.offset + begin, length)):
                yield place, made
                place += len(made)
        checksums.add(repack.finish())
    checksums.verify()


def narrowed(data: bytes, dtype: str) -> bytes:
    """Floats of ``dtype`` as bfloat16: rounded to nearest, ties to even; NaN stays NaN, too large becomes infinite.

    float64 goes by way of float32, as torch converts it.
    """
    if dtype == "float32":
        bits = np.frombuffer(data, "<u4")
    else:
        with np.errstate(over="ignore"):
            bits = np.frombuffer(data, {"float64": "<f8", "float16": "<f2"}[dtype]).astype("<f4").view("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        rounded[nan] = bits[nan] >> 16 | 0x40
    return rounded.astype("<u2").tobytes()


def _gathered(record: bytearray, tensor: TensorRecord, *, narrow: str | None) -> Iterator[Buffer]:
    """The elements of ``tensor`` in the order of its axes, in blocks, so that it is not held twice."""
    size = ITEM_SIZES[tensor.dtype]
    bits: NDArray[np.unsignedinteger] = np.frombuffer(record, f"<u{size}")
    strides = tuple(step * size for step in tensor.stride)
    view = np.lib.stride_tricks.as_strided(bits[tensor.offset :], tensor.shape, strides, writeable=False)
    if not view.ndim:
        view = view.reshape(1)
    rows = max(1, _BLOCK // max(1, view[0].nbytes))
    for begin in range(0, len(view), rows):
        block = np.ascontiguousarray(view[begin : begin + rows]).tobytes()
        yield narrowed(block, narrow) if narrow else block


def combine_crc32(first: int, second: int, length: int) -> int:
    """The CRC-32 of bytes with the CRC ``first`` and then ``length`` bytes with the CRC ``second``.

    Appending a zero bit to a message multiplies its CRC by x modulo the polynomial, so ``length`` bytes are that matrix
    over GF(2) to the power of 8 · ``length`` (M. Adler's method in zlib).
    """
    matrix = [0xEDB88320, *(1 << bit for bit in range(31))]
    for _ in range(3):
        matrix = _squared(matrix)
    while length:
        if length & 1:
            first = _times(matrix, first)
        matrix = _squared(matrix)
        length >>= 1
    return first ^ second


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


def _squared(matrix: list[int]) -> list[int]:
    return [_times(matrix, column) for column in matrix]
