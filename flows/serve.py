"""``dflash-ops serve``: an embedded Prefect server, every deployment and the watch, in one process until it is ended.

What a run started on a host goes on there by itself. Ending this process ends its runs; what they were about is in the
ledger, and the next ``serve`` takes it up again.
"""

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.errors import DFlashError
from flows import prefect_database, pruning
from flows.deployments import Nightly, deployments
from flows.embedded_server import EmbeddedServer, ServerError, answers, api_url
from flows.interrupted import settle
from flows.prefect_home import configure_prefect, forget_serving, home, record_serving, serving
from flows.pruning import Retention
from flows.terminal import HostsFile
from tasks import inventory
from tasks.state import state_dir

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment
    from prefect.runner import Runner

PORT = 4200
POLL_SECONDS = 2
RUNS_AT_ONCE = 8
CLIENT_RETRIES = 9
"""With a doubling pause from 2 s on: a run waits some ten minutes for a server that is being restarted."""

Wake = Callable[[], None]


class AlreadyServingError(DFlashError):
    """Another ``dflash-ops serve`` runs over the same state folder."""

    state_name = "AlreadyServing"


def serve(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the Prefect server, on 127.0.0.1.")] = PORT,
    nightly: Annotated[str, typer.Option(help="Cron schedule of the nightly comparison.")] = Nightly.cron,
    timezone: Annotated[str, typer.Option(help="Its timezone, as in Europe/Berlin.")] = Nightly.timezone,
    keep_runs: Annotated[float, typer.Option(help="Days that ended runs are kept with their logs.")] = Retention.runs,
    keep_events: Annotated[float, typer.Option(help="Days that events are kept.")] = Retention.events,
    hosts: HostsFile = None,
) -> None:
    """Run everything that is due until it is ended: watch for checkpoints, evaluate them, compare every night.

    With PREFECT_API_URL set, that server is used; else one is started here, over SQLite in the state folder.
    """
    inventory.load(hosts)
    keep = Retention(runs=keep_runs, events=keep_events)
    with _alone():
        embedded = configure(port, keep)
        wanted = deployments(hosts, nightly=Nightly(nightly, timezone))
        with _server(port) if embedded else _others_server() as server:
            asyncio.run(_run(wanted, server))
    _say("ended")


def configure(port: int, keep: Retention) -> bool:
    """Put what this process and its runs need into the environment; whether the server is to be embedded."""
    embedded = "PREFECT_API_URL" not in os.environ
    if embedded:
        os.environ["PREFECT_API_URL"] = api_url(port)
    own = {
        **pruning.settings(keep),
        "PREFECT_RUNNER_POLL_FREQUENCY": str(POLL_SECONDS),
        "PREFECT_CLIENT_MAX_RETRIES": str(CLIENT_RETRIES),
    }
    for name, value in own.items():
        os.environ.setdefault(name, value)
    configure_prefect()
    return embedded


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the state folder's lock of serving. Raises :class:`AlreadyServingError`."""
    with (state_dir() / "serve.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            where = serving() or "it is just starting"
            raise AlreadyServingError(
                f"another dflash-ops serve runs over {state_dir()} already ({where}): end that one, or use it"
            ) from None
        yield


@contextmanager
def _server(port: int) -> Iterator[EmbeddedServer]:
    home().mkdir(mode=0o700, parents=True, exist_ok=True)
    if "PREFECT_API_DATABASE_CONNECTION_URL" not in os.environ:
        prefect_database.make_ready(home() / "prefect.db", _say)
    _say("starting the Prefect server (the first time it makes its database, half a minute)")
    server = EmbeddedServer(port)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def _others_server() -> Iterator[None]:
    api = os.environ["PREFECT_API_URL"]
    if not answers(api):
        raise ServerError(f"no Prefect server answers at {api}, which PREFECT_API_URL names: start it, or unset it")
    yield


async def _run(wanted: "Sequence[RunnerDeployment]", server: EmbeddedServer | None) -> None:
    """Apply the deployments and run what is due of them until SIGTERM or Ctrl-C."""
    from prefect.client.orchestration import get_client
    from prefect.runner import Runner

    runner = Runner("dflash", query_seconds=POLL_SECONDS, limit=RUNS_AT_ONCE, pause_on_shutdown=False)
    ids = [await runner.aadd_deployment(one) for one in wanted]
    with get_client(sync_client=True) as client:
        vanished = settle(client, ids)
    if vanished:
        _say(f"{len(vanished)} runs of an earlier dflash-ops serve were not running any more")
    api = os.environ["PREFECT_API_URL"]
    record_serving(api)
    try:
        # Ctrl-C ends as SIGTERM does, which the runner takes for itself
        signal.signal(signal.SIGINT, runner.handle_sigterm)
        _say(f"serving {api.removesuffix('/api')} until Ctrl-C")
        async with asyncio.TaskGroup() as group:
            guard = group.create_task(_guard(runner, server))
            await runner.start()
            guard.cancel()
    finally:
        forget_serving()
    if server is not None and not server.alive:
        raise ServerError("the Prefect server ended by itself; start dflash-ops serve again")


async def _guard(runner: "Runner", server: EmbeddedServer | None) -> None:
    """End the runner when the server is gone: whoever started this process starts all of it anew."""
    while server is None or server.alive:
        await asyncio.sleep(1)
    await runner.astop()


def _say(text: str) -> None:
    print(f"dflash-ops serve: {text}", file=sys.stderr, flush=True)
