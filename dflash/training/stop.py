"""Asking a run to end: SIGTERM, as schedulers and torchrun send it before they kill."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self


class Stopped(BaseException):
    """SIGTERM came where there is nothing to finish first.

    No :class:`Exception`: what goes on after one of those must not go on after this.
    """


class Stop:
    """Remembers that SIGTERM came; :meth:`at_once` ends what may be left unfinished."""

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False

    @classmethod
    @contextmanager
    def on_sigterm(cls) -> Iterator[Self]:
        """Take SIGTERM for as long as the block lasts. Signals reach the main thread alone; in another none comes."""
        stop = cls()
        if threading.current_thread() is not threading.main_thread():
            yield stop
            return
        before = signal.signal(signal.SIGTERM, stop._take)
        try:
            yield stop
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For as long as the block lasts SIGTERM raises :class:`Stopped`, also one that came before."""
        self._at_once = True
        try:
            if self.asked:
                raise Stopped
            yield
        finally:
            self._at_once = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._at_once:
            self._at_once = False  # once: cleaning up must not be interrupted again
            raise Stopped
