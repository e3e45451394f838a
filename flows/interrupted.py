"""Runs that say they are running while nothing runs them: what a machine that went down leaves on the server.

A run is a process of this machine that carries its id in its environment; where there is none, the run has crashed, and
whoever waits for it may know.
"""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import State

STATE = "Vanished"
RUN_VARIABLE = b"PREFECT__FLOW_RUN_ID="


def settle(client: "SyncPrefectClient", deployments: Collection[UUID]) -> list[UUID]:
    """Have the runs of ``deployments`` that no process runs any more end in the state :data:`STATE`; their ids.

    To be called before anything is started: a run that is just being started has no process yet.
    """
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterId,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    going = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=going))),
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=list(deployments))),
    )
    living = alive()
    gone = [run.id for run in runs if str(run.id) not in living]
    for run in gone:
        state: State[Any] = Crashed(
            name=STATE, message="nothing runs it any more: this machine or dflash-ops serve went down"
        )
        client.set_flow_run_state(run, state, force=True)
    return gone


def alive() -> set[str]:
    """The ids of the flow runs that a process of this machine, one of this user's, is running."""
    return {run for environment in _environments() if (run := _run_of(environment)) is not None}


def _environments() -> Iterable[bytes]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield (process / "environ").read_bytes()
        except OSError:
            continue  # another user's, or it has just ended


def _run_of(environment: bytes) -> str | None:
    found = (entry.removeprefix(RUN_VARIABLE) for entry in environment.split(b"\0") if entry.startswith(RUN_VARIABLE))
    return next((os.fsdecode(run) for run in found), None)
