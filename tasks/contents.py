"""What a transfer sends of a source: a file as it is, or one that is made of the ranges a selection names."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import groupby

from tasks.actions import escape
from tasks.channel import RequestFailed
from tasks.ends import Reader, ReadSource, is_missing
from tasks.gate import ByteStream, Stat
from tasks.inventory import Location
from tasks.repack import Checksums, OutputFile, Piece, Range, Repack
from tasks.selection import Selection
from tasks.transfer import PIPE_BYTES, Moved, SourceChangedError, SourceEndedError, TransferError, pump, write_all

RANGE_BYTES = 256 << 20


class SourceError(TransferError):
    """The source is not what can be relayed."""


def spans_of(size: int, *, streams: int, range_bytes: int = RANGE_BYTES) -> list[tuple[int, int]]:
    """Consecutive (offset, length) over ``size`` bytes: ranges of ``range_bytes``, smaller where streams would idle."""
    length = max(1, min(range_bytes, math.ceil(size / streams)))
    return [(offset, min(length, size - offset)) for offset in range(0, size, length)]


@dataclass(frozen=True)
class WholeFile:
    """All of one file, as it is."""

    source: Location
    identity: Stat

    @property
    def size(self) -> int:
        return self.identity.size

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

    def send(self, reader: Reader, offset: int, length: int, sink: int, moved: Moved) -> str:
        unit, digest = self.units[offset], sha256()
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

    def check_unchanged(self, reader: Reader) -> None:
        with noticing_if_it_vanished(self.source):
            self.selection.require_unchanged(ReadSource(reader, self.source).look())


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
