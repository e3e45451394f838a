"""What a line of training data may be: exact token ids, a chat, or a prompt and its response. Imports no torch.

Of a line with several of these the ids count before the chat, and the chat before the pair; other keys are somebody
else's and left alone.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from dflash.errors import DFlashError, UsageError


class DataError(DFlashError):
    """Training data cannot be read, or has a line that is none; the message names the file and the line."""


def _encodable(text: str) -> str:
    """JSON can say half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds {text[error.start]!r}, half of a character; write the file again as UTF-8") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class Turn(BaseModel):
    """One turn of a chat; ``reasoning_content`` is a thought kept apart from what was said."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: Text
    reasoning_content: Text | None = None


class ExactIds(BaseModel):
    """A prompt and what the target wrote behind it, as the tokens that the target read and wrote.

    ``response`` is the same as text, ``thinking`` the mode it was asked in, where a chat was; ``retokenized`` when the
    server gave text only and the ids are the tokenizer's reading of it.
    """

    model_config = ConfigDict(frozen=True)

    prompt_ids: list[NonNegativeInt]
    response_ids: list[NonNegativeInt]
    response: Text | None = None
    thinking: bool | None = None
    retokenized: bool = False


class Chat(BaseModel):
    """A chat for the target's own template."""

    model_config = ConfigDict(frozen=True)

    messages: list[Turn] = Field(min_length=1)


class Pair(BaseModel):
    """A raw text and its continuation, without a template."""

    model_config = ConfigDict(frozen=True)

    prompt: Text = Field(min_length=1)
    response: Text


Line = ExactIds | Chat | Pair
KINDS: tuple[tuple[tuple[str, ...], type[Line]], ...] = (
    (("prompt_ids", "response_ids"), ExactIds),
    (("messages",), Chat),
    (("prompt", "response"), Pair),
)


@dataclass(frozen=True)
class Source:
    """A file or a data set: ``digest`` is of all that is in it, ``read`` gives its lines with their places.

    ``size`` is in bytes for a file, in rows for a data set; ``read`` calls back with how much of it is read.
    """

    name: str
    digest: str
    size: int
    read: Callable[[Callable[[int], None]], Iterator[tuple[str, Line]]]


def file_source(path: Path) -> Source:
    """A file of JSON lines. Raises :class:`DataError`, from ``read`` as well."""

    def read(done: Callable[[int], None]) -> Iterator[tuple[str, Line]]:
        position, content = 0, hashlib.sha256()
        try:
            with path.open("rb") as lines:  # cuts at line feeds alone; JSON may hold U+2028
                for number, line in enumerate(lines, start=1):
                    position += len(line)
                    content.update(line)
                    done(position)
                    line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                    if line.strip():
                        yield f"{path}:{number}", parse(_object(line, f"{path}:{number}"), f"{path}:{number}")
        except OSError as error:
            raise _unreadable(path, error) from None
        if content.hexdigest() != digest:
            raise DataError(f"{path}: was changed while it was read; run the command again when it is finished")

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{path}: is a directory or a pipe; expected a file of JSON lines, which is read twice")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    return Source(str(path), digest, size, read)


def dataset_source(name: str, split: str) -> Source:
    """A Hugging Face data set by ``name``, ``name:config``, or the path of a local one.

    Raises :class:`DataError`, from ``read`` as well, and :class:`UsageError` where ``datasets`` is not installed.
    """
    try:
        from datasets import load_dataset  # heavy, and a part of the runs only
    except ImportError:
        raise UsageError(
            f"data.datasets names {name}, and the package datasets is not installed; pip install "
            f"'dflash-pipeline[datasets]', or give data.files"
        ) from None
    repository, _, config = name.partition(":")
    try:
        rows: Any = load_dataset(repository, config or None, split=split)
    except Exception as error:  # hub, network, pyarrow and the builders share no base class
        said = " ".join(str(error).split())[:300]
        raise DataError(f"data set {name}, split {split}: cannot be loaded ({said}); give a local file") from None

    def read(done: Callable[[int], None]) -> Iterator[tuple[str, Line]]:
        for number, row in enumerate(rows):
            done(number + 1)
            yield f"{name}[{number}]", parse(row, f"{name}[{number}]")

    return Source(name, str(rows._fingerprint), len(rows), read)


def parse(raw: dict[str, Any], place: str) -> Line:
    """The line that ``raw`` is. Raises :class:`DataError` that names ``place`` and the key at fault.

    A key whose value is null counts as absent: tables have every column in every row.
    """
    raw = _without_nulls(raw)
    kind = next((kind for keys, kind in KINDS if all(key in raw for key in keys)), None)
    if kind is None:
        raise DataError(
            f"{place}: has {', '.join(sorted(map(str, raw))[:8]) or 'no key'}; expected messages, or prompt and "
            f"response, or prompt_ids and response_ids"
        )
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise DataError(f"{place}: {_said(error)}") from None


def _said(error: ValidationError) -> str:
    """The first problem; a key that a turn does not have explains others, such as a call instead of a content."""
    problems = error.errors()
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    key = ".".join(str(part) for part in problem["loc"])
    if key.startswith("messages.") and problem["type"] in ("extra_forbidden", "missing", "string_type"):
        found = {"extra_forbidden": "is not known", "missing": "is missing", "string_type": "is no text"}
        return (
            f"{key} {found[problem['type']]}; a turn has role, content and perhaps reasoning_content, as text (a "
            f"tool's call as the target writes it); rewrite the line or leave it out"
        )
    return f"{key}: {problem['msg'].removeprefix('Value error, ')}"


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}); expected a file of JSON lines")


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise DataError(f"{place}: is no JSON object; expected messages, prompt and response, or token ids")
    return raw


def _without_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in raw.items() if value is not None}
    if isinstance(kept.get("messages"), list):
        kept["messages"] = [
            {key: value for key, value in turn.items() if value is not None} if isinstance(turn, dict) else turn
            for turn in kept["messages"]
        ]
    return kept
