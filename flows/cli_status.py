"""``dflash-ops status``: hosts, watches, queue, last numbers and grants that run out, in one screen."""

import json
import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flows import status as gathered
from flows.status import GrantRow, HostRow, Number, Queue, RunRow, Status, Unfinished
from flows.terminal import AsJson, HostsFile, console, listing
from tasks import inventory
from tasks.actions import escape, said
from tasks.ledger import Watch
from tasks.quantities import show_duration

EVERY_SECONDS = 2.0
PLACE_WIDTH, MOST_FAILED, MOST_UNFINISHED = 40, 3, 3


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and show it anew every two seconds.")] = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what is watched, what runs, the last numbers, and which grants run out; no host is asked."""
    known = inventory.load(hosts)
    if as_json:
        typer.echo(json.dumps(gathered.gather(known).as_json()))
    elif watch:
        with (
            suppress(KeyboardInterrupt),  # that is how it ends
            Live(screen(gathered.gather(known)), console=console(), auto_refresh=False) as live,
        ):
            while True:
                time.sleep(EVERY_SECONDS)
                live.update(screen(gathered.gather(known)), refresh=True)
    else:
        console().print(screen(gathered.gather(known)))


def screen(found: Status) -> RenderableType:
    """``found`` as text for a terminal of 80 columns."""
    now = found.time
    parts: list[RenderableType] = [
        _hosts(found.hosts, now),
        _titled("watches", _watches(found.watches, now) if found.watches else Text("none: no standing approval")),
        _titled("queue", _queue(found.queue, now)),
        _titled("checkpoints", _checkpoints(found.checkpoints)),
    ]
    if found.numbers:
        parts.append(_numbers(found.numbers, now))
    if found.unfinished:
        parts.append(_titled("not whole", _unfinished(found.unfinished, now)))
    parts.append(_titled("grants", _grants(found.grants, now) if found.grants else Text("no standing approval")))
    return Group(*parts)


def _hosts(hosts: list[HostRow], now: float) -> Table:
    table = listing("host", "role", "address", "known of it", "ago", folded="known of it")
    for host in hosts:
        role = f"{host.role}, protected" if host.protected else host.role
        table.add_row(*map(Text, (host.name, role, host.address, said(host.known), _ago(host.since, now))))
    return table


def _watches(watches: list[Watch], now: float) -> RenderableType:
    rows: list[Text] = []
    for watch in watches:
        style = "green" if watch.state == "watching" else "bold red"
        looked = f"looked {_ago(watch.looked, now)} ago" if watch.looked else "has not looked yet"
        rows.append(Text.assemble((watch.state, style), f"  {escape(watch.source)}  {looked}"))
        if watch.message:
            rows.append(Text(f"  {said(watch.message)}"))
    return Group(*rows)


def _queue(queue: Queue, now: float) -> RenderableType:
    where = "" if queue.api is None else f"{escape(queue.api.removesuffix('/api'))}: "
    if queue.problem:
        return Text(f"{where}{said(queue.problem)}", "red")
    table = _plain()
    for run in queue.going:
        table.add_row(Text(run.state, "green"), Text(_end(run.name)), Text(f"for {_ago(run.since, now)}"))
    for run in queue.waiting:
        table.add_row(Text(run.state, "yellow"), Text(_end(run.name)), Text(f"due for {_ago(run.since, now)}"))
    if queue.next is not None:
        table.add_row(Text("next"), Text(_end(queue.next.name)), Text(_until(queue.next, now)))
    for run in queue.failed[:MOST_FAILED]:
        why = Text(f"{_ago(run.since, now)} ago: {said(run.message)}")
        table.add_row(Text(run.state, "bold red"), Text(_end(run.name)), why)
    return Group(Text(f"{where}{len(queue.going)} running, {len(queue.waiting)} waiting"), table)


def _checkpoints(suites: dict[str, dict[str, int]]) -> RenderableType:
    table = _plain()
    for suite, states in suites.items():
        counted = ", ".join(f"{count} {state}" for state, count in states.items() if count)
        table.add_row(Text(f"suite {suite[:8]}"), Text(""), Text(counted))
    return table if suites else Text("none evaluated yet")


def _numbers(numbers: list[Number], now: float) -> Table:
    table = listing("step", "τ", "95 %", "on", "ago", "checkpoint", folded="checkpoint")
    for number in numbers:
        step = "–" if number.step is None else str(number.step)
        tau = number.state if number.tau is None else f"{number.tau:.3f}"
        ends = "–" if number.ci95 is None else f"{number.ci95[0]:.2f} … {number.ci95[1]:.2f}"
        why = "" if number.state == "evaluated" else f"\n{number.state}: {said(number.message)}{_again(number, now)}"
        cells = (step, tau, ends, number.on or "–", _ago(number.updated, now), _end(number.place, 32) + why)
        table.add_row(*map(Text, cells))
    return table


def _again(number: Number, now: float) -> str:
    if number.state != "failed":
        return ""
    if number.again is None:
        return "; it is not tried again by itself"
    return f"; it is tried again {_in(number.again, now)}"


def _unfinished(found: list[Unfinished], now: float) -> Table:
    table = _plain()
    for one in found[:MOST_UNFINISHED]:
        table.add_row(Text(_end(one.place)), Text(f"looked {_ago(one.since, now)} ago"), Text(said(one.reason)))
    if len(found) > MOST_UNFINISHED:
        table.add_row(Text(f"and {len(found) - MOST_UNFINISHED} more"))
    return table


def _grants(grants: list[GrantRow], now: float) -> Table:
    table = _plain()
    for grant in grants:
        left = f"ends in {show_duration(max(0, grant.not_after - now))}"
        where = _end(f"{grant.host}:{grant.where}")
        table.add_row(Text(grant.id), Text(where), Text(left, "bold red" if grant.ends_soon else ""))
    return table


def _titled(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(title, "bold"), body, Text(""))


def _plain() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _end(text: str, width: int = PLACE_WIDTH) -> str:
    """``text`` shortened at its start: the end of a path tells more."""
    shown = escape(text)
    return shown if len(shown) <= width else f"…{shown[len(shown) - width + 1 :]}"


def _ago(since: float | None, now: float) -> str:
    return "–" if since is None else show_duration(max(0.0, now - since))


def _until(run: RunRow, now: float) -> str:
    return "" if run.since is None else _in(run.since, now)


def _in(when: float, now: float) -> str:
    return f"in {show_duration(max(0.0, when - now))}"
