"""The pump between two processes, and the sender's half of what ``deploy/relay/receiver.py`` speaks."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from typing import Any

from dflash.errors import DFlashError
from tasks.actions import said
from tasks.process import Popen, TimeoutExpired

PIPE_BYTES = 1 << 20
PROGRESS_SECONDS = 0.1
CLOSING_SECONDS = 10.0
LONGEST_REPLY = 1 << 16

Progress = Callable[[int, int], None]


class TransferError(DFlashError):
    """A file did not get across; nothing is under its final name."""


class SourceEndedError(TransferError):
    """The source stopped before it had sent what it announced; the caller knows why."""


class SinkClosedError(TransferError):
    """The destination stopped reading; its reply or its exit code says why."""


class ReceiverError(TransferError):
    """The receiver refused or failed, or its process ended; the message holds its own words."""


def pump(source: int, sink: int, length: int, *, progress: Progress | None = None) -> str:
    """Move ``length`` bytes from one descriptor to another and return their sha256 as hex.

    Memory is one buffer of 1 MiB, whatever the length. Both descriptors should be pipes: theirs are widened to 1 MiB,
    so that the process on either side goes on while this one hashes. ``progress`` is called with (bytes done,
    ``length``) at the start, ten times a second and at the end.

    Raises :class:`SourceEndedError` and :class:`SinkClosedError`.
    """
    _widen(source)
    _widen(sink)
    report = progress or (lambda done, total: None)
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(PIPE_BYTES))
    done, reported = 0, time.monotonic()
    report(0, length)
    while done < length:
        count = os.readv(source, [buffer[: length - done]])
        if not count:
            raise SourceEndedError(f"the source stopped after {done} of {length} bytes")
        _write(sink, buffer[:count])
        digest.update(buffer[:count])
        done += count
        if time.monotonic() - reported >= PROGRESS_SECONDS:
            reported = time.monotonic()
            report(done, length)
    report(length, length)
    return digest.hexdigest()


class Receiver:
    """One file on its way into a destination: :meth:`open`, then bytes into :attr:`sink`, then :meth:`commit`.

    ``process`` runs :func:`receiver_argv` with pipes as stdin and stdout; ``place`` names the destination in messages;
    ``explain`` makes an error of the exit code of a process that ended without a reply. Whoever started the process
    ends it; without :meth:`commit` that leaves nothing over there.
    """

    def __init__(self, process: Popen[bytes], place: str, explain: Callable[[int], DFlashError]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._place, self._explain = place, explain

    @property
    def sink(self) -> int:
        return self._stdin.fileno()

    def open(self, path: str, size: int) -> None:
        """Have ``size`` bytes reserved for ``path``; a destination that cannot take the file says so here."""
        self._send({"path": path, "size": size})
        self._reply()

    def commit(self, sha256: str) -> None:
        """Have the file put under its final name; raises unless what was stored has this ``sha256``."""
        self._send({"sha256": sha256})
        stored = self._reply().get("sha256")
        if stored != sha256:
            what = said(str(stored))
            raise ReceiverError(f"{self._place}: sha256 {sha256} was sent, but {what} was stored: relay it again")
        if (code := self._exit_code()) != 0:
            raise self._explained(code)

    def failure(self) -> DFlashError:
        """Return why the receiver stopped reading: its last reply, else what its exit code means."""
        try:
            self._reply()
        except DFlashError as error:
            return error
        return self._explained(self._exit_code())

    def _send(self, fields: dict[str, Any]) -> None:
        try:
            _write(self.sink, memoryview(json.dumps(fields).encode("ascii") + b"\n"))
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
            message = str(reply["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ReceiverError(f"{self._place}: the receiver answered {line[:60]!r}: relay it again") from None
        raise ReceiverError(f"{self._place}: {said(message)}")

    def _explained(self, code: int | None) -> DFlashError:
        if code is None:
            return ReceiverError(f"{self._place}: the receiver said nothing more and did not end: relay it again")
        return self._explain(code)

    def _exit_code(self) -> int | None:
        """The process's exit code; None when it goes on although there is nothing left for it to do."""
        with suppress(TimeoutExpired):
            return self._process.wait(CLOSING_SECONDS)
        return None


def receiver_argv() -> list[str]:
    """Return the command of the destination: the receiver's source, run by that host's own Python without its site."""
    return ["python3", "-IS", "-c", files("deploy").joinpath("relay", "receiver.py").read_text(encoding="utf-8")]


def _write(sink: int, chunk: memoryview) -> None:
    try:
        while chunk:
            chunk = chunk[os.write(sink, chunk) :]
    except BrokenPipeError:
        raise SinkClosedError("the destination stopped reading") from None


def _widen(pipe: int) -> None:
    with suppress(OSError):  # not a pipe, or the user's pipe pages are used up: slower, not wrong
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
