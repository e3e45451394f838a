"""Several inference hosts share one queue: a Prefect work pool with one worker a host, which does one run at a time.

A worker is a process on this machine; its environment names its host, and whichever worker is free takes the next
evaluation. A run that loses its host hands its checkpoint on to the queue at once, without its host, and keeps its
worker's only place until the host answers again: a host that is away takes nothing from the others.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dflash.errors import DFlashError
from flows.prefect_home import configure_prefect
from tasks import process
from tasks.evaluation import ON_VARIABLE
from tasks.inventory import Host, Inventory

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

POOL = "dflash-inference"
POLL_SECONDS = 2


class NotHandedOnError(DFlashError):
    """A run lost its host, and its checkpoint could not be given back to the queue."""

    state_name = "HostUnreachable"


def sharing_hosts(inventory: Inventory) -> tuple[Host, ...]:
    """The inference hosts that share the queue; empty where there is one, which needs none."""
    hosts = tuple(host for host in inventory.hosts.values() if host.role == "inference")
    return hosts if len(hosts) > 1 else ()


def deployment_options(inventory: Inventory) -> dict[str, Any]:
    """What the deployment of ``evaluate_checkpoint`` needs besides to be run by the workers; nothing for one host."""
    return {"work_pool_name": POOL} if sharing_hosts(inventory) else {}


def make_pool() -> None:
    """Make the work pool on the server when it is not there."""
    configure_prefect()
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))


@dataclass
class Workers:
    """The worker processes of ``hosts``, one each; :meth:`tend` starts those that do not run."""

    hosts: tuple[str, ...]
    log: Path
    """The folder of what they print."""

    def __post_init__(self) -> None:
        self._running: dict[str, process.Popen[bytes]] = {}

    def tend(self) -> list[str]:
        """Start the worker of every host that has none; the hosts whose worker was started."""
        started = [host for host in self.hosts if host not in self._running or self._running[host].poll() is not None]
        for host in started:
            self._running[host] = self._start(host)
        return started

    def stop(self, seconds: float = 15.0) -> None:
        """End all workers with the runs they have; what those started on hosts goes on."""
        for worker in self._running.values():
            if worker.poll() is None:
                worker.terminate()
        for worker in self._running.values():
            try:
                worker.wait(seconds)
            except process.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._running.clear()

    @property
    def pids(self) -> dict[str, int]:
        """The process of each host's worker."""
        return {host: worker.pid for host, worker in self._running.items()}

    def _start(self, host: str) -> process.Popen[bytes]:
        self.log.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "prefect", "worker", "start"]
        argv += ["--pool", POOL, "--type", "process", "--name", host, "--limit", "1"]
        environment = {**os.environ, ON_VARIABLE: host, "PREFECT_WORKER_QUERY_SECONDS": str(POLL_SECONDS)}
        with (self.log / f"worker-{host}.log").open("ab") as log:
            return process.start(
                argv, env=environment, stdin=process.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


def is_shared(on: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this run takes whatever host its worker has, so that another may do it as well."""
    return on is None and ON_VARIABLE in environment


def hand_on(run: "FlowRun", not_on: Iterable[str], host: Host) -> "FlowRun":
    """Put what ``run`` was started for into the queue again, not to look for its job on ``host``; the new run.

    The same run hands on once, however often this is called. Raises :class:`NotHandedOnError` when the server does not
    answer, or when the run belongs to no deployment.
    """
    import httpx
    from prefect.deployments import run_deployment
    from prefect.exceptions import PrefectException

    if run.deployment_id is None:
        raise NotHandedOnError(f"{host.name} went away, and run {run.name} is of no deployment that another could take")
    parameters = {**run.parameters, "not_on": sorted({*not_on, host.name})}
    try:
        successor: Any = run_deployment(
            UUID(str(run.deployment_id)),
            parameters=parameters,
            idempotency_key=f"handed-on:{run.id}",
            timeout=0,
            as_subflow=False,
        )
    except (PrefectException, httpx.HTTPError, ValueError) as error:
        raise NotHandedOnError(
            f"{host.name} went away, and run {run.name} could not be given back to the queue "
            f"({error or type(error).__name__}); the watch starts it again"
        ) from error
    found: FlowRun = successor
    return found
