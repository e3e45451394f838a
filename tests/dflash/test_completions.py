"""Completions from servers that speak SGLang's and vLLM's wire formats."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash import completions
from dflash.completions import ServerError, complete, connect, until_end


class WireServer:
    """Answers ``routes``: path → function of the request's JSON (None for GET) giving (status, answer)."""

    def __init__(self, routes):
        self.requests = []
        seen = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(None)

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body):
                seen.append((self.path, body))
                status, answer = routes[self.path](body) if self.path in routes else (404, {"detail": "Not Found"})
                payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                with suppress(ConnectionError):  # a client that gave up
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(payload)))
                    self.end_headers()
                    self.wfile.write(payload)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve():
    servers = []

    def start(routes):
        servers.append(WireServer(routes))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def doubled(prompt):
    return [2 * token for token in prompt]


def sglang_generate(body):
    ids = doubled(body["input_ids"])
    return 200, {"text": "…", "output_ids": ids, "meta_info": {"completion_tokens": len(ids)}}


def vllm_completions(body):
    ids = doubled(body["prompt"]) if body.get("return_token_ids") else None
    return 200, {"object": "text_completion", "choices": [{"index": 0, "text": "…", "token_ids": ids}]}


SGLANG = {"/get_model_info": lambda body: (200, {"model_path": "m"}), "/generate": sglang_generate}
VLLM = {
    "/v1/models": lambda body: (200, {"object": "list", "data": [{"id": "served-name"}]}),
    "/v1/completions": vllm_completions,
}


def ask(server, prompts, **changes):
    settings = {"max_new_tokens": 8, "ignore_eos": False, "progress": lambda done, total: None} | changes
    return complete(connect(server.url), prompts, **settings)


@pytest.mark.parametrize("routes", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_token_ids_go_in_and_come_out_in_the_order_of_the_prompts(serve, routes):
    prompts = [[place, place + 1] for place in range(1, 30)]
    seen = []
    assert ask(serve(routes), prompts, progress=lambda *at: seen.append(at)) == [doubled(prompt) for prompt in prompts]
    assert seen[-1] == (29, 29)


def test_sglang_is_asked_natively_and_greedily(serve):
    server = serve(SGLANG)
    ask(server, [[5, 6]], max_new_tokens=7, ignore_eos=True)
    path, body = server.requests[-1]
    assert path == "/generate"
    assert body == {
        "input_ids": [5, 6],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 7, "ignore_eos": True},
    }


def test_other_servers_are_asked_by_the_openai_interface_under_their_own_model_name(serve):
    server = serve(VLLM)
    ask(server, [[5, 6]], max_new_tokens=7)
    path, body = server.requests[-1]
    assert path == "/v1/completions"
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("served-name", [5, 6], 7)
    assert (body["temperature"], body["ignore_eos"], body["return_token_ids"]) == (0.0, False, True)


def test_the_url_may_end_with_v1(serve):
    assert connect(serve(VLLM).url + "/v1/").kind == "openai"


def test_a_server_that_gives_text_only_is_refused(serve):
    text_only = VLLM | {"/v1/completions": lambda body: (200, {"choices": [{"index": 0, "text": "def"}]})}
    with pytest.raises(ServerError, match=r"no token ids in choices\[0\].token_ids"):
        ask(serve(text_only), [[1]])


@pytest.mark.parametrize(
    "answer",
    [[], {}, {"choices": {}}, {"choices": ["x"]}, {"choices": [{"token_ids": [True, "5"]}]}, {"choices": [None]}],
)
def test_an_answer_of_another_form_is_named(serve, answer):
    with pytest.raises(ServerError, match=r"no token ids in choices\[0\].token_ids"):
        ask(serve(VLLM | {"/v1/completions": lambda body: (200, answer)}), [[1]])
    with pytest.raises(ServerError, match="answers neither /model_info"):
        connect(serve({"/v1/models": lambda body: (200, {"data": answer})}).url)


class CutShort(bytes):
    """Announced as 1000 bytes, sent as they are."""

    def __len__(self):
        return 1000


def test_an_answer_that_ends_too_soon_is_named(serve):
    dying = SGLANG | {"/generate": lambda body: (200, CutShort(b'{"output_ids": [1'))}
    with pytest.raises(ServerError, match="no answer"):
        ask(serve(dying), [[1]])


def test_an_error_of_the_server_is_quoted_in_one_line(serve):
    broken = SGLANG | {"/generate": lambda body: (500, b"CUDA out\nof memory")}
    with pytest.raises(ServerError, match="answered 500 Internal Server Error: CUDA out of memory"):
        ask(serve(broken), [[1]])


def test_something_else_on_the_port_is_named(serve):
    with pytest.raises(ServerError, match="answers neither /model_info"):
        connect(serve({}).url)
    with pytest.raises(ServerError, match="the answer is not JSON"):
        connect(serve({"/model_info": lambda body: (200, b"<html>")}).url)


def test_no_server_at_all_is_named():
    with pytest.raises(ServerError, match="is the server running there"):
        connect("http://127.0.0.1:9")
    with pytest.raises(ServerError, match="begins with http"):
        connect("localhost:30000")


def test_a_server_that_hangs_is_named(serve, monkeypatch):
    released = threading.Event()
    hanging = SGLANG | {"/generate": lambda body: released.wait(10) and (200, {})}
    monkeypatch.setattr(completions, "TIMEOUT", 0.2)
    try:
        with pytest.raises(ServerError, match="no answer"):
            ask(serve(hanging), [[1]])
    finally:
        released.set()


def test_a_completion_ends_with_the_first_end_token():
    assert until_end([5, 7, 9, 7], frozenset({7, 9})) == [5, 7]
    assert until_end([5, 6], frozenset({7})) == [5, 6]
    assert until_end([5, 6], frozenset()) == [5, 6]
