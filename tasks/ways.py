"""``--via auto``: over ssh through this machine or through the object store, by what the links were measured at."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tasks.quantities import show_duration, show_rate, show_size

Way = Literal["ssh", "s3"]
WORTH = 1.2
"""So many times faster must the store be: it is one more party that can fail, and that sees the bytes."""

NO_STORE = "no object store can be used"


@dataclass(frozen=True)
class Links:
    """Bytes a second of each link; None where there is no such link, or where it was not measured."""

    source_to_here: int
    here_to_destination: int
    source_to_store: int | None = None
    """None unless the source's host may upload by itself."""
    here_to_store: int | None = None
    store_to_destination: int | None = None
    trouble: str = ""
    """Why the store cannot be used, where that is known."""


@dataclass(frozen=True)
class Choice:
    """The way, how long it takes, and the sentence for the operator."""

    way: Way
    seconds: float
    why: str


def choose_way(links: Links, size: int, *, chunk: int, limit: int = 0) -> Choice:
    """The faster way for ``size`` bytes, ssh where the store is not clearly faster.

    Both ways are pipelines, so each is as fast as its slowest link; by the store the last chunk of ``chunk`` bytes is
    fetched when everything else is done. ``limit`` is the bandwidth that was asked for, 0 for none.
    """
    over_ssh = {
        "from the source to here": links.source_to_here,
        "from here to the destination": links.here_to_destination,
    }
    seconds = size / _slowest(over_ssh, limit)[1]
    by_store = _legs_by_store(links)
    if by_store is None:
        return Choice("ssh", seconds, f"ssh: {_shown(over_ssh, limit, seconds, size)}; {links.trouble or NO_STORE}")
    last = min(chunk, size) / by_store["from the store to the destination"]
    store_seconds = size / _slowest(by_store, limit)[1] + last
    if store_seconds * WORTH < seconds:
        return Choice(
            "s3",
            store_seconds,
            f"s3: {_shown(by_store, limit, store_seconds, size)}; over ssh {_shown(over_ssh, limit, seconds, size)}",
        )
    return Choice(
        "ssh",
        seconds,
        f"ssh: {_shown(over_ssh, limit, seconds, size)}; by the store {_shown(by_store, limit, store_seconds, size)}, "
        f"which is not {WORTH:g} times faster",
    )


def _legs_by_store(links: Links) -> dict[str, int] | None:
    if links.store_to_destination is None:
        return None
    end = {"from the store to the destination": links.store_to_destination}
    if links.source_to_store is not None:
        return {"from the source to the store": links.source_to_store, **end}
    if links.here_to_store is None:
        return None
    return {"from the source to here": links.source_to_here, "from here to the store": links.here_to_store, **end}


def _slowest(legs: Mapping[str, int], limit: int) -> tuple[str, int]:
    name, rate = min(legs.items(), key=lambda leg: leg[1])
    return ("the limit that was asked for", limit) if limit and limit < rate else (name, max(1, rate))


def _shown(legs: Mapping[str, int], limit: int, seconds: float, size: int) -> str:
    name, rate = _slowest(legs, limit)
    return f"{show_size(size)} take {show_duration(math.ceil(seconds))} ({show_rate(rate)} {name})"
