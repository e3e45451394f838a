"""The two ways into the store: this machine puts there what it reads, or the source's host does it by itself."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from tasks.actions import MOST_PARTS, Part, Upload
from tasks.approvals import Approval
from tasks.changes import Uploaded, upload
from tasks.channel import RequestFailed
from tasks.contents import WholeFile
from tasks.ends import Reader
from tasks.errors import Refused
from tasks.inventory import Host
from tasks.journal import Journal, Span
from tasks.object_store import ATTEMPTS, ObjectStore
from tasks.plans import Plan
from tasks.quantities import show_size
from tasks.ssh import Connector
from tasks.staged_leftovers import chunk_key, chunk_prefix
from tasks.store_errors import StoreBusyError
from tasks.streams import Content
from tasks.transfer import PIPE_BYTES, Pace, SinkClosedError, TransferError

PARTS_AT_ONCE = 8
"""Of one upload by the host: until it is over, the store fills at the host's pace."""
SLOWEST = 1 << 20
"""Bytes a second that a host's upload makes at least; its time is up when it does not."""
FIRST_PAUSE = 0.5

assert PARTS_AT_ONCE <= MOST_PARTS


class Work(Protocol):
    """What a sender is asked to do, chunk by chunk."""

    def take(self, most: int) -> list[Span]:
        """Up to ``most`` chunks, as soon as the store has room; none when every chunk has arrived."""

    def key(self, span: Span) -> str:
        """Where it goes."""

    def moved(self, count: int) -> None:
        """``count`` bytes of it went out; raises when there is no use in going on."""

    def placed(self, span: Span, sha256: str) -> None:
        """It is in the store, and this is what was sent."""


class Sender(Protocol):
    """What puts chunks into the store, in a thread of its own."""

    def __call__(self, work: Work) -> None:
        """Put chunks there until none is left, then raise unless the source is still what it was.

        What it raises is told by :func:`~tasks.streams.is_lost_link` to be worth another try or not.
        """

    def abort(self) -> None:
        """Have a call in another thread end soon."""


class ThroughOperator:
    """Read ``content`` by its session and put it into ``store`` as it comes: a few MiB are here, whatever the size."""

    def __init__(
        self,
        content: Content,
        session: Callable[[], AbstractContextManager[Reader]],
        store: ObjectStore,
        *,
        pace: Pace | None = None,
    ) -> None:
        self._content, self._open, self._store = content, session, store
        self._pace = pace or Pace(0)
        self._session: Reader | None = None

    def __call__(self, work: Work) -> None:
        spans = work.take(1)
        with self._opened() as session:
            while spans:
                self._put(session, work, spans[0])
                spans = work.take(1)
            self._content.check_unchanged(session)

    def abort(self) -> None:
        if (session := self._session) is not None:
            session.abort()

    def put_all(self, work: Work, spans: Sequence[Span]) -> None:
        """These chunks, and what was put of them is still of the same source."""
        with self._opened() as session:
            for span in spans:
                self._put(session, work, span)
            self._content.check_unchanged(session)

    @contextmanager
    def _opened(self) -> Iterator[Reader]:
        with self._open() as session:
            self._session = session
            try:
                yield session
            finally:
                self._session = None

    def _put(self, session: Reader, work: Work, span: Span) -> None:
        """One chunk; a store that is busy before it takes any of it is asked again, which costs the grant nothing."""
        for number in range(ATTEMPTS):
            putting = _Putting(self._store, work.key(span), span.length)
            try:
                if putting.wanted():
                    work.placed(span, self._send(session, work, span, putting))
                    return
            finally:
                putting.end()
            if not isinstance(putting.failure, StoreBusyError) or number == ATTEMPTS - 1:
                break
            work.moved(0)
            time.sleep(FIRST_PAUSE * 2**number)
        assert putting.failure is not None
        raise putting.failure

    def _send(self, session: Reader, work: Work, span: Span, putting: "_Putting") -> str:
        def moved(count: int) -> None:
            work.moved(count)
            self._pace(count)

        session.ahead(self._content.requests(span.offset, span.length))
        try:
            sha256 = self._content.send(session, span.offset, span.length, putting.sink, moved)
        except SinkClosedError:
            putting.end()
            raise putting.failure or TransferError(f"{self._store.name} took only a part of a chunk") from None
        putting.end()
        if putting.failure is not None:
            raise putting.failure
        return sha256


