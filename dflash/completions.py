"""Completions from a running server, as token ids; greedy ones, unless a way to draw them is asked for.

SGLang answers its native ``POST /generate``; every other server is asked through the OpenAI-compatible
``POST /v1/completions``. The first prompt finds out how the server gives token ids (the ways below, best first), the
others are asked the same way, several at once.

Only when a server gives no ids at all is its text tokenised again, and the completion is flagged: that can change the
tokens, and with them every figure measured on them. Prompt and completion are tokenised together if the prompt's ids
come out as they were, so that what depends on the text before (sentencepiece's leading space) is right; where the two
merge at the seam, the completion is tokenised alone, for the prompt's ids are what was asked and the model began a
token at the seam. The end token shows in no text and is left out, so is a character that the token limit cut in two.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash.completion_store import Completion, CompletionStore
from dflash.http_client import AbortedError, Http, LostError, ServerError, StatusError, each

__all__ = [
    "GREEDY",
    "Asker",
    "Completion",
    "CompletionStore",
    "Sampling",
    "Server",
    "ServerError",
    "complete",
    "completion_settings",
    "connect",
    "until_end",
]

TIMEOUT = 600.0
"""Seconds for one completion, the server's queue included."""
PROBE_TIMEOUT = 10.0
"""Seconds to find out what kind of server it is."""
CONCURRENCY = 8
"""Prompts a server is asked at once."""
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sent along, for what a request leaves open both servers take from the model's generation config or their own."""
AWAY = (502, 503, 504)
"""What stands in for a server that is being started again."""
REFUSED = (400, 422)
"""What servers answer to a request whose form they do not take."""
_TOKEN_ID = re.compile(r"token_id:([0-9]{1,18})")
_HALF_PAIR = re.compile("[\ud800-\udfff]")  # half of a character that JSON writes as two escapes


@dataclass(frozen=True)
class Sampling:
    """How a server draws tokens: greedily at ``temperature`` 0; ``top_k`` −1 takes all tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1

    @property
    def body(self) -> dict[str, Any]:
        """What a request says of it to SGLang and vLLM, which take what it leaves open from the model's files."""
        if not self.temperature:
            return {"temperature": 0.0}
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": 0.0}

    @property
    def plain_body(self) -> dict[str, Any]:
        """The same in OpenAI's fields alone, as far as these go; a server that knows no others shall say so."""
        return {
            key: value
            for key, value in self.body.items()
            if key in ("temperature", "top_p") or (key == "top_k" and value != -1)
        }


GREEDY = Sampling()


@dataclass(frozen=True)
class Server:
    """A server, the interface it is asked through, and the model it says it serves.

    ``model`` is SGLang's ``model_path`` or the name in an OpenAI-compatible server's list; ``root`` is the path behind
    that name where the list tells it (vLLM).
    """

    url: str
    kind: Literal["sglang", "openai"]
    model: str | None = None
    root: str | None = None


