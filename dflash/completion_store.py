"""Completions on disk, one JSON line each as soon as it is there, so that a run that ended half-way can go on.

The first line says which version wrote the file and which settings the completions depend on (see
:func:`dflash.completions.completion_settings`); other settings are refused rather than mixed. Several processes may add
to one file: each line is one locked write. A line that was cut off, by a crash or a full disk, is the last one and is
dropped.
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

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

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

    prompt: str
    ids: list[NonNegativeInt]
    retokenized: bool


class CompletionStore:
    """What :meth:`open` found in a file, and what was put there since."""

    def __init__(self, path: Path, completions: dict[str, Completion]) -> None:
        self.path = path
        self._completions = completions

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any]) -> "CompletionStore":
        """Read ``path``, or make it; ``settings`` (JSON values) must be those it was made with.

        Raises :class:`CompletionStoreError`.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path, os.O_CREAT) as file:
                if not os.fstat(file).st_size:
                    _append(file, {"dflash_completions": VERSION, "settings": dict(settings)})
                lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise CompletionStoreError(f"{path}: cannot be opened ({error.strerror}); see --cache") from None
        _check_header(path, lines[0], settings)
        return cls(path, dict(_entry(path, number, line) for number, line in enumerate(lines[1:-1], start=2)))

    def get(self, prompt: Sequence[int]) -> Completion | None:
        """The completion of ``prompt`` (token ids) if it is there."""
        return self._completions.get(_key(prompt))

    def put(self, prompt: Sequence[int], completion: Completion) -> None:
        """Keep ``completion``; it is in the file when this returns. Raises :class:`CompletionStoreError`."""
        key = _key(prompt)
        try:
            with _locked(self.path) as file:
                _append(file, {"prompt": key, "ids": completion.ids, "retokenized": completion.retokenized})
        except OSError as error:
            raise CompletionStoreError(f"{self.path}: cannot be added to ({error.strerror}); see --cache") from None
        self._completions[key] = completion

    def __len__(self) -> int:
        return len(self._completions)


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


def _check_header(path: Path, line: bytes, settings: Mapping[str, Any]) -> None:
    try:
        header = _Header.model_validate_json(line)
    except ValidationError:
        raise CompletionStoreError(
            f"{path}: is not a file of completions; move it away or give another --cache"
        ) from None
    if header.dflash_completions != VERSION:
        raise CompletionStoreError(
            f"{path}: was written by another version ({header.dflash_completions}, this one writes {VERSION}); "
            f"move it away or give another --cache"
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
            f"use the same or give another --cache"
        )


def _entry(path: Path, number: int, line: bytes) -> tuple[str, Completion]:
    try:
        parsed = _Line.model_validate_json(line)
    except ValidationError:
        raise CompletionStoreError(
            f"{path}:{number}: is not a completion; the file is damaged, move it away or give another --cache"
        ) from None
    return parsed.prompt, Completion(parsed.ids, parsed.retokenized)
