"""Runs that nothing runs any more, on a real Prefect server."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest

from flows import interrupted
from flows.deployments import deployment
from tasks import process
from tests.flows.conftest import Operator
from tests.prefect_api import REPOSITORY, ask, message, start_run, state

pytestmark = pytest.mark.timeout(600)  # a Prefect server takes minutes to start on a machine that has much to do


@pytest.fixture
def relay(operator: Operator, prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a deployment."""
    monkeypatch.chdir(REPOSITORY)
    return str(deployment("relay_checkpoint", operator.hosts_file).apply())


def due(api: str, relay: str) -> str:
    return start_run(api, relay, {"source": "/nowhere", "destinations": ["/nowhere/else"]})


def forced(api: str, run: str, kind: str, **more: str) -> str:
    ask(api, f"flow_runs/{run}/set_state", {"state": {"type": kind, **more}, "force": True})
    return run


@contextmanager
def process_of(run: str, seconds: float = 600.0) -> Iterator[process.Popen[bytes]]:
    """Something that looks like the process of ``run``."""
    argv = [sys.executable, "-c", f"import time; time.sleep({seconds})", "prefect.engine"]
    running = process.start(argv, env={**os.environ, "PREFECT__FLOW_RUN_ID": run})
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def test_a_run_without_a_process_vanishes_and_one_with_a_process_stays(prefect_api: str, relay: str) -> None:
    gone, going, waiting = (due(prefect_api, relay) for _ in range(3))
    for run in (gone, going):
        forced(prefect_api, run, "RUNNING")
    from prefect.client.orchestration import get_client

    with process_of(going), get_client(sync_client=True) as client:
        assert going in interrupted.alive()
        assert interrupted.settle(client, [UUID(relay)]) == [UUID(gone)]
    assert state(prefect_api, gone) == ("CRASHED", "Vanished")
    assert "nothing runs it any more" in message(prefect_api, gone)
    assert state(prefect_api, going) == ("RUNNING", "Running")
    assert state(prefect_api, waiting)[0] == "SCHEDULED"


def test_what_is_interrupted_is_never_cancelled_and_what_somebody_cancelled_stays_so(
    prefect_api: str, relay: str
) -> None:
    running, cancelled, shut_down, unwanted = (due(prefect_api, relay) for _ in range(4))
    forced(prefect_api, running, "RUNNING")
    from prefect.client.orchestration import get_client

    def stop() -> None:
        forced(prefect_api, cancelled, "CANCELLED", message=interrupted.SHUTTING_DOWN)
        forced(prefect_api, shut_down, "CRASHED", message="a signal for all")
        forced(prefect_api, unwanted, "CANCELLED", message="I do not want it")

    with process_of(running) as alive, get_client(sync_client=True) as client:
        ended = interrupted.interrupt(client, [UUID(relay)], stop)
        assert alive.wait(10) != 0
    assert {UUID(run) for run in (running, cancelled, shut_down)} <= set(ended)
    assert UUID(unwanted) not in ended
    assert {state(prefect_api, run) for run in (running, cancelled, shut_down)} == {("CRASHED", "Vanished")}
    assert state(prefect_api, unwanted) == ("CANCELLED", "Cancelled")


def test_a_run_that_has_its_end_keeps_it_and_its_process_is_waited_for(prefect_api: str, relay: str) -> None:
    run = forced(prefect_api, due(prefect_api, relay), "COMPLETED")
    from prefect.client.orchestration import get_client

    with process_of(run, seconds=1.0) as leaving, get_client(sync_client=True) as client:
        ended = interrupted.interrupt(client, [UUID(relay)])
        assert leaving.poll() == 0  # by itself, and before the runner could call it cancelled
    assert UUID(run) not in ended
    assert state(prefect_api, run) == ("COMPLETED", "Completed")


def test_what_a_run_started_is_not_taken_for_the_run() -> None:
    run = "0" * 8
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = process.start(argv, env={**os.environ, "PREFECT__FLOW_RUN_ID": run})
    try:
        assert run not in interrupted.alive()
    finally:
        child.kill()
        child.wait()
