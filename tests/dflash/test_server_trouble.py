"""Completions from servers that speak SGLang's, vLLM's and ``transformers serve``'s wire formats, and fail."""

import asyncio
import os
import signal
import threading
import time

import httpx
import pytest

from dflash import completions, http_client
from dflash.completions import (
    CompletionStore,
    ServerError,
    completion_settings,
    connect,
)
from dflash.http_client import Http
from tests.dflash.servers import (
    HANG_UP,
    CutChunks,
    CutShort,
    ask,
    first,
    ids,
    sglang,
    vllm,
    vllm_card,
)


@pytest.fixture
def quick(monkeypatch):
    """Retries after hundredths of a second, for up to half a second."""
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(http_client, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(http_client, "PATIENCE", 0.5)


# --- trouble that passes


@pytest.mark.parametrize(
    "trouble",
    [
        HANG_UP,
        (200, CutShort(b'{"output_ids": [1')),
        (200, CutChunks([b'{"output_ids"', b": [1"])),
        (429, {"error": "busy"}, {"Retry-After": "0"}),
        (500, b"CUDA error"),
        (503, b"loading", {"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"}),
        (408, b""),
        (200, {"text": "", "output_ids": [1], "meta_info": {"finish_reason": {"type": "abort", "message": "x"}}}),
    ],
    ids=["hang-up", "cut-body", "cut-chunks", "429", "500", "503", "408", "aborted"],
)
def test_trouble_that_passes_is_waited_out_and_costs_no_prompt(serve, quick, trouble):
    ordinary = sglang()["/generate"]
    server = serve(sglang(generate=first(ordinary, trouble, trouble, ordinary)))
    assert ask(server, [[1], [2], [3]], concurrency=1) == ids([2], [4], [6])
    assert len(server.bodies("/generate")) == 5


def test_retry_after_is_honoured(serve, quick):
    asked = []

    def generate(body):
        asked.append(time.monotonic())
        if len(asked) == 1:
            return 429, {"error": "busy"}, {"Retry-After": "0.3"}
        return sglang()["/generate"](body)

    ask(serve(sglang(generate=generate)), [[1]])
    assert asked[1] - asked[0] >= 0.3


def test_a_server_that_asks_for_more_patience_than_there_is_is_an_error_at_once(serve, quick):
    busy = serve(sglang(generate=lambda body: (429, {"error": "busy"}, {"Retry-After": "3600"})))
    with pytest.raises(ServerError, match="answered 429 Too Many Requests"):
        ask(busy, [[1]])
    assert len(busy.bodies("/generate")) == 1


def test_a_server_that_is_started_again_within_the_limit_is_survived(serve, monkeypatch, caplog):
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.02)
    down = threading.Lock()
    server = serve(sglang(generate=first(sglang()["/generate"], sglang()["/generate"], lambda body: stop())))

    def stop():
        if down.acquire(blocking=False):
            threading.Thread(target=restart).start()
        return HANG_UP

    def restart():
        server.close()
        time.sleep(0.2)
        serve(sglang(), server.port)

    prompts = [[place] for place in range(1, 12)]
    assert ask(server, prompts, concurrency=4) == ids(*([2 * place] for place in range(1, 12)))
    assert "trying again for up to 300 s" in caplog.text


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("answer", [HANG_UP, (503, b"starting")], ids=["lost", "503"])
def test_a_server_that_comes_back_with_another_model_is_an_error(serve, quick, kind, answer, tmp_path):
    """SGLang's answers do not name the model, and vLLM can serve another one under the same name."""
    other = {"model_path": "/models/other", "is_generation": True}
    card = {"object": "list", "data": [vllm_card("served", root="/models/other")]}
    routes = sglang() if kind == "sglang" else vllm()
    page, path = ("/model_info", "/generate") if kind == "sglang" else ("/v1/models", "/v1/completions")
    known, written = routes[page], routes[path]
    turns = iter([written, written, answer])

    def write(body):
        turn = next(turns, written)
        if turn is not answer:
            return turn(body)
        server_routes[page] = lambda body: (200, other if kind == "sglang" else card)
        return answer

    server_routes = routes | {page: known, path: write}
    server = serve(server_routes)
    store = CompletionStore.open(tmp_path / "c.jsonl", {})
    with pytest.raises(ServerError, match=r"/models/other.*; 2 of 5 prompts were done"):
        ask(server, [[place] for place in range(1, 6)], concurrency=1, store=store)
    assert len(store) == 2


# --- trouble that stays


