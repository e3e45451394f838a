"""τ of servers whose rounds are known: three prompts with rounds of 3, 0, 2 / 3, 3 / 1 accepted drafts, block 4."""

import itertools

import pytest

from dflash import vllm_counters
from dflash.completions import ServerError, connect
from dflash.metrics import NoRoundsError
from dflash.served import measure_served, served_metrics, served_rounds
from dflash.vllm_counters import Counters
from tests.dflash.servers import Rounds, SpeculatingVllm, first, sglang, speculating_sglang, vllm

PROMPTS = [("a", [1, 5]), ("b", [2, 5]), ("c", [3, 5])]
ROUNDS = {1: [3, 0, 2], 2: [3, 3], 3: [1]}
TOKENS = {"a": 1 + 8, "b": 1 + 8, "c": 1 + 2}
BY_ACCEPTED = [1, 1, 1, 3]


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(vllm_counters, "SETTLE", 0.2)
    monkeypatch.setattr(vllm_counters, "POLL", 0.01)


def measure(server, prompts=PROMPTS, **changes):
    settings = {"max_new_tokens": 64, "ignore_eos": False, "progress": lambda done, total: None} | changes
    return measure_served(connect(server.url), prompts, **settings)


SERVERS = {
    "sglang": lambda rounds: speculating_sglang(rounds),
    "sglang of 2025": lambda rounds: speculating_sglang(rounds, generation="old"),
    "vllm": lambda rounds: SpeculatingVllm(rounds).routes,
    "vllm by request": lambda rounds: SpeculatingVllm(rounds, by_request=True).routes,
}


@pytest.mark.parametrize("kind", SERVERS)
def test_rounds_tokens_and_positions_are_those_of_the_server(serve, kind):
    seen = []
    served = measure(serve(SERVERS[kind](Rounds(ROUNDS))), progress=lambda *at: seen.append(at))
    assert [(prompt.id, prompt.tokens, prompt.rounds) for prompt in served.prompts] == [
        ("a", 9, 3),
        ("b", 9, 2),
        ("c", 3, 1),
    ]
    assert [prompt.ids for prompt in served.prompts] == [[7] * 9, [7] * 9, [7] * 3]
    assert [(prompt.accepted, prompt.drafted) for prompt in served.prompts] == [(5, 9), (6, 6), (1, 3)]
    assert [prompt.tau for prompt in served.prompts] == [8 / 3, 4, 2]
    assert served_rounds(served) == {"a": (8, 3), "b": (8, 2), "c": (2, 1)}
    assert seen == [(1, 3), (2, 3), (3, 3)]

    metrics = served_metrics(served, ci95=(2.0, 4.0))
    assert metrics.tau.pooled == 18 / 6
    assert metrics.tau.macro == pytest.approx((8 / 3 + 4 + 2) / 3)
    assert metrics.tau.ci95 == (2.0, 4.0)
    assert (metrics.rounds, metrics.tokens, metrics.cut_rounds) == (6, 21, 0)
    assert metrics.histogram == BY_ACCEPTED
    assert metrics.accepted_by_position == [5, 4, 3]
    assert metrics.acceptance_by_position == [5 / 6, 4 / 6, 3 / 6]
    assert metrics.conditional_by_position == [5 / 6, 4 / 5, 3 / 4]
    assert (metrics.accuracy_by_position, metrics.streak, metrics.random_anchor_tau) == ([], {}, None)
    assert served.alone.status == "pass"


@pytest.mark.parametrize(("kind", "raw"), [("sglang", 21 / 6), ("vllm", 1 + 12 / 6)])
def test_the_servers_own_figure_is_kept_apart(serve, kind, raw):
    """SGLang counts the prefill's token, vLLM does not."""
    served = measure(serve(SERVERS[kind](Rounds(ROUNDS))))
    assert served.tau_raw == raw
    assert served.prompts[2].tau_raw == {"sglang": 3 / 1, "vllm": 1 + 1 / 1}[kind]