def connect(url: str, model: str | None = None) -> Server:
    """Find out what answers at ``url`` (with or without a trailing ``/v1``), and that it serves ``model`` if given.

    ``model`` is a name, or a path behind one. Raises :class:`ServerError`, also when a server has several models and
    ``model`` does not say which.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ServerError(f"server {url}: expected a URL that begins with http:// or https://")
    return asyncio.run(_connect(base, model))


def completion_settings(
    server: Server,
    *,
    max_new_tokens: int,
    ignore_eos: bool,
    tokenizer: str | None = None,
    sampling: Sampling = GREEDY,
) -> dict[str, Any]:
    """What completions depend on besides the prompt, for :meth:`CompletionStore.open`; not where the server is.

    ``tokenizer`` is a digest of the tokenizer that made the prompts.
    """
    return {
        "kind": server.kind,
        "model": server.model,
        "root": server.root,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
        "tokenizer": tokenizer,
        **({} if sampling == GREEDY else {"sampling": sampling.body}),
    }


def complete(
    server: Server,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ignore_eos: bool,
    tokenizer: Any = None,
    concurrency: int = CONCURRENCY,
    store: CompletionStore | None = None,
    progress: Callable[[int, int], None],
    turn: Callable[[], Awaitable[None]] | None = None,
) -> list[Completion]:
    """Greedy completion of each prompt (token ids), in their order, up to where the server ends it.

    A completion may be shorter than a block, and empty when text-only output ended at once. What ``store`` has is not
    asked again, what comes in is put there at once. ``tokenizer`` is the target's (transformers); without it a server
    that gives text only is an error. Trouble that may pass is waited out (:mod:`dflash.http_client`); other trouble
    raises :class:`ServerError`, which says how far it got. ``turn`` is awaited before each prompt is sent.
    """
    written: dict[int, Completion] = {}
    if store is not None:
        kept = ((place, store.get(prompt)) for place, prompt in enumerate(prompts))
        written = {place: completion for place, completion in kept if completion is not None}
    progress(len(written), len(prompts))

    async def ask_all() -> None:
        async with Http(server.url, timeout=TIMEOUT) as http:
            asker = Asker(http, server, max_new_tokens, ignore_eos, tokenizer)

            async def ask_one(place: int) -> None:
                if turn is not None:
                    await turn()
                completion, _ = await asker.ask(prompts[place])
                if store is not None:
                    store.put(prompts[place], completion)
                written[place] = completion
                progress(len(written), len(prompts))

            missing = [place for place in range(len(prompts)) if place not in written]
            await each(missing, ask_one, concurrency=concurrency)

    try:
        asyncio.run(ask_all())
    except ServerError as error:
        kept_or_not = (
            "they are kept: the same command with the same --cache goes on from there"
            if store is not None
            else "they are lost; with --cache DIR a later run would go on from there"
        )
        raise ServerError(f"{error}; {len(written)} of {len(prompts)} prompts were done, {kept_or_not}") from None
    return [written[place] for place in range(len(prompts))]


def until_end(ids: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """``ids`` up to and including the first of ``eos_token_ids``."""
    for place, token in enumerate(ids):
        if token in eos_token_ids:
            return ids[: place + 1]
    return ids


class Asker:
    """Asks a server for completions in the way that the first answer showed to work."""

    def __init__(
        self,
        http: Http,
        server: Server,
        max_new_tokens: int,
        ignore_eos: bool,
        tokenizer: Any = None,
        sampling: Sampling = GREEDY,
    ) -> None:
        self._http = http
        self._server = server
        self._max_new_tokens = max_new_tokens
        self._ways = (_sglang_ways if server.kind == "sglang" else _openai_ways)(
            server, max_new_tokens, ignore_eos, tokenizer, sampling
        )
        self._takes_text = tokenizer is not None
        self._way: _Way | None = None
        self._finding = asyncio.Lock()
        self._was_away = False

    async def ask(self, prompt: Sequence[int]) -> tuple[Completion, Any]:
        """The completion of ``prompt`` and the whole answer it came in. Raises :class:`ServerError`."""
        if self._way is None:
            async with self._finding:
                if self._way is None:
                    return await self._find_way(prompt)
        completion, reply = await self._try(self._way, prompt)
        if completion is None:
            raise ServerError(f"server {self._server.url}: no {self._way.gives}, which it gave before")
        return completion, reply

    async def _find_way(self, prompt: Sequence[int]) -> tuple[Completion, Any]:
        reasons: list[str] = []
        refusals: list[StatusError] = []
        for way in self._ways:
            try:
                completion, reply = await self._try(way, prompt)
            except StatusError as error:
                if error.status not in REFUSED:
                    raise
                refusals.append(error)
                reasons.append(str(error))
                continue
            if completion is not None:
                self._way = way
                return completion, reply
            reasons.append(f"server {self._server.url}: no {way.gives}")
        if self._takes_text and len(refusals) == len(self._ways):
            raise refusals[-1]  # not even plain text: something is wrong with the request itself
        raise ServerError(
            f"{'; '.join(dict.fromkeys(reasons))}; use a server that gives token ids (SGLang, vLLM ≥ 0.10) or leave "
            f"--server out and the target writes the completions"
        )

    async def _require_same_model(self) -> None:
        """A server that was away may have been started with another model, and SGLang's answers do not name theirs."""
        before = self._server
        now = await _identify(self._http, before.url, before.model)
        if now != before:
            raise ServerError(
                f"server {before.url}: serves {now.root or now.model} now, and {before.root or before.model} before it "
                f"was away; start it with the same model"
            )
        self._was_away = False

    async def _try(self, way: "_Way", prompt: Sequence[int]) -> tuple[Completion | None, Any]:
        async def once() -> Any:
            try:
                reply = await self._http.post(way.path, way.body(prompt))
            except ServerError as error:
                self._was_away |= isinstance(error, LostError) or (
                    isinstance(error, StatusError) and error.status in AWAY
                )
                raise
            if self._was_away:
                await self._require_same_model()
            ended = at(reply, "meta_info", "finish_reason", "type") or at(reply, "choices", 0, "finish_reason")
            if ended in ("abort", "error"):
                raise AbortedError(f"server {self._server.url}: gave up on a completion (finish reason {ended!r})")
            return reply

        try:
            reply = await self._http.persistently(once)
        except StatusError as error:
            if error.status == 404 and self._server.kind == "openai":
                raise ServerError(
                    f"{error}; the server was asked for {self._server.model!r}, the model it listed: is another one "
                    f"served now?"
                ) from None
            raise
        completion = way.read(prompt, reply)
        if completion is not None:
            completion = Completion(completion.ids[: self._max_new_tokens], completion.retokenized)
        return completion, reply


