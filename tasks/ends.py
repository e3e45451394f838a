"""The two ends of a relay: what reads a source and what receives at a destination, on a host or on this machine."""

import os
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from dflash.checkpoint_layout import ChangedError, Identity
from dflash.errors import DFlashError
from tasks import process
from tasks.actions import escape, said
from tasks.approvals import Approval
from tasks.channel import EXIT_SSH_FAILED, RequestFailed
from tasks.gate import ByteStream, Entry, Stat, Wanted, open_session
from tasks.inventory import Location
from tasks.process import PIPE, Popen, TimeoutExpired, last_line, tail
from tasks.sources import BESIDE, Look, of_the_checkpoint
from tasks.ssh import Connector
from tasks.transfer import Receiver, ReceiverLostError, SourceChangedError, SourceEndedError, receiver_argv

CLOSING_SECONDS = 5.0

T = TypeVar("T")


class Reader(Protocol):
    """Who reads at a source: a gate's session, or this machine for its own files."""

    @property
    def approval(self) -> Approval | None: ...

    def stat(self, path: str) -> Stat: ...

    def list(self, path: str) -> tuple[Entry, ...]: ...

    def ahead(self, wanted: Iterable[Wanted]) -> None: ...

    def read(self, path: str, offset: int, length: int) -> AbstractContextManager[ByteStream]: ...

    def abort(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def open_reader(connector: Connector, place: Location, approval: Approval | None) -> Reader:
    """Who reads at ``place``; raises as :func:`tasks.gate.open_session`."""
    return LocalReader() if place.host is None else open_session(connector, place.host, approval)


class LocalReader:
    """The files of this machine, by the same requests."""

    approval: Approval | None = None

    def stat(self, path: str) -> Stat:
        with _failing(path):
            return Stat(**_described(os.stat(path)))

    def list(self, path: str) -> tuple[Entry, ...]:
        with _failing(path), os.scandir(path) as found:
            entries = [Entry(name=entry.name, **_described(entry.stat(follow_symlinks=False))) for entry in found]
        return tuple(sorted(entries, key=lambda entry: entry.name))

    def ahead(self, wanted: Iterable[Wanted]) -> None: ...

    @contextmanager
    def read(self, path: str, offset: int, length: int) -> Iterator[ByteStream]:
        with _failing(path), open(path, "rb", buffering=0) as file:
            file.seek(offset)
            try:
                yield ByteStream(length, file.fileno())
            except SourceEndedError:
                raise SourceChangedError(f"{escape(path)} became shorter while it was read") from None

    def abort(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def open_receiver(connector: Connector, destination: Location) -> Iterator[Receiver]:
    """Run the receiver where ``destination`` is; on leaving it is gone, and what was not committed stays as a part."""
    host, place = destination.host, escape(str(destination))
    with tempfile.TemporaryFile() as stderr:
        if host is None:
            argv = receiver_argv()
            running = process.start(argv, stdin=PIPE, stdout=PIPE, stderr=stderr, start_new_session=True)
        else:
            running = connector.start(host, receiver_argv(), stdin=PIPE, stdout=PIPE, stderr=stderr)

        def explain(code: int) -> DFlashError:
            text = tail(stderr)
            if code == EXIT_SSH_FAILED and host is not None:
                return connector.failure(host, text)
            how = f"ended with exit status {code}" if code >= 0 else f"was ended by signal {-code}"
            return ReceiverLostError(f"{place}: the receiver {how}: {said(last_line(text)) or 'no word'}")

        try:
            yield Receiver(running, place, explain)
        finally:
            _end(running)


class Pool(Generic[T]):
    """Sessions that outlive one file: what a ``with`` block leaves in good order the next one takes up.

    Only in the thread that made the pool; in others a session ends with its block, because an ssh process dies with the
    thread that started it.
    """

    def __init__(self, opened: Callable[[], AbstractContextManager[T]]) -> None:
        self._opened = opened
        self._thread = threading.get_ident()
        self._kept: list[tuple[T, ExitStack]] = []

    @contextmanager
    def take(self) -> Iterator[T]:
        if threading.get_ident() != self._thread:
            with self._opened() as session:
                yield session
            return
        if self._kept:
            session, stack = self._kept.pop()
        else:
            stack = ExitStack()
            session = stack.enter_context(self._opened())
        with ExitStack() as unless_kept:
            unless_kept.push(stack.__exit__)
            yield session
            unless_kept.pop_all()
            self._kept.append((session, stack))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._kept:
            self._kept.pop()[1].close()


class ReadSource:
    """A checkpoint behind a :class:`Reader`, for :func:`tasks.selection.select`.

    Links to files are followed where no approval says what may be read. ``left_out`` are the entries, by their names
    below the directory, that the last look could make nothing of: other links, pipes, sockets, devices.
    """

    def __init__(self, reader: Reader, place: Location) -> None:
        self._reader = reader
        self.place = escape(str(place))
        directory = reader.stat(place.path).kind == "directory"
        self.single = None if directory else os.path.basename(place.path)
        self._folder = place.path if directory else os.path.dirname(place.path)
        self.left_out: list[str] = []

    def path(self, file: str) -> str:
        return os.path.join(self._folder, file)

    def look(self) -> Look:
        if self.single is None:
            self.left_out = []
            return of_the_checkpoint(dict(self._below("")))
        found = {}
        for name in (self.single, BESIDE):
            with suppress_missing(self.single if name == self.single else None):
                state = self._reader.stat(self.path(name))
                if state.kind == "file":
                    found[name] = identity_of(state)
        return found

    def read(self, file: str, ranges: Sequence[tuple[int, int]]) -> bytes:
        pieces = []
        self._reader.ahead((self.path(file), offset, length) for offset, length in ranges)
        for offset, length in ranges:
            with self._reader.read(self.path(file), offset, length) as stream:
                pieces.append(_read_exactly(stream, f"{self.place} {file}"))
        return b"".join(pieces)

    def _below(self, folder: str) -> Iterator[tuple[str, Identity]]:
        for entry in self._reader.list(self.path(folder) if folder else self._folder):
            name = os.path.join(folder, entry.name)
            if entry.kind == "directory":
                yield from self._below(name)
            elif entry.kind == "file":
                yield name, identity_of(entry)
            elif (state := self._behind_link(name)) is not None:
                yield name, identity_of(state)
            else:
                self.left_out.append(name)

    def _behind_link(self, name: str) -> Stat | None:
        # a gate refuses what lies elsewhere, and with it the session
        if self._reader.approval is not None:
            return None
        try:
            state = self._reader.stat(self.path(name))
        except RequestFailed:
            return None
        return state if state.kind == "file" else None


@contextmanager
def suppress_missing(but: str | None) -> Iterator[None]:
    """A file that is not there is none, unless it is the one that was asked for."""
    try:
        yield
    except RequestFailed as error:
        if but is not None or not is_missing(error):
            raise


def is_missing(error: RequestFailed) -> bool:
    """Whether the request failed because there is no such file."""
    return error.reason.endswith(os.strerror(2))


def _read_exactly(stream: ByteStream, what: str) -> bytes:
    content = bytearray(stream.length)
    view, done = memoryview(content), 0
    while done < stream.length:
        count = os.readv(stream.fileno(), [view[done:]])
        if not count:
            raise ChangedError(f"{what} became shorter while it was read; try again when its writer is done")
        done += count
    return bytes(content)


def identity_of(state: Stat) -> Identity:
    """What one state of a file is known by in a look."""
    return Identity(state.device, state.inode, state.size, state.mtime_ns)


def _described(found: os.stat_result) -> dict[str, Any]:
    kind = "file" if stat.S_ISREG(found.st_mode) else "directory" if stat.S_ISDIR(found.st_mode) else "other"
    return {
        "kind": kind,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
        "device": found.st_dev,
    }


@contextmanager
def _failing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{path!r}: {error.strerror}"
        raise RequestFailed(f"this machine: {said(reason)}", reason) from None


def _end(running: Popen[bytes]) -> None:
    """End of input makes the receiver leave; a connection that hangs is ended here instead."""
    for stream in (running.stdin, running.stdout):
        assert stream is not None
        with suppress(OSError):
            stream.close()
    try:
        running.wait(CLOSING_SECONDS)
    except TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
