"""Reading files on a host: one session, framed requests, the same for a protected host and for any other.

On a protected host sshd starts the gate under the certificate of an approval; on another one the same program is sent
along and serves an ordinary login, so that its callers know one protocol only. A session is an OpenSSH process, not a
paramiko channel: file contents pass through it, and paramiko moves them at a fifth of the speed.
"""

import json
import os
import select
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from types import TracebackType
from typing import IO, Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dflash.errors import DFlashError
from tasks.actions import LARGEST, said
from tasks.approvals import Approval
from tasks.errors import Refused
from tasks.inventory import Host
from tasks.process import PIPE, Popen, TimeoutExpired, last_line, tail
from tasks.ssh import ConnectionFailed, Connector

REPLY_SECONDS = 60.0
CLOSING_SECONDS = 10.0
LONGEST_REPLY = 1 << 24
LONGEST_REPLY_BEFORE_BYTES = 1 << 16
EXIT_SSH_FAILED = 255

Count = Annotated[int, Field(ge=0, le=LARGEST)]
Reply = TypeVar("Reply", bound=BaseModel)

# The program needs a module to live in: dataclasses look their annotations up there.
START_ORDINARY = (
    "import sys, types; gate = sys.modules['dflash_gate'] = types.ModuleType('dflash_gate'); "
    "exec(sys.argv[1], gate.__dict__); sys.exit(gate.serve(gate.OrdinaryAccess()))"
)


class GateError(DFlashError):
    """A request could not be served, or the session broke; nothing about the approval was wrong."""


class RequestFailed(GateError):
    """The gate said no to one request and waits for the next; ``reason`` is all that it said."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Stat(BaseModel):
    """What identifies one state of a file; ``size`` in bytes."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["file", "directory", "other"]
    size: Count
    mtime_ns: int
    inode: int
    device: int


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("no directory holds an entry of that name")
    return name


class Entry(Stat):
    """One entry of a directory; a symbolic link is ``other``."""

    name: Annotated[str, AfterValidator(_file_name)]


class _Entries(BaseModel):
    entries: tuple[Entry, ...]


class _Hash(BaseModel):
    """How far a hash is, and at last what it is."""

    hashed: Count = 0
    sha256: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")] | None = None


@dataclass(frozen=True)
class ByteStream:
    """The ``length`` bytes that are about to come from descriptor ``fileno()``; read exactly those."""

    length: int
    _descriptor: int

    def fileno(self) -> int:
        return self._descriptor


def open_session(connector: Connector, host: Host, approval: Approval | None) -> "GateSession":
    """Open a session on ``host``: under ``approval``, or by ordinary login when there is none.

    The use of an approval enters the audit log before anything is sent, so a crash leaves it there.

    :raises Refused: a protected host without an approval, or its sshd or gate refused.
    """
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - the session closes it
    if approval is None:
        program = files("deploy").joinpath("training-host", "dflash-gate").read_text("utf-8")
        argv = ["python3", "-I", "-c", START_ORDINARY, program]
        process = connector.start(host, argv, stdin=PIPE, stdout=PIPE, stderr=stderr)
    else:
        _record(connector, "consumption", host, approval)
        process = connector.start_gate(approval, host, stdin=PIPE, stdout=PIPE, stderr=stderr)
    session = GateSession(connector, host, approval, process, stderr)
    with session.ending_on_error():
        session.open()
    return session


