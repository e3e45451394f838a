"""What one command wants to do on a protected host: the plan that the operator sees and approves once."""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator
from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.actions import (
    Action,
    AnyChange,
    Change,
    Command,
    Launch,
    Put,
    ReadGrant,
    Revoke,
    Run,
    Signal,
    Upload,
    escape,
)
from tasks.quantities import show_duration, show_rate, show_size

FRAME_WIDTH = 7
"""Of a rendered plan, what is neither a row's name nor its text."""
NARROWEST = 40
SPACE = r"\x20"


class Plan(BaseModel):
    """At most one read grant and the changes in their order, all on one host, and what to expect of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    grant: ReadGrant | None = None
    changes: tuple[AnyChange, ...] = ()
    effect: str
    """One sentence for the operator; not part of the digest."""

    @model_validator(mode="after")
    def _on_one_host(self) -> Self:
        if len({(action.host, action.host_keys) for action in self.actions}) != 1:
            raise ValueError("a plan is about one host and does at least one thing there")
        if len({action.digest() for action in self.changes}) != len(self.changes):
            raise ValueError("a plan does the same thing twice; one approval is for one use")
        return self

    @property
    def actions(self) -> tuple[Action, ...]:
        """The grant, when there is one, then the changes."""
        return (*([self.grant] if self.grant else []), *self.changes)

    @property
    def host(self) -> str:
        return self.actions[0].host

    @property
    def host_keys(self) -> tuple[str, ...]:
        return self.actions[0].host_keys

    def digest(self) -> str:
        """The digest of the only action; of several, the sha256 of the JSON list of theirs."""
        digests = [action.digest() for action in self.actions]
        return digests[0] if len(digests) == 1 else hashlib.sha256(json.dumps(digests).encode("ascii")).hexdigest()

    def render(self, console: Console) -> None:
        """Print the plan, every text from outside escaped, nothing shortened, and no two texts alike."""
        keys = [("host key", key) for key in self.host_keys]
        rows = [("host", self.host), *keys, *(row for action in self.actions for row in _rows(action))]
        # a narrower terminal breaks the lines itself, where a table would leave the texts out
        width = max(NARROWEST, min(console.width, 80))
        room = width - max(len(name) for name, _ in rows) - FRAME_WIDTH
        table = Table(box=box.SIMPLE, show_header=False, padding=(0, 1), width=width)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, Text(_folded(escape(value), room)))
        table.add_row("effect", Text(escape(self.effect)))
        table.add_row("digest", self.digest())
        console.print(table, crop=False)


def _folded(text: str, room: int) -> str:
    """``text`` in lines of ``room`` cells at most, broken anywhere.

    A space at an end of a line, which nobody could see, is an escape: folded at words, texts that differ in spaces
    would look the same.
    """
    if cell_len(text) <= room and text == text.strip(" "):
        return text
    lines = chop_cells(text, max(room - 2 * (len(SPACE) - 1), 1))
    return "\n".join(re.sub("^ | $", lambda _: SPACE, line) for line in lines)


def _rows(action: Action) -> Iterator[tuple[str, str]]:
    """What the operator has to know of one action, in words and numbers."""
    match action:
        case ReadGrant():
            yield from [("path", path) for path in action.paths] or [("tree", action.root or "")]
            yield "may", ", ".join(action.verbs)
            yield "sessions", str(action.sessions)
            yield "bytes", f"{show_size(action.bytes)} ({action.bytes})"
            yield "rate", show_rate(action.rate) if action.rate else "the host's read_limit"
            return
        case Run():
            yield "run", "BREAK-GLASS, an emergency" if action.break_glass else "to its end, within the session"
            yield from _command_rows(action)
            yield "output", f"at most {show_size(action.bytes)} ({action.bytes})"
        case Launch():
            yield "launch", f"job {action.job} in {action.jobs}, which goes on after the session"
            yield from _command_rows(action)
        case Signal():
            yield "signal", f"SIG{action.signal} to job {action.job} in {action.jobs}"
        case Put():
            yield "write", action.path
            yield "content", f"{show_size(action.size)} ({action.size}), sha256 {action.sha256}, mode {action.mode:o}"
            yield "replaces", "nothing, there must be no such file" if action.replaces is None else action.replaces
        case Upload():
            device, inode, size, mtime_ns = action.identity
            yield "upload", action.path
            yield "file", f"device {device}, inode {inode}, {size} bytes, mtime {mtime_ns} ns"
            yield "to", f"{action.endpoint}/{action.bucket}"
            yield "bytes", f"{show_size(action.bytes)} ({action.bytes})"
            for part in action.parts:
                yield "part", f"{part.length} bytes from {part.offset} as {part.key}"
            yield "rate", show_rate(action.rate) if action.rate else "the host's read_limit"
        case Revoke():
            yield "revoke", f"the certificate with serial {action.serial}"
    assert isinstance(action, Change)
    yield "time", f"at most {show_duration(action.seconds)}"


def _command_rows(action: Command) -> Iterator[tuple[str, str]]:
    for number, argument in enumerate(action.argv):
        yield f"argv[{number}]", argument
    yield "folder", action.cwd
    yield from (("env", f"{name}={value}") for name, value in action.env)
    for file in action.requires:
        yield "only if", f"{file.path} has sha256 {file.sha256}"
