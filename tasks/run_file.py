"""``run.yaml``: what one training run is: which host, which command, its config, its script and its environment.

Any trainer fits: the command is a template, and only these words in it are replaced::

    {config} {script}          where the file sent along lies on the host
    {environment} {python}     the host's current environment, and its Python
    {folder}                   the job's own folder, which is also where it runs

The same run has the same id wherever and whenever it is launched, so that it is launched once.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dflash.errors import UsageError
from tasks.actions import Argument, escape
from tasks.inventory import HostName, LocalPath, RemotePath

WORD = re.compile(r"\{\{|\}\}|\{(\w*)\}")
WORDS = ("config", "script", "environment", "python", "folder")
LONGEST_FILE = 1 << 24
"""Bytes; a file that is sent along is a config or a script and no data set."""


class RunFileError(UsageError):
    """A ``run.yaml`` is missing or says something that cannot be."""

    state_name = "RunFileWrong"


def _variables(settings: Any) -> Any:
    # YAML makes numbers and booleans of what is text in an environment
    if not isinstance(settings, Mapping):
        return settings
    for name, value in settings.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"{name!r} is not the name of an environment variable")
        if isinstance(value, bool | None | list | dict):
            raise ValueError(f"{name!r} is no text; quote it")
    return {name: str(value) for name, value in settings.items()}


def _words(argument: str) -> str:
    for found in WORD.finditer(argument):
        if found[1] is not None and found[1] not in WORDS:
            raise ValueError(f"{{{found[1]}}} in {argument!r} is none of {', '.join(WORDS)}; double braces that stay")
    return argument


Template = Annotated[Argument, AfterValidator(_words)]


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", text):
        raise ValueError(f"{text!r} is no name: letters, digits and . _ - only, at most 80, a letter or digit first")
    return text


class Run(BaseModel):
    """The whole file. Paths of this machine are relative to the folder of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: HostName | None = None
    """Where; None leaves it to whoever launches."""
    name: Annotated[str, AfterValidator(_name)]
    command: Annotated[tuple[Template, ...], Field(min_length=1)]
    config: LocalPath | None = None
    script: LocalPath | None = None
    env: Annotated[dict[str, Template], BeforeValidator(_variables)] = {}
    environment: RemotePath | None = None
    """The venv there; None: the current one of the host's entry."""
    cwd: RemotePath | None = None
    """Where the command runs; None: the job's own folder."""
    code: tuple[RemotePath, ...] = ()
    """Files and folders there whose digests are recorded when the job starts."""
    attempt: Annotated[int, Field(ge=1)] = 1
    """A run that is to be launched again, after it failed for one, is another attempt."""


@dataclass(frozen=True)
class Sent:
    """A file that goes along with the run."""

    suffix: str
    """Of its name, as in ``.yaml``."""
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class Described:
    """A run, the files that go along with it, and the id that follows from both."""

    run: Run
    config: Sent | None
    script: Sent | None

    def launch_id(self, host: str) -> str:
        """The job's id on ``host``: the run's name and a digest of all that makes it this run."""
        identity = self.run.model_dump(mode="json", exclude={"config", "script"}) | {
            "host": host,
            "config": None if self.config is None else self.config.sha256,
            "script": None if self.script is None else self.script.sha256,
        }
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode("utf-8")).hexdigest()
        return f"{self.run.name}-{digest[:12]}"


def read_run(path: Path, *, attempt: int | None = None) -> Described:
    """Read ``path`` and the files it names; ``attempt`` replaces the one in it.

    :raises RunFileError: it cannot be read or understood, or a file that it names cannot be read.
    """
    shown = escape(str(path))
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RunFileError(f"{shown}: {reason}; name the file that describes the run with --config") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RunFileError(f"{shown}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise RunFileError(f"{shown}: expected a mapping with name and command, found {type(tree).__name__}")
    try:
        # JSON, because only there does strict validation take a list for a tuple
        run = Run.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise RunFileError(f"{shown}: {_problem(error)}") from None
    except (ValueError, TypeError, RecursionError):
        raise RunFileError(f"{shown}: it contains itself, or a key that is no text; write it out") from None
    if attempt is not None:
        run = run.model_copy(update={"attempt": attempt})
    for word in ("config", "script"):
        if getattr(run, word) is None and any(f"{{{word}}}" in part for part in (*run.command, *run.env.values())):
            raise RunFileError(f"{shown}: {{{word}}} is used, and no {word} is named; name the file to send along")
    return Described(run, _sent(path, run.config), _sent(path, run.script))


def fill(template: str, words: Mapping[str, str]) -> str:
    """``template`` with ``words`` in place of their names in braces; doubled braces become single ones."""
    return WORD.sub(lambda found: found[0][0] if found[1] is None else words[found[1]], template)


def _sent(run_file: Path, named: Path | None) -> Sent | None:
    if named is None:
        return None
    path = run_file.parent / named
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise RunFileError(
            f"{escape(str(run_file))}: {escape(str(path))}: {error.strerror}; correct its path"
        ) from None
    if len(content) > LONGEST_FILE:
        raise RunFileError(
            f"{escape(str(path))} has more than {LONGEST_FILE} bytes, too many to send along; relay it before"
        )
    return Sent(path.suffix if re.fullmatch(r"\.[A-Za-z0-9]{1,10}", path.suffix) else "", content)


def _problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    key = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "extra_forbidden":
            return f"{escape(key)}: unknown key; known are {', '.join(Run.model_fields)}"
        case "missing":
            return f"{escape(key)}: missing; add it"
        case "value_error":
            return f"{escape(key)}: {escape(str(problem['ctx']['error']))}"
    return f"{escape(key)}: found {escape(repr(problem['input']))}: {problem['msg']}"
