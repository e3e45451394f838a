"""What a transfer sends of a source: a file as it is, or one that is made of the ranges a selection names."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import groupby

from tasks.actions import escape
from tasks.channel import RequestFailed
from tasks.ends import Reader, ReadSource, is_missing
from tasks.gate import ByteStream, Stat, Wanted
from tasks.inventory import Location
from tasks.repack import Checksums, OutputFile, Piece, Range, Repack
from tasks.selection import Selection
from tasks.transfer import PIPE_BYTES, Moved, SourceChangedError, SourceEndedError, TransferError, pump, write_all

RANGE_BYTES = 256 << 20
LEAST_BYTES, TURNS = 16 << 20, 8
MOST_OTHER_UNITS = 1000
"""So many of an earlier relay are found in what a checkpoint's records are; it begins anew where there are more."""


class SourceError(TransferError):
    """The source is not what can be relayed."""

    state_name = "NotRelayable"


def spans_of(size: int, *, streams: int, range_bytes: int = RANGE_BYTES) -> list[tuple[int, int]]:
    """Consecutive (offset, length) over ``size`` bytes: ranges of ``range_bytes``, smaller where streams would idle.

    Several streams get several ranges each, in turns: so the destination can take the digest behind all of them.
    """
    even = math.ceil(size / streams)
    most = min(range_bytes, even if streams == 1 else max(LEAST_BYTES, math.ceil(even / TURNS)))
    length = max(1, min(most, even))
    return [(offset, min(length, size - offset)) for offset in range(0, size, length)]


@dataclass(frozen=True)
class WholeFile:
    """All of one file, as it is."""

    source: Location
    identity: Stat

    @property
    def size(self) -> int:
        return self.identity.size

    def requests(self, offset: int, length: int) -> Sequence[Wanted]:
        return [(self.source.path, offset, length)]

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        return True

    def send(self, reader: Reader, offset: int, length: int, sink: int, moved: Moved) -> str:
        digest = sha256()
        with noticing_if_it_vanished(self.source), reader.read(self.source.path, offset, length) as stream:
            pump(stream.fileno(), sink, length, digests=[digest], moved=moved)
        return digest.hexdigest()

    def check_unchanged(self, reader: Reader) -> None:
        with noticing_if_it_vanished(self.source):
            found = reader.stat(self.source.path)
        if found != self.identity:
            raise SourceChangedError(
                f"{escape(str(self.source))} changed while read: relay it again when its writer is done"
            )


@contextmanager
def noticing_if_it_vanished(source: Location) -> Iterator[None]:
    """What is not there any more has changed."""
    try:
        yield
    except RequestFailed as error:
        if is_missing(error):
            name = escape(str(source))
            raise SourceChangedError(f"{name} vanished while it was read: nothing was kept") from None
        raise


@dataclass(frozen=True)
class Unit:
    """Consecutive bytes of an output that are made, and whose checksums are verified, by themselves."""

    offset: int
    length: int
    literal: bytes
    output: OutputFile
    """The part of it that this unit is."""

    def ranges(self) -> tuple[Range, ...]:
        return self.output.ranges()


