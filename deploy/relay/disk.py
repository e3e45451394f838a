"""Files, locks and folders of the destination, and what its errors mean. Stdlib only, Python 3.9."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator

SYNC_FILE_RANGE_WRITE = 2
FLOCK = "hhqqi4x"


class ReceiveError(Exception):
    """The file cannot be received; the message is what the operator reads."""


class NoRoomError(ReceiveError):
    """The disk is full, or would be."""


class DamagedError(ReceiveError):
    """What was stored, and confirmed, is not there any more."""

    def __init__(self, path: str, offset: int, length: int) -> None:
        super().__init__(f"{length} bytes of {path!r} at {offset} are not on the disk as they came: relay it again")


def lock_holder(fd: int) -> int:
    """The process that holds the lock on ``fd``; this one when none does."""
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    if kind == fcntl.F_UNLCK or pid in (0, -1, os.getpid()):
        raise ProcessLookupError
    return int(pid)


@contextlib.contextmanager
def opened_file(path: str) -> Iterator[int]:
    """A regular file for reading, which is no link; of anything else nothing is read. Raises :class:`OSError`."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def naming_in(path: str) -> Iterator[None]:
    """One receiver at a time gives names in a folder, so that no sidecar comes to stand beside another's file."""
    directory = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without such locks
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def unlink_if_unlocked(path: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
        finally:
            os.close(fd)


def sync_folder(path: str) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Have the kernel write while the bytes still come, or the fdatasync waits for the whole range at once."""
    start = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if start is not None:
        start(fd, ctypes.c_int64(offset), ctypes.c_int64(length), SYNC_FILE_RANGE_WRITE)


def kind_of(error: Exception) -> str | None:
    """``full`` or ``denied``, where somebody has to see to the disk or to its rights; ``damaged`` where it is wrong."""
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, NoRoomError) or code in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    if isinstance(error, DamagedError):
        return "damaged"
    return "denied" if code in (errno.EROFS, errno.EACCES, errno.EPERM) else None


def explained(error: Exception) -> str:
    """What happened and, where somebody can mend it, how."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    mends = {
        errno.ENOSPC: "make room and relay it again",
        errno.EDQUOT: "make room and relay it again",
        errno.EROFS: "name a folder that can be written",
        errno.EACCES: "let its user write there, or name another folder",
        errno.EPERM: "let its user write there, or name another folder",
        errno.EIO: "look at that host's disk",
    }
    where = f"{error.filename!r}: " if error.filename else ""
    mend = mends.get(error.errno)
    return f"{where}{error.strerror}" + (f": {mend}" if mend else "")
