"""Runs that a process of this machine ran and runs no more: after a crash, and when ``dflash-ops serve`` is ended.

The process of a run carries its id in its environment. Where none does, the run ends in the state :data:`STATE`, which
says nothing about what it was for: whoever waits for that starts it again, and finds the job that it had launched.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

STATE = "Vanished"
RUN_VARIABLE = b"PREFECT__FLOW_RUN_ID="
ENGINE = b"prefect.engine"
"""The module whose process is the run."""
END_SECONDS = 30.0
JUST_NOW = timedelta(seconds=5)
"""A signal for the whole process group reaches the runs before anybody here knows of it."""
SHUTTING_DOWN = "Runner is shutting down."
MOST_RUNS = 200


def settle(client: "SyncPrefectClient", deployments: Collection[UUID]) -> list[UUID]:
    """Have the runs of ``deployments`` that no process runs any more end in :data:`STATE`; their ids.

    To be called before anything is started: a run that is just being started has no process yet.
    """
    living = alive()
    gone = [run.id for run in _going(client, deployments) if str(run.id) not in living]
    _vanish(client, gone, "nothing runs it any more: this machine or dflash-ops serve went down")
    return gone


def interrupt(
    client: "SyncPrefectClient", deployments: Collection[UUID], stop: Callable[[], None] = lambda: None
) -> list[UUID]:
    """End what runs of ``deployments``, then call ``stop``, which ends what starts runs; the ids of the interrupted.

    Each is asked by SIGTERM first, so that it leaves nothing behind, and ends in :data:`STATE`: it failed at nothing.
    One that has its end, and whose process is just going, keeps it: the process is waited for, since the runner calls
    whatever still has one cancelled.
    """
    begun = datetime.now(UTC) - JUST_NOW
    going = {str(run.id) for run in _going(client, deployments)}
    living = alive()
    leaving = {str(run.id) for run in _over(client, deployments, living)}
    _end({run: pid for run, pid in living.items() if run in going | leaving}, asked=going)
    stop()
    found = [*_going(client, deployments), *_broken_off(client, deployments, begun)]
    interrupted = [run.id for run in found]
    _vanish(client, interrupted, "dflash-ops serve was ended; when it serves again, this is taken up again")
    return interrupted


def alive() -> dict[str, int]:
    """The flow runs that a process of this machine, one of this user's, is running, with its pid."""
    return {run: pid for pid, run in _runs()}


def _runs() -> Iterator[tuple[int, str]]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it has just ended
            # what a run starts has its id as well, and may outlive it
            if ENGINE not in (process / "cmdline").read_bytes().split(b"\0"):
                continue
            for entry in (process / "environ").read_bytes().split(b"\0"):
                if entry.startswith(RUN_VARIABLE):
                    yield int(process.name), os.fsdecode(entry.removeprefix(RUN_VARIABLE))


def _end(running: dict[str, int], asked: Collection[str]) -> None:
    """Return when the processes of ``running`` are gone; those of the runs ``asked`` are told to go."""
    for run, pid in running.items():
        if run in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while running.keys() & alive().keys():
        if time.monotonic() > deadline:
            for run, pid in alive().items():
                if run in running:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.1)


def _going(client: "SyncPrefectClient", deployments: Collection[UUID]) -> "list[FlowRun]":
    from prefect.client.schemas.objects import StateType

    return _of(client, deployments, [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])


def _over(client: "SyncPrefectClient", deployments: Collection[UUID], runs: Collection[str]) -> "list[FlowRun]":
    """Those of ``runs`` that have their end."""
    from prefect.client.schemas.filters import FlowRunFilterId
    from prefect.client.schemas.objects import TERMINAL_STATES

    return _of(client, deployments, list(TERMINAL_STATES), id=FlowRunFilterId(any_=[UUID(run) for run in runs]))


def _broken_off(client: "SyncPrefectClient", deployments: Collection[UUID], since: datetime) -> "list[FlowRun]":
    """Runs that ended since then because of a signal, and not because of what they did."""
    from prefect.client.schemas.filters import FlowRunFilterEndTime
    from prefect.client.schemas.objects import StateType

    ended = FlowRunFilterEndTime(after_=since)  # type: ignore[arg-type]  # the same type under another name
    crashed = _of(client, deployments, [StateType.CRASHED], end_time=ended)
    cancelled = _of(client, deployments, [StateType.CANCELLED], end_time=ended)
    return [*crashed, *(run for run in cancelled if run.state is not None and run.state.message == SHUTTING_DOWN)]


def _of(client: "SyncPrefectClient", deployments: Collection[UUID], types: list[Any], **more: Any) -> "list[FlowRun]":
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterId,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )

    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types)), **more),
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=list(deployments))),
        limit=MOST_RUNS,
    )


def _vanish(client: "SyncPrefectClient", runs: Collection[UUID], message: str) -> None:
    from prefect.states import Crashed

    for run in runs:
        state: State[Any] = Crashed(name=STATE, message=message)
        client.set_flow_run_state(run, state, force=True)
