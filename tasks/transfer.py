"""The pump between two processes, and the sender's half of what ``deploy/relay/receiver.py`` speaks."""

import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

from dflash.errors import DFlashError
from tasks.actions import said
from tasks.process import Popen, TimeoutExpired

PIPE_BYTES = 1 << 20
CLOSING_SECONDS = 10.0
LONGEST_REPLY = 1 << 16
MOST_REPLIES = 64
RECEIVER_MODULES = ("disk", "company", "whole", "fetching")
START_RECEIVER = """
import sys, types
*modules, receiver = sys.argv[1:]
while modules:
    name, source, *modules = modules
    made = sys.modules[name] = types.ModuleType(name)
    exec(source, made.__dict__)
exec(receiver, {"__name__": "__main__"})
"""
"""Its modules import each other by the names they have here, without being files there."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""
Moved = Callable[[int], None]
"""Called with how many bytes have just moved."""


class TransferError(DFlashError):
    """A file did not get across; nothing is under its final name."""


class SourceEndedError(TransferError):
    """The source stopped before it had sent what it announced; the caller knows why."""


class SourceChangedError(TransferError):
    """The source is not any more what it was when the transfer began: what arrived of it is of use to nobody."""

    state_name = "SourceChanged"


class SinkClosedError(TransferError):
    """The destination stopped reading; its reply or its exit code says why."""


class ReceiverError(TransferError):
    """The receiver refused or failed; the message holds its own words."""

    state_name = "DestinationFailed"


class DestinationFullError(ReceiverError):
    """There is no room for the file; make some, and the same relay goes on."""

    state_name = "DiskFull"


class DestinationDeniedError(ReceiverError):
    """The destination may not be written there."""

    state_name = "DestinationNotWritable"


class StoredOtherwiseError(ReceiverError):
    """What was confirmed is not on the destination's disk any more; all of it has to move again."""


class ReceiverLostError(ReceiverError):
    """The receiver's process ended without a word; another session can go on."""

    state_name = "DestinationLost"


class FetchError(TransferError):
    """A presigned URL did not give its bytes; the receiver's session goes on. ``status`` is 0 without an answer."""

    state_name = "StoreUnreachable"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the store, or the way to it, is the trouble: it may be over soon."""
        return self.status == 0 or self.status >= 500


class Digest(Protocol):
    """What hashlib's objects are."""

    def update(self, data: memoryview, /) -> None: ...


def pump(source: int, sink: int, length: int, *, digests: Sequence[Digest] = (), moved: Moved | None = None) -> None:
    """Move ``length`` bytes from one descriptor to another, past ``digests``.

    Memory is one buffer of 1 MiB, whatever the length. Both descriptors should be pipes: theirs are widened to 1 MiB,
    so that the process on either side goes on while this one hashes.

    Raises :class:`SourceEndedError` and :class:`SinkClosedError`.
    """
    _widen(source)
    _widen(sink)
    buffer = memoryview(bytearray(PIPE_BYTES))
    done = 0
    while done < length:
        count = os.readv(source, [buffer[: length - done]])
        if not count:
            raise SourceEndedError(f"the source stopped after {done} of {length} bytes")
        write_all(sink, buffer[:count])
        for digest in digests:
            digest.update(buffer[:count])
        done += count
        if moved is not None:
            moved(count)


class Pace:
    """A bandwidth limit that several threads share; ``rate`` in bytes a second, 0 for none."""

    def __init__(self, rate: int) -> None:
        self._rate, self._next, self._lock = rate, 0.0, threading.Lock()

    def __call__(self, count: int) -> None:
        """Wait until ``count`` more bytes may have moved."""
        if not self._rate:
            return
        with self._lock:
            begin = max(self._next, time.monotonic() - 0.05)
            self._next = begin + count / self._rate
        time.sleep(max(0.0, self._next - time.monotonic()))


@dataclass(frozen=True)
class Opened:
    """What a destination had of a transfer: ``fresh`` nothing, ``committed`` all of it (its sha256), else some."""

    fresh: bool
    committed: str | None


