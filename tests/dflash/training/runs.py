"""Whole runs in small: a random dense target, the texts it writes, and a config that trains on them in seconds."""

import copy
import json
import os
import random
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.probe import FEWEST_TOKENS, make_probe
from dflash.target import Target
from dflash.training import preparation, trainer
from dflash.training.metric_log import METRICS, read_metrics
from dflash.training.recording import probe_tokens
from dflash.training.run_config import RunConfig
from dflash.training.trainer import Outcome, train
from tests.dflash.pairs import write_drafter, write_prompts, write_target

STEPS = 8
"""Over 10 rows, so that the epoch ends within."""


@dataclass(frozen=True)
class TinyRun:
    """A config as a dictionary, under a directory of its own."""

    config: dict[str, Any]

    @property
    def output(self) -> Path:
        return Path(self.config["output"])

    def changed(self, **sections: Any) -> "TinyRun":
        """With other values: of a section those given, of anything else the whole."""
        config = copy.deepcopy(self.config)
        for name, values in sections.items():
            config[name] = {**config.get(name, {}), **values} if isinstance(values, dict) else values
        return TinyRun(config)

    def read(self) -> RunConfig:
        return RunConfig.from_dict(copy.deepcopy(self.config), source="run.yaml")

    def train(self) -> Outcome:
        """In this process."""
        return train(self.read())

    def train_elsewhere(self, world: int = 1, *, before: Callable[[], None] = lambda: None) -> list[int]:
        """In ``world`` processes; their exit codes. ``before`` is called in each, with what it patches patched there.

        Forked: importing takes longer than the run, and the backward pass of the CPU has no threads to lose.
        """
        port = free_port()
        processes = [
            get_context("fork").Process(target=self._as_rank, args=(rank, world, port, before)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [process.exitcode or 0 for process in processes]

    def _as_rank(self, rank: int, world: int, port: int, before: Callable[[], None]) -> None:
        if world > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        before()
        try:
            self.train()
        except BaseException:
            traceback.print_exc()
            raise

    def lines(self, kind: str = "train") -> list[dict[str, Any]]:
        """What the run logged, without what depends on the machine's speed."""
        lines = read_metrics(self.output / METRICS)
        return [
            {key: value for key, value in line.items() if key != "seconds"} for line in lines if line["kind"] == kind
        ]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines()]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def tiny_run(directory: Path) -> TinyRun:
    """A run over 10 short texts, two rows a step, which logs every step and saves every third."""
    write_target(directory / "target")
    write_drafter(directory / "drafter")
    write_prompts(directory / "prompts.jsonl", count=2)
    write_texts(directory / "data.jsonl", directory / "target", count=10)
    return TinyRun(
        {
            "output": str(directory / "output"),
            "seed": 1,
            "target": {"path": str(directory / "target"), "dtype": "float32", "device": "cpu"},
            "drafter": {"config": str(directory / "drafter" / "config.json"), "dtype": "float32"},
            "data": {"files": [str(directory / "data.jsonl")], "max_length": 64, "cache": str(directory / "samples")},
            "objective": {"num_anchors": 4, "gamma": 3.0, "noise": 0.05},
            "optimizer": {"learning_rate": 3e-3, "max_steps": STEPS, "rows": 2},
            "checkpoints": {"save_interval": 3, "keep_last": 9},
            "tracking": {"log_interval": 1, "tensorboard": False},
        }
    )


def write_texts(path: Path, target: Path, *, count: int) -> None:
    """Texts of several lengths that the target wrote greedily, as exact ids."""
    chance = random.Random(0)
    prompts = [[chance.randrange(2, 64) for _ in range(chance.randrange(3, 9))] for _ in range(count)]
    written = Target.load(target).generate_greedy(prompts, 30, ignore_eos=True)
    lines = (
        {"prompt_ids": prompt, "response_ids": own[: chance.randrange(8, 30)]}
        for prompt, own in zip(prompts, written, strict=True)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """The files of a run, made once for a module."""
    return tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(made: TinyRun, tmp_path: Path) -> TinyRun:
    """A run of its own output."""
    return made.changed(output=str(tmp_path / "output"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The probe is the same for every run here, and made token by token; the checks have tests of their own."""
    monkeypatch.setattr(preparation, "run_probe", _probe)
    monkeypatch.setattr(trainer, "preflight_checks", lambda **_: [])
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Of a checkpoint's drafter."""
    from safetensors.torch import load_file

    return load_file(path / "drafter.safetensors")


_KEPT: dict[tuple[str, tuple[int, ...]], Any] = {}


def _probe(target: Target, samples: Any, layers: tuple[int, ...]) -> Any:
    key = (target.path, tuple(layers))
    if key not in _KEPT:
        _KEPT[key] = make_probe(target, probe_tokens(samples, FEWEST_TOKENS), layers, fingerprint="of the target")
    return _KEPT[key]
