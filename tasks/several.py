"""Several destinations of one transfer: the source is read once, and every range goes to each of them."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from dflash.errors import DFlashError
from tasks.ends import open_receiver
from tasks.inventory import Location
from tasks.ssh import Connector
from tasks.transfer import Opened, Receiver, SinkClosedError, TransferError, write_all

DIFFERENT = "another at each destination"


@contextmanager
def open_receivers(connector: Connector, destinations: Sequence[Location]) -> Iterator[Receiver]:
    """The receiver of the only destination, else one that stands for all of them."""
    with ExitStack() as stack:
        receivers = [stack.enter_context(open_receiver(connector, place)) for place in destinations]
        if len(receivers) == 1:
            yield receivers[0]
            return
        several = Several(receivers, [place.path for place in destinations])
        stack.callback(several.close)
        yield several


class Several(Receiver):
    """Receivers that do the same; the slowest of them sets the pace.

    ``paths`` are those of the destinations: a file of the first that lies below it lies below each of the others alike.
    A destination that has the file already is left out.
    """

    def __init__(self, receivers: Sequence[Receiver], paths: Sequence[str]) -> None:
        self._all = list(zip(receivers, paths, strict=True))
        self._active = list(receivers)
        self._sink = -1
        self._tee: threading.Thread | None = None
        self._failed: Receiver | None = None

    @property
    def sink(self) -> int:
        return self._sink

    def open(self, path: str, size: int, transfer: str, *, about: str = "", sparse: bool = False) -> Opened:
        self._active, finished, fresh = [], "", False
        for receiver, own in self._all:
            opened = receiver.open(self._own(path, own), size, transfer, about=about, sparse=sparse)
            if opened.committed is not None:
                finished = opened.committed
            else:
                self._active.append(receiver)
                fresh = fresh or opened.fresh
        return Opened(fresh, None if self._active else finished)

    def join(self, path: str, size: int, transfer: str) -> None:
        for receiver, own in self._all:
            if receiver in self._active:
                receiver.join(self._own(path, own), size, transfer)

    def begin(self, offset: int, length: int) -> None:
        for receiver in self._active:
            receiver.begin(offset, length)
        self.close()
        source, self._sink = os.pipe()
        self._tee = threading.Thread(target=self._copy, args=(source, length), name="to each destination", daemon=True)
        self._tee.start()

    def stored(self) -> str:
        self.close()
        if self._failed is not None:
            raise self._failed.failure()
        return _agreed([receiver.stored() for receiver in self._active])

    def fetch(self, offset: int, length: int, url: str, *, start: int | None = None) -> str:
        return _agreed([receiver.fetch(offset, length, url, start=start) for receiver in self._active])

    def hash(self, offset: int, length: int) -> str:
        return _agreed([receiver.hash(offset, length) for receiver in self._active])

    def commit(
        self,
        ranges: Sequence[tuple[int, int, str]],
        sidecar: dict[str, Any],
        *,
        reread: bool,
        expected: str | None = None,
    ) -> str:
        return _agreed(
            [receiver.commit(ranges, sidecar, reread=reread, expected=expected) for receiver in self._active]
        )

    def discard(self) -> None:
        for receiver in self._active:
            receiver.discard()

    def abort(self) -> None:
        for receiver, _ in self._all:
            receiver.abort()

    def failure(self) -> DFlashError:
        self.close()
        if self._failed is None:
            return TransferError("a destination stopped reading; relay it again")
        return self._failed.failure()

    def close(self) -> None:
        """No more comes of the range; wait until what came has gone to all."""
        if self._sink >= 0:
            os.close(self._sink)
            self._sink = -1
        if self._tee is not None:
            self._tee.join()
            self._tee = None

    def _own(self, path: str, destination: str) -> str:
        return destination + path[len(self._all[0][1]) :]

    def _copy(self, source: int, length: int) -> None:
        """In a thread of its own: what comes out of the pipe goes to every destination."""
        buffer = memoryview(bytearray(1 << 20))
        try:
            while length:
                count = os.readv(source, [buffer[:length]])
                if not count:
                    return
                for receiver in self._active:
                    self._write(receiver, buffer[:count])
                length -= count
        except SinkClosedError:
            return
        finally:
            os.close(source)

    def _write(self, receiver: Receiver, data: memoryview) -> None:
        try:
            write_all(receiver.sink, data)
        except SinkClosedError:
            self._failed = receiver
            raise


def _agreed(digests: Sequence[str]) -> str:
    return digests[0] if len(set(digests)) == 1 else DIFFERENT
