"""A real Prefect server for tests, and asking its API, as anybody who reaches it can."""

import json
import os
import signal
import socket
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from tasks import process

REPOSITORY = Path(__file__).parents[1]
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}
LEAN = {
    # the API is what is needed: without the page and what looks after schedules it is up sooner
    **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in ("SCHEDULER", "LATE_RUNS", "TRIGGERS")},
    "PREFECT_SERVER_UI_ENABLED": "false",
    # as of dflash-ops serve: a statement that has to wait is not a failure
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
}
START_SECONDS = 400.0
BUSY_TRIES = 10
UNUSED = "unused"
STOP_SECONDS = 30.0


def ask(api: str, what: str, question: dict[str, Any]) -> Any:
    """POST ``question`` to the API, again where its database was busy, as Prefect's own client does."""
    request = urllib.request.Request(
        f"{api}/{what}", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    for tries in range(1, BUSY_TRIES + 1):
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 503 or tries == BUSY_TRIES:
                raise
            time.sleep(1.0)
    raise AssertionError(what)


def healthy(api: str) -> bool:
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def start_run(api: str, deployment: str, parameters: Mapping[str, Any]) -> str:
    """A flow run of ``deployment`` that is due now; its id. Nobody runs it yet."""
    run = ask(api, f"deployments/{deployment}/create_flow_run", {"parameters": dict(parameters)})
    return str(run["id"])


def state(api: str, flow_run: str) -> tuple[str, str]:
    """Type and name of the state of a flow run."""
    (run,) = ask(api, "flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    return run["state_type"], run["state_name"]


def message(api: str, flow_run: str) -> str:
    """What the state of a flow run says."""
    (run,) = ask(api, "flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    return str(run["state"]["message"])


def engine(api: str, flow_run: str, **environment: str) -> process.Popen[bytes]:
    """What a runner does about a run that is due: it starts a process for it."""
    env = {**os.environ, "PREFECT_API_URL": api, "PREFECT__FLOW_RUN_ID": flow_run, **environment}
    return process.start(
        [sys.executable, "-m", "prefect.engine"],
        env=env,
        cwd=REPOSITORY,
        stdout=process.DEVNULL,
        stderr=process.DEVNULL,
        start_new_session=True,
    )


def free_port() -> int:
    """A port of the loopback interface that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class Server:
    """``prefect server start`` over its own home, or over another database, on one port through all its lives."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        self.port = free_port()
        self._environment = environment
        self._running: process.Popen[bytes] | None = None

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def log(self) -> str:
        return (self.home / "server.log").read_text(errors="replace")

    def start(self) -> None:
        """Return when it answers."""
        self.home.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **QUIET, "PREFECT_HOME": str(self.home), **self._environment}
        env.pop("PREFECT_API_URL", None)
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        with (self.home / "server.log").open("ab") as log:
            self._running = process.start(command, env=env, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while not healthy(self.api):
            assert self._running.poll() is None, self.log
            assert time.monotonic() < deadline, "the Prefect server did not come up"
            time.sleep(0.2)

    def stop(self, how: int = signal.SIGTERM) -> None:
        """End it, by SIGKILL as a machine does that loses its power."""
        if self._running is not None:
            self._running.send_signal(how)
            self._running.wait(STOP_SECONDS)
            self._running = None


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """``server`` while the block lasts."""
    try:
        server.start()
        yield server
    finally:
        server.stop()


def keep_unused(server: Server) -> None:
    """Keep the database of ``server`` as it is before anybody uses it, for :func:`copy_database`."""
    _copy(server.home, server.home / UNUSED)


def copy_database(server: Server, home: Path) -> None:
    """Give ``home`` the unused database that was kept of ``server``: making a new one takes far longer."""
    _copy(server.home / UNUSED, home)


def _copy(server_home: Path, home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    with (
        closing(sqlite3.connect(server_home / "prefect.db")) as source,
        closing(sqlite3.connect(home / "prefect.db")) as copy,
    ):
        source.backup(copy)


def run_here(flow_run: str) -> None:
    """What :func:`engine` does, in this process, which is quicker; the flow is found by the deployment's entrypoint."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow
    from prefect.flows import load_flow_from_flow_run
    from prefect.utilities.asyncutils import run_coro_as_sync

    async def load() -> Any:
        async with get_client() as client:
            run = await client.read_flow_run(UUID(flow_run))
            return await load_flow_from_flow_run(run), run

    flow, run = run_coro_as_sync(load())
    run_flow(flow, flow_run=run, return_type="state")
