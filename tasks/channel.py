"""One running gate: JSON lines to it and from it, why it ended, and what of that enters the audit log.

A channel is an OpenSSH process and not one of paramiko's: file contents pass through it, and paramiko moves them at a
fifth of the speed. On a protected host it is the gate under an approval; on another the same program is sent along and
serves an ordinary login, so that callers know one protocol only.
"""

import json
import os
import select
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from dflash.errors import DFlashError
from tasks.actions import Action, ReadGrant, said
from tasks.approvals import Approval
from tasks.errors import FileChanged, HostBusy, Refused
from tasks.inventory import Host
from tasks.process import PIPE, Popen, TimeoutExpired, last_line, tail
from tasks.sent_gate import ordinary_argv
from tasks.ssh import ConnectionFailed, Connector

REPLY_SECONDS = 60.0
CLOSING_SECONDS, LEAVING_SECONDS = 10.0, 3.0
LONGEST_REPLY = 1 << 24
LONGEST_REPLY_BEFORE_BYTES = 1 << 16
EXIT_SSH_FAILED = 255

Reply = TypeVar("Reply", bound=BaseModel)


class GateError(DFlashError):
    """A request could not be served, or the session broke; nothing about the approval was wrong."""


class RequestFailed(GateError):
    """The gate said no to one request; ``reason`` is all that it said."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def open_channel(connector: Connector, host: Host, approval: Approval | None, action: Action | None) -> "Channel":
    """A channel to ``host`` on which the gate has taken ``action``; None there is for reading by ordinary login.

    The approval is consumed, which enters the audit log, before anything is sent, so that a crash leaves it there;
    what then came of it is its ``end``.

    :raises Refused: a protected host without an approval, an approval of something else or a spent one, or the host's
        sshd or gate refused.
    """
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - the channel closes it
    try:
        if approval is None:
            process = connector.start(host, ordinary_argv(), stdin=PIPE, stdout=PIPE, stderr=stderr)
        else:
            process = _start_gate(connector, host, approval, action, stderr)
    except BaseException:
        stderr.close()
        raise
    channel = Channel(connector, host, approval, process, stderr)
    with channel.ending_on_error():
        channel.send(b"" if action is None else action.canonical())
        if approval is not None and approval.second_signature is not None and host.enforcement != "client":
            channel.send(second_line(approval.second_person, approval.second_signature))
        channel.reply()
    return channel


@contextmanager
def recording_refusals(connector: Connector, host: Host, approval: Approval) -> Iterator[None]:
    """Have a refusal that leaves the block enter the audit log as one of ``approval``."""
    try:
        yield
    except Refused as refusal:
        _record(connector, "refusal", host, approval, message=str(refusal))
        raise


def _start_gate(
    connector: Connector, host: Host, approval: Approval, action: Action | None, stderr: IO[bytes]
) -> Popen[bytes]:
    with recording_refusals(connector, host, approval):
        connector.check_gate(approval, host)
        _check_it_is_for(approval, host, action)
        connector.store.consume(approval)
        try:
            return connector.start_gate(approval, host, stdin=PIPE, stdout=PIPE, stderr=stderr)
        except BaseException as error:
            _record(connector, "end", host, approval, outcome=_named(error), bytes=0)
            raise


def _check_it_is_for(approval: Approval, host: Host, action: Action | None) -> None:
    if action is None or action.digest() != approval.digest:
        raise Refused(f"approval {approval.id} is of another action than this; ask for one of its own")
    if approval.action.host_keys != host.fingerprints:
        raise Refused(f"hosts.yaml now pins other keys for {host.name} than approval {approval.id} names; ask again")


def second_line(name: str | None, signature: Path) -> bytes:
    """What the gate gets behind the action where two persons approve."""
    try:
        return json.dumps({"second": name, "signature": signature.read_text("ascii")}).encode("ascii")
    except (OSError, UnicodeDecodeError):
        raise Refused(f"the second person's signature in {signature} cannot be read; have it signed again") from None


class Channel:
    """One gate process of ``host``, serving ``approval``; :func:`open_channel` makes it, :meth:`end` ends it.

    ``bytes`` (moved through it) and ``outcome`` are for the audit log.
    """

    def __init__(
        self, connector: Connector, host: Host, approval: Approval | None, process: Popen[bytes], stderr: IO[bytes]
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.connector, self.host, self.approval = connector, host, approval
        self.bytes = 0
        self.outcome = "closed"
        self._process, self._stderr = process, stderr
        self._stdin, self._stdout = process.stdin, process.stdout
        self._buffer = b""
        self._ended = False

    def fileno(self) -> int:
        """The descriptor that raw bytes come from."""
        return self._stdout.fileno()

    def send(self, line: bytes) -> None:
        """Send one line, given without its end."""
        self.write(line + b"\n")

    def write(self, content: bytes | memoryview) -> None:
        """Send ``content`` as it is."""
        if self._ended:
            raise GateError(f"the session with {self.host.name} has ended; open another")
        try:
            self._stdin.write(content)
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self._why_it_stopped_reading() from error

    def answer(self, model: type[Reply], to: str, *, seconds: float | None = None) -> Reply:
        """The next reply, to what ``to`` names, as ``model``."""
        try:
            return model.model_validate(self.reply(seconds=seconds))
        except ValidationError as error:
            raise self.broken(f"its reply to {to} cannot be read") from error

    def reply(self, *, seconds: float | None = None, raw_bytes_follow: bool = False) -> dict[str, Any]:
        """The next reply; where raw bytes follow its line, nothing behind the line is taken.

        :raises RequestFailed: the gate says that it failed.
        :raises Refused: it refused; a grant that is of no more use is retired.
        :raises GateError: no reply came within ``seconds``, none that is one, or the process ended.
        """
        seconds = REPLY_SECONDS if seconds is None else seconds
        if raw_bytes_follow:
            line = self._line(1, LONGEST_REPLY_BEFORE_BYTES, seconds)
        else:
            line = self._line(1 << 16, LONGEST_REPLY, seconds)
        try:
            reply = json.loads(line)
            if reply["ok"] is True:
                return dict(reply)
            message = str(reply["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self.broken(f"it answered {line[:60]!r}") from None
        if reply.get("refused"):
            raise self._refused(message, spent=bool(reply.get("spent")), kind=reply.get("kind"))
        raise RequestFailed(f"{self.host.name}: {said(message)}", message)

    def has_ended(self) -> bool:
        """Whether nothing more will come: the process or its output has ended."""
        if self._process.poll() is not None:
            return True
        return bool(select.select([self.fileno()], [], [], 0)[0]) and not os.read(self.fileno(), 1)

    def failure(self) -> DFlashError:
        """Why the process ended by itself, from ssh's exit status and what came on stderr."""
        status = self._wait(CLOSING_SECONDS)
        if status is None:
            return self.broken("it closed its output and went on")
        stderr = tail(self._stderr)
        last = last_line(stderr)
        if status == Refused.exit_code:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                reply = json.loads(last)
                return self._refused(str(reply["message"]), spent=bool(reply["spent"]), kind=reply.get("kind"))
            return self._refused(last)
        if status != EXIT_SSH_FAILED:
            return self.broken(f"it ended with exit status {status}: {said(last) or 'no word'}")
        error = self.connector.failure(self.host, stderr)
        if self.approval is not None and isinstance(error, ConnectionFailed) and "Permission denied" in last:
            return self._refused(
                f"sshd did not accept the certificate of approval {self.approval.id}; its log there says why: look at "
                "the clocks, at the modes of the CA's and the principals' file, and at the login's shell"
            )
        return error

    def broken(self, what: str) -> GateError:
        """The error of a session in which ``what`` happened."""
        return GateError(f"the session with {self.host.name} broke: {what}; try again")

    def close(self) -> None:
        """End it in good order; raises ``Refused`` when the gate ended it with a refusal meanwhile."""
        if self._ended:
            return
        if self.finish():
            with self.ending_on_error():
                raise self.failure()
        self.end(self.outcome)

    def finish(self, seconds: float = CLOSING_SECONDS) -> int | None:
        """End the gate's input and return the exit status of the process, None when it goes on for longer."""
        with suppress(OSError):
            self._stdin.close()
        return self._wait(seconds)

    def abort(self) -> None:
        """End the process from another thread, so that whoever waits for it goes on and finds out."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

    def end(self, outcome: str) -> None:
        """End the process, if it still runs, and record ``outcome``; a second call does nothing."""
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
            _record(self.connector, "end", self.host, self.approval, outcome=outcome, bytes=self.bytes)

    @contextmanager
    def ending_on_error(self, *, spare: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """End it when anything but ``spare`` leaves the block: the framing is lost then."""
        try:
            yield
        except spare:
            raise
        except BaseException as error:
            try:
                if isinstance(error, Refused) and self.approval is not None and not self._ended:
                    _record(self.connector, "refusal", self.host, self.approval, message=str(error))
                if isinstance(error, Refused | RequestFailed):
                    # it ends by itself, and has given its place to the next session when it has
                    self.finish(LEAVING_SECONDS)
            finally:
                self.end(_named(error))
            raise

    def _line(self, at_once: int, longest: int, seconds: float) -> bytes:
        while b"\n" not in self._buffer:
            if not select.select([self.fileno()], [], [], seconds)[0]:
                raise self.broken(f"it did not answer for {seconds:.0f} s")
            more = os.read(self.fileno(), at_once)
            if not more:
                raise self.failure()
            self._buffer += more
            if len(self._buffer) > longest:
                raise self.broken("its reply does not end")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _why_it_stopped_reading(self) -> DFlashError:
        """What the gate said before it went; without a word, how it ended."""
        try:
            for _ in range(8):
                self.reply()
        except DFlashError as error:
            return error
        return self.broken("it talks on and does not read")

    def _refused(self, why: str, *, spent: bool = False, kind: object = None) -> Refused:
        message = f"{self.host.name} refused: {said(why) or 'no word why'}"
        refusal = HostBusy if kind == "busy" else FileChanged if kind == "changed" else Refused
        if self.approval is None:
            return refusal(message)
        if spent and isinstance(self.approval.action, ReadGrant):
            # a change is spent already; the others of its request are not
            self.connector.store.retire(self.approval.id, message)
        return refusal(message, request_id=self.approval.id)

    def _wait(self, seconds: float) -> int | None:
        """The process's exit status; None when it goes on for longer than that."""
        with suppress(TimeoutExpired):
            return self._process.wait(seconds)
        return None


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _record(connector: Connector, event: str, host: Host, approval: Approval, **fields: Any) -> None:
    connector.audit.append(
        event, request=approval.id, host=host.name, digest=approval.digest, serial=approval.serial, **fields
    )
