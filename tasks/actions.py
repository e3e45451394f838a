"""What may be done to a protected host: the closed set of actions, and the plan that is approved.

An action is a frozen model. Its digest is the sha256 of its canonical JSON; the certificate carries that digest and the
gate receives those bytes, so what was approved is what runs: there is no second representation.
"""

import builtins
import hashlib
import json
import posixpath
import re
import unicodedata
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash.errors import UsageError
from tasks.quantities import show_rate, show_size

Verb = Literal["stat", "list", "read", "hash"]

LARGEST = 2**63 - 1
MOST_PATHS = 32
LONGEST_PATH = 4095
"""Bytes; Linux opens no longer one."""
LONGEST_SAYING = 500


class PathError(UsageError, ValueError):
    """A path that cannot stand in an action."""


def normalise_path(text: str) -> str:
    """``text`` as an absolute POSIX path in NFC, without doubled slashes, ``.`` or a slash at the end.

    ``..`` is refused and not resolved: behind a symbolic link it would not mean what it says.
    """
    path = unicodedata.normalize("NFC", text)
    if "\0" in path or "\n" in path:
        raise PathError(f"path '{escape(path)}' holds a NUL or a line break; name a path without")
    if not path.startswith("/"):
        raise PathError(f"path '{escape(path)}' is not absolute; start it with /")
    if ".." in path.split("/"):
        raise PathError(f"path '{escape(path)}' holds '..'; write the path it means")
    try:
        length = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        raise PathError(f"path '{escape(path)}' is not UTF-8; rename the file, or a folder above it") from None
    if length > LONGEST_PATH:
        raise PathError(f"path '{escape(path[:40])}…' has {length} bytes; the longest is {LONGEST_PATH}")
    return "/" + posixpath.normpath(path).lstrip("/")


def is_text(text: str) -> bool:
    """Whether ``text`` is Unicode; arguments of a command can hold bytes that are not."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") == text


def escape(text: str) -> str:
    """``text`` with every character that could hide or reorder what is shown written as an escape.

    Control, format (bidirectional, zero width), private and unassigned characters, separators other than the plain
    space, variation selectors and blank letters are escaped, and the backslash with them, so that two different texts
    never look alike because of them.
    """
    return "".join(_escaped(character) if _deceives(character) else character for character in text)


def said(text: str) -> str:
    """What a host says, fit for one line of ours: escaped, and not more than its first 500 characters."""
    return escape(text) if len(text) <= LONGEST_SAYING else escape(text[:LONGEST_SAYING]) + "…"


def _deceives(character: str) -> bool:
    return not character.isprintable() or character == "\\" or BLANK.fullmatch(character) is not None


BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]")


def _escaped(character: str) -> str:
    code = ord(character)
    if character == "\\":
        return "\\\\"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _fingerprints(keys: tuple[str, ...]) -> tuple[str, ...]:
    for key in keys:
        if not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", key):
            raise ValueError(f"{key!r} is not a SHA256 host key fingerprint")
    return tuple(sorted(set(keys)))


def _verbs(verbs: tuple[Verb, ...]) -> tuple[Verb, ...]:
    return tuple(sorted(set(verbs)))


def _sorted(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(set(paths)))


AbsolutePath = Annotated[str, AfterValidator(normalise_path)]


class ReadGrant(BaseModel):
    """The right to observe certain files (``paths``) or one tree (``root``) on ``host``, within budgets.

    The deadline is not here but in the certificate: it counts from the decision, not from the request.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["read-grant"] = "read-grant"
    host: str
    host_keys: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_fingerprints)]
    """SHA256 fingerprints of every key the host may show: this is who the host is."""
    paths: Annotated[tuple[AbsolutePath, ...], Field(max_length=MOST_PATHS), AfterValidator(_sorted)] = ()
    root: AbsolutePath | None = None
    verbs: Annotated[tuple[Verb, ...], Field(min_length=1), AfterValidator(_verbs)]
    sessions: int = Field(ge=1, le=LARGEST)
    bytes: int = Field(ge=0, le=LARGEST)
    rate: int = Field(default=0, ge=0, le=LARGEST)
    """Bytes a second; 0 leaves it to the host's ``read_limit``."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.paths) == (self.root is not None):
            raise ValueError("a read grant names either paths or a root, not both and not neither")
        return self

    def canonical(self) -> builtins.bytes:
        """The action as one line of ASCII JSON: sorted keys, no spaces, NFC, no line break at the end."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode("ascii")

    def digest(self) -> str:
        """sha256 of :meth:`canonical`, in hex."""
        return hashlib.sha256(self.canonical()).hexdigest()

    def covers(self, other: "ReadGrant") -> bool:
        """Whether everything ``other`` asks for lies inside this grant (places, verbs and budgets; not the rate)."""
        return (
            (self.host, self.host_keys) == (other.host, other.host_keys)
            and _inside(self, other)
            and set(other.verbs) <= set(self.verbs)
            and other.sessions <= self.sessions
            and other.bytes <= self.bytes
        )


def _inside(outer: ReadGrant, inner: ReadGrant) -> bool:
    if outer.root is None:
        return inner.root is None and set(inner.paths) <= set(outer.paths)
    places = inner.paths or (inner.root,)
    below = outer.root.rstrip("/") + "/"
    return all(f"{place}/".startswith(below) for place in places)


class Plan(BaseModel):
    """What a command wants to do on a protected host and what the operator should expect of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    grant: ReadGrant
    effect: str
    """One sentence for the operator; not part of the digest."""

    @property
    def host(self) -> str:
        return self.grant.host

    def digest(self) -> str:
        return self.grant.digest()

    def render(self, console: Console) -> None:
        """Print the plan, every text from outside escaped, nothing shortened."""
        grant = self.grant
        table = Table(box=box.SIMPLE, show_header=False, padding=(0, 1), width=min(console.width, 80))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        rows = [("host", grant.host), *(("host key", key) for key in grant.host_keys)]
        rows += [("path", path) for path in grant.paths] or [("tree", grant.root or "")]
        rows += [
            ("may", ", ".join(grant.verbs)),
            ("sessions", str(grant.sessions)),
            ("bytes", f"{show_size(grant.bytes)} ({grant.bytes})"),
            ("rate", show_rate(grant.rate) if grant.rate else "the host's read_limit"),
            ("effect", self.effect),
            ("digest", self.digest()),
        ]
        for name, value in rows:
            table.add_row(name, Text(escape(value)))
        console.print(table)
