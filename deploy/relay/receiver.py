"""Receive a file in ranges; it appears under its final name only when it is whole, verified and on disk.

Runs on the destination as ``python3 -c``, sent along with the modules beside it (:func:`tasks.transfer.receiver_argv`),
so all of it takes the standard library alone (Python 3.9 or newer).
One request a line of JSON on stdin, one reply a line on stdout:

    {"verb": "alone", "folder", "names", "about"}          {"ok": true}            nothing of something else is there
    {"verb": "open", "path", "size", "transfer",           {"ok": true, "fresh", "committed"}  the space is reserved,
     "about", "sparse"}                                                                        unless it is sparse
    {"verb": "join", "path", "size", "transfer"}           {"ok": true}            another session of an open transfer
    {"verb": "write", "offset", "length", "others"},       {"ok": true, "sha256"}  once they are on disk
     then the bytes
    {"verb": "fetch", "offset", "length", "url", "start"}  {"ok": true, "sha256"}  the same, from a presigned URL; with
                                                                                   ``start`` only a range of the object
    {"verb": "hash", "offset", "length"}                   {"ok": true, "sha256"}  of what is there
    {"verb": "commit", "ranges", "reread", "expected",     {"ok": true, "sha256"}  the whole file's; it has its name,
     "sidecar"}                                                                    and ``<name>.relay.json`` beside it
    {"verb": "discard"}                                    {"ok": true}            nothing is left of it

``{"ok": false, "message", "kind"}`` and exit code 1 end a session when anything is wrong; only of a fetch it goes on,
with ``"sha256": null, "status", "message"``. What was received stays as ``.<name>.part-<transfer>`` beside the final
name, for the same transfer to go on with; ``fresh`` says that there was nothing. ``committed`` is the file's sha256
when it is there already: another transfer of what is ``about`` the same brought it, or this one did and only the answer
got lost. ``expected`` is the sha256 that the source says it has.
``others`` are ranges, as [offset, length, sha256], that other sessions have stored since the last request: the session
that opened the transfer takes the whole file's digest behind all of them, so that little of it is left for the end.
Where a sha256 is given, of what an earlier run stored, the range must still have it.

The session that opened a transfer holds a lock on its file. That tells what a dead transfer left, which the next one of
that name removes, from what is written now. ``transfer`` is known to one sender alone, so a session that still holds
the lock of a transfer that is opened again is that sender's own, lost behind a dead link, and is ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from typing import Any

from deploy.relay.company import SIDECAR, require_alone, told_by
from deploy.relay.disk import (
    DamagedError,
    NoRoomError,
    ReceiveError,
    explained,
    kind_of,
    lock_holder,
    naming_in,
    opened_file,
    start_writeback,
    sync_folder,
    unlink_if_unlocked,
)
from deploy.relay.fetching import FetchFailed, Read, fetch
from deploy.relay.whole import Whole

CHUNK = 1 << 20
WRITEBACK_BYTES = 32 << 20
LONGEST_LINE = 1 << 24
TAKEOVER_SECONDS = 10.0
LONGEST_ADDITION = len("..part-0123456789abcdef.json")
F_SETPIPE_SZ = 1031  # in fcntl since Python 3.10


class Part:
    """The file under its temporary name."""

    def __init__(self, path: str, size: int, transfer: str, about: str = "", sparse: bool = False) -> None:
        self.path, self.size, self.transfer, self.about, self.sparse = path, size, transfer, about, sparse
        self.directory, self.name = os.path.split(path)
        if not os.path.isabs(path) or not self.name:
            raise ReceiveError(f"{path!r} is not the absolute path of a file")
        if not re.fullmatch("[0-9a-f]{16}", transfer):
            raise ReceiveError(f"{transfer!r} is not the id of a transfer")
        self.temporary = os.path.join(self.directory, f".{self.name}.part-{transfer}")
        self.fd = -1
        self.whole = Whole(self.feed, self.damaged)

    def committed(self) -> str | None:
        """The sha256 of the file under its final name when that is what is to be brought and still whole."""
        written = f"{self.temporary}.json"
        if self._is_described_by(self.path + SIDECAR) or self._is_described_by(written):
            with contextlib.suppress(OSError), naming_in(self.directory):
                # a crash came between the two names
                os.replace(written, self.path + SIDECAR)
                sync_folder(self.directory)
            return self.whole.hexdigest()
        self.whole = Whole(self.feed, self.damaged)
        return None

    def _is_described_by(self, sidecar: str) -> bool:
        """Whether ``sidecar`` is about what is to be brought, and the file there has its sha256."""
        fields = told_by(sidecar)
        same = fields.get("transfer") == self.transfer or (self.about and fields.get("about") == self.about)
        if not same or fields.get("bytes") != self.size:
            return False
        with contextlib.suppress(OSError), opened_file(self.path) as self.fd:
            if os.fstat(self.fd).st_size != self.size:
                return False
            self.whole = Whole(self.feed, self.damaged)
            return bool(self.whole.finish(self.size) == fields.get("sha256"))
        return False

    def open(self) -> bool:
        """Make the file, or take up what there is of it; True when there was nothing."""
        if os.path.islink(self.path):
            raise ReceiveError(
                f"{self.path!r} is a symbolic link to {os.readlink(self.path)!r}, which would be replaced by the file: "
                "name the file itself"
            )
        if os.path.isdir(self.path):
            raise ReceiveError(f"{self.path!r} is a directory: give the file's full name")
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise ReceiveError(f"{self.path!r} is a device, a pipe or a socket: name a file")
        if os.path.isdir(self.path + SIDECAR):
            raise ReceiveError(f"{self.path + SIDECAR!r} is a directory, and the file's sidecar goes there: remove it")
        try:
            os.makedirs(self.directory, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ReceiveError(f"{self.directory!r} is not a directory, or is below a file: name another") from None
        self._require_short_name()
        with naming_in(self.directory):
            self._remove_stale_parts()
        self._lock()
        fresh = os.fstat(self.fd).st_size != self.size or not self.size
        if fresh:
            try:
                self._reserve()
            except BaseException:
                self.discard()
                raise
        return fresh

    def join(self) -> None:
        """Open what another session holds the lock of."""
        self.fd = os.open(self.temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        if os.fstat(self.fd).st_size != self.size:
            raise ReceiveError(f"{self.temporary!r} has another size than it was opened with: relay it again")

    def write(self, offset: int, length: int, read: Read, others: Sequence[Sequence[Any]] = ()) -> str:
        """Store ``length`` bytes of ``read`` durably from ``offset`` on and return their sha256."""
        self._check_span(offset, length)
        for span in others:
            self._check_span(*span[:2])
        self.whole.begin(offset, length, others)
        digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
        at, end, flushed = offset, offset + length, offset
        while at < end:
            count = read(buffer[: end - at])
            if not count:
                raise ReceiveError(f"the sender stopped after {at - offset} of {length} bytes at {offset}")
            written = 0
            while written < count:
                written += os.pwrite(self.fd, buffer[written:count], at + written)
            digest.update(buffer[:count])
            self.whole.pass_by(at, buffer[:count])
            at += count
            if at - flushed >= WRITEBACK_BYTES:
                start_writeback(self.fd, flushed, at - flushed)
                flushed = at
        os.fdatasync(self.fd)
        self.whole.stored(offset, length)
        return digest.hexdigest()

    def damaged(self, offset: int, length: int) -> DamagedError:
        return DamagedError(self.path, offset, length)

    def hash(self, offset: int, length: int) -> str:
        self._check_span(offset, length)
        digest = hashlib.sha256()
        self.feed(offset, length, digest.update)
        return digest.hexdigest()

    def commit(
        self, ranges: list[list[Any]], sidecar: dict[str, Any], *, reread: bool, expected: str | None = None
    ) -> str:
        """Put the file under its final name: what the reader of that name sees is whole even after a power cut."""
        os.fsync(self.fd)
        if reread:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self.whole.forget()
        sha256 = self.whole.finish(self.size, ranges)
        if expected not in (None, sha256):
            self.discard()
            raise ReceiveError(
                f"{self.path!r} has sha256 {sha256}, but its checkpoint says {expected}: it is damaged at its source"
            )
        with naming_in(self.directory):
            # before anything has a name: there may be no room for it
            about = {"transfer": self.transfer, "about": self.about, "bytes": self.size, "sha256": sha256}
            written = self._write_sidecar({**sidecar, **about})
            # beside another file it would be believed, so an old one goes first and the new one comes last
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path + SIDECAR)
            os.replace(self.temporary, self.path)
            os.replace(written, self.path + SIDECAR)
            sync_folder(self.directory)
        os.close(self.fd)
        return sha256

    def discard(self) -> None:
        self.whole.end()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary)
        os.close(self.fd)

    def _lock(self) -> None:
        deadline = time.monotonic() + TAKEOVER_SECONDS
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self.fd = os.open(self.temporary, flags, 0o666)
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    raise ReceiveError(f"{self.path!r} is being written by a session that does not end") from None
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(lock_holder(self.fd), signal.SIGTERM)
                os.close(self.fd)
                time.sleep(0.05)
                continue
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.temporary), os.fstat(self.fd)):
                    return
            # Another receiver took the file for a stale one before it was locked.
            os.close(self.fd)

    def _require_short_name(self) -> None:
        longest = os.pathconf(self.directory, "PC_NAME_MAX") - LONGEST_ADDITION
        if len(os.fsencode(self.name)) > longest:
            raise ReceiveError(
                f"{self.name!r} has more than {longest} bytes, and what is on its way has {LONGEST_ADDITION} more in "
                "its name: give it a shorter one"
            )

    def _reserve(self) -> None:
        """Take the space now: a full disk is found before the first byte, not after the last but one."""
        os.ftruncate(self.fd, 0)
        if self.sparse:
            os.ftruncate(self.fd, self.size)
            return
        room = os.statvfs(self.directory)
        free = room.f_bavail * room.f_frsize
        # Asked first, because a file system may fill itself up before it finds that it cannot.
        if self.size > free:
            raise NoRoomError(f"no room for {self.path!r}: {self.size} bytes needed, {free} free there: make room")
        if self.size:
            os.posix_fallocate(self.fd, 0, self.size)

    def _remove_stale_parts(self) -> None:
        part_of_this = re.compile(re.escape(f".{self.name}.part-") + r"[0-9a-f]{16}(\.json)?")
        for entry in os.listdir(self.directory):
            path = os.path.join(self.directory, entry)
            if part_of_this.fullmatch(entry) and path != self.temporary:
                unlink_if_unlocked(path)

    def _check_span(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ReceiveError(f"{length} bytes at {offset} are not inside the {self.size} of {self.path!r}")

    def feed(self, offset: int, length: int, update: Callable[[memoryview], object]) -> None:
        """Have ``update`` get bytes of the file as they lie there."""
        buffer = memoryview(bytearray(CHUNK))
        while length:
            count = os.preadv(self.fd, [buffer[:length]], offset)
            if not count:
                raise ReceiveError(f"{self.temporary!r} became shorter: relay it again")
            update(buffer[:count])
            offset, length = offset + count, length - count

    def _write_sidecar(self, fields: dict[str, Any]) -> str:
        partial = f"{self.temporary}.json"
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(fields, file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        return partial


def serve(source: FileIO, replies: int) -> None:
    """Serve requests until the input ends. Raises :class:`ReceiveError` or :class:`OSError`; the part stays then."""
    part: Part | None = None
    while True:
        line = source.readline(LONGEST_LINE)
        if not line:
            return
        if not line.endswith(b"\n"):
            raise ReceiveError("the sender stopped in the middle of a request")
        request: dict[str, Any] = json.loads(line)
        verb = request.pop("verb")
        if verb == "open":
            part = Part(**request)
            committed = part.committed()
            reply(replies, committed=committed, fresh=committed is None and part.open())
        elif verb == "alone":
            require_alone(**request)
            reply(replies)
        elif verb == "join":
            part = Part(**request)
            part.join()
            reply(replies)
        elif part is None:
            raise ReceiveError(f"{verb!r} before anything was opened")
        elif verb == "write":
            others = request.get("others", ())
            reply(replies, sha256=part.write(request["offset"], request["length"], source.readinto, others))
        elif verb == "fetch":
            try:
                write = partial(part.write, request["offset"], request["length"])
                reply(replies, sha256=fetch(request["url"], request["length"], request.get("start"), write))
            except FetchFailed as failure:
                reply(replies, sha256=None, status=failure.status, message=str(failure))
        elif verb == "hash":
            reply(replies, sha256=part.hash(**request))
        elif verb == "commit":
            reply(replies, sha256=part.commit(**request))
            part = None
        elif verb == "discard":
            part.discard()
            part = None
            reply(replies)
        else:
            raise ReceiveError(f"{verb!r} is no request of this receiver")


def reply(replies: int, **fields: Any) -> None:
    data = json.dumps({"ok": True, **fields}).encode("ascii") + b"\n"
    while data:
        data = data[os.write(replies, data) :]


def stop(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)
    raise ReceiveError(f"the receiver was ended by signal {signum}")


def main() -> int:
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, stop)
    with contextlib.suppress(OSError):  # sshd may also give a socket, which has no such size
        fcntl.fcntl(0, F_SETPIPE_SZ, CHUNK)
    try:
        serve(FileIO(0), 1)
    except (ReceiveError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        with contextlib.suppress(OSError):
            answer = {"ok": False, "message": explained(error), "kind": kind_of(error)}
            os.write(1, json.dumps(answer).encode("ascii") + b"\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
