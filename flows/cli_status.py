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
from tasks.audit import show_time
from tasks.ledger import Watch
from tasks.quantities import show_duration

EVERY_SECONDS = 2.0
WIDTH, NARROW = 80, 72
PLACE_WIDTH, LEAST_PLACE, BESIDE_PLACE = 40, 16, 40
"""Of a path or a run: the most columns, the fewest, and what stands beside it."""
MOST_FAILED, MOST_UNFINISHED = 3, 3


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and show it anew every two seconds.")] = False,
    hosts: HostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what is watched, what runs, the last numbers, and which grants run out; no host is asked."""
    known = inventory.load(hosts)
    terminal = console()
    if as_json:
        typer.echo(json.dumps(gathered.gather(known).as_json()))
    elif watch:
        with (
            suppress(KeyboardInterrupt),  # that is how it ends
            Live(screen(gathered.gather(known), terminal.width), console=terminal, auto_refresh=False) as live,
        ):
            while True:
                time.sleep(EVERY_SECONDS)
                terminal.width = console().width  # somebody may have made the window narrower
                live.update(screen(gathered.gather(known), terminal.width), refresh=True)
    else:
        terminal.print(screen(gathered.gather(known), terminal.width))


def screen(found: Status, width: int = WIDTH) -> RenderableType:
    """``found`` as text for a terminal of ``width`` columns; what somebody has to see to stands above the numbers."""
    now = found.time
    place = max(LEAST_PLACE, min(PLACE_WIDTH, width - BESIDE_PLACE))
    parts: list[RenderableType] = [
        Text(f"as of {show_time(now)}", "dim"),
        _hosts(found.hosts, now, narrow=width < NARROW),
        _titled("watches", _watches(found.watches, now) if found.watches else Text(NO_WATCH)),
        _titled("grants", _grants(found.grants, now, place) if found.grants else Text("no standing approval")),
        _titled("queue", _queue(found.queue, now, place)),
        _titled("checkpoints", _checkpoints(found.checkpoints)),
    ]
    if found.numbers:
        parts.append(_numbers(found.numbers, now, narrow=width < NARROW))
    if found.unfinished:
        parts.append(_titled("not whole", _unfinished(found.unfinished, now, place)))
    return Group(*parts)


NO_WATCH = "none: dflash-ops guard standing request HOST:/FOLDER asks to look into one"
NO_SERVE = "; dflash-ops serve starts it"
NO_CHECKPOINT = "none evaluated yet: dflash-ops evaluate HOST:/PATH measures one"


def _hosts(hosts: list[HostRow], now: float, *, narrow: bool) -> Table:
    table = listing("host", "role", *(() if narrow else ("address",)), "known of it", "ago", folded="known of it")
    for host in hosts:
        role = f"{host.role}, protected" if host.protected and not narrow else host.role
        cells = (host.name, role, *(() if narrow else (host.address,)), said(host.known), _ago(host.since, now))
        table.add_row(*map(Text, cells))
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


def _queue(queue: Queue, now: float, place: int) -> RenderableType:
    where = "" if queue.api is None else f"{escape(queue.api.removesuffix('/api'))}: "
    if queue.problem:
        return Text(f"{where}{said(queue.problem)}{NO_SERVE if queue.api is None else ''}", "red")
    table = _plain()
    for run in queue.going:
        table.add_row(Text(run.state, "green"), Text(_end(run.name, place)), Text(f"for {_ago(run.since, now)}"))
    for run in queue.waiting:
        table.add_row(Text(run.state, "yellow"), Text(_end(run.name, place)), Text(f"due for {_ago(run.since, now)}"))
    if queue.next is not None:
        table.add_row(Text("next"), Text(_end(queue.next.name, place)), Text(_until(queue.next, now)))
    failed = [
        Text.assemble(
            (run.state, "bold red"), f"  {_end(run.name, PLACE_WIDTH)}  {_ago(run.since, now)} ago: {said(run.message)}"
        )
        for run in queue.failed[:MOST_FAILED]
    ]
    return Group(Text(f"{where}{len(queue.going)} running, {len(queue.waiting)} waiting"), table, *failed)


def _checkpoints(suites: dict[str, dict[str, int]]) -> RenderableType:
    rows = [
        Text(f"suite {suite[:8]}  {', '.join(f'{count} {state}' for state, count in states.items() if count)}")
        for suite, states in suites.items()
    ]
    return Group(*rows) if rows else Text(NO_CHECKPOINT)


def _numbers(numbers: list[Number], now: float, *, narrow: bool) -> RenderableType:
    """A table of them, and below it why those have no number that have none, as wide as the screen is."""
    table = listing("step", "τ", "95 %", *(() if narrow else ("on",)), "ago", "checkpoint", folded="checkpoint")
    reasons: list[Text] = []
    for number in numbers:
        step = "–" if number.step is None else str(number.step)
        good = number.state == "evaluated"
        tau = number.state if number.tau is None else f"{number.tau:.3f}"
        ends = "–" if number.ci95 is None else f"{number.ci95[0]:.2f} … {number.ci95[1]:.2f}"
        on = () if narrow else (Text(number.on or "–"),)
        ago, place = _ago(number.updated, now), _end(number.place, 20 if narrow else 32)
        table.add_row(Text(step), Text(tau, "" if good else "bold red"), Text(ends), *on, Text(ago), Text(place))
        if not good:
            which = place if number.step is None else f"step {step}"
            why = number.message if number.state == "invalid" else f"{number.state}: {number.message}"
            reasons.append(Text(f"{which} {said(why)}{_again(number, now)}"))
    return Group(table, *reasons, *([Text("")] if reasons else []))


def _again(number: Number, now: float) -> str:
    if number.state != "failed":
        return ""
    if number.again is None:
        return "; it is not tried again by itself"
    return f"; it is tried again {_in(number.again, now)}"


def _unfinished(found: list[Unfinished], now: float, place: int) -> RenderableType:
    rows = [
        Text(f"{_end(one.place, place)}  looked {_ago(one.since, now)} ago  {said(one.reason)}")
        for one in found[:MOST_UNFINISHED]
    ]
    if len(found) > MOST_UNFINISHED:
        rows.append(Text(f"and {len(found) - MOST_UNFINISHED} more"))
    return Group(*rows)


def _grants(grants: list[GrantRow], now: float, place: int) -> Table:
    table = _plain()
    for grant in grants:
        left = f"ends in {show_duration(max(0, grant.not_after - now))}"
        where = _end(f"{grant.host}:{grant.where}", place)
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


def _end(text: str, width: int) -> str:
    """``text`` shortened at its start: the end of a path tells more."""
    shown = escape(text)
    return shown if len(shown) <= width else f"…{shown[len(shown) - width + 1 :]}"


def _ago(since: float | None, now: float) -> str:
    return "–" if since is None else show_duration(max(0.0, now - since))


def _until(run: RunRow, now: float) -> str:
    return "" if run.since is None else _in(run.since, now)


def _in(when: float, now: float) -> str:
    return f"in {show_duration(max(0.0, when - now))}"
