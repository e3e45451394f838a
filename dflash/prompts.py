"""Prompt sets: JSON lines of raw texts or chats, turned into token ids the way the target will be asked."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash.errors import DFlashError, UsageError


class PromptFileError(DFlashError):
    """A prompt file is missing, empty, or has a line that is no prompt."""


class ThinkingError(UsageError):
    """The prompts are chats and nobody said whether the target is to think; τ differs between the two."""


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str = Field(min_length=1)


class RawPrompt(BaseModel):
    """A text that the target continues as it stands."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)


class ChatPrompt(BaseModel):
    """A chat that goes through the target's own template."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    messages: list[Message] = Field(min_length=1)


@dataclass(frozen=True)
class PromptSet:
    """Prompts in file order; ``sha256`` is of the whole file, however many were taken."""

    path: Path
    sha256: str
    prompts: list[RawPrompt | ChatPrompt]


def default_prompts() -> Path:
    """``coding10.jsonl``: beside the packages in a source checkout, inside the package in an installed wheel."""
    package = Path(__file__).resolve().parent
    candidates = [package / "prompt_files" / "coding10.jsonl", package.parent / "prompts" / "coding10.jsonl"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise PromptFileError(f"the shipped prompts are neither at {candidates[0]} nor at {candidates[1]}; give --prompts")


def read_prompts(path: Path, *, limit: int | None = None) -> PromptSet:
    """Read the first ``limit`` prompts of ``path``, all by default; every line is checked.

    Raises :class:`PromptFileError` that names the line.
    """
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").split("\n")  # splitlines would also cut at U+2028, which JSON may hold
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read ({error.strerror}); expected a file of JSON lines") from None
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path}: is not UTF-8 (byte {error.start}); expected a file of JSON lines") from None
    prompts: list[RawPrompt | ChatPrompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}:{number}")
        if prompt.id in seen:
            raise PromptFileError(f"{path}:{number}: id {prompt.id!r} is already used in line {seen[prompt.id]}")
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptFileError(f"{path}: has no prompt; expected JSON lines with id and prompt, or id and messages")
    return PromptSet(path, hashlib.sha256(content).hexdigest(), prompts[:limit])


def tokenize(prompts: Sequence[RawPrompt | ChatPrompt], tokenizer: Any, *, thinking: bool | None) -> list[list[int]]:
    """Token ids of each prompt; chats go through the tokenizer's template with the generation prompt behind them.

    ``tokenizer`` is a transformers tokenizer. Raises :class:`ThinkingError` for chats when ``thinking`` is ``None``,
    and :class:`PromptFileError` for chats without a template or that it refuses, and for a prompt without a token.
    """
    require_thinking(prompts, thinking)
    return [_encode(prompt, tokenizer, thinking) for prompt in prompts]


def require_thinking(prompts: Sequence[RawPrompt | ChatPrompt], thinking: bool | None) -> None:
    """Raise :class:`ThinkingError` when a prompt is a chat and nobody said whether the target shall think."""
    chat = next((prompt for prompt in prompts if isinstance(prompt, ChatPrompt)), None)
    if chat is not None and thinking is None:
        raise ThinkingError(f"prompt {chat.id!r} is a chat; say --thinking on or --thinking off, τ differs")


def has_chats(prompts: Sequence[RawPrompt | ChatPrompt]) -> bool:
    """Whether any prompt goes through the chat template."""
    return any(isinstance(prompt, ChatPrompt) for prompt in prompts)


def _parse(line: str, place: str) -> RawPrompt | ChatPrompt:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{place}: is not JSON ({error})") from None
    if not isinstance(raw, dict) or ("prompt" in raw) == ("messages" in raw):
        raise PromptFileError(f"{place}: expected an object with id and either prompt (raw text) or messages (chat)")
    try:
        return RawPrompt.model_validate(raw) if "prompt" in raw else ChatPrompt.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise PromptFileError(f"{place}: {key}: {first['msg']}") from None


def _encode(prompt: RawPrompt | ChatPrompt, tokenizer: Any, thinking: bool | None) -> list[int]:
    if isinstance(prompt, RawPrompt):
        ids = tokenizer(prompt.prompt)["input_ids"]
    elif not tokenizer.chat_template:
        raise PromptFileError(f"prompt {prompt.id!r} is a chat but the target's tokenizer has no chat template")
    else:
        try:
            text = tokenizer.apply_chat_template(
                [message.model_dump() for message in prompt.messages],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
        except Exception as error:  # a template raises what it likes, and jinja its own
            said = " ".join(str(error).split())[:100]
            raise PromptFileError(
                f"prompt {prompt.id!r}: the target's template refuses the chat ({said}); change it or take it out"
            ) from None
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise PromptFileError(f"prompt {prompt.id!r} has no token; the target needs at least one to continue")
    return list(ids)
