"""A file, or what is wanted of a checkpoint, from one host to others: ``dflash-ops relay`` as a Prefect flow."""

import re
import sys
from pathlib import Path

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from flows.awaiting import awaiting_approval, require
from flows.named_states import named_states
from flows.prefect_home import forget_agent
from flows.relay_store import move
from flows.terminal import shown_progress
from tasks.approvals import Approved
from tasks.errors import Refused
from tasks.inventory import Location
from tasks.quantities import show_rate, show_size
from tasks.relay import FILE_BYTES, RelayResult, Settings, check_destinations, plan_relay
from tasks.ssh import Connector


@flow(name="relay-checkpoint", flow_run_name="relay {source}")
@named_states
def relay_checkpoint(
    source: str,
    destinations: list[str],
    settings: Settings | None = None,
    via: str = "ssh",
    upload: bool = False,
    max_bytes: int = FILE_BYTES,
    hosts: Path | None = None,
) -> RelayResult:
    """Relay ``source`` to every one of ``destinations`` (HOST:/path, or a path of this machine), as ``settings`` say.

    ``via``, ``upload`` and ``max_bytes`` are those of ``dflash-ops relay``. Raises ``Refused`` when the source is
    protected and reading it is not approved; the run is then in the state ``AwaitingApproval`` and nothing has moved.
    """
    forget_agent()
    connector = Connector.load(hosts)
    start, *ends = map(connector.inventory.location, [source, *destinations])
    check_destinations(ends)
    plan = plan_relay([start], f"it is read and written to {' and '.join(map(str, ends))}", max_bytes=max_bytes)
    try:
        approved = require(connector.store, plan)
        result = move_step(connector, approved, start, ends, settings or Settings(), via=via, upload=upload)
    except Refused as refusal:
        return awaiting_approval(connector.store, plan, refusal)  # type: ignore[no-any-return]  # Prefect resolves it
    publish(result)
    return result


@task(name="relay", task_run_name="relay {start}", cache_policy=NO_CACHE)
def move_step(
    connector: Connector,
    approved: Approved | None,
    start: Location,
    ends: list[Location],
    settings: Settings,
    *,
    via: str,
    upload: bool,
) -> RelayResult:
    """Move what is missing at the destinations."""
    approval = None if approved is None else approved.read
    with shown_progress(str(start)) as progress:
        return move(
            connector, approval, start, ends, settings, via=via, upload=upload, progress=progress, notice=_notice
        )


def publish(result: RelayResult) -> None:
    """Leave what arrived as a Prefect artifact, a row a file."""
    key = re.sub("[^a-z0-9]+", "-", str(result.source).lower()).strip("-")
    rows = [{"file": file.path, "sha256": file.sha256, "moved": show_size(file.moved)} for file in result.files]
    speed = f" at {show_rate(round(result.mb_per_s * 1e6))}" if result.moved else ", all of it was there already"
    create_table_artifact(rows, key=f"relay-{key}", description=f"{show_size(result.moved)} moved{speed}")


def _notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