def test_a_server_that_stays_dead_is_one_error_that_says_how_far_it_got(serve, quick, tmp_path):
    ordinary = sglang()["/generate"]
    dying = serve(sglang(generate=first(ordinary, ordinary, ordinary, HANG_UP)))
    prompts = [[place] for place in range(1, 9)]
    with pytest.raises(ServerError, match=r"no answer.*3 of 8 prompts were done, they are lost; with --cache DIR"):
        ask(dying, prompts)
    settings = completion_settings(connect(dying.url), max_new_tokens=8, ignore_eos=False)
    store = CompletionStore.open(tmp_path / "completions.jsonl", settings)
    dying = serve(sglang(generate=first(ordinary, ordinary, ordinary, HANG_UP)))
    with pytest.raises(ServerError, match=r"3 of 8 prompts were done, they are kept: the same command"):
        ask(dying, prompts, store=store)

    well = serve(sglang())
    seen = []
    again = CompletionStore.open(tmp_path / "completions.jsonl", settings)
    assert ask(well, prompts, store=again, progress=lambda *at: seen.append(at)) == ids(*([2 * n] for n in range(1, 9)))
    assert seen[0] == (3, 8)
    assert len(well.bodies("/generate")) == 5, "what was there is not asked again"
    assert ask(well, prompts, store=CompletionStore.open(tmp_path / "completions.jsonl", settings)) == ids(
        *([2 * n] for n in range(1, 9))
    )
    assert len(well.bodies("/generate")) == 5


def test_an_internal_error_that_comes_every_time_is_not_tried_for_minutes(serve, monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.001)
    broken = serve(sglang(generate=lambda body: (500, b"CUDA out\nof memory")))
    with pytest.raises(ServerError, match="answered 500 Internal Server Error: CUDA out of memory"):
        ask(broken, [[1]])
    assert len(broken.bodies("/generate")) == http_client.ATTEMPTS


@pytest.mark.parametrize("status", [401, 403, 404, 413])
def test_a_refusal_is_not_tried_again(serve, quick, status):
    refusing = serve(sglang(generate=lambda body: (status, {"detail": "no"})))
    with pytest.raises(ServerError, match=f"answered {status}"):
        ask(refusing, [[1], [2]])
    assert len(refusing.bodies("/generate")) == 1


def test_a_prompt_beyond_the_context_is_told_in_the_servers_words(serve, tokenizer):
    too_long = "This model's maximum context length is 2048 tokens. However, your prompt contains 3000"

    def complete_(body):
        return 400, {"error": {"message": too_long, "type": "BadRequestError", "param": "input_tokens", "code": 400}}

    with pytest.raises(ServerError, match="maximum context length is 2048 tokens"):
        ask(serve(vllm(complete_)), [tokenizer("def f")["input_ids"]], tokenizer=tokenizer)