@dataclass(frozen=True)
class SelectedFile:
    """One file that a selection makes of ``source``; ``range_bytes`` of it are sent at once, or a whole record."""

    source: Location
    place: ReadSource
    output: OutputFile
    selection: Selection
    range_bytes: int = RANGE_BYTES

    @property
    def size(self) -> int:
        return self.output.size

    @cached_property
    def units(self) -> dict[int, Unit]:
        """By their offsets. A record is in one unit whole, so that its CRC is known to be right before it counts."""
        return {unit.offset: unit for unit in _units(self.output, self.range_bytes)}

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(unit.offset, unit.length) for unit in self.units.values()]

    def requests(self, offset: int, length: int) -> Sequence[Wanted]:
        ranges = self._unit(offset, length).ranges()
        return [(self.place.path(planned.file), planned.offset, planned.length) for planned in ranges]

    def send(self, reader: Reader, offset: int, length: int, sink: int, moved: Moved) -> str:
        unit, digest = self._unit(offset, length), sha256()
        if unit.literal:
            write_all(sink, memoryview(unit.literal))
            digest.update(unit.literal)
            moved(len(unit.literal))
        checksums = Checksums([unit.output])
        for planned in unit.ranges():
            repack = Repack(planned)
            path = self.place.path(planned.file)
            with noticing_if_it_vanished(self.source), reader.read(path, planned.offset, planned.length) as stream:
                for chunk in _chunks(stream):
                    for made in repack.feed(chunk):
                        write_all(sink, memoryview(made))
                        digest.update(made)
                        moved(len(made))
            checksums.add(repack.finish())
        checksums.verify()
        return digest.hexdigest()

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether all of it can be sent in ``spans``, into which an earlier relay cut it."""
        known = set(self.spans)
        others = [span for span in spans if span not in known]
        if len(others) > MOST_OTHER_UNITS:
            return False
        try:
            for offset, length in others:
                unit_of(self.output, offset, length)
        except TransferError:
            return False
        return True

    def _unit(self, offset: int, length: int) -> Unit:
        """The unit of a range, also of one that an earlier relay cut by other sizes."""
        unit = self.units.get(offset)
        return unit if unit is not None and unit.length == length else unit_of(self.output, offset, length)

    def check_unchanged(self, reader: Reader) -> None:
        with noticing_if_it_vanished(self.source):
            self.selection.require_unchanged(ReadSource(reader, self.source).look())


def unit_of(output: OutputFile, offset: int, length: int) -> Unit:
    """What makes ``length`` bytes of ``output`` from ``offset`` on.

    Raises :class:`TransferError` where a record is cut: its checksum is over all of it.
    """
    end, literal, pieces = offset + length, b"", list[Piece]()
    for begin, data in output.literals:
        literal += data[max(0, offset - begin) : max(0, end - begin)]
    for group in _whole_records(output.pieces, length):
        begin = group[0].place
        stop = begin + sum(piece.size for piece in group)
        if stop <= offset or begin >= end:
            continue
        if begin < offset or stop > end:
            if group[0].record is not None or group[0].narrow:
                raise TransferError(f"{output.name}: {length} bytes at {offset} cut a record; relay it again")
            group = [_clipped(group[0], offset, end)]
        pieces.extend(group)
    follows = not pieces or pieces[0].place == offset + len(literal)
    if not follows or len(literal) + sum(piece.size for piece in pieces) != length:
        raise TransferError(f"{output.name}: {length} bytes at {offset} are not among what moves; relay it again")
    return Unit(offset, length, literal, replace(output, literals=(), pieces=tuple(pieces)))


def _clipped(piece: Piece, begin: int, end: int) -> Piece:
    """The part of ``piece`` that goes to the places from ``begin`` to ``end``."""
    if begin > piece.place:
        piece = piece.split(begin - piece.place)[1]
    return piece.split(end - piece.place)[0] if end < piece.place + piece.size else piece


def _units(output: OutputFile, most: int) -> Iterator[Unit]:
    """Records whole, as many as ``most`` bytes hold; literals before them, a gap ends one."""
    literals = dict(output.literals)
    begin, end, literal, pieces = 0, 0, b"", list[Piece]()

    def made() -> Iterator[Unit]:
        if end > begin:
            yield Unit(begin, end - begin, literal, replace(output, literals=(), pieces=tuple(pieces)))

    for group in _whole_records(output.pieces, most):
        start = group[0].place
        if start != end or end - begin >= most:
            known = literals.pop(end, b"") if not pieces and end == begin else b""
            if known and end + len(known) == start:
                literal, end = known, start
            else:
                yield from made()
                begin, end, literal, pieces = start, start, b"", []
        pieces.extend(group)
        end += sum(piece.size for piece in group)
    yield from made()
    for offset, data in literals.items():
        yield Unit(offset, len(data), data, replace(output, literals=(), pieces=()))


def _whole_records(pieces: tuple[Piece, ...], most: int) -> Iterator[list[Piece]]:
    """What belongs together: the pieces of one record; what has no checksum may be cut anywhere."""
    for (_, record), group in groupby(pieces, key=lambda piece: (piece.file, piece.record and piece.record.name)):
        if record is not None:
            yield list(group)
            continue
        for piece in group:
            while piece.length > most and not piece.narrow:
                first, piece = piece.split(most)
                yield [first]
            yield [piece]


def _chunks(stream: ByteStream) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(PIPE_BYTES))
    left = stream.length
    while left:
        count = os.readv(stream.fileno(), [buffer[:left]])
        if not count:
            raise SourceEndedError(f"the source stopped {left} bytes before the end of {stream.length}")
        yield buffer[:count]
        left -= count
