"""``dflash train`` from end to end, in small: what it writes, how it goes on, and how it ends."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.config import ConfigError, DrafterConfig
from dflash.manifest import read_manifest
from dflash.metric_replay import batch_metrics, read_replay
from dflash.probe import read_probe
from dflash.target import Target, TargetMismatchError
from dflash.training import checkpointing, preparation, snapshot, step
from dflash.training.checkpointing import DiskFullError, SaveError
from dflash.training.features import write_features
from dflash.training.metric_log import METRICS
from dflash.training.preflight import PreflightError
from dflash.training.resume import ResumeError
from dflash.training.run_config import RunConfigError
from dflash.training.samples import load_samples
from dflash.training.snapshot import NotFiniteRunError
from dflash.training.trainer import NothingSupervisedError
from dflash.training.training_state import read_state
from tests.dflash.training.runs import STEPS, TinyRun, made, quick, run, weights

__all__ = ["made", "quick", "run"]


@pytest.fixture(scope="module")
def whole(made: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run that nothing interrupted; its output is read, never written."""
    uninterrupted = made.changed(output=str(tmp_path_factory.mktemp("whole") / "output"))
    assert uninterrupted.train_elsewhere() == [0]
    return uninterrupted


def test_a_run_lowers_the_loss_and_leaves_whole_checkpoints(whole: TinyRun) -> None:
    losses = whole.losses()
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1
    for number in (3, 6, 8):
        checkpoint = read_checkpoint(whole.output / f"step_{number}")
        assert (checkpoint.format, checkpoint.step) == ("step", number)
        assert set(checkpoint.training) >= {"step", "loss", "accuracy", "streak1", "streak8", "kernel"}
    assert not list(whole.output.glob(".step_*"))


def test_a_checkpoint_holds_what_another_machine_needs_to_check_it(whole: TinyRun) -> None:
    path = whole.output / "step_8"
    checkpoint = read_checkpoint(path)
    assert checkpoint.probe is not None
    assert checkpoint.metric_replay is not None
    target = Target.load(whole.config["target"]["path"])
    drafter = build_drafter(checkpoint, device="cpu", dtype=torch.float32)
    batch = read_replay(checkpoint.metric_replay)
    assert batch_metrics(drafter, target, batch, None) == pytest.approx(batch.metrics, abs=1e-6)
    assert read_probe(checkpoint.probe).kernel == "none"
    manifest, _ = read_manifest(path)
    assert isinstance(manifest.recipe, dict)
    assert (manifest.recipe["loss"], manifest.recipe["gamma"]) == ("ce", 3.0)
    assert len(manifest.recipe["layer_rules"]) == 2
    assert manifest.metrics["loss"] == batch.metrics["loss"]
    raw = json.loads((path / "config.json").read_text())
    assert DrafterConfig.from_dict(raw, source="test") == checkpoint.config
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in path.iterdir())


def test_masters_are_what_the_saved_drafter_is_cast_from(run: TinyRun) -> None:
    half = run.changed(drafter={"dtype": "bfloat16"}, optimizer={"max_steps": 2})
    half.train()
    state = read_state(run.output / "step_2" / "training_state.pt")
    for name, weight in weights(run.output / "step_2").items():
        assert weight.dtype == torch.bfloat16
        assert state.masters[name].dtype == torch.float32
        assert torch.equal(state.masters[name].bfloat16(), weight)
        assert not torch.equal(state.masters[name].bfloat16().float(), state.masters[name]) or weight.ndim == 1


