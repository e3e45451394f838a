"""Completions from servers that speak SGLang's, vLLM's and ``transformers serve``'s wire formats."""

import threading
import time
from pathlib import Path

import pytest

from dflash import completions
from dflash.completions import (
    Completion,
    ServerError,
    complete,
    connect,
    until_end,
)
from tests.dflash.servers import (
    ask,
    doubled,
    ids,
    sglang,
    transformers_serve,
    vllm,
    vllm_answer,
    vllm_card,
)

# --- what is asked, and what comes back


@pytest.mark.parametrize("routes", [sglang(), vllm()], ids=["sglang", "vllm"])
def test_token_ids_go_in_and_come_out_in_the_order_of_the_prompts(serve, routes):
    prompts = [[place, place + 1] for place in range(1, 30)]
    seen = []
    written = ask(serve(routes), prompts, progress=lambda *at: seen.append(at))
    assert written == ids(*(doubled(prompt) for prompt in prompts))
    assert seen == [(done, 29) for done in range(30)]


def test_the_order_is_kept_when_the_first_prompt_is_answered_last(serve):
    others = threading.Barrier(3)

    def generate(body):
        if body["input_ids"] != [9]:  # the first request finds out how to ask, the next three must be there at once
            others.wait(10)
        return sglang()["/generate"](body)

    assert ask(serve(sglang(generate=generate)), [[9], [1], [2], [3]], concurrency=3) == ids([18], [2], [4], [6])


def test_no_more_prompts_are_under_way_than_concurrency_says(serve):
    lock, under_way, most = threading.Lock(), 0, 0

    def generate(body):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.02)
        with lock:
            under_way -= 1
        return sglang()["/generate"](body)

    ask(serve(sglang(generate=generate)), [[place] for place in range(12)], concurrency=3)
    assert most == 3


def test_sglang_is_asked_natively_and_greedily(serve):
    server = serve(sglang())
    ask(server, [[5, 6]], max_new_tokens=7, ignore_eos=True)
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    sampling = {"temperature": 0.0, "max_new_tokens": 7, "ignore_eos": True} | penalties
    assert server.bodies("/generate") == [{"input_ids": [5, 6], "sampling_params": sampling}]


def test_other_servers_are_asked_by_the_openai_interface_under_their_own_model_name(serve):
    server = serve(vllm())
    ask(server, [[5, 6]], max_new_tokens=7)
    (body,) = server.bodies("/v1/completions")
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("served", [5, 6], 7)
    assert (body["temperature"], body["ignore_eos"], body["return_token_ids"]) == (0.0, False, True)
    assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (1.0, 0.0, 0.0)


def test_an_sglang_that_gives_text_is_asked_for_its_log_probabilities_once_and_then_always(serve):
    """Before ``output_ids`` the ids were in ``meta_info.output_token_logprobs``: [log probability, id, text]."""

    def generate(body):
        entries = [[-0.5, token, None] for token in doubled(body["input_ids"])]
        meta = {"completion_tokens": len(entries)} | (
            {"output_token_logprobs": entries} if body.get("return_logprob") else {}
        )
        return 200, {"text": "…", "meta_info": meta}

    server = serve(sglang(generate=generate))
    assert ask(server, [[1], [2], [3]], concurrency=1) == ids([2], [4], [6])
    assert [body.get("return_logprob", False) for body in server.bodies("/generate")] == [False, True, True, True]


def test_a_vllm_from_before_return_token_ids_gives_ids_as_the_tokens_of_log_probabilities(serve):
    def complete_(body):
        written = doubled(body["prompt"])
        asked = body.get("return_tokens_as_token_ids") and body.get("logprobs")
        logprobs = {"tokens": [f"token_id:{token}" for token in written]} if asked else None
        return 200, vllm_answer(written, logprobs=logprobs)

    assert ask(serve(vllm(complete_)), [[1, 2], [3]]) == ids([2, 4], [6])


def test_ids_that_are_fewer_than_the_server_counts_are_not_taken(serve):
    def generate(body):
        return 200, {"text": "…", "output_ids": [8], "meta_info": {"completion_tokens": 5}}

    with pytest.raises(ServerError, match="no token ids in output_ids"):
        ask(serve(sglang(generate=generate)), [[1]])


