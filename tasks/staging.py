"""A file through an object store: the source's side puts chunk after chunk there, and the destination fetches them.

One object a chunk, ``<prefix><transfer>/<number>``, so that the destination fetches one while the next is on its way.
The store is no place to keep anything: a chunk is deleted as soon as the destination has it, a few are there at once,
and what a crash left is swept by the next relay. Nor is it trusted: the sha256 of every chunk is taken where it is sent
and where it arrives.

Hosts get presigned URLs over stdin and no credentials. ``sender`` is :class:`~tasks.staged_senders.ByHost` where the
source's host may upload, else :class:`~tasks.staged_senders.ThroughOperator`.
"""

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dflash.errors import DFlashError
from tasks.journal import Span
from tasks.object_store import ObjectStore
from tasks.staged_leftovers import chunk_prefix, forget, remember, sweep
from tasks.staged_senders import Sender, key_of, missing_spans
from tasks.store_errors import StoreBusyError, StoreError
from tasks.streams import FIRST_PAUSE, LONGEST_PAUSE, Transfer, is_lost_link, is_of_changed_source
from tasks.transfer import FetchError, Opened, Receiver, StoredOtherwiseError, TransferError

CHUNK_BYTES = 64 << 20
MOST_WAITING = 2
"""Chunks that may wait for the destination when the next one is begun."""
TRIES = 3
"""Of one chunk that gets lost, or comes out as another."""
ENDING_SECONDS = 30.0
PROGRESS_SECONDS = 0.1


class _Stopped(Exception):
    """The destination's half is over."""


