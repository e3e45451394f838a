"""What can become an object of a store: a file behind a gate, one of this machine, or another object."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from tasks.actions import escape
from tasks.gate import GateSession
from tasks.object_store import ObjectPlace, ObjectStore
from tasks.streams import Content
from tasks.transfer import Moved, SourceChangedError, SourceEndedError, TransferError, pump


class Feed(Protocol):
    """What becomes an object; ``identity`` names one state of it."""

    @property
    def size(self) -> int: ...

    @property
    def identity(self) -> str: ...

    def opened(self) -> AbstractContextManager["OpenFeed"]: ...


class OpenFeed(Protocol):
    def send(self, offset: int, length: int, sink: int, moved: Moved) -> str: ...

    def check_unchanged(self) -> None:
        """Raise :class:`SourceChangedError` unless it is still what it was."""


class HostFeed:
    """What a host's gate sends."""

    def __init__(
        self, content: Content, identity: str, session: Callable[[], AbstractContextManager[GateSession]]
    ) -> None:
        self._content, self.identity, self._session = content, identity, session

    @property
    def size(self) -> int:
        return self._content.size

    @contextmanager
    def opened(self) -> Iterator[OpenFeed]:
        with self._session() as session:
            yield _OpenHostFeed(self._content, session)


class _OpenHostFeed:
    def __init__(self, content: Content, session: GateSession) -> None:
        self._content, self._session = content, session

    def send(self, offset: int, length: int, sink: int, moved: Moved) -> str:
        return self._content.send(self._session, offset, length, sink, moved)

    def check_unchanged(self) -> None:
        self._content.check_unchanged(self._session)


class LocalFeed:
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._first = self._look(path)
        self.identity = ":".join(str(number) for number in self._first)

    @property
    def size(self) -> int:
        return self._first[2]

    @contextmanager
    def opened(self) -> Iterator[OpenFeed]:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"{self._path}: {error.strerror}") from None
        try:
            yield self
        finally:
            os.close(self._file)

    def send(self, offset: int, length: int, sink: int, moved: Moved) -> str:
        assert self._file is not None
        digest = hashlib.sha256()
        os.lseek(self._file, offset, os.SEEK_SET)
        try:
            pump(self._file, sink, length, digests=[digest], moved=moved)
        except SourceEndedError:
            self.check_unchanged()
            raise
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        if self._look(self._path) != self._first:
            raise SourceChangedError(f"{self._path} changed while read: relay it again when its writer is done")

    @staticmethod
    def _look(path: Path) -> tuple[int, int, int, int]:
        try:
            found = path.stat()
        except OSError as error:
            raise TransferError(f"{escape(str(path))}: {error.strerror}") from None
        if not path.is_file() or not found.st_size:
            raise TransferError(f"{escape(str(path))} is no file with something in it: name one")
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class StoredFeed:
    """An object, of the same store or of another."""

    def __init__(self, store: ObjectStore, place: ObjectPlace) -> None:
        self._store, self._key = store, place.key
        self._first = store.find(place.key)
        self.identity = f"{self._first.etag}:{self._first.size}:{self._first.modified.timestamp()}"

    @property
    def size(self) -> int:
        return self._first.size

    @contextmanager
    def opened(self) -> Iterator[OpenFeed]:
        yield self

    def send(self, offset: int, length: int, sink: int, moved: Moved) -> str:
        digest = hashlib.sha256()
        for piece in self._store.read(self._key, offset, length):
            digest.update(piece)
            view = memoryview(piece)
            while view:
                view = view[os.write(sink, view) :]
            moved(len(piece))
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        if self._store.find(self._key) != self._first:
            raise SourceChangedError(f"{self._store.name}/{self._key} changed while read: relay it again")
