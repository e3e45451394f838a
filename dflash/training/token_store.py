"""Token ids of many documents in flat files, memory-mapped: no process holds them, all on a machine share them.

::

    <directory>/store.json    version, number of documents and tokens, sha256 of both files, and what the writer says
    <directory>/tokens.u32    little-endian; the highest bit says that the target wrote the token
    <directory>/offsets.i64   where each document begins, and where the last one ends

A directory with its name is complete; one that is being written, or was when its process died, has another. Imports
no torch.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dflash.errors import DFlashError

VERSION = 1
MOST_ROWS = 1 << 31
"""Of a vocabulary: ids take 31 bits."""
_WRITTEN = np.uint32(1 << 31)


class TokenStoreError(DFlashError):
    """A directory of tokens is damaged, of another version, or cannot be written."""


class TokenStore:
    """The documents that :func:`writing` left in a directory. ``said`` is what the writer noted."""

    def __init__(self, directory: Path) -> None:
        """Raises :class:`TokenStoreError` where the files are not what was written, to the last bit: all are read."""
        self.directory = directory
        header = _header(directory)
        self.sha256: str = header["sha256"]
        self.said: dict[str, Any] = header["said"]
        self._offsets = _mapped(directory / "offsets.i64", "<i8", header["documents"] + 1)
        self._tokens = _mapped(directory / "tokens.u32", "<u4", header["tokens"])
        if _digest(directory / "tokens.u32", directory / "offsets.i64") != self.sha256:
            raise TokenStoreError(f"{directory} is not what was written there; remove the directory, it is made again")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self._offsets).astype(np.int64)

    def read(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """``ids`` [S] and ``written`` [S] of a document, copies."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        tokens = self._tokens[self._offsets[index] : self._offsets[index + 1]]
        return (tokens & ~_WRITTEN).astype(np.int64), (tokens & _WRITTEN) != 0


class Writer:
    """Takes documents one after another; made by :func:`writing`. ``said`` goes into the header."""

    def __init__(self, tokens: BinaryIO) -> None:
        self.said: dict[str, Any] = {}
        self._file = tokens
        self._sum = hashlib.sha256()
        self._offsets = [0]

    def add(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> None:
        """A document; ``spans`` are the half-open parts of ``ids`` that the target wrote."""
        tokens = np.array(ids, dtype="<u4")
        for start, end in spans:
            tokens[start:end] |= _WRITTEN
        content = tokens.tobytes()
        self._sum.update(content)
        self._file.write(content)
        self._offsets.append(self._offsets[-1] + len(ids))

    def _finish(self, directory: Path) -> None:
        offsets = np.array(self._offsets, dtype="<i8").tobytes()
        self._sum.update(offsets)
        header = {
            "version": VERSION,
            "documents": len(self._offsets) - 1,
            "tokens": self._offsets[-1],
            "sha256": self._sum.hexdigest(),
            "said": self.said,
        }
        for name, content in (("offsets.i64", offsets), ("store.json", json.dumps(header, indent=1).encode())):
            with (directory / name).open("wb") as file:
                file.write(content)
                _to_disk(file)


@contextmanager
def writing(directory: Path) -> Iterator[Writer]:
    """Write ``directory``, which appears whole when the block ends without an error, or not at all.

    Where another process was first, its directory stays; what a killed one left is removed. Raises
    :class:`TokenStoreError` for a full disk and the like.
    """
    partial: Path | None = None
    ours = f".{directory.name}.{platform.node()}."
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(directory.parent.glob(f"{ours}*/tokens.u32"))
        partial = Path(tempfile.mkdtemp(prefix=ours, dir=directory.parent))
        with _locked(partial):
            with (partial / "tokens.u32").open("wb") as tokens:
                writer = Writer(tokens)
                yield writer
                _to_disk(tokens)
            writer._finish(partial)
            partial.chmod(0o755)
            try:
                partial.rename(directory)
            except OSError:
                if not (directory / "store.json").is_file():
                    raise
    except OSError as error:
        raise TokenStoreError(
            f"{directory} could not be written ({error.strerror}); free space there or set data.cache elsewhere"
        ) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Whether ``directory`` is this process's while the block lasts; its lock ends with it, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError:  # another's, or a file system without locks
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def _remove_orphans(files: Iterable[Path]) -> None:
    """The directories of ``files`` whose writers were killed: a living one locks its directory before it writes."""
    for file in files:
        with suppress(OSError), _locked(file.parent) as orphaned:
            if orphaned:
                shutil.rmtree(file.parent, ignore_errors=True)


def _digest(*files: Path) -> str:
    content = hashlib.sha256()
    try:
        for path in files:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    content.update(block)
    except OSError as error:
        raise TokenStoreError(f"{path} cannot be read ({error.strerror}); is the disk well?") from None
    return content.hexdigest()


def _header(directory: Path) -> dict[str, Any]:
    try:
        header = json.loads((directory / "store.json").read_bytes())
        known = header["version"] == VERSION
        sizes = all(isinstance(header[key], int) and header[key] >= 0 for key in ("documents", "tokens"))
        whole = known and sizes and isinstance(header["sha256"], str) and isinstance(header["said"], dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TokenStoreError(
            f"{directory}/store.json cannot be read ({error}); remove the directory, it is made again"
        ) from None
    if not whole:
        raise TokenStoreError(
            f"{directory} is of version {header['version']}, this program reads {VERSION}; remove the directory, it is "
            f"made again"
        )
    return dict(header)


def _mapped(path: Path, dtype: str, length: int) -> NDArray[Any]:
    try:
        size = path.stat().st_size
        if size != length * np.dtype(dtype).itemsize:
            raise TokenStoreError(
                f"{path} has {size} bytes, expected {length * np.dtype(dtype).itemsize}; it is damaged: remove the "
                f"directory, it is made again"
            )
        return np.memmap(path, dtype=dtype, mode="r", shape=(length,)) if length else np.empty(0, dtype)
    except OSError as error:
        raise TokenStoreError(
            f"{path} cannot be read ({error.strerror}); remove the directory, it is made again"
        ) from None


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
