"""Greedy reference completions from a running server, as token ids.

SGLang answers its native ``POST /generate``; every other server is asked through the OpenAI-compatible
``POST /v1/completions`` with token ids in and, as vLLM does it, token ids out. Text is never tokenised again here: that
can change the tokens, and with them every figure measured on them.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash.errors import DFlashError

TIMEOUT = 600.0
"""Seconds for one completion."""
PROBE_TIMEOUT = 10.0
"""Seconds to find out what kind of server it is."""


class ServerError(DFlashError):
    """The server that should write the reference completions is not there, or does not give token ids."""


@dataclass(frozen=True)
class Server:
    """A server and the interface it is asked through; ``model`` is what an OpenAI-compatible one calls its model."""

    url: str
    kind: Literal["sglang", "openai"]
    model: str | None = None


def connect(url: str) -> Server:
    """Find out what answers at ``url`` (with or without a trailing ``/v1``). Raises :class:`ServerError`."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ServerError(f"server {url}: expected a URL that begins with http:// or https://")
    for path in ("/model_info", "/get_model_info"):  # SGLang's name since 2026, and before
        if _get(base + path) is not None:
            return Server(base, "sglang")
    listing = _get(base + "/v1/models")
    model = _at(listing, "data", 0, "id")
    if isinstance(model, str):
        return Server(base, "openai", model)
    raise ServerError(f"server {url}: answers neither /model_info (SGLang) nor /v1/models (OpenAI-compatible)")


def complete(
    server: Server,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ignore_eos: bool,
    progress: Callable[[int, int], None],
) -> list[list[int]]:
    """Greedy completion of each prompt, up to where the server ends it. Raises :class:`ServerError`."""
    written = []
    for prompt in prompts:
        written.append(_ask(server, prompt, max_new_tokens, ignore_eos))
        progress(len(written), len(prompts))
    return written


def until_end(ids: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """``ids`` up to and including the first of ``eos_token_ids``."""
    for place, token in enumerate(ids):
        if token in eos_token_ids:
            return ids[: place + 1]
    return ids


def _ask(server: Server, prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool) -> list[int]:
    if server.kind == "sglang":
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
        reply = _post(f"{server.url}/generate", {"input_ids": list(prompt), "sampling_params": sampling})
        ids = _at(reply, "output_ids")
        where = "output_ids of /generate"
    else:
        body = {"model": server.model, "prompt": list(prompt), "max_tokens": max_new_tokens, "temperature": 0.0}
        reply = _post(f"{server.url}/v1/completions", body | {"ignore_eos": ignore_eos, "return_token_ids": True})
        ids = _at(reply, "choices", 0, "token_ids")
        where = "choices[0].token_ids of /v1/completions"
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ServerError(
            f"server {server.url}: no token ids in {where}; use a server that gives them (SGLang, vLLM ≥ 0.10) "
            f"or leave --server out and the target writes the completions"
        )
    return ids[:max_new_tokens]


def _at(answer: Any, *path: str | int) -> Any:
    """What stands at ``path`` in a parsed answer; ``None`` where the answer has another form."""
    for step in path:
        try:
            answer = answer[step]
        except (KeyError, IndexError, TypeError):
            return None
    return answer


def _post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 (http only)
    return _open(request, TIMEOUT)


def _get(url: str) -> Any:
    """The parsed answer; ``None`` when there is a server but not this page."""
    try:
        return _open(urllib.request.Request(url), PROBE_TIMEOUT)  # noqa: S310 (http only, checked by connect)
    except _StatusError:
        return None


class _StatusError(ServerError):
    """The server answered, with an error status."""


def _open(request: urllib.request.Request, timeout: float) -> Any:
    url = request.full_url
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:  # noqa: S310 (http only, checked by connect)
            answer = reply.read()
    except urllib.error.HTTPError as error:
        said = error.read(200).decode(errors="replace").strip().replace("\n", " ")
        raise _StatusError(f"server {url}: answered {error.code} {error.reason}: {said}") from None
    except TimeoutError:
        raise ServerError(f"server {url}: no answer within {timeout:.0f} s; is it overloaded?") from None
    except (http.client.InvalidURL, UnicodeError) as error:
        raise ServerError(f"server {url}: cannot be asked ({error}); expected http://host:port") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerError(f"server {url}: no answer ({reason}); is the server running there?") from None
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise ServerError(f"server {url}: the answer is not JSON; is this the model server?") from None
