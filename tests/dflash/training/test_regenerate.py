"""``dflash data regenerate``: what is asked of what is written, and how an interrupted run goes on."""

import json
from types import SimpleNamespace

import pytest

from dflash import http_client
from dflash.target import load_tokenizer
from dflash.training.run_config import DataSection
from dflash.training.samples import load_samples
from tests.dflash.servers import first, sglang, transformers_serve, vllm, vllm_answer

END = 2  # <|im_end|> of the tiny tokenizer
ROWS = 512


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(http_client, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(http_client, "PATIENCE", 0.5)


@pytest.fixture(scope="module")
def tokenizer(tiny_hybrid):
    return load_tokenizer(str(tiny_hybrid.target))


@pytest.fixture
def run(run_dflash, tiny_hybrid, tmp_path):
    """The command over lines of prompts: its outcome, and the ``lines`` it wrote (None without a file)."""

    def run(server, *prompts, options=()):
        file, output = tmp_path / "prompts.jsonl", tmp_path / "text.jsonl"
        file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        outcome = run_dflash(
            *("data", "regenerate", "--prompts", file, "--server", server.url),
            *("--target", tiny_hybrid.target, "--output", output, *options),
        )
        lines = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else None
        return SimpleNamespace(**vars(outcome), lines=lines)

    return run


def raw(*texts):
    return [{"id": f"p{place}", "prompt": text} for place, text in enumerate(texts)]


def echo(body):
    """A vLLM's /v1/completions that writes the prompt backwards."""
    ids = body["prompt"][::-1]
    return 200, vllm_answer(ids, token_ids=ids)


def answering(ids):
    """An SGLang's /generate that answers everything with ``ids``."""
    meta = {"finish_reason": {"type": "stop"}, "completion_tokens": len(ids)}
    return lambda body: (200, {"output_ids": list(ids), "meta_info": meta})


def test_text_and_exact_ids_are_written_in_the_order_of_the_prompts(serve, run, tokenizer):
    prompts = raw("def f", "class A", "return x")
    answer = tokenizer(" spelt\n")["input_ids"]

    def generate(body):
        return answering([*answer, 60 + len(body["input_ids"]), END, 9, 9])(body)  # what is behind the end is not kept

    outcome = run(serve(sglang(generate=generate)), *prompts)
    assert outcome.returncode == 0, outcome.err
    ids = [tokenizer(prompt["prompt"])["input_ids"] for prompt in prompts]
    assert [line["id"] for line in outcome.lines] == ["p0", "p1", "p2"]
    assert [line["prompt_ids"] for line in outcome.lines] == ids
    assert [line["response_ids"] for line in outcome.lines] == [[*answer, 60 + len(one), END] for one in ids]
    for line, one in zip(outcome.lines, ids, strict=True):
        assert line["response"] == " spelt\n" + tokenizer.decode([60 + len(one)]), "without the end token"
        assert (line["prompt"], line["thinking"]) == (tokenizer.decode(one), None)


@pytest.mark.parametrize(
    "routes",
    [sglang(generate=lambda body: answering(body["input_ids"][::-1])(body)), vllm(echo)],
    ids=["sglang", "vllm"],
)
def test_training_reads_what_was_written_token_by_token(serve, run, tmp_path, tokenizer, routes):
    prompts = [*raw("def f", "x = 1"), {"id": "c", "messages": [{"role": "user", "content": "Hi"}]}]
    outcome = run(serve(routes), *prompts, options=("--thinking", "off"))
    assert outcome.returncode == 0, outcome.err
    data = DataSection(files=(tmp_path / "text.jsonl",), thinking=False, min_loss_tokens=1)
    samples = load_samples(data, tokenizer, cache=tmp_path / "cache", vocab_size=ROWS)
    for sample, line in zip(samples, outcome.lines, strict=True):
        assert sample.ids.tolist() == line["prompt_ids"] + line["response_ids"]
        assert sample.ids[sample.loss_mask].tolist() == line["response_ids"]


@pytest.mark.parametrize(("switch", "opened"), [("on", "<think>\n"), ("off", "<think>\n\n</think>\n\n")])
def test_chats_are_asked_through_the_template_in_the_mode_that_is_said(serve, run, tokenizer, switch, opened):
    server = serve(sglang(generate=answering([5, END])))
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "old"}]
    outcome = run(server, {"id": "c", "messages": chat}, options=("--thinking", switch))
    asked = tokenizer.decode(server.bodies("/generate")[0]["input_ids"])
    assert asked == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{opened}"
    (line,) = outcome.lines
    assert line["messages"] == chat[:1], "the answer that was there is replaced"
    assert line["thinking"] is (switch == "on")
    assert "1 chats had answers at their end" in outcome.out


def test_chats_without_a_mode_are_refused_before_the_server_is_asked(serve, run):
    server = serve(sglang())
    outcome = run(server, {"id": "c", "messages": [{"role": "user", "content": "Hi"}]})
    assert (outcome.returncode, server.requests) == (2, [])
    assert "--thinking" in outcome.err


