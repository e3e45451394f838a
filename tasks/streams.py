"""The ranges of one file over several pairs of sessions at once, until the destination has them all.

A stream is one session with the source's gate, one receiver on the destination and the pump between them; it takes one
range after the other. The next one is asked for while one comes, and a range is confirmed while the next is on its way,
so that neither end waits for the other's round trip. The first stream holds the transfer open and gives the file its
name; the others join it. A lost link costs the ranges that were on it: the stream connects anew and goes on, as long as
something moved within
``patience`` seconds and ranges arrive. Everything else ends the transfer, and the journal keeps what arrived.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dflash.checkpoint_layout import ChangedError
from dflash.errors import DFlashError
from tasks.channel import GateError, RequestFailed
from tasks.ends import Reader
from tasks.errors import FileChanged, HostBusy
from tasks.gate import Wanted
from tasks.journal import Journal, Span
from tasks.ssh import ConnectionFailed
from tasks.transfer import (
    Moved,
    Opened,
    Pace,
    Progress,
    Receiver,
    ReceiverLostError,
    SinkClosedError,
    SourceChangedError,
    StoredOtherwiseError,
    TransferError,
)

PATIENCE_SECONDS = 120.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
CONNECTS_AT_ONCE = 3
"""An sshd drops connections while too many have not logged in yet (MaxStartups)."""
MOST_BROKEN_RANGES = 5
"""So often may the link break in the middle of a range without one arriving before the transfer gives up."""
PROGRESS_SECONDS = 0.1
AHEAD_BYTES, MOST_AHEAD = 32 << 20, 32
"""What a stream takes behind the range that it sends, as long as there is enough for the others."""
UNCONFIRMED_BYTES = 4 << 20
"""Before the range that was sent last; what the destination still writes."""

T = TypeVar("T")


class Content(Protocol):
    """What is sent: a file, or what was selected of one, as consecutive ranges of the destination."""

    @property
    def size(self) -> int: ...

    def requests(self, offset: int, length: int) -> Sequence[Wanted]:
        """What :meth:`send` reads for a range, in its order."""

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether all of it can be sent in these ranges."""

    def send(self, session: Reader, offset: int, length: int, sink: int, moved: Moved) -> str:
        """Send a range into ``sink`` and return its sha256."""

    def check_unchanged(self, session: Reader) -> None:
        """Raise unless the source is still what the journal calls it."""


@dataclass(frozen=True)
class Ends:
    """How a stream gets its two sessions; each ends with its ``with`` block."""

    session: Callable[[], AbstractContextManager[Reader]]
    receiver: Callable[[], AbstractContextManager[Receiver]]
    reached: threading.Event = field(default_factory=threading.Event)
    """Set once both have been: from then on a lost one is worth another try."""


class _Stopped(Exception):
    """Another stream failed, or the operator interrupted; there is nothing to say about this one."""


