"""Where a checkpoint's bytes come from: files by name, states that tell whether one changed, and bytes by ranges."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dflash.checkpoint_layout import ChangedError, CheckpointError, Identity, NotACheckpointError, reading
from dflash.records import ByteReader, DamagedError, read_ranges
from dflash.safetensors_header import read_header
from dflash.torch_zip import MAGIC, read_directory

Look = Mapping[str, Identity]
"""The files of a checkpoint by their names below its directory, each with its state."""

_LARGEST_WHOLE = 16 << 20
BESIDE = "config.json"
SIDECAR = ".relay.json"
_PART = re.compile(r"\..+\.part-[0-9a-f]{16}(\.json)?", re.DOTALL)


class Source(Protocol):
    """A checkpoint on this machine or behind a host's gate."""

    @property
    def place(self) -> str:
        """What messages call it."""
        ...

    @property
    def single(self) -> str | None:
        """The name of the file where the checkpoint is one file and not a directory."""
        ...

    def look(self) -> Look:
        """The files there now; of a single file that one, and the config.json beside it where there is one."""
        ...

    def read(self, file: str, ranges: Sequence[tuple[int, int]]) -> bytes:
        """The bytes of all ``(offset, length)`` of ``file``, one after the other."""
        ...


class LocalSource:
    """A checkpoint on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path):
            self.single = None if path.is_dir() else path.name
        self._folder = path if self.single is None else path.parent

    @property
    def place(self) -> str:
        return str(self._path)

    def look(self) -> Look:
        with reading(self._path):
            if self.single is None:
                files = [path for path in self._folder.rglob("*") if path.is_file()]
            else:
                files = [path for path in (self._path, self._folder / BESIDE) if path.is_file()]
            look = {str(path.relative_to(self._folder)): Identity.of(path) for path in sorted(files)}
            return look if self.single is not None else of_the_checkpoint(look)

    def read(self, file: str, ranges: Sequence[tuple[int, int]]) -> bytes:
        path = self._folder / file
        with reading(path), path.open("rb") as opened:
            pieces = []
            for offset, length in ranges:
                opened.seek(offset)
                pieces.append(opened.read(length))
            return b"".join(pieces)


def of_the_checkpoint(look: Look) -> Look:
    """``look`` without what relays have put beside its files: sidecars, and parts of what was on its way."""
    return {
        name: state
        for name, state in look.items()
        if not (name.endswith(SIDECAR) and name.removesuffix(SIDECAR) in look)
        and not _PART.fullmatch(name.rpartition("/")[2])
    }


def require_whole(reading: "Reading", name: str) -> bool:
    """Whether the file ``name`` is a torch zip or safetensors; :class:`DamagedError` when it is and is not whole.

    What is neither says nothing about itself.
    """
    file = reading.file(name)
    if file.size < len(MAGIC):
        return False
    if file.name.endswith(".safetensors"):
        read_header(file)
        return True
    (head,) = read_ranges(file, [(0, len(MAGIC))])
    if head != MAGIC:
        return False
    read_directory(file)
    return True


def require_settled(place: str, before: Look, after: Look) -> None:
    """:class:`ChangedError` unless two looks at ``place`` show the same files in the same state.

    Whoever relays what no manifest vouches for looks twice, some time apart: what a trainer still writes changes.
    """
    for file in sorted({*before, *after}):
        old, new = before.get(file), after.get(file)
        if old == new:
            continue
        if old is None:
            what = "appeared"
        elif new is None:
            what = "vanished"
        else:
            what = f"changed (from {old.size} to {new.size} bytes)"
        raise ChangedError(
            f"{place}: {file} {what} between two looks: it is still being written; try again when the trainer is done "
            f"with it"
        )


@dataclass
class Reading:
    """A source as it was at one look; ``moved`` counts the bytes that were read of it, ``opened`` names the files."""

    source: Source
    look: Look
    moved: int = 0
    opened: set[str] = field(default_factory=set)

    @property
    def place(self) -> str:
        return self.source.place

    def file(self, name: str) -> ByteReader:
        """One file; :class:`NotACheckpointError` if it is not there."""
        if name not in self.look:
            raise NotACheckpointError(f"{self.place} has no {name}; is the path right?")
        return _File(self, name, self.look[name].size)

    def whole(self, name: str) -> bytes:
        """All bytes of a small file; :class:`CheckpointError` if it is not small."""
        file = self.file(name)
        if file.size > _LARGEST_WHOLE:
            raise CheckpointError(
                f"{file.name} has {file.size} bytes, {_LARGEST_WHOLE} are read of a file of its kind; is it what its "
                f"name says?"
            )
        if not file.size:
            raise DamagedError(f"{file.name} is empty; was it cut off while it was written or copied?")
        return read_ranges(file, [(0, file.size)])[0]


@dataclass(frozen=True)
class _File:
    reading: Reading
    file: str
    size: int

    @property
    def name(self) -> str:
        return self.reading.place if self.file == self.reading.source.single else f"{self.reading.place}/{self.file}"

    def read(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        self.reading.opened.add(self.file)
        self.reading.moved += sum(length for _, length in ranges)
        return self.reading.source.read(self.file, ranges)
