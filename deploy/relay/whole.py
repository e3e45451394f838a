"""The digest of a file that comes in ranges, in any order, through several sessions. Stdlib only, Python 3.9."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any


class Whole:
    """The sha256 of a file that comes in ranges: of its first bytes, as far as all of them are there.

    With one session it is taken while the bytes pass. Once there are others, a thread reads what they have stored,
    behind all of them, so that not all of a large file is read when its last byte has come. ``feed`` reads the file;
    ``damaged`` makes the error of a range that is read and is not what it was.
    """

    def __init__(
        self,
        feed: Callable[[int, int, Callable[[memoryview], object]], None],
        damaged: Callable[[int, int], Exception],
    ) -> None:
        self._feed, self._damaged = feed, damaged
        self._digest, self._upto = hashlib.sha256(), 0
        # by their offsets: length and sha256 of the ranges that are there and not in the digest
        self._stored: dict[int, tuple[int, str]] = {}
        self._change = threading.Condition()
        self._behind: threading.Thread | None = None
        self._failure: Exception | None = None
        self._ending = False

    def begin(self, offset: int, length: int, others: Sequence[Sequence[Any]]) -> None:
        """A range is about to be written, and ``others`` were by other sessions; what has a sha256 must have that."""
        with self._change:
            if offset < self._upto or offset in self._stored:
                # what was there before came wrong, or not whole
                self._forget()
            for other, size, *sha256 in others:
                self._stored[other] = size, str(*sha256)
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
                self._stored[offset] = length, ""
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

    def finish(self, size: int, ranges: Sequence[Sequence[Any]] = ()) -> str:
        """The sha256 of all ``size`` bytes, which are there now; ``ranges`` of them are (offset, length, sha256)."""
        self.end()
        if self._failure is not None:
            raise self._failure
        for offset, length, sha256 in ranges:
            # what did not pass by here was stored by an earlier session
            if offset >= self._upto:
                self._read(offset - self._upto, "")
                self._read(length, sha256)
        self._read(size - self._upto, "")
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
            length, sha256 = self._stored[offset]
        same = self._feed_both(offset, length, sha256, digest)
        with self._change:
            # else it is being written anew
            if digest is self._digest:
                if not same:
                    raise self._damaged(offset, length)
                self._upto += self._stored.pop(offset)[0]
        return True

    def _read(self, length: int, sha256: str) -> None:
        if not self._feed_both(self._upto, length, sha256, self._digest):
            raise self._damaged(self._upto, length)
        self._upto += length

    def _feed_both(self, offset: int, length: int, sha256: str, digest: Any) -> bool:
        """Have ``digest`` get a range; whether it has ``sha256``, where one is given."""
        own = hashlib.sha256()

        def update(data: memoryview) -> None:
            digest.update(data)
            own.update(data)

        self._feed(offset, length, update if sha256 else digest.update)
        return not sha256 or own.hexdigest() == sha256
