"""Whole evaluations of random pairs, from files to a report directory."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash import completions, evaluate
from dflash import request as request_module
from dflash.checkpoints import read_checkpoint
from dflash.completion_store import Completion
from dflash.completions import Server
from dflash.errors import UsageError
from dflash.hidden_states import fingerprint
from dflash.metrics import SEED, judge, summarize
from dflash.output import OutputError
from dflash.progress import Phases
from dflash.prompts import read_prompts
from dflash.report import read_report
from dflash.request import Request
from dflash.target import Target, TargetMismatchError
from tests.dflash.pairs import write_drafter, write_prompts, write_target


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    write_target(directory / "target")
    write_drafter(directory / "drafter")
    write_drafter(directory / "other", seed=1, taps=[1, 5], block_size=4)
    write_prompts(directory / "prompts.jsonl")
    return directory


@pytest.fixture
def request_of(files, tmp_path):
    def make(**changes):
        settings = {
            "target": files / "target",
            "checkpoint": files / "drafter",
            "prompts": files / "prompts.jsonl",
            "output": tmp_path / "report",
            "max_new_tokens": 24,
            "ignore_eos": True,
            "device": "cpu",
            "kernel": "torch",
        }
        return Request(**(settings | changes))

    return make


def run(request):
    return evaluate.evaluate(request, Phases(5))


def rounds_of(directory: Path):
    return [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]


def test_the_report_directory_holds_what_was_measured(request_of):
    request = request_of()
    report = run(request)
    assert report.valid, report.invalid_because
    assert read_report(request.output / "report.json") == report
    assert (request.output / "report.md").read_text().startswith(f"# {report.headline()}")
    assert sorted(path.name for path in request.output.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
        "rounds.jsonl",
    ]
    assert not list(request.output.parent.glob(".report*"))
    assert report.target.class_name == "Qwen3ForCausalLM"
    assert report.target.dtype == "float32"
    assert report.settings.completion_agreement == 1.0
    assert [prompt.tokens for prompt in report.prompts] == [24] * 4
    assert list(report.timings) == ["tokenizer", "reference_completions", "hidden_states", "drafter", "blocks"]
    names = [check.name for check in report.checks]
    assert len(names) == len(set(names)) == 19
    assert {"tap-source", "independent-forward", "context-strictly-before-anchor", "gqa"} <= {
        check.name for check in report.checks if check.status == "pass"
    }


def test_the_figures_are_those_of_the_rounds_written_beside_them(request_of):
    request = request_of()
    report = run(request)
    written = {prompt.id: prompt.token_ids for prompt in report.prompts}
    lengths = {prompt.id: len(prompt.prompt.split()) for prompt in read_prompts(request.prompts).prompts}
    again = []
    for line in rounds_of(request.output):
        following = written[line["prompt"]][line["anchor"] - lengths[line["prompt"]] + 1 :][:6]
        assert line["right"] == following[:5] + [None] * (5 - len(following[:5]))
        ranks = [0 if rank is None else rank for rank in line["rank_of_right"]]
        again.append(judge(line["prompt"], line["anchor"], line["drafted"], ranks, following))
    assert [json.loads(json.dumps(one.to_dict())) for one in again] == rounds_of(request.output)
    expected = summarize(again, [], {}, seed=SEED)
    assert report.metrics.model_copy(update={"random_anchor_tau": None, "ddtree": None}) == expected
    assert list(report.metrics.ddtree) == ["8", "16", "64", "128", "256", "512"]


def test_a_hybrid_target_in_both_dtypes(request_of, tmp_path):
    hybrid = write_target(tmp_path / "hybrid", hybrid=True)
    report = run(request_of(target=hybrid))
    assert report.valid, report.invalid_because
    assert (report.target.class_name, report.target.kernel) == ("Qwen3_5ForCausalLM", "torch")
    half = run(request_of(target=hybrid, dtype="bfloat16", output=tmp_path / "half"))
    assert half.target.dtype == "bfloat16"


def test_the_reference_is_measured_on_the_same_completions_with_its_own_taps(request_of, files, tmp_path):
    report = run(request_of(checkpoint=files / "other", reference=files / "drafter"))
    alone = run(request_of(output=tmp_path / "alone"))
    assert report.reference_metrics == alone.metrics
    assert report.reference.path == str(files / "drafter")
    assert report.comparison.difference == report.metrics.tau.pooled - alone.metrics.tau.pooled
    assert report.invalid_because == ["taps-as-reference"]
    assert (tmp_path / "report" / "report.json").exists()
    assert report.headline() == "not valid: taps-as-reference"


def test_completions_end_at_the_end_token_unless_it_is_ignored(request_of, monkeypatch, tmp_path):
    """The target's own completions, with one of their tokens declared the end of sequence."""
    full = run(request_of())
    end = full.prompts[0].token_ids[7]
    monkeypatch.setattr(Target, "eos_token_ids", property(lambda self: frozenset({end})))
    cut = run(request_of(ignore_eos=False, output=tmp_path / "cut"))
    for long, short in zip(full.prompts, cut.prompts, strict=True):
        stop = long.token_ids.index(end) + 1 if end in long.token_ids else len(long.token_ids)
        assert short.token_ids == long.token_ids[:stop]
    assert cut.metrics.tokens == sum(prompt.tokens for prompt in cut.prompts if prompt.tokens > 1)


