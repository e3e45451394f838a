"""What may be done to a protected host: the closed set of actions.

Observing is one :class:`ReadGrant`, which many requests spend. Everything else is one :class:`Change` each, spent at
its first session: ``upload``, ``run``, ``put``, ``launch``, ``signal``, ``revoke``.

An action is a frozen model. Its digest is the sha256 of its canonical JSON; the certificate carries that digest and the
gate receives those bytes, so what was approved is what runs: there is no second representation. Nothing volatile is in
it: no time, no id of a run or a try, no wording.
"""

import builtins
import hashlib
import json
import posixpath
import re
import unicodedata
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from dflash.errors import UsageError

Verb = Literal["stat", "list", "read", "hash"]

LARGEST = 2**63 - 1
LONGEST_ACTION = 1 << 16
"""Bytes of the canonical form; the gate reads no longer line."""
MOST_PATHS = 32
MOST_PARTS = 512
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


def _argument(text: str) -> str:
    # passed to execve as it is: a line break or $(…) in it is only a character, a NUL would cut it off
    if "\0" in text:
        raise ValueError(f"'{escape(text[:40])}' holds a NUL, which no argument can")
    if not is_text(text):
        raise ValueError(f"'{escape(text[:40])}' is not UTF-8 text")
    return text


def _by_name(settings: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    names = [name for name, _ in settings]
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"'{escape(name)}' is not the name of an environment variable")
    if len(set(names)) != len(names):
        raise ValueError("an environment variable is given twice")
    return tuple(sorted(settings))


AbsolutePath = Annotated[str, AfterValidator(normalise_path)]
Argument = Annotated[str, AfterValidator(_argument)]
Environment = Annotated[tuple[tuple[str, Argument], ...], AfterValidator(_by_name)]
Sha256 = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
JobId = Annotated[str, Field(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\z")]
Count = Annotated[int, Field(ge=0, le=LARGEST)]


class Action(BaseModel):
    """What every action has: the host, by name and by its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: str
    host_keys: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_fingerprints)]
    """SHA256 fingerprints of every key the host may show: this is who the host is."""

    @model_validator(mode="after")
    def _fits_a_line(self) -> Self:
        if len(self.canonical()) > LONGEST_ACTION:
            raise ValueError(f"an action of {len(self.canonical())} bytes is too long; the longest is {LONGEST_ACTION}")
        return self

    def canonical(self) -> builtins.bytes:
        """The action as one line of ASCII JSON: sorted keys, no spaces, no line break at the end."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode("ascii")

    def digest(self) -> str:
        """sha256 of :meth:`canonical`, in hex."""
        return hashlib.sha256(self.canonical()).hexdigest()


class ReadGrant(Action):
    """The right to observe certain files (``paths``) or one tree (``root``) on ``host``, within budgets.

    The deadline is not here but in the certificate: it counts from the decision, not from the request.
    """

    kind: Literal["read-grant"] = "read-grant"
    paths: Annotated[tuple[AbsolutePath, ...], Field(max_length=MOST_PATHS), AfterValidator(_sorted)] = ()
    root: AbsolutePath | None = None
    verbs: Annotated[tuple[Verb, ...], Field(min_length=1), AfterValidator(_verbs)]
    sessions: int = Field(ge=1, le=LARGEST)
    bytes: Count
    rate: Count = 0
    """Bytes a second; 0 leaves it to the host's ``read_limit``."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.paths) == (self.root is not None):
            raise ValueError("a read grant names either paths or a root, not both and not neither")
        return self

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


class Change(Action):
    """An action that alters the host or sends bytes away from it; each needs a certificate of its own."""

    seconds: int = Field(ge=1, le=7 * 24 * 3600)
    """How long it may take once it has begun; then the gate ends it."""


class FileDigest(BaseModel):
    """A file that must have this sha256 at the moment of the effect; a changed one is a new plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: AbsolutePath
    sha256: Sha256


class Command(Change):
    """An exact argv, started without a shell and with no other environment than ``env``."""

    argv: Annotated[tuple[Argument, ...], Field(min_length=1)]
    """``argv[0]`` is the absolute path of the program."""
    cwd: AbsolutePath = "/"
    env: Environment = ()
    requires: tuple[FileDigest, ...] = ()

    @model_validator(mode="after")
    def _names_a_program(self) -> Self:
        if normalise_path(self.argv[0]) != self.argv[0]:
            raise ValueError(f"argv[0] '{escape(self.argv[0])}' is not the plain path of a program; write it whole")
        return self


class Run(Command):
    """Run a command to its end within the session; stdin is empty."""

    kind: Literal["run"] = "run"
    bytes: Count = 1 << 20
    """Output, stdout and stderr together, after which it is ended."""
    break_glass: bool = False
    """An emergency, see ``guard break-glass``; the host's log says so."""


class Launch(Command):
    """Start a command that outlives the session as job ``job``: at most once, whatever happens."""

    kind: Literal["launch"] = "launch"
    jobs: AbsolutePath
    """The folder of all jobs; this one's is ``<jobs>/<job>``."""
    job: JobId
    seconds: int = Field(default=60, ge=1, le=7 * 24 * 3600)


class Signal(Change):
    """Send a signal to the processes of a launched job."""

    kind: Literal["signal"] = "signal"
    jobs: AbsolutePath
    job: JobId
    signal: Literal["TERM", "INT", "KILL", "HUP", "USR1", "USR2"]
    seconds: int = Field(default=60, ge=1, le=7 * 24 * 3600)


class Put(Change):
    """Write one file of exactly these bytes."""

    kind: Literal["put"] = "put"
    path: AbsolutePath
    size: Count
    sha256: Sha256
    mode: Literal[0o600, 0o644, 0o700, 0o755] = 0o644
    replaces: Sha256 | None = None
    """sha256 of the file that may be replaced; None: there must be none."""


class Part(BaseModel):
    """``length`` bytes from ``offset`` on, which become the object ``key``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    offset: Count
    length: Count
    key: Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_argument)]


class Upload(Change):
    """Send ranges of one file to an object store, by presigned URLs that come on stdin and must match this."""

    kind: Literal["upload"] = "upload"
    path: AbsolutePath
    identity: tuple[Count, Count, Count, int]
    """Device, inode, size and mtime in ns that the file must have, as ``stat`` tells them."""
    endpoint: Annotated[str, Field(pattern=r"\Ahttps?://[A-Za-z0-9.\[\]:-]+\z")]
    """Scheme, host and port, nothing behind."""
    bucket: Annotated[str, Field(pattern=r"\A[A-Za-z0-9._-]+\z")]
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=MOST_PARTS)]
    rate: Count = 0
    """Bytes a second; 0 leaves it to the host's ``read_limit``."""

    @model_validator(mode="after")
    def _inside_the_file(self) -> Self:
        if any(part.offset + part.length > self.identity[2] for part in self.parts):
            raise ValueError("a part ends behind the end of the file")
        if len({part.key for part in self.parts}) != len(self.parts):
            raise ValueError("two parts have the same key")
        return self

    @property
    def bytes(self) -> int:
        return sum(part.length for part in self.parts)


class Revoke(Change):
    """Make the host refuse the certificate with this serial from now on."""

    kind: Literal["revoke"] = "revoke"
    serial: int = Field(ge=1, le=LARGEST)
    seconds: int = Field(default=60, ge=1, le=7 * 24 * 3600)


AnyChange = Annotated[Run | Put | Launch | Signal | Upload | Revoke, Field(discriminator="kind")]
