"""Several ranks train as one would: two processes over gloo, with DDP and with sharded masters."""

import gc
import json
import os
import shutil
import weakref
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dflash import cli_train
from dflash.errors import UsageError
from dflash.training import snapshot, step, trainer
from dflash.training.distributed import ElsewhereError, Ranks
from dflash.training.training_state import TrainingState, read_state
from tests.dflash.training.runs import TinyRun, free_port, made, quick, run, weights

__all__ = ["made", "quick", "run"]


def _of(run: TinyRun, directory: Path, name: str, **sections: Any) -> TinyRun:
    return run.changed(output=str(directory / name), checkpoints={"save_interval": 1000}, **sections)


def test_two_ranks_give_the_losses_of_one_with_twice_the_rows(run: TinyRun, tmp_path: Path) -> None:
    one = _of(run, tmp_path, "one", optimizer={"rows": 2, "max_steps": 50})
    two = _of(run, tmp_path, "two", optimizer={"rows": 1, "max_steps": 50})
    assert one.train_elsewhere() == [0]
    assert two.train_elsewhere(world=2) == [0, 0]
    assert len(two.losses()) == 50
    assert two.losses() == pytest.approx(one.losses(), abs=1e-5)
    assert [line["blocks"] for line in two.lines()] == [line["blocks"] for line in one.lines()]


def test_sharded_masters_give_the_same_losses_and_a_whole_checkpoint(run: TinyRun, tmp_path: Path) -> None:
    optimizer = {"rows": 1, "accumulate": 2, "max_steps": 6}
    one = _of(run, tmp_path, "one", optimizer=optimizer | {"rows": 2})
    sharded = _of(run, tmp_path, "sharded", optimizer=optimizer, parallel={"strategy": "fsdp"})
    assert one.train_elsewhere() == [0]
    assert sharded.train_elsewhere(world=2) == [0, 0]
    assert sharded.losses() == pytest.approx(one.losses(), abs=1e-5)
    ours, theirs = (read_state(each.output / "step_6" / "training_state.pt") for each in (one, sharded))
    for name, master in ours.masters.items():
        torch.testing.assert_close(theirs.masters[name], master, atol=1e-5, rtol=0)
        for kind, value in ours.optimizer[name].items():
            torch.testing.assert_close(theirs.optimizer[name][kind], value, atol=1e-5, rtol=1e-3)


def test_masters_are_sharded_where_a_drafter_computes_in_bfloat16(run: TinyRun, tmp_path: Path) -> None:
    sections = {"drafter": {"dtype": "bfloat16"}, "target": {"dtype": "bfloat16"}}
    one = _of(run, tmp_path, "one", optimizer={"rows": 2, "max_steps": 6}, **sections)
    sharded = _of(
        run, tmp_path, "sharded", optimizer={"rows": 1, "max_steps": 6}, parallel={"strategy": "fsdp"}, **sections
    )
    assert one.train_elsewhere() == [0]
    assert sharded.train_elsewhere(world=2) == [0, 0]
    assert sharded.losses() == pytest.approx(one.losses(), abs=2e-3)
    masters = read_state(sharded.output / "step_6" / "training_state.pt").masters
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_ranks_go_on_to_the_last_bit(run: TinyRun, tmp_path: Path, strategy: str) -> None:
    def two(name: str, save_interval: int) -> TinyRun:
        return run.changed(
            output=str(tmp_path / name),
            optimizer={"rows": 1, "max_steps": 6},
            parallel={"strategy": strategy},
            checkpoints={"save_interval": save_interval},
        )

    whole, broken = two("whole", 1000), two("broken", 3)
    assert whole.train_elsewhere(world=2) == [0, 0]

    def interrupted() -> None:
        take = step.Steps.take

        def stopping(self: step.Steps, number: int, *, stop: bool) -> Any:
            return take(self, number, stop=number == 2 and self.ranks.rank == 1)

        step.Steps.take = stopping  # type: ignore[method-assign]  # in a process of its own

    assert broken.train_elsewhere(world=2, before=interrupted) == [0, 0]
    assert len(broken.losses()) == 3
    assert broken.train_elsewhere(world=2) == [0, 0]
    assert broken.lines() == whole.lines()
    for name, weight in weights(broken.output / "step_6").items():
        assert torch.equal(weight, weights(whole.output / "step_6")[name])


