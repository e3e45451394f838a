"""Receive one file on stdin; it appears under its final name only when it is whole, verified and on disk.

Runs on the destination as ``python3 -c <this text>``, so it takes the standard library alone (Python 3.8 or newer).

stdin   one JSON line ``{"path", "size"}``; after the first reply ``size`` bytes; one JSON line ``{"sha256"}``
stdout  ``{"ok": true, "ready": true}`` once the space is reserved; ``{"ok": true, "bytes", "sha256"}`` once the file is
        under its name; ``{"ok": false, "message"}`` and exit code 1 when anything is wrong: then no trace is left

The file grows as ``.<name>.part-<id>`` beside its final name. Its writer holds a lock on it, so what a killed receiver
left is told from what another one is writing now, and the next receiver of that name removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import secrets
import signal
import stat
import sys
from io import FileIO
from types import TracebackType
from typing import Any

PIPE_BYTES = 1 << 20
WRITEBACK_BYTES = 32 << 20
HEADER_BYTES = 64 << 10
SYNC_FILE_RANGE_WRITE = 2
F_SETPIPE_SZ = 1031  # in fcntl since Python 3.10


class ReceiveError(Exception):
    """The file cannot be received; the message is what the operator reads."""


class Part:
    """The file under its temporary name; gone on leaving the ``with`` block unless it was committed."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        self.directory, self.name = os.path.split(path)
        self.fd, self.temporary = -1, ""

    def __enter__(self) -> Part:
        if not os.path.isabs(self.path) or not self.name:
            raise ReceiveError(f"{self.path!r} is not the absolute path of a file")
        if os.path.isdir(self.path):
            raise ReceiveError(f"{self.path!r} is a directory: give the file's full name")
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise ReceiveError(f"{self.path!r} is a device, a pipe or a socket: name a file")
        os.makedirs(self.directory, exist_ok=True)
        self._remove_stale_parts()
        try:
            self._create()
            self._reserve()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.temporary:
            os.unlink(self.temporary)
        if self.fd >= 0:
            os.close(self.fd)

    def commit(self) -> None:
        """Put the file under its final name: what the reader of that name sees is whole even after a power cut."""
        os.fsync(self.fd)
        os.replace(self.temporary, self.path)
        self.temporary = ""
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _create(self) -> None:
        while True:
            temporary = os.path.join(self.directory, f".{self.name}.part-{secrets.token_hex(8)}")
            self.fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self.temporary = temporary
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            if os.path.exists(temporary):
                return
            # Another receiver took the file for a stale one before it was locked.
            self.temporary = ""
            os.close(self.fd)

    def _reserve(self) -> None:
        """Take the space now: a full disk is found before the first byte, not after the last but one."""
        room = os.statvfs(self.directory)
        free = room.f_bavail * room.f_frsize
        # Asked first, because a file system may fill itself up before it finds that it cannot.
        if self.size > free:
            raise ReceiveError(f"no room for {self.path!r}: {self.size} bytes needed, {free} free there: make room")
        if self.size:
            os.posix_fallocate(self.fd, 0, self.size)

    def _remove_stale_parts(self) -> None:
        part_of_this = re.compile(re.escape(f".{self.name}.part-") + "[0-9a-f]{16}")
        for entry in os.listdir(self.directory):
            if part_of_this.fullmatch(entry):
                _unlink_if_unlocked(os.path.join(self.directory, entry))


def _unlink_if_unlocked(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    except OSError:
        pass
    finally:
        os.close(fd)


def receive(source: FileIO, replies: int) -> None:
    """Receive one file from ``source``, answering on the descriptor ``replies``.

    Raises :class:`ReceiveError` or :class:`OSError`; the temporary file is gone then.
    """
    header = _read_line(source)
    with Part(str(header["path"]), int(header["size"])) as part:
        _reply(replies, {"ok": True, "ready": True})
        digest = _store(source, part)
        if _read_line(source)["sha256"] != digest:
            raise ReceiveError(f"{part.path!r} arrived with another sha256 than it was sent with: relay it again")
        part.commit()
    _reply(replies, {"ok": True, "bytes": part.size, "sha256": digest})


def _store(source: FileIO, part: Part) -> str:
    """Write ``part.size`` bytes of ``source`` and return their sha256 as hex."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(PIPE_BYTES))
    done = flushed = 0
    while done < part.size:
        count = source.readinto(buffer[: part.size - done])
        if not count:
            raise ReceiveError(f"the sender stopped after {done} of {part.size} bytes of {part.path!r}")
        written = 0
        while written < count:
            written += os.write(part.fd, buffer[written:count])
        digest.update(buffer[:count])
        done += count
        if done - flushed >= WRITEBACK_BYTES:
            _start_writeback(part.fd, flushed, done - flushed)
            flushed = done
    return digest.hexdigest()


def _start_writeback(fd: int, offset: int, length: int) -> None:
    """Have the kernel write while the bytes still come, or the final fsync waits for the whole file at once."""
    start = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if start is not None:
        start(fd, ctypes.c_int64(offset), ctypes.c_int64(length), SYNC_FILE_RANGE_WRITE)


def _read_line(source: FileIO) -> dict[str, Any]:
    line = source.readline(HEADER_BYTES)
    if not line.endswith(b"\n"):
        raise ReceiveError("the sender stopped before it confirmed the file")
    fields: dict[str, Any] = json.loads(line)
    return fields


def _reply(replies: int, fields: dict[str, Any]) -> None:
    os.write(replies, json.dumps(fields).encode("ascii") + b"\n")


def _stop(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)
    raise ReceiveError(f"the receiver was ended by signal {signum}")


def main() -> int:
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, _stop)
    with contextlib.suppress(OSError):  # sshd may also give a socket, which has no such size
        fcntl.fcntl(0, F_SETPIPE_SZ, PIPE_BYTES)
    try:
        receive(FileIO(0), 1)
    except (ReceiveError, OSError) as error:
        with contextlib.suppress(BrokenPipeError):
            _reply(1, {"ok": False, "message": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
