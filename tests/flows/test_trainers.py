"""Real trainers as jobs, ours and that of speculators: a few steps, and the operator's side killed in between."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tasks import jobs, process
from tasks.process import DEVNULL
from tests.flows.conftest import Operator
from tests.gate_talk import wait_for
from tests.prefect_api import REPOSITORY
from tests.tiny import FIXTURES

PEERS = REPOSITORY / ".venv-peers" / "bin" / "python"
SECONDS = 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ON_CPU = '''
"""speculators' trainer where there is no accelerator: the processor takes that place. It is not changed otherwise."""
import runpy, sys
import torch

for name in ("nms", "qnms"):  # PyPI's torchvision is built for CUDA, and transformers imports it for images
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else torch.device("cpu")
torch.accelerator.synchronize = lambda *_: None
torch.accelerator.is_available = lambda: False
torch.Tensor.pin_memory = lambda self, *_: self


def on_cpu(to):
    def moved(self, *where, **options):
        where = tuple("cpu" if type(one) is int else one for one in where)
        return to(self, *where, **{name: "cpu" if type(one) is int else one for name, one in options.items()})

    return moved


torch.nn.Module.to, torch.Tensor.to = on_cpu(torch.nn.Module.to), on_cpu(torch.Tensor.to)
sys.argv = ["speculators.train", *sys.argv[1:]]
runpy.run_module("speculators.train", run_name="__main__")
'''
FEATURES = '''
"""Prepared features as speculators' trainer reads them: token ids, and states of three taps and the last layer."""
import json, pathlib, sys
import torch
from datasets import Dataset
from safetensors.torch import save_file

out, target = pathlib.Path(sys.argv[1]), json.loads(pathlib.Path(sys.argv[2], "config.json").read_text())
(out / "hidden_states").mkdir(parents=True)
random, rows = torch.Generator().manual_seed(0), []
for number in range(8):
    ids = torch.randint(5, target["vocab_size"], (64,), generator=random)
    rows.append({"input_ids": ids.tolist(), "loss_mask": [1] * 64, "seq_len": 64})
    states = torch.randn(64, 4, target["hidden_size"], generator=random)
    save_file({"hidden_states": states, "token_ids": ids}, out / "hidden_states" / f"hs_{number}.safetensors")
Dataset.from_list(rows).with_format("torch").save_to_disk(out)
'''


@pytest.fixture
def remote(operator: Operator) -> Iterator[Path]:
    folder = operator.checkpoint.parents[1]
    yield folder
    for record in (folder / "jobs").glob("*/job.json"):
        with suppress(ProcessLookupError):
            os.killpg(json.loads(record.read_text())["pid"], signal.SIGKILL)


def launch_and_kill(api: str, file: Path, mark: str) -> str:
    """Launch ``file`` with ``--follow`` and, when its log shows ``mark``, kill who follows; the job's id."""
    shown = file.with_suffix(".shown")
    with shown.open("wb") as output:
        argv = [sys.executable, "-m", "flows", "launch", "--config", str(file), "--follow"]
        env = {**os.environ, "PREFECT_API_URL": api}
        following = process.start(argv, env=env, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(lambda: mark in shown.read_text() or following.poll() is not None, seconds=SECONDS)
        assert following.poll() is None, shown.read_text()
    finally:
        os.killpg(following.pid, signal.SIGKILL)
        following.wait()
    return shown.read_text().partition(" on ct129: launched")[0].splitlines()[-1]


def ended_well(operator: Operator, remote: Path, job: str) -> str:
    """Wait for the end of the job, which must be good; its log."""
    folder = remote / "jobs" / job
    wait_for((folder / "exit").exists, seconds=SECONDS)
    host = operator.connector.inventory.host("ct129")
    log = b"".join(jobs.logs(operator.connector, host, None, job)).decode()
    assert jobs.status(operator.connector, host, None, job).exit == 0, log
    return log


def run_file(folder: Path, **run: Any) -> Path:
    file = folder / "run.yaml"
    file.write_text(json.dumps({"name": "night", "host": "ct129", **run}))
    return file


def test_our_trainer_goes_on_when_the_operators_side_is_killed(
    operator: Operator, remote: Path, prefect_api: str, tmp_path: Path
) -> None:
    output = remote / "run"
    config = {
        "output": str(output),
        "target": {"path": str(FIXTURES / "tiny-hybrid"), "dtype": "float32", "kernel": "torch"},
        "drafter": {"config": str(REPOSITORY / "configs" / "tiny-drafter.json"), "dtype": "float32"},
        "data": {"files": [str(FIXTURES / "tiny-hybrid-text.jsonl")], "max_length": 608},
        "features": {"mode": "online"},
        "objective": {"num_anchors": 16},
        "optimizer": {"learning_rate": 3e-3, "max_steps": 6, "rows": 2},
        "checkpoints": {"save_interval": 2},
    }
    (tmp_path / "train.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "dflash", "train", "--config", "{config}"]
    env = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": 1}
    file = run_file(tmp_path, command=command, config="train.json", env=env)
    log = ended_well(operator, remote, launch_and_kill(prefect_api, file, "step_2"))
    assert "done: step 6 of 6" in log
    assert (output / "step_6" / "manifest.json").exists()


@pytest.mark.skipif(not PEERS.exists(), reason="no peers; make peers")
def test_the_trainer_of_speculators_goes_on_when_the_operators_side_is_killed(
    operator: Operator, remote: Path, prefect_api: str, tmp_path: Path
) -> None:
    features, target = remote / "features", FIXTURES / "tiny-dense"
    process.run([str(PEERS), "-c", FEATURES, str(features), str(target)], timeout=SECONDS)
    (tmp_path / "on_cpu.py").write_text(ON_CPU)
    settings = {
        "verifier-name-or-path": target,
        "data-path": features,
        "save-path": remote / "run",
        "log-dir": remote / "logs",
        "speculator-type": "dflash",
        "on-missing": "raise",
        "total-seq-len": 128,
        "num-layers": 1,
        "max-anchors": 8,
        "block-size": 4,
        "mask-token-id": 1,
        "draft-attn-impl": "eager",
        "loss-implementation": "eager",
        "optimizer": "adamw",
        "hidden-states-dtype": "float32",
        "num-workers": 0,
        "epochs": 3,
        "max-steps": 6,
    }
    command = [str(PEERS), "{script}", *(f"--{name}={value}" for name, value in settings.items())]
    command += ["--target-layer-ids", "2", "4", "6"]
    file = run_file(tmp_path, command=command, script="on_cpu.py", env={"OMP_NUM_THREADS": 1})
    ended_well(operator, remote, launch_and_kill(prefect_api, file, "No previous"))
    assert list((remote / "run").glob("**/*.safetensors"))