def test_short_and_empty_completions_come_as_they_are_and_long_ones_are_cut(serve):
    lengths = {1: 0, 2: 1, 3: 20}

    def generate(body):
        written = [7] * lengths[body["input_ids"][0]]
        meta = {"completion_tokens": len(written), "finish_reason": {"type": "stop", "matched": 7}}
        return 200, {"text": "", "output_ids": written, "meta_info": meta}

    assert ask(serve(sglang(generate=generate)), [[1], [2], [3]], max_new_tokens=8) == ids([], [7], [7] * 8)


def test_a_completion_ends_with_the_first_end_token():
    assert until_end([5, 7, 9, 7], frozenset({7, 9})) == [5, 7]
    assert until_end([5, 6], frozenset({7})) == [5, 6]
    assert until_end([5, 6], frozenset()) == [5, 6]


# --- servers that give text only


def test_a_server_of_text_is_asked_with_text_and_its_answers_are_tokenised_and_flagged(serve, tokenizer):
    prompts = [tokenizer(text)["input_ids"] for text in ("def add(a, b):", "class Model:", "def f(x):")]
    server = serve(transformers_serve(lambda prompt: f"\n    return {len(prompt)}"))
    written = ask(server, prompts, tokenizer=tokenizer, max_new_tokens=32)
    assert all(completion.retokenized for completion in written)
    assert [tokenizer.decode(prompt + one.ids) for prompt, one in zip(prompts, written, strict=True)] == [
        "def add(a, b):\n    return 14",
        "class Model:\n    return 12",
        "def f(x):\n    return 9",
    ]
    bodies = server.bodies("/v1/completions")
    greedy = {"temperature": 0.0, "frequency_penalty": 0.0}
    assert {"model": "m", "prompt": "def f(x):", "max_tokens": 32} | greedy in bodies
    assert sum(not isinstance(body["prompt"], str) for body in bodies) == 3, "only the first prompt tries other ways"


def test_a_server_that_takes_token_ids_but_gives_text_is_read_the_same_way(serve, tokenizer):
    prompt = tokenizer("def add(a, b):")["input_ids"]

    def complete_(body):
        return 200, {"choices": [{"index": 0, "text": " return a", "finish_reason": "stop"}]}

    (written,) = ask(serve(vllm(complete_)), [prompt], tokenizer=tokenizer)
    assert written == Completion(tokenizer(" return a")["input_ids"], retokenized=True)


def test_where_prompt_and_completion_merge_the_prompts_ids_stay(serve, tokenizer):
    """Tokenised together, "def r" + "eturn x" are other tokens than the prompt's own."""
    prompt, completion = tokenizer("def r")["input_ids"], "eturn x"
    together = tokenizer("def return x")["input_ids"]
    assert together[: len(prompt)] != prompt, "the fixture's tokenizer no longer merges here: choose another seam"
    (written,) = ask(serve(transformers_serve(lambda _: completion)), [prompt], tokenizer=tokenizer)
    assert written.ids == tokenizer(completion)["input_ids"]