class ByHost:
    """Have the source's host put the file ``content`` into ``store``, with presigned URLs and no credentials.

    A protected host does so under ``approvals``, one for each upload of :func:`plan_uploads`; what they do not cover,
    because a chunk got lost on its way, is left to ``otherwise``.
    """

    def __init__(
        self,
        connector: Connector,
        host: Host,
        content: WholeFile,
        store: ObjectStore,
        *,
        approvals: Sequence[Approval] = (),
        otherwise: ThroughOperator | None = None,
        rate: int = 0,
    ) -> None:
        self._connector, self._host, self._content = connector, host, content
        self._store, self._approvals, self._otherwise, self._rate = store, list(approvals), otherwise, rate
        self._failed = 0

    def __call__(self, work: Work) -> None:
        while spans := work.take(PARTS_AT_ONCE):
            action = upload_of(self._host, self._content, self._store, spans, work.key, self._rate)
            if not self._host.protected:
                self._upload(work, None, action, spans)
            elif (approval := self._approval_of(action)) is not None:
                self._upload(work, approval, action, spans)
            else:
                self._do_otherwise(work, spans)

    def abort(self) -> None:
        if self._otherwise is not None:
            self._otherwise.abort()

    def _upload(self, work: Work, approval: Approval | None, action: Upload, spans: Sequence[Span]) -> None:
        def each(done: Uploaded) -> None:
            self._failed = 0
            work.placed(spans[done.part], done.sha256)
            work.moved(spans[done.part].length)

        urls = [self._store.presign_put(part.key, seconds=action.seconds) for part in action.parts]
        try:
            upload(self._connector, self._host, approval, action, urls, each=each)
        except RequestFailed as error:
            self._failed += 1
            if self._failed >= ATTEMPTS or (approval is not None and self._otherwise is None):
                raise
            # whether it is the store, and for how long, is heard best from here
            next(self._store.list(self._store.prefix), None)
            raise StoreBusyError(str(error)) from None

    def _approval_of(self, action: Upload) -> Approval | None:
        """The approval of exactly ``action``, once."""
        for approval in self._approvals:
            if approval.digest == action.digest():
                self._approvals.remove(approval)
                return approval
        return None

    def _do_otherwise(self, work: Work, spans: Sequence[Span]) -> None:
        if self._otherwise is None:
            raise Refused(
                f"{self._host.name} may not upload {show_size(sum(span.length for span in spans))} that have to go "
                "into the store again: what was approved is spent; relay it again to ask for the rest"
            )
        self._otherwise.put_all(work, spans)


def plan_uploads(store: ObjectStore, host: Host, content: WholeFile, journal: Journal, *, rate: int = 0) -> Plan | None:
    """What must be approved before ``host``, which is protected, may put what is missing into ``store`` by itself.

    None when nothing is missing. One upload for every eight chunks: the next one begins when the destination has
    fetched most of them.
    """
    missing, _ = missing_spans(store, journal)

    def key(span: Span) -> str:
        return key_of(store, journal, span)

    groups = [missing[start : start + PARTS_AT_ONCE] for start in range(0, len(missing), PARTS_AT_ONCE)]
    if not groups:
        return None
    uploads = tuple(upload_of(host, content, store, spans, key, rate) for spans in groups)
    return Plan(
        changes=uploads,
        effect=f"{host.name} sends {show_size(sum(each.bytes for each in uploads))} of the file to {store.name}",
    )


def missing_spans(store: ObjectStore, journal: Journal) -> tuple[list[Span], list[Span]]:
    """``(what has to be put into the store, what is there already)`` of that which has not arrived."""
    there = {found.key: found.size for found in store.list(chunk_prefix(store, journal.transfer))}
    missing: list[Span] = []
    placed: list[Span] = []
    for span in journal.spans:
        if not span.stored:
            here = span.sha256 is not None and there.get(key_of(store, journal, span)) == span.length
            (placed if here else missing).append(span)
    return missing, placed


def key_of(store: ObjectStore, journal: Journal, span: Span) -> str:
    """The object that ``span`` becomes."""
    number = next(number for number, other in enumerate(journal.spans) if other.offset == span.offset)
    return chunk_key(store, journal.transfer, number)


def upload_of(
    host: Host,
    content: WholeFile,
    store: ObjectStore,
    spans: Sequence[Span],
    key: Callable[[Span], str],
    rate: int,
) -> Upload:
    """The action by which ``host`` puts ``spans`` of ``content`` into ``store``."""
    identity = content.identity
    return Upload(
        host=host.name,
        host_keys=host.fingerprints,
        path=content.source.path,
        identity=(identity.device, identity.inode, identity.size, identity.mtime_ns),
        endpoint=store.endpoint,
        bucket=store.bucket,
        parts=tuple(Part(offset=span.offset, length=span.length, key=key(span)) for span in spans),
        rate=rate,
        seconds=60 + sum(span.length for span in spans) // SLOWEST,
    )


class _Putting:
    """One PUT whose bytes come out of a pipe; it runs until :meth:`end`."""

    def __init__(self, store: ObjectStore, key: str, length: int) -> None:
        self.failure: BaseException | None = None
        self._source, self.sink = os.pipe()
        self._length, self._asked = length, threading.Event()
        self._open = [self._source, self.sink]
        self._thread = threading.Thread(target=self._run, args=(store, key), name="put", daemon=True)
        self._thread.start()

    def wanted(self) -> bool:
        """Wait until the store wants the bytes; False when it refused before, and :attr:`failure` says why."""
        self._asked.wait()
        return self.failure is None

    def end(self) -> None:
        """No more bytes come; wait for the store's word. What is missing by then fails it."""
        if self.sink in self._open:
            self._open.remove(self.sink)
            os.close(self.sink)
        self._thread.join()

    def _run(self, store: ObjectStore, key: str) -> None:
        try:
            store.put(key, self._length, self._chunks())
        except BaseException as error:
            self.failure = error
        finally:
            os.close(self._source)
            self._asked.set()

    def _chunks(self) -> Iterator[memoryview]:
        self._asked.set()
        buffer, left = memoryview(bytearray(PIPE_BYTES)), self._length
        while left:
            count = os.readv(self._source, [buffer[:left]])
            if not count:
                raise TransferError(f"a chunk ended {left} bytes early")
            left -= count
            yield buffer[:count]
