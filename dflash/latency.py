"""The latency of the model that is served beside an evaluation: probed before, watched during, waited for if it rises.

:class:`Watch` decides from the times of the probes alone; :func:`probing` sends them, from a thread of its own, to the
running server. The evaluation asks :meth:`Probes.pause` between its pieces of work, and it is there that it waits.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dflash.completions import Server
from dflash.errors import DFlashError
from dflash.http_client import Http, ServerError
from dflash.report import Check

RISE = 1.3
"""How much of its own p95 the served model may lose; DESIGN's number."""
BEFORE = 20
"""Probes before the evaluation begins."""
WINDOW = 20
"""Probes that the verdict is of."""
FEWEST = 8
"""Probes without which there is no verdict."""
EVERY_SECONDS = 1.0
TOKENS = 8
TIMEOUT_SECONDS = 30.0
PATIENCE_SECONDS = 1800.0
"""How long a served model that stays slow without us is waited for."""
PROMPT = "Count from one to twenty in words: one, two, three,"


class ServedModelSlowError(DFlashError):
    """The served model stayed slow while the evaluation waited, so it is busy by itself."""

    state_name = "ServedModelSlow"


def p95(seconds: Sequence[float]) -> float:
    """The 95th percentile by nearest rank: the smallest value that at least 95 % do not exceed; not of nothing."""
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]


class Watch:
    """Whether to pause, from the seconds of one probe after the other; a probe that failed counts as endless.

    ``worst`` is the highest p95 of a whole window over that of before.
    """

    def __init__(self, before: Sequence[float], *, rise: float = RISE, window: int = WINDOW, fewest: int = FEWEST):
        self.before = p95(before)
        self.limit = rise * self.before
        self.paused = False
        self.worst: float | None = None
        self._fewest = fewest
        self._last: deque[float] = deque(maxlen=window)

    def add(self, seconds: float) -> None:
        """Take the next probe into account.

        What was measured before a pause says nothing about its end, nor the other way round, so each begins anew.
        """
        self._last.append(seconds)
        if len(self._last) < self._fewest:
            return
        now = p95(self._last)
        if not self.paused:
            self.worst = max(self.worst or 0.0, now / self.before)
        if self.paused == (now <= self.limit):
            self.paused = not self.paused
            self._last.clear()


class Probes:
    """What the evaluation sees of the probing."""

    def __init__(self, url: str, before: Sequence[float], *, patience: float = PATIENCE_SECONDS) -> None:
        self.url = url
        self.paused_seconds = 0.0
        self.pauses = 0
        self._watch = Watch(before)
        self._patience = patience
        self._calm = threading.Event()
        self._calm.set()
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Take one probe into account."""
        with self._lock:
            was = self._watch.paused
            self._watch.add(seconds)
            if self._watch.paused and not was:
                self.pauses += 1
                self._calm.clear()
            elif was and not self._watch.paused:
                self._calm.set()

    def pause(self, say: Callable[[str], None]) -> None:
        """Return at once while the served model is as fast as before, else when it is again.

        Raises :class:`ServedModelSlowError` when it does not become so.
        """
        if self._calm.is_set():
            return
        say(f"paused: p95 of {self.url} rose above {RISE:g} × the {self._watch.before * 1000:.0f} ms of before")
        begun = time.monotonic()
        calm = self._calm.wait(self._patience)
        self.paused_seconds += time.monotonic() - begun
        if not calm:
            raise ServedModelSlowError(
                f"{self.url} stayed slower than {RISE:g} × its {self._watch.before * 1000:.0f} ms of before for "
                f"{self._patience:.0f} s, though the evaluation was paused: it is busy by itself; evaluate again when "
                "it has less to do"
            )
        say("goes on")

    async def turn(self, say: Callable[[str], None]) -> None:
        """:meth:`pause`, for what runs in an event loop."""
        if not self._calm.is_set():
            await asyncio.to_thread(self.pause, say)

    def check(self) -> Check:
        """What the served model had to bear, as a row of the report."""
        worst = self._watch.worst
        within = worst is not None and worst <= RISE
        paused = f"; paused {self.pauses} times, {self.paused_seconds:.0f} s in all" if self.pauses else ""
        told = "not measured often enough to say" if worst is None else f"at worst {worst:.2f} × that of before"
        return Check(
            name="served-latency",
            status="skipped" if worst is None else "pass" if within else "warn",
            measured=None if worst is None or math.isinf(worst) else round(worst, 3),
            limit=RISE,
            explanation=f"p95 of the served model while this evaluation ran: {told}{paused}",
        )


@contextmanager
def probing(server: Server, *, every: float = EVERY_SECONDS, before: int = BEFORE) -> Iterator[Probes]:
    """Probe ``server`` ``before`` times, then every ``every`` seconds in the background while the block runs.

    Raises :class:`~dflash.http_client.ServerError` when the server does not answer before anything has begun.
    """
    probes = Probes(server.url, asyncio.run(_several(server, before)))
    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_watching(server, probes, every, ended)), daemon=True)
    thread.start()
    try:
        yield probes
    finally:
        ended.set()
        thread.join(2 * every + 1)  # a probe that gets no answer is not waited for


async def _several(server: Server, count: int) -> list[float]:
    async with Http(server.url, timeout=TIMEOUT_SECONDS) as http:
        await _probe(http, server)  # the first fills the server's caches, which the others then find full
        return [await _probe(http, server) for _ in range(count)]


async def _watching(server: Server, probes: Probes, every: float, ended: threading.Event) -> None:
    async with Http(server.url, timeout=TIMEOUT_SECONDS) as http:
        while not ended.is_set():
            try:
                probes.add(await _probe(http, server))
            except ServerError:
                probes.add(math.inf)
            wait = time.monotonic() + every
            while not ended.is_set() and time.monotonic() < wait:
                await asyncio.sleep(min(0.05, every))


async def _probe(http: Http, server: Server) -> float:
    path, body = _question(server)
    begun = time.monotonic()
    await http.post(path, body)
    return time.monotonic() - begun


def _question(server: Server) -> tuple[str, dict[str, Any]]:
    if server.kind == "sglang":
        return "/generate", {"text": PROMPT, "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS}}
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
    return "/v1/completions", asked | ({} if server.model is None else {"model": server.model})
