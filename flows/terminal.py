"""What the commands share at the terminal: options, tables, progress, plans."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from dflash.command_line import is_quiet
from dflash.errors import UsageError
from tasks import inventory
from tasks.actions import Action, Command, Launch, Put, ReadGrant, Revoke, Signal, Upload, escape, is_text
from tasks.approvals import ApprovalStore
from tasks.audit import Audit, show_time
from tasks.inventory import Inventory
from tasks.plans import Plan
from tasks.quantities import show_duration, show_rate, show_size
from tasks.requests import Origin
from tasks.transfer import Progress as Report

PLAIN_AFTER_SECONDS = 2.0
PLAIN_EVERY_SECONDS = 5.0
BAR_WIDTH = 12
FIGURES_WIDTH = 38
"""Size, rate, time left and the gaps around them."""

HostsFile = Annotated[Path | None, typer.Option("--hosts", help="hosts.yaml; else $DFLASH_HOSTS, else ./hosts.yaml")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Say what would be asked for and done; change nothing.")]


COMMAND_LINE: ContextVar[tuple[str, ...]] = ContextVar("COMMAND_LINE", default=())
"""What dflash-ops was called with."""


def asked_here() -> Origin | None:
    """The command that runs, for a request to name; None when it is not known or is not text."""
    command = COMMAND_LINE.get()
    return Origin(command=command) if command and all(map(is_text, command)) else None


@contextmanager
def typed() -> Iterator[None]:
    """In the block an action is made of what was typed; raises ``UsageError`` where it cannot be one."""
    try:
        yield
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in problem["loc"] if isinstance(part, str))
        why = problem.get("ctx", {}).get("error") or f"{problem['msg'].lower()}; write it again"
        raise UsageError(f"{where}{why}") from None


def console(*, stderr: bool = False) -> Console:
    """A console for tables: 80 columns at most, numbers not coloured."""
    terminal = Console(highlight=False, stderr=stderr)
    terminal.width = min(terminal.width, 80)
    return terminal


def listing(*columns: str, folded: str) -> Table:
    """A table that shortens nothing: the column ``folded`` gets what width the others leave and breaks its lines."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != folded)
    return table


def open_store(hosts: Path | None) -> tuple[Inventory, ApprovalStore]:
    """The inventory of ``hosts`` (a hosts.yaml, see :func:`tasks.inventory.load`) and this machine's approvals."""
    known = inventory.load(hosts)
    return known, ApprovalStore(known, Audit())


def show_plan(store: ApprovalStore, plan: Plan | None, way: str, *, as_json: bool) -> None:
    """Print what ``plan`` asks for and whether it is approved; None needs no approval."""
    approved = None if plan is None else store.find(plan)
    if as_json:
        actions = [] if plan is None else [action.model_dump(mode="json") for action in plan.actions]
        digest = None if plan is None else plan.digest()
        approval = None if approved is None else approved.id
        typer.echo(json.dumps({"actions": actions, "digest": digest, "approval": approval}))
    elif plan is None:
        typer.echo(f"{escape(way)}: no protected host is in it, so nothing needs an approval")
    else:
        plan.render(console())
        if approved is None:
            typer.echo("not approved: it would be refused and leave a request")
        else:
            typer.echo(f"approved: {approved.id}, until {show_time(approved.not_after)}")


def place(action: Action) -> str:
    """What ``action`` is about, HOST:/path or HOST: and the command, a line each, escaped."""
    match action:
        case ReadGrant():
            found = action.paths or ((action.root or "").rstrip("/") + "/**",)
        case Command():
            found = (" ".join(action.argv),)
        case Put() | Upload():
            found = (action.path,)
        case Signal():
            found = (f"{action.jobs}/{action.job}",)
        case Revoke():
            found = (f"serial {action.serial}",)
        case _:
            raise AssertionError(action)
    return "\n".join(escape(f"{action.host}:{one}") for one in found)


def may(action: Action) -> str:
    """The verbs of ``action``, a line each; of a grant its bytes too."""
    match action:
        case ReadGrant():
            return "\n".join((*action.verbs, show_size(action.bytes)))
        case Launch():
            return f"launch\n{action.job}"
        case Signal():
            return f"signal\n{action.signal}"
        case Put() | Upload():
            return f"{action.kind}\n{show_size(action.size if isinstance(action, Put) else action.bytes)}"
        case _:
            return str(getattr(action, "kind", ""))


@contextmanager
def shown_progress(what: str) -> Iterator[Report]:
    """Show a transfer on stderr: a bar with rate and time left at a terminal, else a line now and then.

    Nothing of it when the command is to be quiet.
    """
    if is_quiet():
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        yield _PlainProgress(escape(what))
        return
    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    title = TextColumn("{task.description}", markup=False)
    terminal = Console(stderr=True)
    name, room = escape(what), max(1, terminal.width - BAR_WIDTH - FIGURES_WIDTH)
    if len(name) > room:
        # the end of a path tells more than its start, and the figures more than either
        name = f"…{name[len(name) - room + 1 :]}"
    with Progress(title, BarColumn(BAR_WIDTH), *columns, console=terminal) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show at a terminal, on stderr, that ``what`` is being waited for; nothing when the command is to be quiet."""
    if is_quiet() or not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(Text(f"{escape(what)} …")):
        yield


def say_progress(line: str) -> None:
    """A line on stderr about how far something is, for whoever waits; none when the command is to be quiet."""
    if not is_quiet():
        print(line, file=sys.stderr, flush=True)


class _PlainProgress:
    """One line after two seconds and then every five, for logs and pipes."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun: float | None = None
        self._due = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._begun is None:
            self._begun, self._due = now, now + PLAIN_AFTER_SECONDS
        if now < self._due:
            return
        self._due = now + PLAIN_EVERY_SECONDS
        rate = done / (now - self._begun)
        left = show_duration((total - done) / rate) if done else "unknown time"
        line = f"{self._what}: {show_size(done)} of {show_size(total)}, {show_rate(round(rate))}, {left} left"
        print(line, file=sys.stderr, flush=True)