@dataclass(frozen=True)
class _Way:
    """A request, and where in the answer to it the completion is; ``gives`` names that for messages."""

    path: str
    gives: str
    body: Callable[[Sequence[int]], dict[str, Any]]
    read: Callable[[Sequence[int], Any], Completion | None]


def _sglang_ways(
    server: Server, max_new_tokens: int, ignore_eos: bool, tokenizer: Any, sampling: Sampling
) -> list[_Way]:
    """``output_ids`` came with SGLang 0.5; before it the ids are in the log probabilities, when those are asked for.

    Field names: python/sglang/srt/managers/tokenizer_manager.py of sgl-project/sglang.
    """
    params = sampling.body | {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos} | NO_PENALTIES

    def body(prompt: Sequence[int]) -> dict[str, Any]:
        return {"input_ids": list(prompt), "sampling_params": params}

    def count(reply: Any) -> Any:
        return at(reply, "meta_info", "completion_tokens")

    def from_logprobs(reply: Any) -> Any:
        entries = at(reply, "meta_info", "output_token_logprobs")
        return [at(entry, 1) for entry in entries] if isinstance(entries, list) else None

    ways = [
        _Way(
            "/generate",
            "token ids in output_ids of /generate",
            body,
            lambda prompt, reply: _completion(at(reply, "output_ids"), count(reply)),
        ),
        _Way(
            "/generate",
            "token ids in meta_info.output_token_logprobs of /generate",
            lambda prompt: body(prompt) | {"return_logprob": True},
            lambda prompt, reply: _completion(from_logprobs(reply), count(reply)),
        ),
    ]
    if tokenizer is not None:
        ways.append(
            _Way(
                "/generate",
                "text of /generate",
                body,
                lambda prompt, reply: _from_text(prompt, at(reply, "text"), tokenizer),
            )
        )
    return ways


def _openai_ways(
    server: Server, max_new_tokens: int, ignore_eos: bool, tokenizer: Any, sampling: Sampling
) -> list[_Way]:
    """vLLM gives ``token_ids`` since 0.10.2, and before it ids in place of the text of log probabilities.

    Field names: vllm/entrypoints/openai/completion/protocol.py of vllm-project/vllm. ``transformers serve`` takes a
    string only and refuses every field that is not OpenAI's.
    """
    path = "/v1/completions"

    def plain(prompt: list[int] | str) -> dict[str, Any]:
        # transformers serve makes a repetition penalty of the frequency penalty, and takes the model's without one
        drawn = sampling.plain_body | {"frequency_penalty": 0.0}
        return {"model": server.model, "prompt": prompt, "max_tokens": max_new_tokens} | drawn

    def extended(prompt: Sequence[int]) -> dict[str, Any]:
        return plain(list(prompt)) | sampling.body | NO_PENALTIES | {"ignore_eos": ignore_eos}

    def text(prompt: Sequence[int], reply: Any) -> Completion | None:
        return _from_text(prompt, at(reply, "choices", 0, "text"), tokenizer)

    def count(reply: Any) -> Any:
        return at(reply, "usage", "completion_tokens")

    ways = [
        _Way(
            path,
            "token ids in choices[0].token_ids of /v1/completions",
            lambda prompt: extended(prompt) | {"return_token_ids": True},
            lambda prompt, reply: _completion(at(reply, "choices", 0, "token_ids"), count(reply)),
        ),
        _Way(
            path,
            "token ids in choices[0].logprobs.tokens of /v1/completions",
            lambda prompt: extended(prompt) | {"logprobs": 1, "return_tokens_as_token_ids": True},
            lambda prompt, reply: _completion(_numbered(at(reply, "choices", 0, "logprobs", "tokens")), count(reply)),
        ),
    ]
    if tokenizer is not None:
        ways += [
            _Way(path, "text in choices[0].text of /v1/completions", extended, text),
            _Way(
                path,
                "text in choices[0].text of /v1/completions",
                # a server that knows OpenAI's fields only cannot be told to ignore the end, and shall say so
                lambda prompt: plain(_prompt_text(prompt, tokenizer)) | ({"ignore_eos": True} if ignore_eos else {}),
                text,
            ),
        ]
    return ways


