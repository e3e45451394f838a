"""Everything that runs beside the Prefect server: the runner, the workers of several inference hosts, the watches."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING
from uuid import UUID

from flows import workers
from flows.embedded_server import EmbeddedServer, ServerError
from flows.interrupted import interrupt, settle
from flows.prefect_home import forget_serving, left_over, record_serving
from flows.watching import Watching, watch
from flows.workers import Workers
from tasks.actions import escape

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment
    from prefect.runner import Runner

POLL_SECONDS = 2
TEND_SECONDS = 1.0
WATCH_STOP_SECONDS = 20.0
LEFT_OVER_SECONDS = 15.0
RUNS_AT_ONCE = 8

Notice = Callable[[str], None]


class Serving:
    """One life of it, over a server that answers."""

    def __init__(
        self,
        wanted: "Sequence[RunnerDeployment]",
        watches: Sequence[Watching],
        shared: Workers,
        server: EmbeddedServer | None,
        notice: Notice,
    ) -> None:
        self._say = notice
        self._wanted, self._watches, self._shared, self._server = wanted, watches, shared, server
        self._ids: list[UUID] = []
        self._stop = threading.Event()

    async def run(self) -> None:
        """Apply the deployments and run what is due of them until SIGTERM or Ctrl-C, which end it well.

        Raises :class:`ServerError` when the embedded server ended by itself.
        """
        from prefect.runner import Runner

        loop, ended, api = asyncio.get_running_loop(), asyncio.Event(), os.environ["PREFECT_API_URL"]
        runner = Runner("dflash", query_seconds=POLL_SECONDS, limit=RUNS_AT_ONCE, pause_on_shutdown=False)
        await self._apply(runner)
        await asyncio.to_thread(self._settle)
        running = asyncio.create_task(runner.start())
        await asyncio.sleep(0)
        # the runner has taken SIGTERM for itself in its first step; it would have its runs cancelled
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        with ExitStack() as stack:
            record_serving(api)
            stack.callback(forget_serving)
            threads = [self._start(one, lambda: _wake(runner)) for one in self._watches]
            self._say(f"serving {api.removesuffix('/api')}, {_named(self._watches)}, until Ctrl-C")
            await self._tend(running, ended)
            self._say("ending: what runs is taken up again by the next dflash-ops serve")
            await asyncio.to_thread(self._interrupt, threads)
            if not running.done():
                await runner.astop()
            await running
        if self._server is not None and not self._server.alive:
            raise ServerError("the Prefect server ended by itself; start dflash-ops serve again")

    async def _apply(self, runner: "Runner") -> None:
        if self._shared.hosts:
            await asyncio.to_thread(workers.make_pool)
        for deployment in self._wanted:
            # the workers take the runs of what is in a pool; the runner must not
            if deployment.work_pool_name is None:
                self._ids.append(await runner.aadd_deployment(deployment))
            else:
                self._ids.append(await deployment.aapply())

    def _settle(self) -> None:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            vanished = settle(client, self._ids)
        if vanished:
            self._say(f"{len(vanished)} runs of an earlier dflash-ops serve were not running any more")

    def _start(self, watching: Watching, wake: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(
            target=watch, args=(watching,), kwargs={"stop": self._stop, "wake": wake}, name=watching.source, daemon=True
        )
        thread.start()
        return thread

    async def _tend(self, running: "asyncio.Task[None]", ended: asyncio.Event) -> None:
        """Return when it is to end: by a signal, or because a part of it is gone."""
        while not (ended.is_set() or running.done() or (self._server is not None and not self._server.alive)):
            if self._shared.tend():
                record_serving(os.environ["PREFECT_API_URL"], self._shared.pids.values())
            try:
                await asyncio.wait_for(ended.wait(), TEND_SECONDS)
            except TimeoutError:
                continue

    def _interrupt(self, threads: Sequence[threading.Thread]) -> None:
        """First the watches, so that none takes a run that is ended here for one that somebody did not want."""
        from prefect.client.orchestration import get_client

        self._stop.set()
        for thread in threads:
            thread.join(WATCH_STOP_SECONDS)
        if self._server is None or self._server.alive:
            with get_client(sync_client=True) as client:
                interrupt(client, self._ids, self._shared.stop)
        else:
            self._shared.stop()


def _wake(runner: "Runner") -> None:
    """Have the runner look now for runs that are due, and not only with its next poll."""
    runner.execute_in_background(runner._get_and_submit_flow_runs)


def _named(watches: Sequence[Watching]) -> str:
    return "watching " + (" and ".join(escape(one.source) for one in watches) or "nothing")


def end_left_over() -> None:
    """End the workers of a ``dflash-ops serve`` that was killed: its successor starts workers of its own."""
    pids = left_over()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + LEFT_OVER_SECONDS
    while alive := left_over():
        if time.monotonic() > deadline:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