@dataclass
class Transfer:
    """One file on its way to ``path``; :meth:`run` returns the sha256 that the destination took of it."""

    content: Content
    journal: Journal
    ends: Ends
    path: str
    sidecar: dict[str, Any]
    streams: int = 1
    pace: Pace = field(default_factory=lambda: Pace(0))
    progress: Progress | None = None
    notice: Callable[[str], None] | None = None
    """Told in a sentence when a link was lost and is tried again."""
    reread: bool = False
    expected: str | None = None
    """The sha256 that the file must have to get its name, where the source says one."""
    patience: float = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Span] = deque()
        self._in_hands = 0
        self._by_others: list[tuple[int, int, str]] = []
        self._failure: DFlashError | None = None
        self._helpers: list[threading.Thread] = []
        self._under_way: set[Reader | Receiver] = set()
        self._stopping = threading.Event()
        self._connecting = threading.BoundedSemaphore(CONNECTS_AT_ONCE)
        self._first_look = True
        self._moved_bytes = self._reported = 0.0
        self._stored_ranges = 0
        self._last_moved = time.monotonic()
        self.missing = sum(span.length for span in self.journal.spans)
        """Bytes that were not there when the destination was first asked."""

    def run(self) -> str:
        try:
            try:
                return self._persistently(self._lead)
            finally:
                self._stop()
        except DFlashError as error:
            if is_of_changed_source(error):
                self._leave_nothing()
            raise

    def _leave_nothing(self) -> None:
        """Remove what arrived, if the destination can be reached."""
        self.journal.remove()
        with suppress(DFlashError), self.ends.receiver() as receiver:
            self._open(receiver)
            receiver.discard()

    # --- the first stream

    def _lead(self) -> str:
        with self._connected(self._open_transfer) as (session, receiver, committed):
            if committed is not None:
                return self._done(committed)
            if not self._helpers:
                self._start_helpers()
            self._move(session, receiver, leading=True)
            while self._waiting or self._in_hands:
                # not for the helpers as such: one may look for a session slot for long after all is done
                time.sleep(0.02)
                self._move(session, receiver, leading=True)
            self._raise_failure()
            self._report(force=True)
            self.content.check_unchanged(session)
            return self._commit(receiver)

    def _open_transfer(self, receiver: Receiver) -> str | None:
        """Reserve the space, or find out what is there of an earlier try; the sha256 when all of it was finished."""
        opened = self._open(receiver)
        self.ends.reached.set()
        if opened.committed is not None:
            if self._first_look:
                self.missing = 0
            return opened.committed
        if opened.fresh and self._helpers_at_work():
            raise TransferError(f"{self.path}: what had arrived was removed there meanwhile; relay it again")
        if opened.fresh:
            self.journal.begin_anew()
        for span in self.journal.spans:
            if span.sha256 is not None and not span.stored:
                # it went out whole, and the confirmation was lost with the link
                if receiver.hash(span.offset, span.length) == span.sha256:
                    self.journal.stored(span)
                else:
                    self.journal.lost(span)
        with self._lock:
            stored = [span for span in self.journal.spans if span.stored]
            self._by_others = [(span.offset, span.length, span.sha256 or "") for span in stored]
        if not self._helpers_at_work():
            self._waiting = deque(span for span in self.journal.spans if not span.stored)
            self._moved_bytes = sum(span.length for span in self.journal.spans if span.stored)
            self._report(force=True)
        if self._first_look:
            self._first_look, self.missing = False, sum(span.length for span in self._waiting)
        return None

    def _open(self, receiver: Receiver) -> Opened:
        notes = self.journal
        return receiver.open(self.path, self.content.size, notes.transfer, about=notes.about, sparse=notes.sparse)

    def _commit(self, receiver: Receiver) -> str:
        if not all(span.stored for span in self.journal.spans):
            raise TransferError(f"{self.path}: a range did not arrive and was not missed; relay it again")
        ranges = [(span.offset, span.length, span.sha256 or "") for span in self.journal.spans]
        try:
            sha256 = receiver.commit(ranges, self.sidecar, reread=self.reread, expected=self.expected)
        except StoredOtherwiseError:
            self.journal.begin_anew()
            raise
        return self._done(sha256)

    def _done(self, sha256: str) -> str:
        self.journal.remove()
        return sha256

    # --- the others

    def _start_helpers(self) -> None:
        wanted = min(self.streams, len(self._waiting)) - 1
        for number in range(wanted):
            thread = threading.Thread(target=self._help, name=f"stream {number + 2}", daemon=True)
            self._helpers.append(thread)
            thread.start()

    def _help(self) -> None:
        try:
            self._persistently(self._join)
        except _Stopped:
            pass
        except DFlashError as error:
            if not is_lost_link(error):
                self._fail(error)

    def _join(self) -> None:
        with self._connected(self._join_transfer) as (session, receiver, _):
            self._move(session, receiver, leading=False)

    def _join_transfer(self, receiver: Receiver) -> None:
        receiver.join(self.path, self.content.size, self.journal.transfer)

    def _helpers_at_work(self) -> bool:
        return any(thread.is_alive() for thread in self._helpers)

    # --- every stream

    @contextmanager
    def _connected(self, greet: Callable[[Receiver], T]) -> Iterator[tuple[Reader, Receiver, T]]:
        """A session, a receiver and what ``greet`` got from it; few streams connect at once."""
        with ExitStack() as stack:
            with self._connecting:
                if self._stopping.is_set():
                    raise _Stopped
                # the receiver is on its way while the session is waited for
                receiver = stack.enter_context(self.ends.receiver())
                session = stack.enter_context(self.ends.session())
                stack.enter_context(self._abortable(session, receiver))
                greeting = greet(receiver)
            yield session, receiver, greeting

    def _move(self, session: Reader, receiver: Receiver, *, leading: bool) -> None:
        """Take range after range until none waits, and see each of them confirmed."""
        taken, sent = deque[Span](), deque[Span]()
        try:
            while self._take(session, taken):
                self._send(session, receiver, taken[0], leading=leading)
                sent.append(taken.popleft())
                while len(sent) > MOST_AHEAD or _length([*sent][:-1]) >= UNCONFIRMED_BYTES:
                    self._confirm(receiver, sent, leading=leading)
            while sent:
                self._confirm(receiver, sent, leading=leading)
        except SinkClosedError:
            while sent:
                self._confirm(receiver, sent, leading=leading)
            raise receiver.failure() from None
        except DFlashError:
            # what went out before the source failed need not go again
            with suppress(DFlashError):
                while sent and not self._stopping.is_set():
                    self._confirm(receiver, sent, leading=leading)
            raise
        finally:
            self._give_back([*sent, *taken])

    def _take(self, session: Reader, taken: "deque[Span]") -> bool:
        """Fill ``taken`` with what is to be sent next; False when there is nothing."""
        new: list[Span] = []
        with self._lock:
            self._raise_failure()
            while self._waiting and self._has_room(taken):
                taken.append(self._waiting.popleft())
                new.append(taken[-1])
                self._in_hands += 1
        session.ahead(wanted for span in new for wanted in self.content.requests(span.offset, span.length))
        return bool(taken)

    def _has_room(self, taken: "deque[Span]") -> bool:
        if not taken:
            return True
        behind = _length([*taken][1:])
        # no more than its share of what is left, or the others would have nothing to do
        fair = len(taken) * self.streams <= len(self._waiting)
        return fair and behind < AHEAD_BYTES and len(taken) <= MOST_AHEAD

    def _send(self, session: Reader, receiver: Receiver, span: Span, *, leading: bool) -> None:
        others: list[tuple[int, int, str]] = []
        if leading:
            with self._lock:
                others, self._by_others = self._by_others, []
        receiver.begin(span.offset, span.length, others)
        sha256 = self.content.send(session, span.offset, span.length, receiver.sink, self._on_moved)
        self.journal.sent(span, sha256)

    def _confirm(self, receiver: Receiver, sent: "deque[Span]", *, leading: bool) -> None:
        """Wait for the word that the range which was sent first is on the disk."""
        span = sent.popleft()
        try:
            stored = receiver.stored()
            if stored != span.sha256:
                sent_as = f"{str(span.sha256)[:16]}…"
                self.journal.lost(span)
                raise TransferError(
                    f"{self.path}: {span.length} bytes at {span.offset} were sent with sha256 {sent_as} and stored "
                    f"with {stored[:16]}…: they were changed on the way; relay it again"
                )
            self.journal.stored(span)
        finally:
            # what is not there, another stream may take
            self._give_back([span])
        self._stored_ranges += 1
        if not leading:
            with self._lock:
                self._by_others.append((span.offset, span.length, ""))

    def _give_back(self, spans: Sequence[Span]) -> None:
        with self._lock:
            self._in_hands -= len(spans)
            self._waiting.extendleft(span for span in reversed(spans) if not span.stored)

    def _on_moved(self, count: int) -> None:
        if self._stopping.is_set():
            raise _Stopped
        self._raise_failure()
        self._last_moved = time.monotonic()
        with self._lock:
            self._moved_bytes += count
            self._report()
        self.pace(count)

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if self.progress is not None and (force or now - self._reported >= PROGRESS_SECONDS):
            self._reported = now
            # what a lost link made move twice is not more than all
            self.progress(min(int(self._moved_bytes), self.content.size), self.content.size)

    def _persistently(self, attempt: Callable[[], T]) -> T:
        """Repeat ``attempt`` over lost links while something moved within the patience and ranges arrive."""
        pause, broken = FIRST_PAUSE, 0
        while True:
            begun, stored = time.monotonic(), self._stored_ranges
            try:
                return attempt()
            except DFlashError as error:
                if self._stopping.is_set():
                    raise _Stopped from None
                moved = self._last_moved > begun
                broken = 0 if self._stored_ranges > stored else broken + moved
                # what cannot be reached at all is said at once
                if not self.ends.reached.is_set() or not is_lost_link(error) or broken >= MOST_BROKEN_RANGES:
                    raise
                if time.monotonic() - self._last_moved > self.patience:
                    raise
                if self.notice is not None:
                    self.notice(f"{error}; trying again")
            pause = FIRST_PAUSE if moved else min(2 * pause, LONGEST_PAUSE)
            if self._stopping.wait(pause):
                raise _Stopped

    @contextmanager
    def _abortable(self, *ends: Reader | Receiver) -> Iterator[None]:
        self._under_way.update(ends)
        try:
            yield
        finally:
            self._under_way.difference_update(ends)

    def _fail(self, error: DFlashError) -> None:
        with self._lock:
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _stop(self) -> None:
        self._stopping.set()
        for end in list(self._under_way):
            end.abort()
        for thread in self._helpers:
            thread.join(10.0)


def _length(spans: Sequence[Span]) -> int:
    return sum(span.length for span in spans)


def is_lost_link(error: DFlashError) -> bool:
    """Whether only the connection failed, so that another one can go on."""
    if isinstance(error, RequestFailed):
        return False
    # what a lost session leaves is counted by the host until its sshd notices
    return isinstance(error, GateError | ConnectionFailed | ReceiverLostError | HostBusy)


def is_of_changed_source(error: DFlashError) -> bool:
    """Whether the source is not any more what it was, so that what arrived of it is of use to nobody."""
    return isinstance(error, SourceChangedError | FileChanged | ChangedError)
