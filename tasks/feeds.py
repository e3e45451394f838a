"""What can become an object of a store: a file behind a gate, one of this machine, or another object."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from tasks.approvals import Approval
from tasks.contents import WholeFile
from tasks.ends import Reader, open_reader
from tasks.inventory import Location
from tasks.object_store import ObjectPlace, ObjectStore
from tasks.relayable import name_of_state, whole_file
from tasks.ssh import Connector
from tasks.transfer import Moved, SourceChangedError


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


class ReadFeed:
    """A file that a gate sends, or this machine reads of its own."""

    def __init__(self, content: WholeFile, reader: Callable[[], AbstractContextManager[Reader]]) -> None:
        self._content, self._open = content, reader
        self.identity = name_of_state(content.identity)

    @property
    def size(self) -> int:
        return self._content.size

    @contextmanager
    def opened(self) -> Iterator[OpenFeed]:
        with self._open() as reader:
            yield _OpenFeed(self._content, reader)


class _OpenFeed:
    def __init__(self, content: WholeFile, reader: Reader) -> None:
        self._content, self._reader = content, reader

    def send(self, offset: int, length: int, sink: int, moved: Moved) -> str:
        return self._content.send(self._reader, offset, length, sink, moved)

    def check_unchanged(self) -> None:
        self._content.check_unchanged(self._reader)


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


def feed_of(connector: Connector, approval: Approval | None, source: Location) -> ReadFeed:
    """The file ``source`` of a host or of this machine; looking at it costs a session of ``approval``.

    Raises as :func:`tasks.relayable.whole_file`.
    """
    with open_reader(connector, source, approval) as reader:
        content = WholeFile(source, whole_file(reader, source, reader.stat(source.path)))
    return ReadFeed(content, lambda: open_reader(connector, source, approval))