def test_a_server_that_hangs_is_named_and_so_is_one_that_trickles(serve, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(completions, "TIMEOUT", 0.2)
    try:
        hanging = serve(sglang(generate=lambda body: released.wait(10) and (200, {})))
        with pytest.raises(ServerError, match="no answer within"):
            ask(hanging, [[1]])
        with pytest.raises(ServerError, match="no answer within"):
            ask(serve(sglang(generate=lambda body: (200, Trickle()))), [[1]])
    finally:
        released.set()


class Trickle(CutChunks):
    """A byte every 20 ms for two seconds."""

    def __iter__(self):
        for _ in range(100):
            time.sleep(0.02)
            yield b" "


@pytest.mark.parametrize(
    "answer",
    [[], {}, {"choices": {}}, {"choices": ["x"]}, {"choices": [{"token_ids": [True, "5"]}]}, {"choices": [None]}],
)
def test_an_answer_of_another_form_is_named(serve, answer):
    with pytest.raises(ServerError, match=r"no token ids in choices\[0\].token_ids"):
        ask(serve(vllm(lambda body: (200, answer))), [[1]])
    with pytest.raises(ServerError, match="answers neither /model_info"):
        connect(serve({"/v1/models": lambda body: (200, {"data": answer})}).url)


def test_an_answer_that_is_not_json_is_named(serve):
    with pytest.raises(ServerError, match="the answer is not JSON"):
        ask(serve(sglang(generate=lambda body: (200, b'{"output_ids": [1'))), [[1]])


@pytest.mark.parametrize("charset", ["hex", "rot13", "utf-16", "idna"])
def test_json_is_utf_8_whatever_the_header_says(charset):
    """httpx would hand the bytes to the named codec, and these raise what nobody expects of an answer."""
    typed = {"Content-Type": f"application/json; charset={charset}"}
    client = Http("http://127.0.0.1", timeout=1)
    for status in (200, 400):
        client._client = httpx.AsyncClient(
            transport=httpx.MockTransport(
                lambda request, status=status: httpx.Response(status, headers=typed, content=b'{"a": "\xc3\xa9"}')
            )
        )
        if status == 200:
            assert asyncio.run(client.get("/x")) == {"a": "é"}
        else:
            with pytest.raises(ServerError, match=r'answered 400 Bad Request: \{"a": "é"\}'):
                asyncio.run(client.get("/x"))


@pytest.mark.parametrize(
    "tokens",
    [["token_id:" + "9" * 5000], ["token_id:\u0661"], ["token_id:-1"], ["1", "2"]],
    ids=["long", "arabic", "negative", "text"],
)
def test_what_only_looks_like_token_ids_is_not_taken_for_them(serve, tokens):
    """Digits alone are the text of tokens, from a server that does not know ``return_tokens_as_token_ids``."""
    choice = {"index": 0, "text": "12", "logprobs": {"tokens": tokens}, "finish_reason": "length"}
    with pytest.raises(ServerError, match=r"no token ids in choices\[0\].logprobs.tokens"):
        ask(serve(vllm(lambda body: (200, {"choices": [choice]}))), [[1]])


def test_half_of_a_surrogate_pair_is_half_a_character(serve, tokenizer):
    prompt = tokenizer("def ")["input_ids"]
    answers = {"": "abc", "\ud83d": "abc\ud83d"}
    written = [
        ask(
            serve(sglang(generate=lambda body, text=text: (200, {"text": text, "meta_info": {}}))),
            [prompt],
            tokenizer=tokenizer,
        )
        for text in answers.values()
    ]
    assert written[0] == written[1]


def test_a_port_that_no_machine_has_is_named():
    with pytest.raises(ServerError, match=r"cannot be asked .*expected http://host:port"):
        connect("http://127.0.0.1:99999")


def test_a_retry_after_that_no_calendar_has_is_ignored():
    assert http_client._seconds("Fri, 31 Dec 2026 23:59:59 +99999999999999999999") is None


def test_an_answer_that_changes_its_form_in_the_middle_is_named(serve):
    changed = serve(sglang(generate=first(sglang()["/generate"], (200, {"text": "x", "meta_info": {}}))))
    with pytest.raises(ServerError, match="no token ids in output_ids of /generate, which it gave before"):
        ask(changed, [[1], [2]])


def test_something_else_on_the_port_is_named(serve):
    with pytest.raises(ServerError, match="answers neither /model_info"):
        connect(serve({}).url)
    with pytest.raises(ServerError, match="the answer is not JSON"):
        connect(serve({"/model_info": lambda body: (200, b"<html>")}).url)
    with pytest.raises(ServerError, match="answered 401"):
        connect(serve({"/model_info": lambda body: (401, {"error": "Unauthorized"})}).url)


def test_no_server_at_all_is_named():
    with pytest.raises(ServerError, match="is the server running there"):
        connect("http://127.0.0.1:9")
    with pytest.raises(ServerError, match="begins with http"):
        connect("localhost:30000")
    with pytest.raises(ServerError, match="server http://"):
        connect("http://[::1:30000")


def test_the_proxies_of_the_environment_are_not_between_this_machine_and_itself(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert ask(serve(sglang()), [[1]]) == ids([2])


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://localhost:30000", True),
        ("http://127.8.0.1", True),
        ("http://[::1]:8000", True),
        ("http://10.1.230.172:30000", False),
        ("http://localhost.example.org", False),
    ],
)
def test_what_this_machine_is(url, here):
    assert http_client.is_loopback(url) is here


def test_ctrl_c_ends_it_and_what_is_done_is_kept(serve, tmp_path):
    """The prompts under way are given up, and no thread is waited for."""
    released = threading.Event()

    def generate(body):
        if body["input_ids"] == [3]:
            os.kill(os.getpid(), signal.SIGINT)
            released.wait(10)
        return sglang()["/generate"](body)

    server = serve(sglang(generate=generate))
    store = CompletionStore.open(tmp_path / "completions.jsonl", {})
    before = set(threading.enumerate())
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(server, [[1], [2], [3], [4]], concurrency=1, store=store)
        new = {thread for thread in threading.enumerate() if not thread.daemon} - before
        assert not new
    finally:
        signal.signal(signal.SIGINT, previous)
        released.set()
    assert len(CompletionStore.open(tmp_path / "completions.jsonl", {})) == 2


def test_a_failure_cancels_what_is_under_way():
    cancelled = []

    async def work(item):
        if item == 0:
            await asyncio.sleep(0.01)
            raise ServerError("dead")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(ServerError, match="dead"):
        asyncio.run(http_client.each([0, 1, 2], work, concurrency=3))
    assert cancelled == [1, 2]
