"""Changing a host: one approved action each, performed once or not at all.

Everything that can be told before is told before, because the approval is spent first: durably, in the store and in the
audit log, before anything is sent. A crash behind that leaves it spent and its outcome ``unknown``; nothing is tried
again by itself.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Annotated, Any, BinaryIO, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dflash.errors import DFlashError, UsageError
from tasks.actions import AnyChange, Change, Count, Launch, Put, Revoke, Run, Sha256, Signal, Upload, escape
from tasks.approvals import Approval
from tasks.channel import Channel, Reply, open_channel
from tasks.inventory import Host
from tasks.ssh import Connector

CHUNK = 1 << 20
GRACE_SECONDS = 30.0
"""What the gate gets, beyond the time of the action, to say that it is over."""

Output = Callable[[Literal["stdout", "stderr"], bytes], None]
Progress = Callable[[int, int], None]


class ContentError(UsageError):
    """What is to be sent is not what was approved; nothing was changed."""


class NothingToRevokeError(UsageError):
    """A host on which nothing is installed that could refuse a certificate."""


@dataclass(frozen=True)
class Uploaded:
    """One part, by its index in the action, that the object store has taken."""

    part: int
    sha256: str
    crc32: int
    etag: str


def run(connector: Connector, host: Host, approval: Approval | None, action: Run, output: Output) -> int:
    """Run the command to its end; its exit status, or minus the signal that ended it.

    ``output`` gets what it writes as it comes. ``approval`` is None on an unprotected host only, here and below.

    :raises Refused: a protected host without an approval, one of something else, a spent one, or its gate refused.
    :raises GateError: it could not be started, or it was ended at its limit of time or of output.
    """
    with _performing(connector, host, approval, action) as channel:
        while (reply := channel.answer(_Ran, "run", seconds=_patience(action))).exit is None:
            channel.bytes += len(reply.data)
            output(reply.stream, reply.data)
        channel.outcome = f"exit {reply.exit}"
        return reply.exit


def put(
    connector: Connector,
    host: Host,
    approval: Approval | None,
    action: Put,
    source: BinaryIO,
    progress: Progress | None = None,
) -> None:
    """Write the bytes of ``source`` from where it stands; ``progress`` gets (bytes sent, bytes in all).

    :raises ContentError: they are not those of the action; told before anything is spent when ``source`` can seek.
    :raises Refused: see :func:`run`.
    :raises GateError: the file could not be written; the one that was there is still there.
    """
    _check_content(source, action)
    with _performing(connector, host, approval, action) as channel:
        channel.answer(_Ready, "put", seconds=_patience(action))
        with _ended_after(channel, _patience(action)):
            for chunk in _approved_chunks(source, action):
                channel.write(chunk)
                channel.bytes += len(chunk)
                if progress is not None:
                    progress(channel.bytes, action.size)
        stored = channel.answer(_Stored, "put", seconds=_patience(action)).sha256
        if stored != action.sha256:
            raise channel.broken(f"it wrote {stored}, and {action.sha256} was sent")


def launch(connector: Connector, host: Host, approval: Approval | None, action: Launch) -> int:
    """Start the job and return the id of its process; it goes on after this.

    :raises Refused: see :func:`run`.
    :raises GateError: it was not started, for one because a job of that id is there already.
    """
    with _performing(connector, host, approval, action) as channel:
        started = channel.answer(_Launched, "launch", seconds=_patience(action))
        if started.job != action.job:
            raise channel.broken(f"it started another job than {action.job}")
        channel.outcome = f"pid {started.pid}"
        return started.pid


def signal(connector: Connector, host: Host, approval: Approval | None, action: Signal) -> int:
    """Signal the processes of a launched job and return the id of its first.

    :raises Refused: see :func:`run`.
    :raises GateError: there is no such job, or it has ended.
    """
    with _performing(connector, host, approval, action) as channel:
        signalled = channel.answer(_Signalled, "signal", seconds=_patience(action)).signalled
        channel.outcome = f"pid {signalled}"
        return signalled


def upload(
    connector: Connector,
    host: Host,
    approval: Approval | None,
    action: Upload,
    urls: Sequence[str],
    progress: Progress | None = None,
    each: Callable[[Uploaded], None] | None = None,
) -> tuple[Uploaded, ...]:
    """Have the host send its parts to ``urls``, presigned and one a part; what the object store took, in their order.

    The URLs go over stdin and stand in no command, log or message. ``progress`` gets (bytes sent, bytes in all),
    ``each`` every part as soon as the store has it.

    :raises UsageError: there are not as many URLs as parts; nothing was spent.
    :raises Refused: see :func:`run`; also a URL that leads elsewhere than the action says.
    :raises GateError: a part did not get through, or the file changed meanwhile.
    """
    if len(urls) != len(action.parts):
        raise UsageError(f"{len(urls)} URLs for {len(action.parts)} parts; make one for each, in their order")
    taken: list[Uploaded] = []
    with _performing(connector, host, approval, action) as channel:
        channel.send(json.dumps({"urls": list(urls)}).encode("ascii"))
        while (reply := channel.answer(_Part, "upload", seconds=_patience(action))).part is not None:
            if reply.part != len(taken) or reply.part >= len(action.parts):
                raise channel.broken(f"it named part {reply.part}, and part {len(taken)} was next")
            taken.append(Uploaded(reply.part, reply.sha256, reply.crc32, reply.etag))
            channel.bytes += action.parts[reply.part].length
            if progress is not None:
                progress(channel.bytes, action.bytes)
            if each is not None:
                each(taken[-1])
        if len(taken) != len(action.parts):
            raise channel.broken(f"it ended after {len(taken)} of {len(action.parts)} parts")
    return tuple(taken)


def revoke(connector: Connector, host: Host, approval: Approval, action: Revoke) -> None:
    """Have the host refuse the certificate with that serial from now on.

    :raises NothingToRevokeError: nothing is installed there that could; nothing was spent.
    :raises Refused: see :func:`run`.
    :raises GateError: it could not be done.
    """
    if host.enforcement == "client":
        raise NothingToRevokeError(
            f"nothing on {host.name} looks at certificates, so there is nothing to tell it; that the key is deleted "
            "here is all there is to it"
        )
    with _performing(connector, host, approval, action) as channel:
        revoked = channel.answer(_Revoked, "revoke", seconds=_patience(action)).revoked
        if revoked != action.serial:
            raise channel.broken(f"it revoked serial {revoked}, and {action.serial} was asked for")


@contextmanager
def _performing(connector: Connector, host: Host, approval: Approval | None, action: AnyChange) -> Iterator[Channel]:
    """A channel on which the gate performs ``action``; what is said on it in the block is the outcome."""
    channel = open_channel(connector, host, approval, action)
    channel.outcome = "done"
    with channel.ending_on_error():
        yield channel
    # the gate has said what came of it; it gets time to write that into its own log, and its exit changes nothing
    channel.finish()
    channel.end(channel.outcome)


@contextmanager
def _ended_after(channel: Channel, seconds: float) -> Iterator[None]:
    """End ``channel`` when the block takes longer: a gate that takes in nothing any more would block it for ever."""
    timer = Timer(seconds, channel.abort)
    timer.start()
    try:
        yield
    except DFlashError:
        if timer.finished.is_set():
            raise channel.broken(f"it took in nothing more for {seconds:.0f} s") from None
        raise
    finally:
        timer.cancel()


def _patience(action: Change) -> float:
    return action.seconds + GRACE_SECONDS


def _check_content(source: BinaryIO, action: Put) -> None:
    """Read a source that can be read again, so that a wrong one spends no approval."""
    if not source.seekable():
        return
    start = source.tell()
    digest, size = hashlib.sha256(), 0
    while size <= action.size and (chunk := source.read(CHUNK)):
        digest.update(chunk)
        size += len(chunk)
    source.seek(start)
    if (size, digest.hexdigest()) != (action.size, action.sha256):
        raise ContentError(
            f"what is to be written to {escape(action.path)} is not the {action.size} approved bytes with sha256 "
            f"{action.sha256}; nothing was sent: make a new plan"
        )


def _approved_chunks(source: BinaryIO, action: Put) -> Iterator[bytes]:
    """The bytes of the action; the last of them only when all are right, so that the gate never has a wrong file."""
    digest, left = hashlib.sha256(), action.size
    while left:
        chunk = source.read(min(CHUNK, left))
        digest.update(chunk)
        left -= len(chunk)
        if not chunk or (not left and digest.hexdigest() != action.sha256):
            raise ContentError(
                f"what was to be written to {escape(action.path)} became other bytes than the approved ones after "
                f"{action.size - left} of {action.size}; nothing was written: make a new plan"
            )
        yield chunk


def _decoded(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("not base64")
    return base64.b64decode(text, validate=True)


class _Reply(BaseModel):
    """What the gate says; of the wrong type it is not believed."""

    model_config = ConfigDict(strict=True)


class _Ran(_Reply):
    """Output or, at last, the exit status."""

    stream: Literal["stdout", "stderr"] = "stdout"
    data: Annotated[bytes, BeforeValidator(_decoded)] = b""
    exit: int | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        return _with_just(self, {"stream", "data"} if self.exit is None else {"exit"})


class _Ready(_Reply):
    ready: Literal[True]


class _Stored(_Reply):
    sha256: Sha256


class _Launched(_Reply):
    job: str
    pid: Annotated[int, Field(ge=1)]


class _Signalled(_Reply):
    signalled: Annotated[int, Field(ge=1)]


class _Part(_Reply):
    """One part or, at last, no more."""

    part: Count | None = None
    sha256: Sha256 = ""
    crc32: Annotated[int, Field(ge=0, lt=2**32)] = 0
    etag: str = ""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        return _with_just(self, set() if self.part is None else {"part", "sha256", "crc32", "etag"})


class _Revoked(_Reply):
    revoked: int


def _with_just(reply: Reply, fields: set[str]) -> Reply:
    if reply.model_fields_set != fields:
        raise ValueError(f"it has {reply.model_fields_set} and not {fields}")
    return reply
