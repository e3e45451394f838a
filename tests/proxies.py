"""A link that can be made bad: a TCP proxy that delays, freezes, drops, slows and flips a bit of what passes.

It stands between a client and one sshd, on the sshd's own address, so that only the port differs. Nothing of SSH is
known to it. :func:`in_a_process` gives one that shares no interpreter with what is measured through it.
"""

import multiprocessing
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK = 1 << 18
TO_SERVER, TO_CLIENT = "to the server", "to the client"


class Proxy:
    """Forwards every connection to ``port`` of its own to ``address`` and ``target_port``.

    ``delay`` is the time from one end to the other in seconds, half a round trip; ``rate`` the bytes a second of each
    direction, all connections together, 0 for as many as come.
    """

    def __init__(self, address: str, target_port: int, *, delay: float = 0.0, rate: int = 0) -> None:
        self.delay = delay
        self._target = (address, target_port)
        self._limits = {TO_SERVER: _Limit(rate), TO_CLIENT: _Limit(rate)}
        self._links: list[_Link] = []
        self._flips: dict[str, deque[int]] = {TO_SERVER: deque(), TO_CLIENT: deque()}
        self._spoilt_at: dict[str, int | None] = {TO_SERVER: None, TO_CLIENT: None}
        self.passed = {TO_SERVER: 0, TO_CLIENT: 0}
        """Bytes that went each way so far."""
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server((address, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        """How many there have been."""
        return len(self._links)

    def cut(self) -> None:
        """Pull the plug: nothing passes any more, and nobody is told."""
        self._open.clear()

    def restore(self, *, forget: bool = False) -> None:
        """Plug it in again; ``forget`` leaves the connections of before dead, as a router does that was restarted."""
        if forget:
            for link in self._links:
                link.dead.set()
        self._open.set()

    def drop(self) -> None:
        """Reset every connection."""
        for link in self._links:
            link.reset()

    def flip(self, after: int, direction: str = TO_SERVER) -> None:
        """Flip one bit of the byte that is ``after`` bytes away in ``direction``."""
        with self._lock:
            self._flips[direction].append(self.passed[direction] + after)

    def spoil(self, after: int, direction: str = TO_SERVER) -> None:
        """Flip one bit of the byte ``after`` bytes into every connection that gets so far."""
        self._spoilt_at[direction] = after

    def close(self) -> None:
        # closing alone does not wake a thread that waits in accept
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.restore()
        self.drop()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=[client], daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        link = _Link(client, server)
        self._links.append(link)
        for source, sink, direction in ((client, server, TO_SERVER), (server, client, TO_CLIENT)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._forward, args=[link, source, sink, direction], daemon=True).start()

    def _forward(self, link: "_Link", source: socket.socket, sink: socket.socket, direction: str) -> None:
        pipe = _Delay(self.delay)
        threading.Thread(target=self._deliver, args=[link, pipe, sink, direction], daemon=True).start()
        with suppress(OSError):
            while data := source.recv(CHUNK):
                pipe.put(data)
        pipe.put(b"")

    def _deliver(self, link: "_Link", pipe: "_Delay", sink: socket.socket, direction: str) -> None:
        with suppress(OSError):
            while data := pipe.get():
                self._limits[direction].wait(len(data))
                self._open.wait()
                if link.dead.is_set():
                    return
                sink.sendall(self._spoilt(link, data, direction))
            self._open.wait()
            if not link.dead.is_set():
                sink.shutdown(socket.SHUT_WR)

    def _spoilt(self, link: "_Link", data: bytes, direction: str) -> bytes:
        with self._lock:
            places = []
            flips = self._flips[direction]
            while flips and flips[0] < self.passed[direction] + len(data):
                places.append(flips.popleft() - self.passed[direction])
            each = self._spoilt_at[direction]
            if each is not None and link.passed[direction] <= each < link.passed[direction] + len(data):
                places.append(each - link.passed[direction])
            self.passed[direction] += len(data)
            link.passed[direction] += len(data)
        for at in places:
            data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        return data


@contextmanager
def between(address: str, target_port: int, *, delay: float = 0.0, rate: int = 0) -> Iterator[Proxy]:
    """A proxy in this process, closed at the end."""
    proxy = Proxy(address, target_port, delay=delay, rate=rate)
    try:
        yield proxy
    finally:
        proxy.close()


@contextmanager
def in_a_process(address: str, target_port: int, *, delay: float) -> Iterator[int]:
    """The port of a proxy that has a process to itself."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()

    def serve() -> None:
        there.send(Proxy(address, target_port, delay=delay).port)
        there.recv()

    child = fork.Process(target=serve, daemon=True)
    child.start()
    try:
        yield here.recv()
    finally:
        here.send("end")
        child.join(10)
        child.kill()


class _Link:
    """The two connections of one client."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._sockets = (client, server)
        self.passed = {TO_SERVER: 0, TO_CLIENT: 0}
        self.dead = threading.Event()

    def reset(self) -> None:
        for end in self._sockets:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # close alone leaves the connection to the threads that wait in it
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class _Limit:
    """Bytes a second; a tenth of a second that was slept too long is made up for."""

    def __init__(self, rate: int) -> None:
        self._rate, self._next, self._lock = rate, 0.0, threading.Lock()

    def wait(self, count: int) -> None:
        if not self._rate:
            return
        with self._lock:
            begin = max(self._next, time.monotonic() - 0.1)
            self._next = begin + count / self._rate
        time.sleep(max(0.0, self._next - time.monotonic()))


class _Delay:
    """What was put in comes out ``delay`` later; it holds whatever is on its way, as a long line does."""

    def __init__(self, delay: float) -> None:
        self._delay, self._waiting = delay, threading.Condition()
        self._queue: deque[tuple[float, bytes]] = deque()

    def put(self, data: bytes) -> None:
        with self._waiting:
            self._queue.append((time.monotonic() + self._delay, data))
            self._waiting.notify()

    def get(self) -> bytes:
        with self._waiting:
            while not self._queue:
                self._waiting.wait()
            due, data = self._queue.popleft()
        time.sleep(max(0.0, due - time.monotonic()))
        return data