def test_what_depends_on_the_text_before_is_tokenised_with_it(serve):
    """A sentencepiece-like tokenizer puts a space before every text, so a completion alone would get one too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3, "▁": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Split("c", "isolated")]
    )
    words.decoder = decoders.Metaspace(prepend_scheme="always")
    spaced = PreTrainedTokenizerFast(tokenizer_object=words)
    (written,) = ask(serve(transformers_serve(lambda prompt: "c b")), [[1]], tokenizer=spaced)
    assert written.ids == [3, 2]


def test_a_start_token_that_the_server_puts_itself_is_not_sent_twice(serve):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    starting = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    server = serve(transformers_serve(lambda prompt: " b"))
    assert ask(server, [starting("a")["input_ids"]], tokenizer=starting) == [Completion([2], retokenized=True)]
    assert server.bodies("/v1/completions")[-1]["prompt"] == "a"


def test_half_a_character_at_the_token_limit_is_left_out(serve, tokenizer):
    prompt = tokenizer("def f")["input_ids"]
    (written,) = ask(serve(transformers_serve(lambda _: "(x)\ufffd")), [prompt], tokenizer=tokenizer)
    assert tokenizer.decode(written.ids) == "(x)"


def test_an_empty_text_is_an_empty_completion(serve, tokenizer):
    prompt = tokenizer("def f")["input_ids"]
    assert ask(serve(transformers_serve(lambda _: "")), [prompt], tokenizer=tokenizer) == [Completion([], True)]


def test_a_prompt_that_no_text_stands_for_is_an_error_on_a_server_of_text(serve, tokenizer):
    pairs = ([one, other] for one in range(3, 300) for other in range(3, 300))
    strange = next(ids for ids in pairs if not round_trips(tokenizer, ids))
    with pytest.raises(ServerError, match="has no text that the tokenizer reads as its token ids"):
        ask(serve(transformers_serve(lambda _: "x")), [strange], tokenizer=tokenizer)


def round_trips(tokenizer, tokens):
    return tokenizer(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))["input_ids"] == tokens


def test_text_without_a_tokenizer_is_refused_with_what_to_do(serve):
    def complete_(body):
        return 200, {"choices": [{"index": 0, "text": "def"}]}

    with pytest.raises(ServerError, match=r"no token ids in choices\[0\].token_ids.*use a server that gives token ids"):
        ask(serve(vllm(complete_)), [[1]])
    with pytest.raises(ServerError, match=r"Unexpected fields.*use a server that gives token ids"):
        ask(serve(transformers_serve(lambda _: "x")), [[1]])


def test_a_server_that_cannot_ignore_the_end_says_so(serve, tokenizer):
    prompt = tokenizer("def f")["input_ids"]
    with pytest.raises(ServerError, match=r"Unexpected fields in the request: .'ignore_eos'"):
        ask(serve(transformers_serve(lambda _: "x")), [prompt], tokenizer=tokenizer, ignore_eos=True)


# --- which model


def test_the_report_can_name_what_was_served(serve):
    assert connect(serve(sglang()).url).model == "/models/Qwen3.6-27B"
    assert (connect(serve(vllm()).url).model, connect(serve(vllm()).url).root) == ("served", "/models/m")


def test_the_older_name_of_sglangs_page_is_known(serve):
    older = {("/get_model_info" if path == "/model_info" else path): route for path, route in sglang().items()}
    assert connect(serve(older).url).kind == "sglang"


def test_the_url_may_end_with_v1(serve):
    assert connect(serve(vllm()).url + "/v1/").kind == "openai"


def test_aliases_and_adapters_are_not_other_models(serve):
    cards = [vllm_card("a"), vllm_card("b"), vllm_card("lora", root="/adapters/x", parent="a")]
    assert connect(serve(vllm(cards=cards)).url).model == "a"


def test_among_several_models_the_wanted_one_must_be_named(serve):
    server = serve(vllm(cards=[vllm_card("a", root="/models/a"), vllm_card("b", root="/models/b")]))
    with pytest.raises(ServerError, match=r"serves several models \(a, b\)"):
        connect(server.url)
    assert connect(server.url, "b").model == connect(server.url, "/models/b").model == "b"
    with pytest.raises(ServerError, match="serves a, b, not c"):
        connect(server.url, "c")
    with pytest.raises(ServerError, match=r"serves /models/Qwen3\.6-27B, not c"):
        connect(serve(sglang()).url, "c")
    assert connect(serve(sglang()).url, "Qwen3.6-27B").kind == "sglang"


def test_a_model_that_is_no_longer_served_is_named(serve):
    server = serve(vllm())
    known = connect(server.url)
    gone = completions.Server(known.url, known.kind, "old-name")
    with pytest.raises(ServerError, match=r"404.*asked for 'old-name'.*is another one served now"):
        complete(gone, [[1]], max_new_tokens=4, ignore_eos=False, progress=lambda done, total: None)


# --- the real thing


@pytest.mark.slow
def test_transformers_serve_writes_what_the_target_writes(tiny_dense, tokenizer):
    from benchmarks.transformers_serve import agreement, running

    with running(tiny_dense.target) as url:
        same, tokens = agreement(url, tiny_dense.target, Path(tiny_dense.prompts), num_prompts=4, max_new_tokens=48)
    assert tokens == 4 * 48
    assert same >= 0.97 * tokens
