"""Several destinations of one transfer: the source is read once, and every range goes to each of them."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from dflash.errors import DFlashError
from tasks.ends import open_receiver
from tasks.inventory import Location
from tasks.ssh import Connector
from tasks.transfer import Opened, Receiver, SinkClosedError, TransferError, write_all

DIFFERENT = "another at each destination"


def beside(path: str, first: str, other: str) -> str:
    """Where the file ``path``, which is ``first`` or lies below it, is at another destination."""
    below = os.path.relpath(path, first)
    return other if below == "." else os.path.join(other, below)


@contextmanager
def open_receivers(
    connector: Connector, destinations: Sequence[Location], left_out: set[int] | None = None
) -> Iterator[Receiver]:
    """The receiver of the only destination, else one that stands for all of them.

    ``left_out`` is shared by all that take part in one transfer; see :class:`Several`.
    """
    with ExitStack() as stack:
        receivers = [stack.enter_context(open_receiver(connector, place)) for place in destinations]
        if len(receivers) == 1:
            yield receivers[0]
            return
        several = Several(receivers, [place.path for place in destinations], left_out)
        stack.callback(several.close)
        yield several


class Several(Receiver):
    """Receivers that do the same; the slowest of them sets the pace.

    ``paths`` are those of the destinations: a file of the first that lies below it lies below each of the others alike.
    A destination that has the file already is left out: :meth:`open` puts its number into ``left_out``, and whoever
    joins does without it.
    """

    def __init__(self, receivers: Sequence[Receiver], paths: Sequence[str], left_out: set[int] | None = None) -> None:
        self._all = list(zip(receivers, paths, strict=True))
        self._active = list(receivers)
        self._left_out = set() if left_out is None else left_out
        self._sink = -1
        self._tee: threading.Thread | None = None
        self._failed: Receiver | None = None

    @property
    def sink(self) -> int:
        return self._sink

    def require_alone(self, folder: str, names: Sequence[str], about: Mapping[str, str]) -> None:
        for receiver, own in self._all:
            receiver.require_alone(self._own(folder, own), names, about)

    def open(self, path: str, size: int, transfer: str, *, about: str = "", sparse: bool = False) -> Opened:
        self._active, finished, fresh = [], "", False
        self._left_out.clear()
        for number, (receiver, own) in enumerate(self._all):
            opened = receiver.open(self._own(path, own), size, transfer, about=about, sparse=sparse)
            if opened.committed is not None:
                finished = opened.committed
                self._left_out.add(number)
            else:
                self._active.append(receiver)
                fresh = fresh or opened.fresh
        return Opened(fresh, None if self._active else finished)

    def join(self, path: str, size: int, transfer: str) -> None:
        self._active = []
        for number, (receiver, own) in enumerate(self._all):
            if number not in self._left_out:
                receiver.join(self._own(path, own), size, transfer)
                self._active.append(receiver)

    def begin(self, offset: int, length: int, others: Sequence[tuple[int, int, str]] = ()) -> None:
        # before anything else is said, all of the range before has gone to all
        self.close()
        for receiver in self._active:
            receiver.begin(offset, length, others)
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
        digests = [receiver.commit(ranges, sidecar, reread=reread, expected=expected) for receiver in self._active]
        if _agreed(digests) == DIFFERENT:
            raise TransferError(
                "the destinations took different digests of what they were sent alike: look at their memory, and relay "
                "it again with --verify reread"
            )
        return digests[0]

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
        return beside(path, self._all[0][1], destination)

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