@pytest.mark.parametrize("kind", SERVERS)
def test_a_round_that_reaches_over_the_end_counts_with_what_it_emitted(serve, kind):
    served = measure(serve(SERVERS[kind](Rounds(ROUNDS))), max_new_tokens=7)
    assert served_rounds(served) == {"a": (6, 3), "b": (6, 2), "c": (2, 1)}
    metrics = served_metrics(served, ci95=None)
    assert metrics.tau.pooled == 14 / 6
    assert metrics.cut_rounds == 2
    if kind.startswith("vllm"):
        assert served.tau_raw == 1 + 12 / 6, "drafts beyond the end are among the accepted of its counters"


@pytest.mark.parametrize("kind", SERVERS)
def test_a_prompt_that_ended_with_its_first_token_has_no_round(serve, kind):
    served = measure(serve(SERVERS[kind](Rounds(ROUNDS | {4: []}))), [*PROMPTS, ("d", [4])])
    assert (served.prompts[3].tokens, served.prompts[3].rounds, served.prompts[3].tau) == (1, 0, None)
    assert "d" not in served_rounds(served)
    assert served_metrics(served, ci95=None).tau.pooled == 18 / 6


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_set_without_any_round_has_no_tau(serve, kind):
    served = measure(serve(SERVERS[kind](Rounds({4: []}))), [("d", [4])])
    with pytest.raises(NoRoundsError, match="no completion is longer than one token"):
        served_metrics(served, ci95=None)
    with pytest.raises(NoRoundsError):
        served.tau_raw  # noqa: B018 - it is the property that raises


def test_what_the_server_tells_of_itself_is_kept(serve):
    new, old = (serve(speculating_sglang(Rounds(ROUNDS), generation=generation)) for generation in ("new", "old"))
    for server in (new, old):
        facts = measure(server).facts
        assert facts["speculative_draft_model_path"] == "/models/drafter"
        assert (facts["version"], facts["speculative_num_draft_tokens"]) == ("0.5.9", 4)
    assert measure(serve(SpeculatingVllm(Rounds(ROUNDS)).routes)).facts == {"version": "0.32.0"}
    assert measure(serve(sglang(generate=speculating_sglang(Rounds(ROUNDS))["/generate"]))).facts == {}


def test_a_histogram_of_other_rounds_is_not_taken(serve):
    ordinary = speculating_sglang(Rounds(ROUNDS))

    def generate(body):
        status, answer = ordinary["/generate"](body)
        answer["meta_info"]["spec_correct_drafts_histogram"] = [100, 1]
        return status, answer

    metrics = served_metrics(measure(serve(ordinary | {"/generate": generate})), ci95=None)
    assert (metrics.histogram, metrics.accepted_by_position) == ([], [])
    assert metrics.tau.pooled == 3.0


def test_zeros_that_sglang_leaves_out_at_the_histograms_end_are_slots_all_the_same(serve):
    ordinary = speculating_sglang(Rounds({3: [1]}))

    def generate(body):
        status, answer = ordinary["/generate"](body)
        answer["meta_info"]["spec_correct_drafts_histogram"] = [0, 1]
        return status, answer

    metrics = served_metrics(measure(serve(ordinary | {"/generate": generate}), [("c", [3])]), ci95=None)
    assert metrics.histogram == [0, 1, 0, 0]
    assert metrics.accepted_by_position == [1, 0, 0]
    assert metrics.conditional_by_position == [1.0, 0.0, None]


def test_a_server_that_does_not_speculate_is_refused(serve):
    with pytest.raises(ServerError, match=r"no spec_verify_ct.*--speculative-algorithm DFLASH"):
        measure(serve(sglang()))
    plain = SpeculatingVllm(Rounds(ROUNDS))
    without = "\n".join(line for line in plain.metrics().splitlines() if "spec_decode" not in line) + "\n"
    routes = plain.routes | {"/metrics": lambda body: (200, without.encode())}
    with pytest.raises(ServerError, match=r"does not speculate.*--speculative-config"):
        measure(serve(routes))


