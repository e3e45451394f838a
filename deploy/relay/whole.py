"""The digest of a file that comes in ranges, in any order, through several sessions. Stdlib only, Python 3.9."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence


class Whole:
    """The sha256 of a file that comes in ranges: of its first bytes, as far as all of them are there.

    With one session it is taken while the bytes pass. Once there are others, a thread reads what they have stored,
    behind all of them, so that not all of a large file is read when its last byte has come. ``feed`` reads the file.
    """

    def __init__(self, feed: Callable[[int, int, Callable[[memoryview], object]], None]) -> None:
        self._feed = feed
        self._digest, self._upto = hashlib.sha256(), 0
        self._stored: dict[int, int] = {}  # lengths by offsets of the ranges that are there and not in the digest
        self._change = threading.Condition()
        self._behind: threading.Thread | None = None
        self._failure: Exception | None = None
        self._ending = False

    def begin(self, offset: int, length: int, others: Sequence[Sequence[int]]) -> None:
        """A range is about to be written, and ``others`` were by other sessions."""
        with self._change:
            if offset < self._upto or offset in self._stored:
                # what was there before came wrong, or not whole
                self._forget()
            for other, size in others:
                self._stored[other] = size
            if others and self._behind is None:
                self._behind = threading.Thread(target=self._follow, daemon=True)
                self._behind.start()
            self._change.notify_all()

    def pass_by(self, offset: int, data: memoryview) -> None:
        """``data`` has been written at ``offset``."""
        if self._behind is None and offset == self._upto:
            self._digest.update(data)
            self._upto += len(data)

    def stored(self, offset: int, length: int) -> None:
        """A range is there."""
        with self._change:
            if offset >= self._upto:
                self._stored[offset] = length
                self._change.notify_all()

    def forget(self) -> None:
        """Take it anew."""
        with self._change:
            self._forget()

    def end(self) -> None:
        """It is not wanted any more."""
        with self._change:
            self._ending = True
            self._change.notify_all()
        if self._behind is not None:
            self._behind.join()

    def finish(self, size: int) -> str:
        """The sha256 of all ``size`` bytes, which are there now."""
        self.end()
        if self._failure is not None:
            raise self._failure
        self._feed(self._upto, size - self._upto, self._digest.update)
        self._upto = size
        return self.hexdigest()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _forget(self) -> None:
        self._digest, self._upto = hashlib.sha256(), 0
        self._stored.clear()

    def _follow(self) -> None:
        try:
            while self._hash_next():
                pass
        except Exception as error:
            self._failure = error

    def _hash_next(self) -> bool:
        """Hash the range that is next as soon as it is there; False when no more come."""
        with self._change:
            self._change.wait_for(lambda: self._upto in self._stored or self._ending)
            if self._ending:
                return False
            offset, digest = self._upto, self._digest
            length = self._stored[offset]
        self._feed(offset, length, digest.update)
        with self._change:
            if digest is self._digest:
                self._upto += self._stored.pop(offset)
        return True