class GateSession:
    """Requests to one gate, one at a time; :func:`open_session` makes it, ``with`` ends it.

    A failed request raises :class:`GateError` and leaves the session usable. A refusal raises ``Refused`` and ends it.
    """

    def __init__(
        self, connector: Connector, host: Host, approval: Approval | None, process: Popen[bytes], stderr: IO[bytes]
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.host, self.approval = host, approval
        self._connector, self._process, self._stderr = connector, process, stderr
        self._stdin, self._stdout = process.stdin, process.stdout
        self._buffer = b""
        self._bytes = 0
        self._ended = False

    def open(self) -> None:
        """Send the approved action and wait until the gate takes it."""
        if self.approval is not None:
            self._send(self.approval.grant.canonical())
        self._reply()

    def stat(self, path: str) -> Stat:
        return self._ask(Stat, verb="stat", path=path)

    def list(self, path: str) -> tuple[Entry, ...]:
        """The entries of a directory, by name."""
        return self._ask(_Entries, verb="list", path=path).entries

    def hash(self, path: str, *, progress: Callable[[int], None] | None = None) -> str:
        """sha256 of a file in hex, computed over there; ``progress`` gets the bytes hashed, once a second."""
        with self.ending_on_error():
            self._send_request(verb="hash", path=path)
            while (reply := self._answer(_Hash, "hash")).sha256 is None:
                if progress is not None:
                    progress(reply.hashed)
            return reply.sha256

    @contextmanager
    def read(self, path: str, offset: int, length: int) -> Iterator[ByteStream]:
        """``length`` bytes of a file from ``offset`` on, as a descriptor to read exactly them from.

        At the end the gate's word is taken that they all came from the file that was first seen. When the stream ends
        early, what the gate or ssh said about it is raised in place of the reader's own error.
        """
        with self.ending_on_error():
            self._send_request(verb="read", path=path, offset=offset, length=length)
            reply = self._reply(raw_bytes_follow=True)
            if reply.get("length") != length:
                raise self._broken("it announced another number of bytes than was asked for")
            try:
                yield ByteStream(length, self._stdout.fileno())
            except Exception as error:
                if self._process.poll() is None and not self._at_end():
                    raise
                raise self._failure() from error
            self._reply()
            self._bytes += length

    def close(self) -> None:
        """End the session in good order; raises ``Refused`` when the gate ended it with a refusal meanwhile."""
        if self._ended:
            return
        with suppress(OSError):
            self._stdin.close()
        if self._wait(CLOSING_SECONDS):
            with self.ending_on_error():
                raise self._failure()
        self._end("closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end(f"{type(error).__name__}: {error}")

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """Kill the process when anything but a failed request leaves the block: the framing is lost then."""
        try:
            yield
        except RequestFailed:
            raise
        except BaseException as error:
            self._end(f"{type(error).__name__}: {error}")
            raise

    def _ask(self, model: type[Reply], **request: Any) -> Reply:
        with self.ending_on_error():
            self._send_request(**request)
            return self._answer(model, request["verb"])

    def _answer(self, model: type[Reply], verb: str) -> Reply:
        try:
            return model.model_validate(self._reply())
        except ValidationError as error:
            raise self._broken(f"its reply to {verb} cannot be read") from error

    def _send_request(self, **request: Any) -> None:
        self._send(json.dumps(request, separators=(",", ":")).encode("ascii"))

    def _send(self, line: bytes) -> None:
        if self._ended:
            raise GateError(f"the session with {self.host.name} has ended; open another")
        try:
            self._stdin.write(line + b"\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def _reply(self, *, raw_bytes_follow: bool = False) -> dict[str, Any]:
        """The next reply; where raw bytes follow its line, nothing behind the line is taken."""
        line = self._line(1, LONGEST_REPLY_BEFORE_BYTES) if raw_bytes_follow else self._line(1 << 16, LONGEST_REPLY)
        try:
            reply = json.loads(line)
            if reply["ok"] is True:
                return dict(reply)
            message = str(reply["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._broken(f"it answered {line[:60]!r}") from None
        if reply.get("refused"):
            raise self._refused(message, spent=bool(reply.get("spent")))
        raise RequestFailed(f"{self.host.name}: {said(message)}", message)

    def _line(self, at_once: int, longest: int) -> bytes:
        descriptor = self._stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], REPLY_SECONDS)[0]:
                raise self._broken(f"it did not answer for {REPLY_SECONDS:.0f} s")
            more = os.read(descriptor, at_once)
            if not more:
                raise self._failure()
            self._buffer += more
            if len(self._buffer) > longest:
                raise self._broken("its reply does not end")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _at_end(self) -> bool:
        """Whether nothing more will come: the other side closed."""
        descriptor = self._stdout.fileno()
        return bool(select.select([descriptor], [], [], 0)[0]) and not os.read(descriptor, 1)

    def _failure(self) -> DFlashError:
        """Why the session ended by itself, from ssh's exit status and what came on stderr."""
        status = self._wait(CLOSING_SECONDS)
        if status is None:
            return self._broken("it closed its output and went on")
        stderr = tail(self._stderr)
        last = last_line(stderr)
        if status == Refused.exit_code:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                reply = json.loads(last)
                return self._refused(str(reply["message"]), spent=bool(reply["spent"]))
            return self._refused(last)
        if status != EXIT_SSH_FAILED:
            return self._broken(f"it ended with exit status {status}: {said(last) or 'no word'}")
        error = self._connector.failure(self.host, stderr)
        if self.approval is not None and isinstance(error, ConnectionFailed) and "Permission denied" in last:
            return self._refused(
                f"sshd did not accept the certificate of approval {self.approval.id}; its log there says why: look at "
                "the clocks, at the modes of the CA's and the principals' file, and at the login's shell"
            )
        return error

    def _refused(self, why: str, *, spent: bool = False) -> Refused:
        message = f"{self.host.name} refused: {said(why) or 'no word why'}"
        if self.approval is None:
            return Refused(message)
        _record(self._connector, "refusal", self.host, self.approval, message=message)
        if spent:
            self._connector.store.retire(self.approval.id, message)
        return Refused(message, request_id=self.approval.id)

    def _broken(self, what: str) -> GateError:
        return GateError(f"the session with {self.host.name} broke: {what}; try again")

    def _wait(self, seconds: float) -> int | None:
        """The process's exit status; None when it goes on for longer than that."""
        with suppress(TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def _end(self, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._stderr):
            with suppress(OSError):
                stream.close()
        if self.approval is not None:
            _record(self._connector, "end", self.host, self.approval, outcome=outcome, bytes=self._bytes)


def _record(connector: Connector, event: str, host: Host, approval: Approval, **fields: Any) -> None:
    connector.audit.append(
        event, request=approval.id, host=host.name, digest=approval.digest, serial=approval.serial, **fields
    )