def test_a_server_whose_rounds_cannot_be_read_is_refused(serve):
    with pytest.raises(ServerError, match=r"/metrics: answered 404"):
        measure(serve(vllm()))
    with pytest.raises(ServerError, match="has none of vLLM's counters"):
        measure(serve(vllm() | {"/metrics": lambda body: (200, b"# TYPE up gauge\nup 1.0\n")}))
    with pytest.raises(ServerError, match="is not in Prometheus' text format"):
        measure(serve(vllm() | {"/metrics": lambda body: (200, b"<html>not this</html>\n")}))


def test_counters_that_come_a_step_late_are_waited_for(serve, soon):
    served = measure(serve(SpeculatingVllm(Rounds(ROUNDS), lag=2).routes))
    assert served_rounds(served) == {"a": (8, 3), "b": (8, 2), "c": (2, 1)}
    assert served.alone.status == "pass"


def test_tokens_of_others_fail_the_check(serve, soon):
    served = measure(serve(SpeculatingVllm(Rounds(ROUNDS), foreign=1).routes))
    assert (served.alone.name, served.alone.status, served.alone.measured) == ("served-alone", "fail", 3)
    assert "(a, b, c); stop its other traffic" in served.alone.explanation


def test_a_server_that_answers_others_is_refused_before_anything_is_measured(serve, soon):
    server = SpeculatingVllm(Rounds(ROUNDS))
    server.running = 1
    with pytest.raises(ServerError, match=r"is answering others \(2 requests running or waiting\)"):
        measure(serve(server.routes))


def test_others_that_come_in_the_middle_fail_the_check(serve, soon):
    server = SpeculatingVllm(Rounds(ROUNDS))

    def others_come(body):
        server.running = int(body["prompt"] == [2, 5])
        return server.complete(body)

    served = measure(serve(server.routes | {"/v1/completions": others_come}))
    assert (served.alone.status, served.alone.measured) == ("fail", 2), "and c began while they were still there"


def test_others_do_no_harm_where_requests_are_counted_apart(serve, soon):
    served = measure(serve(SpeculatingVllm(Rounds(ROUNDS), foreign=5, by_request=True).routes))
    assert served_rounds(served) == {"a": (8, 3), "b": (8, 2), "c": (2, 1)}
    assert served.alone.status == "pass"


def test_a_prompt_that_was_disturbed_once_is_measured_again(serve, soon):
    server = SpeculatingVllm(Rounds(ROUNDS))

    def once_disturbed(body):
        server.foreign = 4 if len(seen) == 2 else 0
        seen.append(body)
        return server.complete(body)

    seen = []
    served = measure(serve(server.routes | {"/v1/completions": once_disturbed}))
    assert served.alone.status == "pass"
    assert served_rounds(served) == {"a": (8, 3), "b": (8, 2), "c": (2, 1)}
    assert len(seen) == 1 + 3 + 1, "one to find out how, three, and one of them twice"


def test_counters_that_start_again_are_a_disturbance_and_no_negative_figure(serve, soon):
    before, after = SpeculatingVllm(Rounds(ROUNDS)), SpeculatingVllm(Rounds(ROUNDS))
    for _ in range(5):
        before.complete({"prompt": [2], "max_tokens": 64})
    looks = first((200, before.metrics().encode()), lambda body: (200, after.metrics().encode()))
    served = measure(serve(after.routes | {"/metrics": looks}))
    assert served.alone.status == "pass"
    assert served_rounds(served) == {"a": (8, 3), "b": (8, 2), "c": (2, 1)}


def test_a_step_without_a_draft_is_a_round(serve):
    """vLLM counts no draft for it; its token is one of the completion's all the same."""
    server = SpeculatingVllm(Rounds(ROUNDS))
    server.rounds.tokens = lambda prompt, most: 9 + 2
    served = measure(serve(server.routes), [("a", [1])])
    assert (served.prompts[0].rounds, served.prompts[0].tau) == (3 + 2, 10 / 5)
    assert served.prompts[0].tau_raw == 8 / 3