class StagedTransfer:
    """``transfer`` by ``store`` instead; :meth:`run` returns the sha256 that the destination took of the file.

    The journal stays good for the other way.
    """

    def __init__(self, transfer: Transfer, store: ObjectStore, sender: Sender) -> None:
        self.transfer, self.store, self.sender = transfer, store, sender
        self.journal, self.path, self.patience = transfer.journal, transfer.path, transfer.patience
        self.notice = transfer.notice
        self.missing = self._size = sum(span.length for span in transfer.journal.spans)
        self._change = threading.Condition()
        self._waiting: deque[Span] = deque()
        self._taken: list[Span] = []
        self._ready: deque[Span] = deque()
        self._tries: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._stopping = False
        # bytes: that have arrived, that are or were in the store, that went out of a chunk on its way there
        self._stored = self._placed = self._partly = 0
        self._last_moved = time.monotonic()
        self._reported = 0.0
        self._uploading: threading.Thread | None = None
        self._deleting = ThreadPoolExecutor(1, "delete")

    def run(self) -> str:
        sweep(self.store)
        remember(self.store, self.journal.transfer)
        try:
            while True:
                try:
                    return self._lead()
                except DFlashError as error:
                    self._raise_unless_lost(error)
        except DFlashError as error:
            if is_of_changed_source(error):
                self._discard()
            raise
        finally:
            self._end()

    # --- the destination's half, in the caller's thread

    def _lead(self) -> str:
        with self.transfer.ends.receiver() as receiver:
            opened = self._open(receiver)
            if opened.committed is not None:
                if self._uploading is None:
                    self.missing = 0
                self.journal.remove()
                return opened.committed
            if self._uploading is None:
                if opened.fresh:
                    self.journal.begin_anew()
                self._begin()
            elif opened.fresh and self._stored:
                raise TransferError(f"{self.path}: what had arrived was removed there meanwhile; relay it again")
            while (span := self._next()) is not None:
                self._fetch(receiver, span)
            self._report(force=True)
            return self._commit(receiver)

    def _open(self, receiver: Receiver) -> Opened:
        notes = self.journal
        return receiver.open(self.path, notes.size, notes.transfer, about=notes.about, sparse=notes.sparse)

    def _begin(self) -> None:
        """Go on with what is in the store already, of a relay that was killed, and send what is not."""
        missing, placed = missing_spans(self.store, self.journal)
        for span in missing:
            # it may have gone out by another way, whose last word was lost
            self.journal.lost(span)
        self._waiting, self._ready = deque(missing), deque(placed)
        self._stored = sum(span.length for span in self.journal.spans if span.stored)
        self.missing -= self._stored
        self._placed = self._stored + sum(span.length for span in placed)
        self._report(force=True)
        self._uploading = threading.Thread(target=self._upload, name="upload", daemon=True)
        self._uploading.start()

    def _next(self) -> Span | None:
        """The next chunk that is in the store; None when all have arrived and the source was still the same then."""
        assert self._uploading is not None
        with self._change:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._ready:
                    return self._ready[0]
                if not self._uploading.is_alive():
                    return None
                self._change.wait(0.2)

    def _fetch(self, receiver: Receiver, span: Span) -> None:
        stored = self._fetched(receiver, span)
        if stored == span.sha256:
            self.journal.stored(span)
            self._deleting.submit(self._delete, span)
            with self._change:
                self._ready.remove(span)
                self._stored += span.length
                self._last_moved = time.monotonic()
                self._change.notify_all()
            self._report()
        elif stored is None:
            self._again(span, f"{self.path}: the chunk at {span.offset} was lost in {self.store.name}")
        else:
            sent = f"{str(span.sha256)[:16]}…"
            self._again(
                span,
                f"{self.path}: the chunk at {span.offset} was sent with sha256 {sent} and came out of "
                f"{self.store.name} with {stored[:16]}…",
            )

    def _fetched(self, receiver: Receiver, span: Span) -> str | None:
        """The sha256 of the chunk as it arrived; None when the store has it no more."""
        key, pause, refused = self.key(span), FIRST_PAUSE, 0
        while True:
            try:
                return receiver.fetch(span.offset, span.length, self.store.presign_get(key))
            except FetchError as error:
                if error.status == 404:
                    return None
                if not error.may_pass:
                    refused += 1
                    # what is wrong with the credentials, the bucket or the clock is told to this machine at length
                    self.store.find(key)
                if refused == TRIES or time.monotonic() - self._last_moved > self.patience:
                    raise
                if self.notice is not None:
                    self.notice(f"{error}; trying again")
            self._pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _again(self, span: Span, why: str) -> None:
        self._tries[span.offset] = self._tries.get(span.offset, 0) + 1
        self.journal.lost(span)
        if self._tries[span.offset] == TRIES:
            raise StoreError(f"{why}, {TRIES} times: relay it with --via ssh, or through another store")
        if self.notice is not None:
            self.notice(f"{why}; sending it again")
        with self._change:
            self._ready.remove(span)
            self._placed -= span.length
            self._waiting.appendleft(span)
            self._change.notify_all()

    def _commit(self, receiver: Receiver) -> str:
        ranges = [(span.offset, span.length, span.sha256 or "") for span in self.journal.spans]
        try:
            sha256 = receiver.commit(
                ranges, self._sidecar(), reread=self.transfer.reread, expected=self.transfer.expected
            )
        except StoredOtherwiseError:
            self.journal.begin_anew()
            raise
        self.journal.remove()
        return sha256

    def _sidecar(self) -> dict[str, Any]:
        return {**self.transfer.sidecar, "via": self.store.name}

    def _discard(self) -> None:
        """What arrived is of use to nobody."""
        self.journal.remove()
        with suppress(DFlashError), self.transfer.ends.receiver() as receiver:
            self._open(receiver)
            receiver.discard()

    def _raise_unless_lost(self, error: DFlashError) -> None:
        """A lost link to the destination is waited for while something moves; all else is raised."""
        over = time.monotonic() - self._last_moved > self.patience
        if error is self._failure or over or not is_lost_link(error):
            raise error
        if self.notice is not None:
            self.notice(f"{error}; trying again")
        self._pause(FIRST_PAUSE)

    def _pause(self, seconds: float) -> None:
        with self._change:
            self._change.wait_for(lambda: self._failure is not None, seconds)

    # --- the source's half, in a thread of its own

    def _upload(self) -> None:
        pause = FIRST_PAUSE
        while True:
            begun = time.monotonic()
            try:
                self.sender(self)
                return
            except _Stopped:
                return
            except BaseException as error:
                with self._change:
                    lost = isinstance(error, StoreBusyError) or (isinstance(error, DFlashError) and is_lost_link(error))
                    if self._stopping or not lost or begun - self._last_moved > self.patience:
                        self._failure = error
                        self._change.notify_all()
                        return
                    self._waiting.extendleft(reversed(self._taken))
                    self._taken, self._partly = [], 0
                if self.notice is not None:
                    self.notice(f"{error}; trying again")
            pause = FIRST_PAUSE if self._last_moved > begun else min(2 * pause, LONGEST_PAUSE)
            with self._change:
                self._change.wait_for(lambda: self._stopping, pause)

    def take(self, most: int) -> list[Span]:
        with self._change:
            while True:
                if self._stopping:
                    raise _Stopped
                if self._waiting and len(self._ready) <= MOST_WAITING:
                    self._taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
                    return list(self._taken)
                if self._stored == self._size:
                    return []
                self._change.wait(0.2)

    def key(self, span: Span) -> str:
        return key_of(self.store, self.journal, span)

    def moved(self, count: int) -> None:
        if self._stopping:
            raise _Stopped
        with self._change:
            self._partly += count
            self._last_moved = time.monotonic()
        self._report()

    def placed(self, span: Span, sha256: str) -> None:
        self.journal.sent(span, sha256)
        with self._change:
            self._taken.remove(span)
            self._ready.append(span)
            self._placed += span.length
            self._partly = max(0, self._partly - span.length)
            self._last_moved = time.monotonic()
            self._change.notify_all()

    # --- both

    def _report(self, *, force: bool = False) -> None:
        """What is in the store counts half."""
        now = time.monotonic()
        progress = self.transfer.progress
        if progress is not None and (force or now - self._reported >= PROGRESS_SECONDS):
            self._reported = now
            sent = min(self._placed + self._partly, self._size)
            progress((sent + self._stored) // 2, self._size)

    def _delete(self, span: Span) -> None:
        with suppress(StoreError):  # what is left is found at the end
            self.store.delete([self.key(span)])

    def _end(self) -> None:
        """Nothing of this transfer stays in the store, unless it cannot be reached; then the next relay sees to it."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        if self._uploading is not None and self._uploading.is_alive():
            self.sender.abort()
            self._uploading.join(ENDING_SECONDS)
        self._deleting.shutdown()
        prefix = chunk_prefix(self.store, self.journal.transfer)
        try:
            self.store.delete([found.key for found in self.store.list(prefix)])
        except StoreError as error:
            if self.notice is not None:
                self.notice(f"{error}; what is below {prefix} there is left to the next relay")
            return
        if self._uploading is None or not self._uploading.is_alive():
            forget(self.journal.transfer)