def test_completions_of_a_server_are_measured_as_the_targets_own(request_of, monkeypatch, tmp_path):
    own = run(request_of())
    replies = {prompt.id: prompt.token_ids for prompt in own.prompts}
    monkeypatch.setattr(completions, "connect", lambda url: Server(url, "sglang"))
    monkeypatch.setattr(completions, "complete", lambda *asked, **settings: list(map(Completion, replies.values())))
    served = run(request_of(server="http://server", output=tmp_path / "served"))
    assert served.metrics == own.metrics
    assert served.settings.completions == "http://server"
    assert served.settings.completion_agreement == 1.0
    replies["p0"] = [*replies["p0"][:-1], (replies["p0"][-1] + 1) % 64]
    other = run(request_of(server="http://server", output=tmp_path / "other"))
    assert other.settings.completion_agreement == 1 - 1 / (4 * 24)


def test_what_a_server_wrote_behind_the_end_token_is_left_out(request_of, monkeypatch, tmp_path):
    full = run(request_of())
    end = full.prompts[0].token_ids[7]
    monkeypatch.setattr(Target, "eos_token_ids", property(lambda self: frozenset({end})))
    monkeypatch.setattr(completions, "connect", lambda url: Server(url, "sglang"))
    replies = [prompt.token_ids for prompt in full.prompts]
    monkeypatch.setattr(completions, "complete", lambda *asked, **settings: list(map(Completion, replies)))
    served = run(request_of(server="http://server", ignore_eos=False, output=tmp_path / "served"))
    assert served.prompts[0].token_ids == completions.until_end(replies[0], frozenset({end}))
    assert served.prompts[0].tokens <= 8


def test_a_drafter_that_is_worse_than_the_reference_is_below_it(request_of, tiny_dense, tmp_path):
    raw = json.loads((tiny_dense.drafter / "config.json").read_text())
    report = run(
        request_of(
            target=tiny_dense.target,
            checkpoint=write_drafter(tmp_path / "random", **raw),
            reference=tiny_dense.drafter,
            prompts=tiny_dense.prompts,
            num_prompts=4,
        )
    )
    assert report.valid, report.invalid_because
    assert report.comparison.difference == report.metrics.tau.pooled - report.reference_metrics.tau.pooled
    assert report.comparison.ci95[1] < -1


def test_num_prompts_and_max_blocks(request_of):
    report = run(request_of(num_prompts=2, max_blocks=3))
    assert [prompt.id for prompt in report.prompts] == ["p0", "p1"]
    assert report.metrics.rounds == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the target .* has 32"),
        ({"num_target_layers": 12}, "num_target_layers is 12, the target .* has 8"),
    ],
)
def test_a_drafter_of_another_target_is_refused(request_of, tmp_path, change, message):
    with pytest.raises(TargetMismatchError, match=message):
        run(request_of(checkpoint=write_drafter(tmp_path / "drafter", **change)))
    assert not (tmp_path / "report").exists()


def test_a_config_borrowed_from_the_reference_is_a_warning(request_of, files, monkeypatch):
    borrowed = replace(read_checkpoint(files / "drafter"), config_source="reference")
    monkeypatch.setattr(request_module, "read_checkpoint", lambda path, **sources: borrowed)
    report = run(request_of())
    assert report.valid
    assert [check.status for check in report.checks if check.name == "config-source"] == ["warn"]


def test_what_the_checkpoint_says_of_its_training_is_in_the_report(request_of, files, monkeypatch):
    said = {"step": 400, "loss": 1.5, "accuracy": "high", "recipe": "paper"}
    checkpoint = replace(read_checkpoint(files / "drafter"), training=said)
    monkeypatch.setattr(request_module, "read_checkpoint", lambda path, **sources: checkpoint)
    training = run(request_of()).training.model_dump(exclude_none=True)
    assert training == {"step": 400, "loss": 1.5, "recipe": "paper"}


def test_an_output_in_use_is_refused_before_anything_runs(request_of, tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "kept").write_text("mine")
    with pytest.raises(OutputError, match="is not an empty directory"):
        run(request_of(target=tmp_path / "none"))
    assert (tmp_path / "report" / "kept").read_text() == "mine"


def test_an_output_that_somebody_else_filled_meanwhile_is_theirs(request_of, tmp_path, monkeypatch):
    measure = evaluate.measure

    def slowly(*arguments):
        measured = measure(*arguments)
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / "kept").write_text("theirs")
        return measured

    monkeypatch.setattr(evaluate, "measure", slowly)
    with pytest.raises(OutputError, match="was filled by somebody else meanwhile"):
        run(request_of(num_prompts=1))
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert (tmp_path / "report" / "kept").read_text() == "theirs"


def test_an_output_may_be_a_link_or_the_current_directory(request_of, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    run(request_of(output=tmp_path / "link", num_prompts=1))
    assert (tmp_path / "elsewhere" / "report.json").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(request_of(output=Path("."), num_prompts=1))
    assert (tmp_path / "here" / "report.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "here", "link"]


def test_a_full_disk_leaves_nothing_behind(request_of, tmp_path, monkeypatch):
    def full(self, *args, **settings):
        self.touch()
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match=r"could not be written \(No space left on device\); nothing was left"):
        run(request_of())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing_behind(request_of, tmp_path, monkeypatch):
    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(request_of())
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_wrong_usage(request_of):
    for name in ("nonsense", "mps"):
        with pytest.raises(UsageError, match="expected auto, cpu, cuda"):
            run(request_of(device=name))
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA device"):
            run(request_of(device="cuda"))


def test_the_fingerprint_tells_weights_apart(files, tmp_path):
    first = fingerprint(files / "target")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((files / "target" / name).read_bytes())
    assert fingerprint(tmp_path) == first
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert fingerprint(tmp_path) != first
