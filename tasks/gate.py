"""Observing a host: one session, framed requests, the same for a protected host and for any other."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tasks.actions import LARGEST
from tasks.approvals import Approval
from tasks.channel import Channel, Reply, RequestFailed, open_channel, recording_refusals
from tasks.client_enforcement import LocalBudget
from tasks.inventory import Host
from tasks.ssh import Connector

Count = Annotated[int, Field(ge=0, le=LARGEST)]


MOST_ASKED = 32
"""Reads that a gate is asked for before their turn; the lines fit into what ssh holds on its way."""

Wanted = tuple[str, int, int]
"""A path, and offset and length of a range of it."""


class Stat(BaseModel):
    """What identifies one state of a file; ``size`` in bytes."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["file", "directory", "other"]
    size: Count
    mtime_ns: int
    inode: int
    device: int


StatReply = TypeVar("StatReply", bound=Stat)


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("no directory holds an entry of that name")
    return name


class Entry(Stat):
    """One entry of a directory; a symbolic link is ``other``."""

    name: Annotated[str, AfterValidator(_file_name)]


class JobRecord(Stat):
    """What a ``job.json`` is, and what its host can tell of the job; None where the gate there is too old to tell.

    Of a job's folder it is the host's clock alone.
    """

    now: float | None = None
    """The host's own clock, seconds since the epoch."""
    boot: str | None = None
    """The host's boot."""
    lives: bool | None = None
    """Whether the job's first process lives, which no other that got its id is taken for."""


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
    """Open a session on ``host``: under ``approval`` of a read grant, or by ordinary login when there is none.

    The use of an approval enters the audit log before anything is sent, so a crash leaves it there.

    :raises Refused: a protected host without an approval, or its sshd or gate refused.
    """
    if approval is None:
        return GateSession(open_channel(connector, host, None, None), None)
    if host.enforcement != "client":
        return GateSession(open_channel(connector, host, approval, approval.grant), None)
    with recording_refusals(connector, host, approval):
        budget = LocalBudget(connector.store, approval)
    try:
        return GateSession(open_channel(connector, host, approval, approval.grant), budget)
    except BaseException:
        budget.close()
        raise


class GateSession:
    """Requests to one gate, one at a time; :func:`open_session` makes it, ``with`` ends it.

    A failed request raises :class:`GateError` and leaves the session usable. A refusal raises ``Refused`` and ends it.
    ``budget`` is what is kept on this machine when nothing on the host keeps it.
    """

    def __init__(self, channel: Channel, budget: LocalBudget | None) -> None:
        self._channel, self._budget = channel, budget
        self._planned: deque[Wanted] = deque()
        self._asked: deque[Wanted] = deque()

    @property
    def host(self) -> Host:
        return self._channel.host

    @property
    def approval(self) -> Approval | None:
        return self._channel.approval

    def stat(self, path: str) -> Stat:
        with self._until_it_breaks():
            return self._stat(path, renew=True, model=Stat)

    def stat_job(self, path: str) -> JobRecord:
        """Stat the ``job.json`` at ``path``, which tells also whether its job lives, or the folder of a job."""
        with self._until_it_breaks():
            return self._stat(path, renew=True, model=JobRecord)

    def list(self, path: str) -> tuple[Entry, ...]:
        """The entries of a directory, by name."""
        with self._until_it_breaks():
            return self._ask(_Entries, verb="list", path=path).entries

    def hash(self, path: str, *, progress: Callable[[int], None] | None = None) -> str:
        """sha256 of a file in hex, computed over there; ``progress`` gets the bytes hashed, once a second."""
        with self._until_it_breaks():
            self._debit(path)
            self._send(verb="hash", path=path)
            while (reply := self._channel.answer(_Hash, "hash")).sha256 is None:
                if progress is not None:
                    progress(reply.hashed)
            return reply.sha256

    def ahead(self, wanted: Iterable[Wanted]) -> None:
        """Say what the next reads will be, exactly and in this order, behind those that were said before.

        They are asked for before their turn, so that none of them costs a round trip.
        """
        if self._budget is None:
            self._planned.extend(wanted)

    @contextmanager
    def read(self, path: str, offset: int, length: int) -> Iterator[ByteStream]:
        """``length`` bytes of a file from ``offset`` on, as a descriptor to read exactly them from.

        At the end the gate's word is taken that they all came from the file that was first seen. When the stream ends
        early, what the gate or ssh said about it is raised in place of the reader's own error.
        """
        channel = self._channel
        with self._until_it_breaks():
            self._debit(path, length)
            self._ask_for((path, offset, length))
            try:
                reply = channel.reply(raw_bytes_follow=True)
            except RequestFailed as error:
                if self._asked or self._planned:
                    # what was asked for behind it will be answered, and nobody waits for that
                    channel.end(f"{type(error).__name__}: {error}")
                raise
            if reply.get("length") != length:
                raise channel.broken("it announced another number of bytes than was asked for")
            try:
                yield ByteStream(length, channel.fileno())
            except Exception as error:
                if not channel.has_ended():
                    raise
                raise channel.failure() from error
            channel.reply(raw_bytes_follow=bool(self._asked))
            channel.bytes += length

    def abort(self) -> None:
        """End the session's process from another thread, so that whoever waits for it goes on."""
        self._channel.abort()

    def close(self) -> None:
        """End the session in good order; raises ``Refused`` when the gate ended it with a refusal meanwhile."""
        try:
            self._channel.close()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._channel.end(f"{type(error).__name__}: {error}")
            self._release()

    @contextmanager
    def _until_it_breaks(self) -> Iterator[None]:
        """What is no more than a failed request leaves the session usable; anything else ends it."""
        try:
            with self._channel.ending_on_error(spare=RequestFailed):
                yield
        except RequestFailed:
            raise
        except BaseException:
            self._release()
            raise

    def _ask(self, model: type[Reply], **request: Any) -> Reply:
        self._send(**request)
        return self._channel.answer(model, request["verb"])

    def _send(self, **request: Any) -> None:
        self._channel.send(json.dumps(request, separators=(",", ":")).encode("ascii"))

    def _ask_for(self, wanted: Wanted) -> None:
        """Have the next answer be that of ``wanted``, and ask for some of what is planned behind it."""
        if not self._asked and not self._planned:
            self._planned.append(wanted)
        while self._planned and len(self._asked) < MOST_ASKED:
            path, offset, length = self._planned.popleft()
            self._send(verb="read", path=path, offset=offset, length=length)
            self._asked.append((path, offset, length))
        if self._asked.popleft() != wanted:
            raise self._channel.broken("another range than this was announced as the next")

    def _stat(self, path: str, *, renew: bool, model: type[StatReply]) -> StatReply:
        found = self._ask(model, verb="stat", path=path)
        if self._budget is not None and found.kind == "file":
            self._budget.check_same(path, (found.device, found.inode, found.size, found.mtime_ns), renew=renew)
        return found

    def _debit(self, path: str, length: int | None = None) -> None:
        """Have ``length`` bytes, by default the whole file, taken from a budget that is kept here."""
        if self._budget is not None:
            size = self._stat(path, renew=False, model=Stat).size
            self._budget.debit(size if length is None else length)

    def _release(self) -> None:
        if self._budget is not None:
            self._budget.close()
