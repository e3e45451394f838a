"""Killed with SIGKILL at any moment, a run of the command goes on to the same figures and the same bytes."""

import random
import signal
import subprocess  # processes are killed
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from dflash.training.checkpointing import newest_whole
from tests.dflash.training.runs import TinyRun, tiny_run, weights

STEPS = 60


def _start(run: TinyRun) -> subprocess.Popen[bytes]:
    path = run.output.parent / f"{run.output.name}.yaml"
    path.write_text(yaml.safe_dump(run.config))
    return subprocess.Popen([sys.executable, "-m", "dflash", "train", "--config", str(path)])


def _long(tmp_path: Path, name: str) -> TinyRun:
    made = tiny_run(tmp_path / "made") if not (tmp_path / "made").exists() else None
    run = made or TinyRun(yaml.safe_load((tmp_path / "config.yaml").read_text()))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run.config))
    return run.changed(
        output=str(tmp_path / name),
        optimizer={"max_steps": STEPS},
        checkpoints={"save_interval": 2, "keep_last": 3, "keep_every": 20},
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_any_moment_the_losses_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    (tmp_path / "made").parent.mkdir(exist_ok=True)
    whole, broken = _long(tmp_path, "whole"), _long(tmp_path, "broken")
    assert _start(whole).wait() == 0
    chance, kills = random.Random(5), 0
    while True:
        before = len(broken.lines()) if (broken.output / "metrics.jsonl").exists() else 0
        process = _start(broken)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            lines = len(broken.lines()) if (broken.output / "metrics.jsonl").exists() else 0
            if kills < 5 and lines > before + 2:
                time.sleep(chance.random() * 0.3)  # anywhere in a step or a save
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        if process.wait() == 0:
            break
    assert kills == 5
    assert broken.lines() == whole.lines()
    found = newest_whole(broken.output, warn=lambda line: pytest.fail(line))
    assert found is not None
    assert found.path.name == f"step_{STEPS}"
    for name, weight in weights(found.path).items():
        assert torch.equal(weight, weights(whole.output / found.path.name)[name])
    assert sorted(path.name for path in broken.output.glob("*step_*")) == sorted(
        path.name for path in whole.output.glob("*step_*")
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sigterm_ends_the_command_with_code_0_and_a_checkpoint(tmp_path: Path) -> None:
    run = _long(tmp_path, "output").changed(optimizer={"max_steps": 100_000}, checkpoints={"save_interval": 10**6})
    process = _start(run)
    while process.poll() is None and not (run.output / "metrics.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    found = newest_whole(run.output, warn=lambda line: pytest.fail(line))
    assert found is not None
    assert len(run.lines()) == found.manifest.step
