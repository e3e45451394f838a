"""What of a transfer has arrived, on the operator's disk, so that a later one moves only what is missing.

One file a (source, destination, selection). It names one state of the source; another state begins anew, under another
``transfer`` id, so that bytes of two states never meet in one file.

Its first line says what is on its way. What has arrived since is a line each behind it, because one that is lost costs
a range that moves again, and no more; whatever takes something back is written anew, and on the disk before it counts.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.state import state_dir
from tasks.transfer import TransferError

VERSION = 1
SYNC_BYTES = 64 << 20
"""So much may have to move again when this machine loses its power."""

Sha256 = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class JournalError(TransferError):
    """The journal cannot be read or written, or another relay of the same file is running."""

    state_name = "JournalUnusable"


class OnItsWayError(JournalError):
    """Another relay of the same file to the same place is running."""

    state_name = "AlreadyRunning"


class Span(BaseModel):
    """One range of the destination; ``sha256`` once it was sent, ``stored`` once the destination has it on its disk."""

    model_config = ConfigDict(extra="forbid", strict=True)

    offset: int = Field(ge=0)
    length: int = Field(ge=0)
    sha256: Sha256 | None = None
    stored: bool = False


class Content(BaseModel):
    """What a journal says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int
    source: str
    destination: str
    identity: str
    transfer: str = Field(pattern=r"\A[0-9a-f]{16}\z")
    size: int = Field(ge=0)
    spans: list[Span]

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """Offsets and lengths of the spans."""
        return [(span.offset, span.length) for span in self.spans]

    @property
    def moving(self) -> int:
        """Bytes that move at all."""
        return sum(span.length for span in self.spans)


NOTE = re.compile(rb"(\d{1,9}) ([0-9a-f]{64}) (sent|stored)")


class Journal:
    """One transfer; safe for the threads of one process, and held by one process at a time (:func:`opened`)."""

    def __init__(self, file: Path, content: Content) -> None:
        self._file, self._content, self._lock = file, content, threading.Lock()
        self._numbers = {span.offset: number for number, span in enumerate(content.spans)}
        self._unsynced = 0

    @property
    def transfer(self) -> str:
        """Random, of this machine alone, the same as long as the transfer can be gone on with."""
        return self._content.transfer

    @property
    def about(self) -> str:
        """Names what is brought: the source and its state."""
        return f"{self._content.source} {self._content.identity}"

    @property
    def size(self) -> int:
        return self._content.size

    @property
    def sparse(self) -> bool:
        """Whether there are zeros that do not move."""
        return self._content.moving < self._content.size

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._content.spans)

    def begin_anew(self) -> None:
        """Forget every range: the destination has nothing of them any more."""
        with self._lock:
            for span in self._content.spans:
                span.sha256, span.stored = None, False
            self._save()

    def sent(self, span: Span, sha256: str) -> None:
        """Note what went out, before the destination confirms it."""
        with self._lock:
            span.sha256 = sha256
            self._add(span, "sent")

    def stored(self, span: Span) -> None:
        """Note that the destination has ``span`` on its disk with the sha256 it was sent with."""
        with self._lock:
            span.stored = True
            self._unsynced += span.length
            self._add(span, "stored")

    def lost(self, span: Span) -> None:
        """Note that the destination holds something else at ``span``."""
        with self._lock:
            span.sha256, span.stored = None, False
            self._save()

    def remove(self) -> None:
        """The file has arrived; nothing can be gone on with."""
        self._file.unlink(missing_ok=True)

    def _add(self, span: Span, what: str) -> None:
        line = f"{self._numbers[span.offset]} {span.sha256} {what}\n".encode("ascii")
        try:
            file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                if os.write(file, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if self._unsynced >= SYNC_BYTES:
                    os.fdatasync(file)
                    self._unsynced = 0
            finally:
                os.close(file)
        except OSError as error:
            raise _unusable(self._file, error) from None

    def _save(self) -> None:
        partial = self._file.with_suffix(".part")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.write(self._content.model_dump_json() + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._file)
        except OSError as error:
            raise _unusable(self._file, error) from None


@contextmanager
def opened(
    source: str,
    destination: str,
    identity: str,
    size: int,
    spans: Sequence[tuple[int, int]],
    *,
    fits: Callable[[Sequence[tuple[int, int]]], bool] | None = None,
    folder: Path | None = None,
) -> Iterator[Journal]:
    """The journal of ``source`` in the state ``identity`` going to ``destination``: a file of ``size`` bytes.

    ``spans`` (offset, length) are what moves, in order; what lies between them is zeros.

    One that an earlier transfer of the same state left is taken up with its own spans, if ``fits`` says that all of the
    file can be sent in them. :class:`JournalError` when
    another process has it open, or when it cannot be read or written.
    """
    place = folder or state_dir() / "relays"
    # a name need not be text
    source, destination, identity = map(_as_text, (source, destination, identity))
    name = hashlib.sha256(json.dumps([source, destination]).encode()).hexdigest()[:32]
    file = place / f"{name}.json"
    with _held(place / f"{name}.lock", f"{source} is on its way to {destination}", file.exists):
        content = read(file)
        new = Content(
            version=VERSION,
            source=source,
            destination=destination,
            identity=identity,
            transfer=secrets.token_hex(8),
            size=size,
            spans=[Span(offset=offset, length=length) for offset, length in spans],
        )
        if content is None or not _same(content, new) or (fits is not None and not fits(content.cuts)):
            content = new
        journal = Journal(file, content)
        journal._save()
        yield journal


@contextmanager
def _held(path: Path, what: str, wanted: Callable[[], bool]) -> Iterator[None]:
    """The lock ``path``, which goes at the end unless it is ``wanted``; ``what`` is on its way meanwhile."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _locked(path, what)
    except OSError as error:
        raise _unusable(path.parent, error) from None
    try:
        yield
    finally:
        if not wanted():
            path.unlink(missing_ok=True)
        os.close(lock)


def _locked(path: Path, what: str) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise OnItsWayError(f"{what} already; wait for that relay or end it") from None
        except FileNotFoundError:
            pass
        # whoever held it was done, and removed it, before it was locked here
        os.close(lock)


def read(file: Path) -> Content | None:
    """What is in ``file``; a journal that cannot be believed is none: everything moves again then."""
    try:
        head, *notes = file.read_bytes().split(b"\n")
        content = Content.model_validate_json(head)
    except (FileNotFoundError, ValidationError):
        return None
    except OSError as error:
        raise _unusable(file, error) from None
    for note in map(NOTE.fullmatch, notes):
        if note is None or int(note[1]) >= len(content.spans):
            # the last one, which was being written
            break
        span = content.spans[int(note[1])]
        span.sha256, span.stored = note[2].decode("ascii"), note[3] == b"stored"
    at = 0
    for span in content.spans:
        if span.offset < at or (span.stored and span.sha256 is None):
            return None
        at = span.offset + span.length
    return content if content.version == VERSION and at <= content.size else None


def _same(one: Content, other: Content) -> bool:
    """Whether both are about the same bytes, however they are cut."""
    return all(
        getattr(one, field) == getattr(other, field)
        for field in ("source", "destination", "identity", "size", "moving")
    )


def transfer_of(file: Path) -> str | None:
    """The id of the transfer that the journal ``file`` can go on with; None when it can with none."""
    try:
        content = read(file)
    except JournalError:
        return None
    return None if content is None else content.transfer


def _as_text(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _unusable(path: Path, error: OSError) -> JournalError:
    return JournalError(
        f"journal {path}: {error.strerror}; make room and make it writable, or name another $DFLASH_STATE"
    )
