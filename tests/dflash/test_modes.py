"""Whole evaluations that decode, that find their states in a cache, that stream layers, and that ask a server."""

import json
import shutil

import pytest
import torch

from dflash import evaluate
from dflash.errors import UsageError
from dflash.hidden_states import CachedTaps
from dflash.progress import Phases
from dflash.request import Request
from dflash.target import Target
from tests.dflash.pairs import write_drafter, write_prompts, write_target
from tests.dflash.servers import Rounds, servers, speculating_sglang


@pytest.fixture(scope="module", params=[pytest.param("dense", marks=pytest.mark.slow), "hybrid"])
def files(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    write_target(directory / "target", hybrid=request.param == "hybrid")
    write_drafter(directory / "drafter")
    write_drafter(directory / "other", seed=1, taps=[1, 5])
    write_prompts(directory / "prompts.jsonl")
    return directory


@pytest.fixture
def run(files, tmp_path):
    """Measure with these changes: the report."""

    def measure(**changes):
        settings = {
            "target": files / "target",
            "checkpoint": files / "drafter",
            "prompts": files / "prompts.jsonl",
            "output": tmp_path / "report",
            "max_new_tokens": 24,
            "ignore_eos": True,
            "device": "cpu",
        }
        return evaluate.measure(Request(**(settings | changes)), Phases(5))[0]

    return measure


def figures(report):
    return report.metrics.model_copy(update={"lossless_prompts": None, "speedup": None})


def test_decoding_finds_what_the_replay_finds_and_times_it(run):
    decoded, replayed = run(mode="decode"), run()
    assert decoded.valid, decoded.invalid_because
    assert figures(decoded) == figures(replayed)
    assert decoded.metrics.lossless_prompts == 4
    assert [check.status for check in decoded.checks if check.name == "lossless"] == ["pass"]
    speedup = decoded.metrics.speedup
    rounds = speedup.draft + speedup.verify
    assert speedup.expected == pytest.approx(decoded.metrics.tau.pooled * speedup.step / rounds)
    assert [one.token_ids for one in decoded.prompts] == [one.token_ids for one in replayed.prompts]


def test_decoding_with_a_temperature_is_seeded_and_claims_no_greedy_completion(run):
    first, second = (run(mode="decode", temperature=1.5) for _ in range(2))
    assert first.prompts == second.prompts
    assert first.metrics.lossless_prompts is None
    assert "lossless" not in [check.name for check in first.checks]
    assert (first.settings.sampler, first.settings.temperature) == ("rejection", 1.5)
    assert [one.token_ids for one in first.prompts] != [one.token_ids for one in run().prompts]
    assert first.valid, first.invalid_because


def test_a_second_checkpoint_finds_its_states_and_completions_in_the_cache(run, files, tmp_path, monkeypatch):
    cold = run(cache=tmp_path / "cache")
    plain = run(checkpoint=files / "other")

    def none(*arguments, **settings):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", none)
    warm = run(checkpoint=files / "other", cache=tmp_path / "cache")
    assert figures(warm) == figures(plain), "taps 1 and 5 are among those cached for the first drafter"
    again = run(cache=tmp_path / "cache")
    assert figures(again) == figures(cold)
    assert [check.status for check in again.checks if check.name == "tap-source"] == ["pass"]
    assert [check.status for check in warm.checks if check.name == "tap-source"] == ["skipped"]


def test_streamed_layers_give_the_same_figures(run, tmp_path, monkeypatch):
    plain = run(cache=tmp_path / "writes")
    [home] = [path for path in (tmp_path / "writes").iterdir() if path.is_dir()]
    opened = []
    source = CachedTaps.source.fget
    monkeypatch.setattr(CachedTaps, "source", property(lambda self: opened.append(self) or source(self)))
    for entry in home.rglob("*.safetensors"):
        entry.unlink()  # the completions stay
    streamed = run(cache=tmp_path / "writes", offload=True)
    assert opened
    assert figures(streamed) == figures(plain)
    assert streamed.settings.offload
    assert streamed.settings.completion_agreement is None
    skipped = {check.name for check in streamed.checks if check.status == "skipped"}
    assert {"tap-source", "reference-agreement"} <= skipped


def test_streaming_refuses_what_would_read_the_weights_for_every_token(run):
    with pytest.raises(UsageError, match=r"--mode decode with --offload would take about .* 24 tokens"):
        run(mode="decode", offload=True)
    with pytest.raises(UsageError, match=r"cannot write the completions: that would take about .* with --server"):
        run(offload=True)


def test_options_that_exclude_each_other_are_wrong_usage(run, files, tmp_path):
    with pytest.raises(UsageError, match="say which with --server"):
        run(mode="served")
    with pytest.raises(UsageError, match="leave out --reference"):
        run(mode="served", server="http://server", reference=files / "other")
    with pytest.raises(UsageError, match="runs no model here"):
        run(mode="served", server="http://server", dtype="bfloat16")
    with pytest.raises(UsageError, match="needs --mode decode"):
        run(temperature=0.5)
    with pytest.raises(UsageError, match="no use for any"):
        run(mode="decode", temperature=0.5, server="http://server")
    with pytest.raises(UsageError, match="--sampler target-match needs --temperature"):
        run(mode="decode", sampler="target-match")


@pytest.mark.parametrize("temperature", [1e-320, 1e-4, 1e4, float("inf"), float("nan"), -1.0])
def test_a_temperature_that_leaves_no_distribution_is_wrong_usage(run, temperature):
    with pytest.raises(UsageError, match=r"expected 0 \(greedy\), or 0.001 to 1000"):
        run(mode="decode", temperature=temperature)


def test_sampling_writes_no_greedy_completions_first(run, monkeypatch):
    def none(*arguments, **settings):
        raise AssertionError("greedy completions were written")

    monkeypatch.setattr(Target, "generate_greedy", none)
    assert run(mode="decode", temperature=1e-3).prompts
    assert run(mode="decode", temperature=1e3, sampler="target-match").prompts


def test_what_the_likeliest_drafts_would_do_is_no_figure_beside_drawn_ones(run):
    drawn = run(mode="decode", temperature=1.5).metrics
    assert (drawn.random_anchor_tau, drawn.ddtree) == (None, None)
    likeliest = run(mode="decode", temperature=1.5, sampler="target-match").metrics
    assert likeliest.random_anchor_tau is not None
    assert likeliest.ddtree is not None


def test_a_cache_knows_what_ended_its_completions(run, files, tmp_path):
    shutil.copytree(files / "target", tmp_path / "target")
    settings = {"target": tmp_path / "target", "ignore_eos": False}
    before = run(cache=tmp_path / "cache", **settings)
    ends = before.prompts[0].token_ids[5]
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    after = run(cache=tmp_path / "cache", **settings)
    assert after.prompts == run(**settings).prompts
    assert after.prompts[0].token_ids[-1] == ends
    assert after.prompts[0].tokens < before.prompts[0].tokens


@pytest.mark.parametrize(("block", "warned"), [(4, ["served-block"]), (6, [])])
def test_a_server_with_another_block_than_the_checkpoint_is_a_warning(run, block, warned):
    rounds = Rounds({2: [3, 0, 2], 9: [3, 3], 16: [1], 23: [0]}, block=block)
    with servers() as start:
        report = run(mode="served", server=start(speculating_sglang(rounds)).url)
    assert report.metrics.rounds == 7
    assert report.settings.device == "the server's"
    assert [check.name for check in report.checks if check.status == "warn" and check.name != "served-alone"] == warned


def test_prompts_of_the_training_data_are_named_and_in_no_figure(run, files, tmp_path):
    lines = (files / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "training.jsonl").write_text(lines[-1] + "\n")
    report = run(training_data=tmp_path / "training.jsonl")
    assert report.left_out == ["p3"]
    assert [one.id for one in report.prompts] == ["p0", "p1", "p2"]
    (tmp_path / "training.jsonl").write_text("\n".join(lines) + "\n")
    assert torch.is_grad_enabled()
