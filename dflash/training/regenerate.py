"""A prompt file answered by the target itself, behind a server: what a drafter of that target is trained on.

Each line of the output holds the text and the exact token ids that were read and written, so that training never
tokenises a completion again. Completions are kept beside the output as they come in; the same command goes on from
there. Neither completions nor texts are held in memory.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from transformers import GenerationConfig

from dflash import completions
from dflash.completion_store import Completion, CompletionStore
from dflash.completions import GREEDY, Asker, Sampling, Server, ServerError
from dflash.errors import UsageError
from dflash.hidden_states import tokenizer_digest
from dflash.http_client import Http, StatusError, each
from dflash.output import OutputError
from dflash.progress import Phases, Report
from dflash.prompts import ChatPrompt, PromptFileError, RawPrompt, read_prompts, require_thinking, tokenize
from dflash.target import TargetMismatchError, end_tokens, load_tokenizer, text_config

PHASES = 2


@dataclass(frozen=True)
class Regeneration:
    """What is asked: ``target`` is the directory of the model that the server at ``server`` serves.

    ``thinking`` is needed for chats. ``max_new_tokens`` ends a completion that the target does not end itself.
    ``concurrency`` prompts are under way at once.
    """

    prompts: Path
    server: str
    target: Path
    output: Path
    thinking: bool | None = None
    model: str | None = None
    max_new_tokens: int = 2048
    sampling: Sampling = GREEDY
    concurrency: int = 64
    num_prompts: int | None = None


class Regenerated(BaseModel):
    """What was written: ``ended`` completions end with the target's end token, the others at the limit.

    ``retokenized`` ones came as text only, and their ids are the tokenizer's reading of it. ``answers_replaced`` chats
    had answers at their end, which were dropped.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    samples: int
    tokens: int
    ended: int
    retokenized: int
    answers_replaced: int


def regenerate(asked: Regeneration, phases: Phases) -> Regenerated:
    """Write ``asked.output``, one line a prompt in their order; it appears whole or not at all.

    Raises :class:`OutputError` where it exists, :class:`PromptFileError`, :class:`dflash.prompts.ThinkingError`,
    :class:`ServerError` that says how far it got, :class:`dflash.completion_store.CompletionStoreError` for completions
    that other settings made, and :class:`TargetMismatchError` for a token that the target does not have.
    """
    _require_free(asked.output)
    read = read_prompts(asked.prompts, limit=asked.num_prompts).prompts
    require_thinking(read, asked.thinking)
    prompts = [_open_ended(prompt) for prompt in read]
    replaced = sum(before is not after for before, after in zip(read, prompts, strict=True))
    tokenizer = load_tokenizer(str(asked.target))
    server = completions.connect(asked.server, asked.model)
    store = _store(asked, server)
    with phases.phase(
        "completions", f"completions of {len(prompts)} prompts from {asked.server}", unit="prompts"
    ) as report:
        texts = _Texts(prompts, tokenizer, asked.thinking)
        asyncio.run(_complete(asked, server, texts, store, report))
    with phases.phase("writing", f"writing {asked.output}", unit="samples") as report:
        return _write(asked, texts, store, replaced, report)


@dataclass(frozen=True)
class _Texts:
    """Prompts and their ids, tokenised each time they are needed: a few hundred microseconds instead of the memory."""

    prompts: Sequence[RawPrompt | ChatPrompt]
    tokenizer: Any
    thinking: bool | None

    def __iter__(self) -> Iterator[tuple[RawPrompt | ChatPrompt, list[int]]]:
        for prompt in self.prompts:
            yield prompt, tokenize([prompt], self.tokenizer, thinking=self.thinking)[0]


def _open_ended(prompt: RawPrompt | ChatPrompt) -> RawPrompt | ChatPrompt:
    """A chat without the answers at its end. Raises :class:`PromptFileError` where nothing else is in it."""
    if isinstance(prompt, RawPrompt) or prompt.messages[-1].role != "assistant":
        return prompt
    messages = list(prompt.messages)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise PromptFileError(f"prompt {prompt.id!r} has answers only; expected a chat with something to answer")
    return prompt.model_copy(update={"messages": messages})


def _store(asked: Regeneration, server: Server) -> CompletionStore:
    settings = completions.completion_settings(
        server,
        max_new_tokens=asked.max_new_tokens,
        ignore_eos=False,
        tokenizer=tokenizer_digest(asked.target),
        sampling=asked.sampling,
    )
    path = asked.output.with_name(f"{asked.output.name}.completions")
    return CompletionStore.open(path, settings, option="--output")


