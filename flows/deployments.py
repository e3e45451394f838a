"""The six flows as Prefect deployments, named by module, so that a run loads what is installed and not what was."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.prefect_home import configure_prefect
from tasks.night_time import DEFAULT_CRON, DEFAULT_ZONE, NightTime

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

    cron: str = DEFAULT_CRON
    timezone: str = DEFAULT_ZONE

    @property
    def options(self) -> dict[str, Any]:
        """Of its deployment. Raises ``UsageError`` for a schedule whose nights have no date."""
        from prefect.schedules import Cron

        NightTime.of_cron(self.cron, self.timezone)
        # one at a time: what was missed collapses in the flow, which is told by what schedule it runs
        return {
            "schedules": [Cron(self.cron, timezone=self.timezone)],
            "parameters": {"cron": self.cron, "timezone": self.timezone},
            "concurrency_limit": 1,
        }


def deployments(
    hosts: Path | None, *, nightly: Nightly | None, more: Mapping[str, Mapping[str, Any]] | None = None
) -> "list[RunnerDeployment]":
    """A deployment of every flow, with the inventory ``hosts`` as its default; nothing is sent to a server yet.

    Without ``nightly`` the comparison has no schedule. ``more`` are options of single flows' deployments by the
    names in :data:`FLOWS`, as ``Flow.to_deployment`` takes them.
    """
    configure_prefect()
    options = {"nightly_comparison": {} if nightly is None else nightly.options} | dict(more or {})
    return [deployment(name, hosts, **options.get(name, {})) for name in FLOWS]


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