@pytest.mark.slow
def test_a_run_of_sharded_ranks_goes_on_as_one_in_the_middle_of_an_epoch(run: TinyRun, tmp_path: Path) -> None:
    def of(name: str, **optimizer: Any) -> TinyRun:
        return run.changed(output=str(tmp_path / name), optimizer=optimizer, checkpoints={"save_interval": 3})

    whole = of("whole", rows=2, max_steps=8)
    assert whole.train_elsewhere() == [0]
    two = of("broken", rows=1, max_steps=8).changed(parallel={"strategy": "fsdp"})
    assert two.train_elsewhere(world=2) == [0, 0]
    shutil.rmtree(two.output / "step_8")
    shutil.rmtree(two.output / "step_6")
    assert of("broken", rows=1, accumulate=2, max_steps=8).train_elsewhere() == [0]
    assert two.losses() == pytest.approx(whole.losses(), abs=1e-5)
    assert len(two.losses()) == 8


def test_a_rank_whose_rows_have_no_anchor_keeps_step_with_the_others(run: TinyRun, tmp_path: Path) -> None:
    data = tmp_path / "short.jsonl"
    data.write_text(
        '{"prompt_ids": [5, 6, 7], "response_ids": [8]}\n{"prompt_ids": [5, 6], "response_ids": [8, 9, 10, 11]}\n'
    )
    short = {"data": {"files": [str(data)], "min_loss_tokens": 1}, "optimizer": {"rows": 1, "max_steps": 3}}
    two = _of(run, tmp_path, "two", **short)
    assert two.train_elsewhere(world=2) == [0, 0]
    assert [line["anchorless"] for line in two.lines()] == [1, 2, 3]
    assert len(two.losses()) == 3
    one = _of(run, tmp_path, "one", **short | {"optimizer": {"rows": 2, "max_steps": 3}})
    assert one.train_elsewhere() == [0]
    assert two.losses() == pytest.approx(one.losses(), abs=1e-5)


def test_the_group_outlives_whatever_else_holds_it() -> None:
    """Else a rank hangs at its end, now and then: see ``_let_go_at_exit``."""

    def meets(rank: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with Ranks.joined("cpu") as ranks:
            group = weakref.ref(dist.group.WORLD)
            assert ranks.any(True)
        gc.collect()
        os._exit(0 if group() is not None else 1)

    port = free_port()
    processes = [get_context("fork").Process(target=meets, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]


def test_what_fails_on_the_first_rank_ends_the_others(run: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        snapshot.write_state = refuse  # type: ignore[assignment]  # in a process of its own

    two = run.changed(optimizer={"rows": 1, "max_steps": 2})
    assert two.train_elsewhere(world=2, before=full) == [1, 1]
    said = capfd.readouterr().err
    assert "DiskFullError" in said
    assert f"{ElsewhereError.__name__}: rank 0 failed: " in said


def test_one_process_needs_no_group() -> None:
    with Ranks.joined("cpu") as ranks:
        assert (ranks.rank, ranks.world, ranks.main) == (0, 1, True)
        assert ranks.first(lambda: 5) == ranks.in_turn(lambda: 5) == ranks.share(5) == 5
        assert ranks.any(True)
        assert not ranks.any(False)
        assert "MASTER_PORT" not in os.environ


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"target\.device is cuda, and torch sees no GPU"), Ranks.joined("cuda"):
        pass


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "mps"])
def test_a_device_that_is_none_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"target.device is {name}; expected auto, cpu, cuda"), Ranks.joined(name):
        pass


def test_the_outcome_is_printed_by_the_first_rank_alone(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = trainer.Outcome(step=2, total=2, stopped=False, skipped=0, checkpoint=None, best=None, tau=None)
    monkeypatch.setattr(trainer, "train", lambda _: outcome)
    (tmp_path / "run.yaml").write_text(json.dumps(run.config))
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        cli_train.train(tmp_path / "run.yaml")
    assert capsys.readouterr().out == "done: step 2 of 2\n"


def test_only_the_first_rank_keeps_the_training_state(run: TinyRun, tmp_path: Path) -> None:
    def kept() -> None:
        gather = TrainingState.gather

        def told(*arguments: Any, keep: bool, **named: Any) -> Any:
            state = gather(*arguments, keep=keep, **named)
            assert (state is not None) == (os.environ["RANK"] == "0")
            return state

        TrainingState.gather = told  # type: ignore[method-assign]  # in a process of its own

    two = _of(run, tmp_path, "two", optimizer={"rows": 1, "max_steps": 1})
    assert two.train_elsewhere(world=2, before=kept) == [0, 0]