async def _complete(asked: Regeneration, server: Server, texts: _Texts, store: CompletionStore, report: Report) -> None:
    """Ask for what ``store`` lacks; workers take prompts from one stream, so that few are held at a time."""
    done, total = 0, len(texts.prompts)
    rows = int(text_config(str(asked.target)).vocab_size)
    stream = iter(texts)

    async def work(_worker: int) -> None:
        nonlocal done
        for prompt, ids in stream:
            if ids not in store:
                try:
                    completion, _ = await asker.ask(ids)
                except StatusError as error:
                    if error.status not in completions.REFUSED:
                        raise
                    raise ServerError(
                        f"{error}; it was asked prompt {prompt.id!r} of {len(ids)} tokens for at most "
                        f"{asked.max_new_tokens} more; if it takes no such prompt, take it out of {asked.prompts}"
                    ) from None
                _require_known(completion.ids, rows, asked)
                store.put(ids, completion)
            done += 1
            report(done, total)

    try:
        async with Http(server.url, timeout=completions.TIMEOUT) as http:
            asker = Asker(http, server, asked.max_new_tokens, False, texts.tokenizer, asked.sampling)
            await each(range(asked.concurrency), work, concurrency=asked.concurrency)
    except ServerError as error:
        raise ServerError(
            f"{error}; {done} of {total} prompts were done and are kept in {store.path}: the same command goes on from "
            f"there"
        ) from None


def _write(asked: Regeneration, texts: _Texts, store: CompletionStore, replaced: int, report: Report) -> Regenerated:
    end = _end_tokens(asked.target)
    counts = {"samples": 0, "tokens": 0, "ended": 0, "retokenized": 0}
    partial: str | None = None
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f".{asked.output.name}.", dir=asked.output.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            for prompt, ids in texts:
                completion = store.get(ids)
                assert completion is not None  # all are there, or asking for them had raised
                own = completions.until_end(completion.ids, end)
                file.write(_line(prompt, ids, own, completion, texts))
                counts["samples"] += 1
                counts["tokens"] += len(own)
                counts["ended"] += bool(own) and own[-1] in end
                counts["retokenized"] += completion.retokenized
                report(counts["samples"], len(texts.prompts))
            file.flush()
            os.fsync(descriptor)
        os.chmod(partial, 0o644)
        _require_free(asked.output)  # the completions may have taken days
        os.rename(partial, asked.output)
    except OSError as error:
        raise OutputError(
            f"--output {asked.output} could not be written ({error.strerror}); the completions are kept in {store.path}"
        ) from None
    finally:
        if partial is not None:
            with suppress(FileNotFoundError):
                os.unlink(partial)
    return Regenerated(path=str(asked.output), answers_replaced=replaced, **counts)


def _line(prompt: RawPrompt | ChatPrompt, ids: list[int], own: list[int], completion: Completion, texts: _Texts) -> str:
    line = prompt.model_dump()
    line["response"] = texts.tokenizer.decode(own, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    line |= {"prompt_ids": ids, "response_ids": own}
    line["thinking"] = texts.thinking if isinstance(prompt, ChatPrompt) else None
    if completion.retokenized:
        line["retokenized"] = True
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


def _end_tokens(target: Path) -> frozenset[int]:
    config = text_config(str(target))
    try:
        generation = GenerationConfig.from_pretrained(str(target))
    except OSError:  # there need be none
        generation = None
    return end_tokens(config, generation)


def _require_known(ids: Sequence[int], rows: int, asked: Regeneration) -> None:
    strange = next((token for token in ids if token >= rows), None)
    if strange is not None:
        raise TargetMismatchError(
            f"server {asked.server} wrote token {strange}, the target {asked.target} has {rows} rows; does it serve "
            f"this model?"
        )


def _require_free(output: Path) -> None:
    if output.exists():
        raise OutputError(f"--output {output} exists; choose another or remove it")


def require_sampling(sampling: Sampling) -> None:
    """:class:`UsageError` for settings that contradict each other."""
    if not sampling.temperature and sampling != GREEDY:
        raise UsageError("--top-p and --top-k choose among drawn tokens, and at --temperature 0 none is drawn")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise UsageError(f"--top-k {sampling.top_k}: expected at least 1, or −1 for all tokens")
