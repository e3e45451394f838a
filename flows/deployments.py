"""The six flows as Prefect deployments, named by module, so that a run loads what is installed and not what was."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dflash.errors import UsageError
from flows.prefect_home import configure_prefect
from tasks.actions import escape

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment
    from prefect.flows import Flow

NAME = "dflash"
"""Every deployment's name: ``evaluate-checkpoint/dflash``."""

FLOWS = (
    "relay_checkpoint",
    "evaluate_checkpoint",
    "provision_host",
    "launch_training",
    "watch_training",
    "nightly_comparison",
)
"""Each a module of this package and the flow in it."""


@dataclass(frozen=True)
class Nightly:
    """When the nightly comparison runs; the zone's changes of the clock are Prefect's to know."""

    cron: str = "30 2 * * *"
    timezone: str = "UTC"


def deployments(
    hosts: Path | None, *, nightly: Nightly | None, more: Mapping[str, Mapping[str, Any]] | None = None
) -> "list[RunnerDeployment]":
    """A deployment of every flow, with the inventory ``hosts`` as its default; nothing is sent to a server yet.

    Without ``nightly`` the comparison has no schedule. ``more`` are options of single flows' deployments by the
    names in :data:`FLOWS`, as ``Flow.to_deployment`` takes them.
    """
    return [deployment(name, hosts, **_schedule(name, nightly), **(more or {}).get(name, {})) for name in FLOWS]


def deployment(name: str, hosts: Path | None, **options: Any) -> "RunnerDeployment":
    """The deployment of the flow ``name``, one of :data:`FLOWS`."""
    configure_prefect()
    from prefect.types.entrypoint import EntrypointType

    parameters = {"hosts": None if hosts is None else str(hosts.absolute())} | options.pop("parameters", {})
    return flow(name).to_deployment(  # type: ignore[return-value]
        NAME, parameters=parameters, entrypoint_type=EntrypointType.MODULE_PATH, tags=[NAME], **options
    )


def flow(name: str) -> "Flow[..., Any]":
    """The flow ``name``, one of :data:`FLOWS`."""
    found: Flow[..., Any] = getattr(importlib.import_module(f"flows.{name}"), name)
    return found


def _schedule(name: str, nightly: Nightly | None) -> dict[str, Any]:
    if name != "nightly_comparison" or nightly is None:
        return {}
    from prefect.schedules import Cron

    try:
        ZoneInfo(nightly.timezone)
        schedule = Cron(nightly.cron, timezone=nightly.timezone)
    except (ValueError, ZoneInfoNotFoundError) as error:
        raise UsageError(
            f"no schedule can be made of '{escape(nightly.cron)}' in the timezone '{escape(nightly.timezone)}': write "
            "them as in '30 2 * * *' and Europe/Berlin"
        ) from error
    # a night at a time: what was missed collapses in the flow, keyed by its date
    parameters = {"cron": nightly.cron, "timezone": nightly.timezone}
    return {"schedules": [schedule], "concurrency_limit": 1, "parameters": parameters}