def _completion(ids: Any, count: Any) -> Completion | None:
    """``None`` unless ``ids`` are token ids, and no fewer than the ``count`` of tokens that came with them."""
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        return None
    return None if isinstance(count, int) and len(ids) < count else Completion(ids)


def _numbered(tokens: Any) -> list[int] | None:
    """The ids of ``["token_id:5", …]``."""
    if not isinstance(tokens, list):
        return None
    numbers = [_TOKEN_ID.fullmatch(str(token)) for token in tokens]
    return [int(number[1]) for number in numbers if number] if all(numbers) else None


def _from_text(prompt: Sequence[int], text: Any, tokenizer: Any) -> Completion | None:
    if not isinstance(text, str):
        return None
    text = _HALF_PAIR.sub("\ufffd", text).rstrip("\ufffd")
    together: list[int] = list(tokenizer(_decode(prompt, tokenizer) + text)["input_ids"])
    if together[: len(prompt)] == list(prompt):
        return Completion(together[len(prompt) :], retokenized=True)
    return Completion(list(tokenizer(text, add_special_tokens=False)["input_ids"]), retokenized=True)


def _prompt_text(prompt: Sequence[int], tokenizer: Any) -> str:
    """The text that a server with the same tokenizer reads as ``prompt``. Raises :class:`ServerError` without one."""
    text = _decode(prompt, tokenizer)
    if list(tokenizer(text)["input_ids"]) != list(prompt):
        raise ServerError(
            "a prompt has no text that the tokenizer reads as its token ids, so this server, which takes text only, "
            "cannot be asked; use a server that takes token ids (SGLang, vLLM) or leave --server out"
        )
    return text


def _decode(prompt: Sequence[int], tokenizer: Any) -> str:
    """The prompt's text, without a start token that the tokenizer would put before it again."""
    ids = list(prompt)
    added = list(tokenizer("")["input_ids"])
    if added and ids[: len(added)] == added:
        ids = ids[len(added) :]
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def at(answer: Any, *path: str | int) -> Any:
    """What stands at ``path`` in a parsed answer; ``None`` where the answer has another form."""
    for step in path:
        try:
            answer = answer[step]
        except (KeyError, IndexError, TypeError):
            return None
    return answer


async def _connect(base: str, model: str | None) -> Server:
    async with Http(base, timeout=PROBE_TIMEOUT) as http:
        return await _identify(http, base, model)


async def _identify(http: Http, base: str, model: str | None) -> Server:
    for path in ("/model_info", "/get_model_info"):  # SGLang's name since 2026, and before
        served = at(await _page(http, path), "model_path")
        if isinstance(served, str):
            if model is not None and model not in (served, served.rstrip("/").rpartition("/")[2]):
                raise ServerError(f"server {base}: serves {served}, not {model}")
            return Server(base, "sglang", served)
    listed = at(await _page(http, "/v1/models"), "data")
    cards = [card for card in listed if isinstance(at(card, "id"), str)] if isinstance(listed, list) else []
    if not cards:
        raise ServerError(f"server {base}: answers neither /model_info (SGLang) nor /v1/models (OpenAI-compatible)")
    card = _choose(base, cards, model)
    root = card.get("root")
    return Server(base, "openai", card["id"], root if isinstance(root, str) else None)


def _choose(base: str, cards: list[dict[str, Any]], model: str | None) -> dict[str, Any]:
    """The card of ``model``, else of the only model; adapters (with a ``parent``) and aliases are no second one."""
    names = ", ".join(card["id"] for card in cards)
    if model is not None:
        for card in cards:
            if model in (card["id"], card.get("root")):
                return card
        raise ServerError(f"server {base}: serves {names}, not {model}")
    whole = [card for card in cards if not card.get("parent")]
    if len({str(card.get("root") or card["id"]) for card in whole}) != 1:
        raise ServerError(f"server {base}: serves several models ({names}); start one that serves the target only")
    return whole[0]


async def _page(http: Http, path: str) -> Any:
    """The parsed answer; ``None`` when there is a server but not this page."""
    try:
        return await http.get(path)
    except StatusError as error:
        if error.status in (404, 405):
            return None
        raise
