"""``dflash-ops relay --plan``: what has to be approved, and how much moves how and how long."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import typer

from dflash.errors import DFlashError
from flows.terminal import show_plan
from tasks.actions import escape
from tasks.approvals import Approval
from tasks.plans import Plan
from tasks.quantities import show_duration, show_rate, show_size
from tasks.ssh import Connector


@dataclass(frozen=True)
class Way:
    """How a relay would go; ``rate`` is in bytes a second, the most that is known to be possible."""

    source_bytes: int
    moving_bytes: int
    streams: int
    how: str
    rate: int

    @property
    def seconds(self) -> float:
        """The least that it takes."""
        return self.moving_bytes / self.rate


def show_relay_plan(
    connector: Connector,
    needed: Plan | None,
    ends: str,
    found: Callable[[Approval | None], Way],
    *,
    as_json: bool,
) -> None:
    """Print what has to be approved and, where the source may be looked at, the way that ``found`` finds.

    The first is printed also where looking fails, which is raised then.
    """
    approved = None if needed is None else connector.store.find(needed)
    if not as_json:
        show_plan(connector.store, needed, ends, as_json=False)
    way, failure = None, None
    if needed is None or approved is not None:
        try:
            way = found(None if approved is None else approved.read)
        except DFlashError as error:
            failure = error
    if as_json:
        actions = [] if needed is None else [action.model_dump(mode="json") for action in needed.actions]
        digest, approval = None if needed is None else needed.digest(), None if approved is None else approved.id
        shown = None if way is None else vars(way) | {"seconds": round(way.seconds, 1)}
        typer.echo(json.dumps({"actions": actions, "digest": digest, "approval": approval, "way": shown}))
    elif way is not None:
        moving = f"{show_size(way.moving_bytes)} of {show_size(way.source_bytes)} move"
        typer.echo(f"{escape(ends)}: {moving}, {way.how}")
        typer.echo(f"at no more than {show_rate(way.rate)}, so in {show_duration(way.seconds)} or more")
    if failure is not None:
        raise failure