@pytest.mark.parametrize("at", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_resumed_the_losses_are_the_uninterrupted_runs_to_the_last_bit(
    whole: TinyRun, run: TinyRun, at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole.output / f"step_{at}", run.output / f"step_{at}")
    shutil.copy(whole.output / METRICS, run.output)  # with lines of steps that will be made again
    run.train()
    assert run.lines() == whole.lines()
    for name, weight in weights(run.output / "step_8").items():
        assert torch.equal(weight, weights(whole.output / "step_8")[name])
    assert f"going on from {run.output / f'step_{at}'}" in _said(capfd)


def test_of_a_damaged_checkpoint_the_one_before_is_taken_with_a_warning(
    whole: TinyRun, run: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    for at in (3, 6):
        shutil.copytree(whole.output / f"step_{at}", run.output / f"step_{at}")
    state = run.output / "step_6" / "training_state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    run.train()
    assert f"warning: {run.output / 'step_6'} is damaged and passed over" in _said(capfd)
    assert [line["loss"] for line in run.lines()] == whole.losses()[3:]
    assert read_checkpoint(run.output / "step_6").step == 6


def test_nothing_whole_is_not_begun_anew_in_silence(whole: TinyRun, run: TinyRun) -> None:
    shutil.copytree(whole.output / "step_3", run.output / "step_3")
    (run.output / "step_3" / "manifest.json").unlink()
    with pytest.raises(ResumeError, match="up to step 3, and none of them is whole"):
        run.train()


def test_resume_never_does_not_mix_two_runs(whole: TinyRun, run: TinyRun) -> None:
    shutil.copytree(whole.output / "step_3", run.output / "step_3")
    with pytest.raises(ResumeError, match="resume is never; choose another output"):
        run.changed(checkpoints={"resume": "never"}).train()


def test_a_changed_config_is_refused_by_the_name_of_the_key(whole: TinyRun, run: TinyRun) -> None:
    shutil.copytree(whole.output / "step_3", run.output / "step_3")
    with pytest.raises(ResumeError, match=r"optimizer\.learning_rate was 0\.003 and is 0\.1"):
        run.changed(optimizer={"learning_rate": 0.1}).train()
    other = Path(run.config["data"]["files"][0]).read_text().splitlines(keepends=True)[1:]
    (run.output / "other.jsonl").write_text("".join(other))
    with pytest.raises(ResumeError, match="data are not the same"):
        run.changed(data={"files": [str(run.output / "other.jsonl")]}).train()


def test_sigterm_saves_and_the_run_goes_on_as_if_nothing_had_been(
    whole: TinyRun, run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = step.Steps.take

    def interrupted(self: step.Steps, number: int, *, stop: bool) -> Any:
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, number, stop=stop)

    monkeypatch.setattr(step.Steps, "take", interrupted)
    outcome = run.train()
    # the step under way is finished, and the next one says that it is the last
    assert (outcome.step, outcome.stopped) == (6, True)
    assert read_checkpoint(Path(str(outcome.checkpoint))).step == 6
    monkeypatch.setattr(step.Steps, "take", take)
    assert run.train().step == STEPS
    assert run.lines() == whole.lines()


def test_sigterm_while_preparing_ends_at_once(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on after SIGTERM")

    monkeypatch.setattr(preparation, "load_samples", slow)
    outcome = run.train()
    assert (outcome.step, outcome.stopped, outcome.checkpoint) == (0, True, None)
    assert outcome.headline() == "stopped before the first step; what was there is as it was"
    assert not list(run.output.glob("step_*"))


@pytest.mark.parametrize(
    "where", ["write_state", *(pytest.param(name, marks=pytest.mark.slow) for name in ("record", "write_drafter"))]
)
def test_killed_while_saving_a_run_goes_on_from_the_checkpoint_before(
    whole: TinyRun, run: TinyRun, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    original, calls = getattr(snapshot, where), 0

    def killed(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*arguments, **named)
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, where, killed)
        assert run.train_elsewhere() == [-signal.SIGKILL]
    assert list(run.output.glob(".step_6.*"))
    assert not (run.output / "step_6").exists()
    run.train()
    assert run.lines() == whole.lines()
    assert not list(run.output.glob(".step_*"))


def test_a_full_disk_stops_the_run_and_keeps_the_last_good_checkpoint(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill_the_disk(monkeypatch, at={6})
    with pytest.raises(DiskFullError, match="step_6 could not be written: the disk is full"):
        run.train()
    assert [path.name for path in run.output.glob("*step_*")] == ["step_3"]
    assert read_checkpoint(run.output / "step_3").step == 3


def test_with_a_full_disk_a_run_goes_on_where_it_is_told_to(
    whole: TinyRun, run: TinyRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _fill_the_disk(monkeypatch, at={6})
    outcome = run.changed(checkpoints={"on_full_disk": "continue"}).train()
    assert "warning: " in _said(capfd)
    assert run.losses() == whole.losses()
    assert sorted(path.name for path in run.output.glob("*step_*")) == ["step_3", "step_8"]
    assert outcome.checkpoint == str(run.output / "step_8")


def test_a_run_does_not_end_well_without_its_last_checkpoint(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill_the_disk(monkeypatch, at={2})
    with pytest.raises(DiskFullError):
        run.changed(checkpoints={"on_full_disk": "continue"}, optimizer={"max_steps": 2}).train()


def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_batch(
    whole: TinyRun, run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_loss, calls = step.head_loss, 0

    def spoiled(hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return head_loss(hidden * torch.nan if calls == 5 else hidden, *arguments, **named)

    monkeypatch.setattr(step, "head_loss", spoiled)
    with pytest.raises(NotFiniteRunError, match="the loss of step 5 is not finite; nothing was updated"):
        run.train()
    (kept,) = (run.output / "not_finite").iterdir()
    checkpoint = read_checkpoint(kept)
    assert checkpoint.metric_replay is not None
    batch = read_replay(checkpoint.metric_replay)
    assert read_manifest(kept)[0].metrics["not_finite"]["samples"] != []
    assert len(batch.ids) == 2
    # what is kept are the weights before the step, and the run's own checkpoints are as they were
    assert not torch.equal(checkpoint.weights["fc.weight"], weights(run.output / "step_3")["fc.weight"])
    assert len(run.losses()) == 4
    monkeypatch.setattr(step, "head_loss", head_loss)
    run.train()
    assert run.lines() == whole.lines()


def test_an_update_that_ruins_the_drafter_is_not_saved(run: TinyRun) -> None:
    ruinous = run.changed(optimizer={"learning_rate": 1e30, "warmup_ratio": 0, "max_steps": 1})
    with pytest.raises(NotFiniteRunError, match="after its update the loss of step 1 on its own batch is not finite"):
        ruinous.train()
    assert not list(run.output.glob("*step_*"))


def test_a_gradient_that_is_not_a_number_updates_nothing(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = step.scale_gradients

    def spoiled(parameters: Any, factor: float) -> None:
        scale(parameters, torch.inf)

    monkeypatch.setattr(step, "scale_gradients", spoiled)
    with pytest.raises(NotFiniteRunError, match="the gradient of step 1 is not finite"):
        run.train()
    (kept,) = (run.output / "not_finite").iterdir()
    assert read_checkpoint(kept).step == 0


def test_a_text_without_an_anchor_is_counted_and_a_step_without_one_is_skipped(run: TinyRun) -> None:
    # of one token of the target's own there is no anchor with a label behind it
    text = [{"prompt_ids": [5, 6, 7], "response_ids": [8]}, {"prompt_ids": [5, 6], "response_ids": [8, 9, 10, 11, 12]}]
    data = run.output.parent / "short.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in text))
    short = run.changed(
        data={"files": [str(data)], "min_loss_tokens": 1}, optimizer={"rows": 1, "max_steps": 4}, objective={"noise": 0}
    )
    outcome = short.train()
    lines = short.lines()
    assert outcome.skipped == 2
    assert outcome.headline().endswith("2 steps had nothing supervised and updated nothing")
    assert [line["anchorless"] for line in lines][-1] == 2
    skipped = [line for line in lines if "loss" not in line]
    assert len(skipped) == 2
    assert all(line["blocks"] == 0 for line in skipped)
    assert all(torch.isfinite(weight).all() for weight in weights(short.output / "step_4").values())


def test_data_without_a_single_anchor_are_told_after_an_epoch(run: TinyRun) -> None:
    data = run.output.parent / "one.jsonl"
    data.write_text(5 * '{"prompt_ids": [5, 6, 7], "response_ids": [8]}\n')
    barren = run.changed(data={"files": [str(data)], "min_loss_tokens": 1}, optimizer={"rows": 2, "max_steps": 9})
    with pytest.raises(NothingSupervisedError, match="3 steps, and in none was there anything to learn"):
        barren.train()
    assert not list(run.output.glob("step_*"))


@pytest.mark.slow
def test_accumulated_micro_batches_are_one_batch(whole: TinyRun, run: TinyRun) -> None:
    accumulated = run.changed(optimizer={"rows": 1, "accumulate": 2, "max_steps": 4})
    accumulated.train()
    whole_four = run.changed(output=str(run.output.parent / "other"), optimizer={"max_steps": 4})
    whole_four.train()
    assert accumulated.losses() == pytest.approx(whole_four.losses(), abs=1e-5)


def test_tau_is_measured_and_the_best_checkpoint_is_kept(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Path(run.config["drafter"]["config"]).parents[1] / "prompts.jsonl"
    evaluation = {"prompts": str(prompts), "eval_interval": 2, "max_new_tokens": 12, "ignore_eos": True}
    taus = iter([1.5, 2.5, 2.0, 1.0])
    measure = preparation.HeldOut.measure

    def told(self: Any, *arguments: Any, **named: Any) -> Any:
        found = measure(self, *arguments, **named)
        assert 1.0 <= found.tau_pooled <= 6.0
        return found.model_copy(update={"tau_pooled": next(taus)})

    monkeypatch.setattr(preparation.HeldOut, "measure", told)
    kept = run.changed(evaluation=evaluation, checkpoints={"keep_last": 1, "save_interval": 3})
    outcome = kept.train()
    assert [line["tau"] for line in kept.lines("eval")] == [1.5, 2.5, 2.0, 1.0]
    # steps 2 and 4 were the best so far, 3 and 6 due, 8 the last
    assert sorted(path.name for path in run.output.glob("step_*")) == ["step_4", "step_8"]
    assert (outcome.tau, outcome.best) == (2.5, str(run.output / "step_4"))
    assert read_manifest(run.output / "step_4")[0].metrics["tau"] == 2.5


def test_a_check_that_fails_stops_the_run_before_the_first_step(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(preparation, "run_probe", lambda *_: None)
    config = json.loads(Path(run.config["drafter"]["config"]).read_text())
    wrong = run.output.parent / "config.json"
    wrong.write_text(json.dumps(config | {"max_position_embeddings": 16}))
    with pytest.raises(PreflightError, match="max-position"):
        run.changed(drafter={"config": str(wrong)}).train()
    said = _said(capfd)
    rows = [line.lower().split() for line in said.splitlines()]
    assert any({"max-position", "fail"} <= set(row) for row in rows)
    assert any({"context-strictly-before-anchor", "pass"} <= set(row) for row in rows)
    assert "parameters" in said
    assert not run.output.joinpath(METRICS).exists()
    allowed = run.changed(
        drafter={"config": str(wrong)}, preflight={"allow": ["max-position"]}, optimizer={"max_steps": 1}
    )
    assert allowed.train().step == 1


def test_a_warm_start_begins_with_the_checkpoints_weights(whole: TinyRun, run: TinyRun) -> None:
    warm = run.changed(drafter={"init": str(whole.output / "step_8")}, optimizer={"max_steps": 1})
    warm.train()
    assert warm.losses()[0] < whole.losses()[0]
    with pytest.raises(RunConfigError, match=r"drafter\.init: .* taps"):
        _with_config(run, "taps", dflash_config={"mask_token_id": 1, "target_layer_ids": [1, 3, 4]}).changed(
            drafter={"init": str(whole.output / "step_8")}
        ).train()
    with pytest.raises(RunConfigError, match=r"drafter\.init: .* has .* of shape"):
        _with_config(run, "wide", intermediate_size=64).changed(drafter={"init": str(whole.output / "step_8")}).train()


def test_a_checkpoint_that_cannot_be_removed_ends_no_run(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> None:
        raise SaveError(f"{path} could not be removed")

    monkeypatch.setattr(checkpointing, "_remove", refused)
    short = run.changed(checkpoints={"save_interval": 1, "keep_last": 1}, optimizer={"max_steps": 2})
    assert short.train().checkpoint == str(run.output / "step_2")
    assert f"warning: {run.output / 'step_1'} could not be removed" in _said(capfd)


def test_a_target_of_another_vocabulary_and_a_tap_on_its_last_block_are_refused(run: TinyRun) -> None:
    with pytest.raises(TargetMismatchError, match="vocab_size is 60"):
        _with_config(run, "other", vocab_size=60).train()
    with pytest.raises(ConfigError, match="target's last layer 7"):
        _with_config(run, "last", dflash_config={"mask_token_id": 1, "target_layer_ids": [1, 3, 7]}).train()


def _with_config(run: TinyRun, name: str, **changes: Any) -> TinyRun:
    config = json.loads(Path(run.config["drafter"]["config"]).read_text())
    path = run.output.parent / f"{name}.json"
    path.write_text(json.dumps(config | changes))
    return run.changed(drafter={"config": str(path)})


def _fill_the_disk(monkeypatch: pytest.MonkeyPatch, *, at: set[int]) -> None:
    """The state of these steps does not fit any more."""
    write = snapshot.write_state

    def full(path: Path, state: Any) -> None:
        if state.progress.step in at:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, state)

    monkeypatch.setattr(snapshot, "write_state", full)


def _said(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


def test_features_from_files_give_the_losses_of_the_target_beside_the_drafter(run: TinyRun, tmp_path: Path) -> None:
    online = run.changed(optimizer={"max_steps": 6}, objective={"loss": "kl", "temperature": 1.0})
    online.train()
    config = online.read()
    target = Target.load(config.target.path)
    samples = load_samples(config.data, target.tokenizer, cache=Path(str(config.data.cache)), vocab_size=64)
    write_features(tmp_path / "features", target, samples, (1, 3, 5), soft=True)
    offline = online.changed(
        output=str(tmp_path / "offline"), features={"mode": "offline", "directory": str(tmp_path / "features")}
    )
    offline.train()
    assert offline.losses() == pytest.approx(online.losses(), abs=1e-5)


def test_packed_rows_hold_several_texts_and_every_one_of_them_once_an_epoch(run: TinyRun) -> None:
    packed = run.changed(
        features={"packing": True}, objective={"num_anchors": 64}, optimizer={"rows": 8, "max_steps": 1}
    )
    packed.train()
    (together,) = packed.lines()
    apart = run.changed(
        output=str(run.output.parent / "apart"), objective={"num_anchors": 64}, optimizer={"rows": 10, "max_steps": 1}
    )
    apart.train()
    (alone,) = apart.lines()
    assert together["tokens"] < alone["tokens"] * 2
    assert together["blocks"] == alone["blocks"]
    assert together["loss"] == pytest.approx(alone["loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_compiled_drafter_gives_the_same_losses(whole: TinyRun, run: TinyRun) -> None:
    run.changed(parallel={"compile": True}).train()
    assert run.losses() == pytest.approx(whole.losses(), abs=1e-5)
