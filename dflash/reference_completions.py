"""The greedy completions that blocks are walked over, by a server or by the target, kept where there is a cache."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from dflash import completions
from dflash.cache import Cache
from dflash.completion_store import Completion, CompletionStore
from dflash.errors import UsageError
from dflash.hidden_states import CachedTaps, LoadedTaps, TargetFacts, tokenizer_digest
from dflash.offload import decode_estimate
from dflash.request import Inputs, Request
from dflash.target import Target, TargetMismatchError

Progress = Callable[[int, int], None]


def reference_completions(
    request: Request,
    inputs: Inputs,
    server: completions.Server | None,
    taps: CachedTaps,
    progress: Progress,
    turn: Callable[[], Awaitable[None]] | None = None,
) -> list[Completion]:
    """One completion a prompt; with a cache, only those that it lacks are written now.

    ``progress`` counts prompts of a server and tokens of the target. ``turn`` is awaited before each prompt goes to a
    server, which then gets one at a time: others are served by it, and their latency is watched. Raises
    :class:`UsageError` where the target's layers are streamed and would have to be read again for every token, and what
    the server raises.
    """
    how = {"max_new_tokens": request.max_new_tokens, "ignore_eos": request.ignore_eos}
    if server is None:
        return _by_target(request, inputs, how, taps, progress)
    settings = completions.completion_settings(
        server,
        max_new_tokens=request.max_new_tokens,
        ignore_eos=request.ignore_eos,
        tokenizer=tokenizer_digest(request.target),
    )
    return completions.complete(
        server,
        inputs.prompts,
        max_new_tokens=request.max_new_tokens,
        ignore_eos=request.ignore_eos,
        tokenizer=inputs.tokenizer,
        store=_store(taps.cache, server.url, settings),
        progress=progress,
        concurrency=completions.CONCURRENCY if turn is None else 1,
        turn=turn,
    )


def fitted(request: Request, facts: TargetFacts, written: Sequence[Completion]) -> list[Completion]:
    """The completions up to the target's own end token.

    Raises :class:`TargetMismatchError` where they hold a token that the target has no row for.
    """
    rows = facts.vocab_size
    strange = next((token for one in written for token in one.ids if not 0 <= token < rows), None)
    if strange is not None:
        found = f"server {request.server} wrote token {strange}" if request.server else f"the cache has token {strange}"
        todo = "does it serve this model?" if request.server else "it is damaged, give another --cache"
        raise TargetMismatchError(f"{found}, the target {request.target} has {rows} rows; {todo}")
    end = frozenset() if request.ignore_eos else frozenset(facts.eos_token_ids)
    return [replace(one, ids=completions.until_end(one.ids, end)) for one in written]


def loaded_target(taps: CachedTaps) -> Target:
    """The whole target behind ``taps``, loaded now if it was not."""
    source = taps.source
    assert isinstance(source, LoadedTaps)
    return source.target


def _by_target(
    request: Request, inputs: Inputs, how: dict[str, Any], taps: CachedTaps, progress: Progress
) -> list[Completion]:
    store = _store(taps.cache, "target", how)
    kept = {tuple(prompt): store.get(prompt) for prompt in inputs.prompts} if store is not None else {}
    missing = [prompt for prompt in inputs.prompts if kept.get(tuple(prompt)) is None]
    if missing and request.offload:
        raise UsageError(
            f"--offload reads the target's layers once for all texts, so it cannot write the completions: that would "
            f"take {decode_estimate(request.target, request.max_new_tokens)}; let a server write them with --server "
            f"URL, or give a --cache that has them"
        )
    if missing:
        done, most = 0, len(missing) * request.max_new_tokens

        def count(added: int) -> None:
            nonlocal done
            done += added
            progress(done, most)

        generated = loaded_target(taps).generate_greedy(
            missing, request.max_new_tokens, ignore_eos=request.ignore_eos, progress=count
        )
        for prompt, ids in zip(missing, generated, strict=True):
            kept[tuple(prompt)] = Completion(ids)
            if store is not None:
                store.put(prompt, Completion(ids))
    written = (kept[tuple(prompt)] for prompt in inputs.prompts)
    return [one for one in written if one is not None]


def _store(cache: Cache | None, source: str, settings: dict[str, Any]) -> CompletionStore | None:
    return None if cache is None else CompletionStore.open(cache.completions_file(source, settings), settings)