def test_a_server_that_speculates_and_never_drafts_has_tau_one_and_no_positions(serve):
    server = SpeculatingVllm(Rounds({1: []}))
    server.rounds.tokens = lambda prompt, most: 5
    metrics = served_metrics(measure(serve(server.routes), [("a", [1])]), ci95=None)
    assert (metrics.tau.pooled, metrics.rounds, metrics.histogram) == (1.0, 4, [])


def test_an_answer_without_the_statistics_that_others_had_is_an_error(serve):
    server = SpeculatingVllm(Rounds(ROUNDS), by_request=True)

    def forgets(body):
        server.by_request = body["prompt"] != [3, 5]
        return server.complete(body)

    with pytest.raises(ServerError, match=r"no metrics.speculative_decoding.*2 of 3 prompts were measured"):
        measure(serve(server.routes | {"/v1/completions": forgets}), concurrency=1)


@pytest.mark.parametrize("name", ["num_spec_steps", "num_accepted_draft_tokens"])
def test_statistics_under_another_name_are_an_error_and_not_a_tau_of_one(serve, name):
    server = SpeculatingVllm(Rounds(ROUNDS), by_request=True)

    def renamed(body):
        status, answer = server.complete(body)
        statistics = answer["metrics"]["speculative_decoding"]
        statistics[f"{name}_total"] = statistics.pop(name)
        return status, answer

    with pytest.raises(ServerError, match=rf"has no number {name}, so its rounds cannot be read"):
        measure(serve(server.routes | {"/v1/completions": renamed}))


def test_an_sglang_that_verified_nothing_of_a_long_answer_does_not_speculate(serve):
    meta = {"completion_tokens": 5, "spec_verify_ct": 0}
    answer = {"text": "…", "output_ids": [7] * 5, "meta_info": meta}
    with pytest.raises(ServerError, match="does not speculate"):
        measure(serve(sglang(generate=lambda body: (200, answer))))


@pytest.mark.parametrize(
    "said", [{"spec_accept_histogram": [5, -4]}, {"spec_accept_histogram": [0, 1], "spec_draft_token_num": 10**12}]
)
def test_a_histogram_that_no_block_can_have_costs_neither_memory_nor_positions(serve, said):
    meta = {"completion_tokens": 3, "spec_verify_ct": 1} | said
    answer = {"text": "…", "output_ids": [7] * 3, "meta_info": meta}
    metrics = served_metrics(measure(serve(sglang(generate=lambda body: (200, answer)))), ci95=None)
    assert (metrics.tau.pooled, metrics.histogram) == (2.0, [0, 3] if len(said) == 2 else [])


def test_counters_that_start_again_every_time_fail_the_check_without_a_negative_figure(serve, soon):
    high, low = SpeculatingVllm(Rounds(ROUNDS)), SpeculatingVllm(Rounds(ROUNDS))
    for _ in range(5):
        high.complete({"prompt": [2], "max_tokens": 64})
    looks = itertools.cycle([high, low])
    served = measure(serve(low.routes | {"/metrics": lambda body: (200, next(looks).metrics().encode())}))
    assert served.alone.status == "fail"
    assert all(
        min(prompt.raw[0], prompt.accepted, prompt.drafted, *prompt.by_accepted) >= 0 for prompt in served.prompts
    )


def test_counters_of_other_things_may_be_nan():
    text = SpeculatingVllm(Rounds(ROUNDS)).metrics() + "# TYPE vllm:cache_hit_rate gauge\nvllm:cache_hit_rate NaN\n"
    assert Counters.parse("http://x", text).drafts == 0


def test_the_counters_of_all_engines_are_added_up():
    server = SpeculatingVllm(Rounds(ROUNDS))
    for prompt in ([1], [2], [3]):
        server.complete({"prompt": prompt, "max_tokens": 64})
    counters = Counters.parse("http://x", server.metrics())
    assert (counters.drafts, counters.drafted, counters.accepted, counters.generated) == (6, 18, 12, 21)
    assert counters.by_position == {0: 5, 1: 4, 2: 3}