def test_greedy_is_the_default_and_sampling_is_said_in_full(serve, run):
    """What a request leaves open, servers take from the model's generation config."""
    server = serve(sglang(generate=answering([5, END])))
    run(server, *raw("a"), options=("--max-new-tokens", 7))
    greedy = server.bodies("/generate")[0]["sampling_params"]
    assert (greedy["temperature"], greedy["max_new_tokens"], greedy["ignore_eos"]) == (0.0, 7, False)
    assert "top_p" not in greedy


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_sampling_goes_to_both_kinds_of_servers(serve, run, kind):
    server = serve({"sglang": sglang(), "vllm": vllm()}[kind])
    outcome = run(server, *raw("a"), options=("--temperature", 0.7, "--top-p", 0.8, "--top-k", 20))
    assert outcome.returncode == 0, outcome.err
    body = server.bodies({"sglang": "/generate", "vllm": "/v1/completions"}[kind])[0]
    body = body.get("sampling_params", body)
    drawn = {key: body[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    assert drawn == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize("options", [("--top-p", 0.9), ("--top-k", 5), ("--temperature", 1, "--top-k", 0)])
def test_sampling_settings_that_contradict_each_other_are_refused(serve, run, options):
    outcome = run(serve(sglang()), *raw("a"), options=options)
    assert (outcome.returncode, outcome.lines) == (2, None)
    assert "--top-" in outcome.err


def test_a_server_of_text_alone_is_taken_and_said_to_be_so(serve, run, tmp_path, tokenizer):
    outcome = run(serve(transformers_serve(lambda text: " spelt")), *raw("def f", "class A"))
    assert outcome.returncode == 0, outcome.err
    assert [line["retokenized"] for line in outcome.lines] == [True, True]
    assert "2 completions came as text only" in outcome.out
    data = DataSection(files=(tmp_path / "text.jsonl",), min_loss_tokens=1)
    assert load_samples(data, tokenizer, cache=tmp_path / "cache", vocab_size=ROWS).counts.retokenized == 2


def test_a_run_that_broke_off_goes_on_where_it_ended(serve, run, quick, tmp_path):
    prompts = raw(*(f"x = {number}" for number in range(12)))
    failing = (500, {"error": "out of memory"})
    answers = [answering([5, 60 + number, END]) for number in range(8)]
    outcome = run(serve(sglang(generate=first(*answers, failing))), *prompts, options=("--concurrency", 1))
    assert (outcome.returncode, outcome.lines) == (1, None)
    assert "8 of 12 prompts were done and are kept in" in outcome.err
    assert "the same command goes on from there" in outcome.err
    well = serve(sglang(generate=answering([6, END])))
    outcome = run(well, *prompts, options=("--concurrency", 3))
    assert outcome.returncode == 0, outcome.err
    assert len(well.bodies("/generate")) == 4
    own = [line["response_ids"] for line in outcome.lines]
    assert own == [[5, 60 + number, END] for number in range(8)] + [[6, END]] * 4


def test_the_one_prompt_that_a_server_does_not_take_is_named(serve, run):
    def short(body):
        if len(body["input_ids"]) > 20:
            return 400, {"error": {"message": "longer than the model's context length (20 tokens)"}}
        return answering([5, END])(body)

    long = {"id": "the long one", "prompt": "return x\n" * 40}
    outcome = run(serve(sglang(generate=short)), *raw("a", "b"), long, options=("--concurrency", 1))
    assert outcome.returncode == 1
    assert "context length (20 tokens)" in outcome.err
    assert "it was asked prompt 'the long one' of " in outcome.err
    assert "2 of 3 prompts were done" in outcome.err


def test_prompts_added_later_are_asked_alone(serve, run, tmp_path):
    server = serve(sglang(generate=answering([5, END])))
    run(server, *raw("a", "b"))
    (tmp_path / "text.jsonl").unlink()
    outcome = run(server, *raw("a", "b", "c"))
    assert len(outcome.lines) == 3
    assert len(server.bodies("/generate")) == 3


def test_completions_of_other_settings_are_not_mixed_in(serve, run, tmp_path):
    server = serve(sglang(generate=answering([5, END])))
    run(server, *raw("a"))
    (tmp_path / "text.jsonl").unlink()
    outcome = run(server, *raw("a"), options=("--temperature", 1))
    assert outcome.returncode == 1
    assert "sampling None, now" in outcome.err
    assert "give another --output" in outcome.err


def test_an_output_that_is_there_is_not_touched(serve, run, tmp_path):
    (tmp_path / "text.jsonl").write_text('"mine"\n')
    server = serve(sglang())
    outcome = run(server, *raw("a"))
    assert (outcome.returncode, outcome.lines, server.requests) == (1, ["mine"], [])
    assert "exists" in outcome.err


def test_several_prompts_are_under_way_and_each_is_asked_once(serve, run):
    server = serve(sglang(generate=answering([5, END])))
    outcome = run(server, *raw(*(f"x = {number}" for number in range(40))), options=("--concurrency", 7))
    assert len(outcome.lines) == len(server.bodies("/generate")) == 40


def test_a_token_that_the_target_does_not_have_is_refused_as_it_comes(serve, run, tmp_path):
    outcome = run(serve(sglang(generate=answering([600, END]))), *raw("a"))
    assert (outcome.returncode, outcome.lines) == (1, None)
    assert "wrote token 600" in outcome.err
    assert "512 rows" in outcome.err
    kept = (tmp_path / "text.jsonl.completions").read_text().splitlines()
    assert len(kept) == 1, "the settings; a completion of another model is not kept"


def test_the_number_of_prompts_can_be_limited_and_the_result_read_by_programs(serve, run):
    server = serve(vllm(lambda body: (200, vllm_answer([5, END], token_ids=[5, END]))))
    outcome = run(server, *raw("a", "b", "c"), options=("--num-prompts", 2, "--json"))
    said = json.loads(outcome.out)
    assert (said["samples"], said["tokens"], said["ended"], said["retokenized"]) == (2, 4, 2, 0)
    assert "[1/2] completions of 2 prompts" in outcome.err
