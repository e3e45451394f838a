"""Completions on disk, one JSON line each as soon as it is there, so that a run that ended half-way can go on.

The first line says which version wrote the file and which settings the completions depend on (see
:func:`dflash.completions.completion_settings`); other settings are refused rather than mixed. Several processes may add
to one file: each line is one locked write. A line that was cut off, by a crash or a full disk, is the last one and is
dropped. Completions stay on disk, memory holds where each is: a training set's worth of them fits into no memory.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from dflash.errors import DFlashError

VERSION = 1
BEGINNING = b'{"dflash_completions":'


class CompletionStoreError(DFlashError):
    """A file of completions cannot be read or written, or holds completions made another way."""


@dataclass(frozen=True)
class Completion:
    """Token ids behind a prompt, the end token included where the server gave it; may be empty.

    ``retokenized``: the server gave text only, and the ids are the tokenizer's reading of it.
    """

    ids: list[int]
    retokenized: bool = False


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")

    dflash_completions: int
    settings: dict[str, Any]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(pattern="^[0-9a-f]{64}$")
    ids: list[NonNegativeInt]
    retokenized: bool


class CompletionStore:
    """What :meth:`open` found in a file, and what was put there since."""

    def __init__(self, path: Path, places: dict[bytes, int], option: str) -> None:
        self.path = path
        self._places = places
        self._option = option

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any], *, option: str = "--cache") -> "CompletionStore":
        """Read ``path``, or make it; ``settings`` (JSON values) must be those it was made with.

        ``option`` is what messages call the choice of the place. Raises :class:`CompletionStoreError`.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path, os.O_CREAT) as file:
                if not os.fstat(file).st_size:
                    _append(file, {"dflash_completions": VERSION, "settings": dict(settings)})
                end = os.fstat(file).st_size
            return cls(path, _places(path, end, settings, option), option)
        except OSError as error:
            raise CompletionStoreError(f"{path}: cannot be opened ({error.strerror}); see {option}") from None

    def get(self, prompt: Sequence[int]) -> Completion | None:
        """The completion of ``prompt`` (token ids) if it is there. Raises :class:`CompletionStoreError`."""
        key = _key(prompt)
        place = self._places.get(bytes.fromhex(key))
        if place is None:
            return None
        try:
            with self.path.open("rb") as file:
                file.seek(place)
                found = _parsed(file.readline())
        except OSError as error:
            raise CompletionStoreError(f"{self.path}: cannot be read ({error.strerror}); see {self._option}") from None
        if found is None or found.prompt != key:
            raise CompletionStoreError(
                f"{self.path}: was changed while it was in use; move it away or give another {self._option}"
            )
        return Completion(found.ids, found.retokenized)

    def put(self, prompt: Sequence[int], completion: Completion) -> None:
        """Keep ``completion``; it is in the file when this returns. Raises :class:`CompletionStoreError`."""
        key = _key(prompt)
        try:
            with _locked(self.path) as file:
                place = os.fstat(file).st_size
                _append(file, {"prompt": key, "ids": completion.ids, "retokenized": completion.retokenized})
        except OSError as error:
            raise CompletionStoreError(
                f"{self.path}: cannot be added to ({error.strerror}); see {self._option}"
            ) from None
        self._places[bytes.fromhex(key)] = place

    def __contains__(self, prompt: Sequence[int]) -> bool:
        return bytes.fromhex(_key(prompt)) in self._places

    def __len__(self) -> int:
        return len(self._places)


def _key(prompt: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(prompt)).encode()).hexdigest()


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of the file, locked against other processes, with a line that was cut off taken away."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        _drop_torn_line(file)
        yield file
    finally:
        os.close(file)


def _drop_torn_line(file: int) -> None:
    begins = os.pread(file, len(BEGINNING), 0)
    if not BEGINNING.startswith(begins):
        return  # somebody else's file, which is left as it is
    size = end = os.fstat(file).st_size
    while end:
        start = max(0, end - (1 << 16))
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(file, end)


def _append(file: int, record: dict[str, Any]) -> None:
    """One write; what a full disk cuts off is dropped by the next one that opens the file."""
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    written = os.write(file, line)
    if written < len(line):
        os.write(file, line[written:])  # raises what stopped the first one


def _places(path: Path, end: int, settings: Mapping[str, Any], option: str) -> dict[bytes, int]:
    """Where in the file the completion of each prompt begins; every line up to ``end`` is checked."""
    places: dict[bytes, int] = {}
    with path.open("rb") as lines:
        _check_header(path, lines.readline(), settings, option)
        place = lines.tell()
        for number, line in enumerate(lines, start=2):
            if place >= end:
                break  # another process is adding to it
            found = _parsed(line)
            if found is None:
                raise CompletionStoreError(
                    f"{path}:{number}: is not a completion; the file is damaged, move it away or give another {option}"
                )
            places[bytes.fromhex(found.prompt)] = place
            place += len(line)
    return places


def _check_header(path: Path, line: bytes, settings: Mapping[str, Any], option: str) -> None:
    try:
        header = _Header.model_validate_json(line)
    except ValidationError:
        raise CompletionStoreError(
            f"{path}: is not a file of completions; move it away or give another {option}"
        ) from None
    if header.dflash_completions != VERSION:
        raise CompletionStoreError(
            f"{path}: was written by another version ({header.dflash_completions}, this one writes {VERSION}); "
            f"move it away or give another {option}"
        )
    wanted: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    other = [
        f"{name} {header.settings.get(name)!r}, now {wanted.get(name)!r}"
        for name in sorted(header.settings.keys() | wanted.keys())
        if header.settings.get(name) != wanted.get(name)
    ]
    if other:
        raise CompletionStoreError(
            f"{path}: its completions were made with other settings ({'; '.join(other)}); "
            f"use the same or give another {option}"
        )


def _parsed(line: bytes) -> _Line | None:
    try:
        return _Line.model_validate_json(line)
    except ValidationError:
        return None