class Receiver:
    """One session of the receiver on a destination: :meth:`open` or :meth:`join`, ranges, then :meth:`commit`.

    ``process`` runs :func:`receiver_argv` with pipes as stdin and stdout; ``place`` names the destination in messages;
    ``explain`` makes an error of the exit code of a process that ended without a reply. Whoever started the process
    ends it; without :meth:`commit` that leaves what was received under its temporary name.
    """

    def __init__(self, process: Popen[bytes], place: str, explain: Callable[[int], DFlashError]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._place, self._explain = place, explain

    @property
    def sink(self) -> int:
        """Where the bytes of a range go between :meth:`begin` and :meth:`stored`."""
        return self._stdin.fileno()

    def require_alone(self, folder: str, names: Sequence[str], about: Mapping[str, str]) -> None:
        """Raise :class:`ReceiverError` where files of another relay would stay in ``folder`` beside ``names``.

        ``about`` are fields of the sidecars of what may stay.
        """
        self._ask(verb="alone", folder=folder, names=names, about=about)

    def open(self, path: str, size: int, transfer: str, *, about: str = "", sparse: bool = False) -> "Opened":
        """Reserve ``size`` bytes for ``path``, or take up what there is of this ``transfer``.

        A whole file that an earlier transfer of what is ``about`` the same left there is not asked for again. Of a
        ``sparse`` one nothing is reserved. A destination that cannot take the file says so here.
        """
        reply = self._ask(verb="open", path=path, size=size, transfer=transfer, about=about, sparse=sparse)
        committed = reply.get("committed")
        return Opened(bool(reply.get("fresh")), None if committed is None else str(committed))

    def join(self, path: str, size: int, transfer: str) -> None:
        """Take part in a transfer that another session has open."""
        self._ask(verb="join", path=path, size=size, transfer=transfer)

    def begin(self, offset: int, length: int, others: Sequence[tuple[int, int, str]] = ()) -> None:
        """Announce ``length`` bytes for ``offset``, which go into :attr:`sink` at once.

        ``others`` are ranges that other sessions have stored since this one's last was announced; one with a sha256 is
        held to it.
        """
        told = {"others": others} if others else {}
        self._send(verb="write", offset=offset, length=length, **told)

    def stored(self) -> str:
        """Wait until the range is on the destination's disk and return the sha256 of what was written there."""
        return str(self._reply().get("sha256"))

    def fetch(self, offset: int, length: int, url: str, *, start: int | None = None) -> str:
        """Have the destination get a range from a presigned URL; returns its sha256 once it is on the disk.

        ``start``: of the object it is the ``length`` bytes from there on. Raises :class:`FetchError` when the URL did
        not give them.
        """
        part = {} if start is None else {"start": start}
        reply = self._ask(verb="fetch", offset=offset, length=length, url=url, **part)
        if reply.get("sha256") is None:
            raise FetchError(f"{self._place}: {said(str(reply.get('message')))}", int(reply.get("status") or 0))
        return str(reply["sha256"])

    def hash(self, offset: int, length: int) -> str:
        """sha256 of a range as it lies there."""
        return str(self._ask(verb="hash", offset=offset, length=length).get("sha256"))

    def commit(
        self,
        ranges: Sequence[tuple[int, int, str]],
        sidecar: dict[str, Any],
        *,
        reread: bool,
        expected: str | None = None,
    ) -> str:
        """Have the file put under its final name and return its sha256, which the destination took.

        ``reread``: every one of ``ranges`` (offset, length, sha256) is read from the disk again before. A file of
        another sha256 than ``expected`` gets no name.
        """
        asked = {"ranges": ranges, "sidecar": sidecar, "reread": reread, "expected": expected}
        return str(self._ask(verb="commit", **asked).get("sha256"))

    def discard(self) -> None:
        """Leave nothing of what was received."""
        self._ask(verb="discard")

    def abort(self) -> None:
        """End the process from another thread, so that whoever waits for it goes on."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def failure(self) -> DFlashError:
        """Why the receiver stopped reading: its last reply, else what its exit code means."""
        try:
            for _ in range(MOST_REPLIES):
                # what it still had to say of ranges before
                self._reply()
        except DFlashError as error:
            return error
        return self._explained(self._exit_code())

    def _ask(self, **fields: Any) -> dict[str, Any]:
        self._send(**fields)
        return self._reply()

    def _send(self, **fields: Any) -> None:
        try:
            write_all(self.sink, memoryview(json.dumps(fields).encode("ascii") + b"\n"))
        except SinkClosedError:
            raise self.failure() from None

    def _reply(self) -> dict[str, Any]:
        line = self._stdout.readline(LONGEST_REPLY)
        if not line:
            raise self._explained(self._exit_code())
        try:
            reply: dict[str, Any] = json.loads(line)
            if reply["ok"] is True:
                return reply
            message, kind = str(reply["message"]), str(reply.get("kind"))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ReceiverError(f"{self._place}: the receiver answered {line[:60]!r}: relay it again") from None
        kinds = {"full": DestinationFullError, "denied": DestinationDeniedError, "damaged": StoredOtherwiseError}
        raise kinds.get(kind, ReceiverError)(f"{self._place}: {said(message)}")

    def _explained(self, code: int | None) -> DFlashError:
        if code is None:
            return ReceiverLostError(f"{self._place}: the receiver said nothing more and did not end: relay it again")
        return self._explain(code)

    def _exit_code(self) -> int | None:
        """The process's exit code; None when it goes on although there is nothing left for it to do."""
        with suppress(TimeoutExpired):
            return self._process.wait(CLOSING_SECONDS)
        return None


def receiver_argv() -> list[str]:
    """The command of the destination: the receiver's sources, run by that host's own Python without its site."""
    modules = [word for name in RECEIVER_MODULES for word in (f"deploy.relay.{name}", _receiver_source(name))]
    return ["python3", "-IS", "-c", START_RECEIVER, *modules, _receiver_source("receiver")]


def _receiver_source(module: str) -> str:
    return files("deploy").joinpath("relay", f"{module}.py").read_text(encoding="utf-8")


def write_all(sink: int, data: memoryview) -> None:
    """Write all of ``data``; raises :class:`SinkClosedError` when nobody reads any more."""
    try:
        while data:
            data = data[os.write(sink, data) :]
    except BrokenPipeError:
        raise SinkClosedError("the destination stopped reading") from None


def _widen(pipe: int) -> None:
    with suppress(OSError):  # not a pipe, or the user's pipe pages are used up: slower, not wrong
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
