"""``dflash data features``: a run's config becomes a directory that the run can train from."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from dflash.target import Target
from dflash.training.feature_store import read_index
from dflash.training.features import OnlineFeatures, StoredFeatures
from dflash.training.run_config import RunConfig
from dflash.training.samples import load_samples
from tests.dflash.pairs import DRAFTER, write_target

Run = Callable[..., SimpleNamespace]
LINES = [
    {"prompt_ids": list(range(2, 2 + count)), "response_ids": [*range(10, 40), *range(20, 20 + count)]}
    for count in (5, 9, 3, 17)
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "drafter.json").write_text(json.dumps(DRAFTER))
    return run_file(tmp_path, write_target(tmp_path / "target"))


def run_file(directory: Path, target: Path, **sections: object) -> Path:
    """The YAML of a run whose files lie in ``directory``; ``sections`` replace its own."""
    run = {
        "output": str(directory / "run"),
        "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "drafter": {"config": str(directory / "drafter.json")},
        "data": {"files": [str(directory / "text.jsonl")], "max_length": 60},
        "features": {"mode": "offline", "directory": str(directory / "features")},
        "objective": {"gamma": 4.0},
        "optimizer": {"max_steps": 1},
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(run | sections))
    return path


def test_what_it_writes_is_what_the_run_reads(config: Path, run_dflash: Run) -> None:
    done = run_dflash("data", "features", "--config", config, "--json")
    assert done.returncode == 0, done.err
    said = json.loads(done.out)
    assert (said["samples"], said["layer_ids"], said["last_hidden_states"]) == (4, [1, 3, 5], False)
    assert (said["shards"], said["total"], said["already"], said["dtype"]) == (1, 1, 0, "float32")
    assert said["bytes"] == said["tokens"] * 3 * 32 * 4
    assert "[3/3] writing the target's states" in done.err
    run = RunConfig.read(config)
    target = Target.load(run.target.path)
    samples = load_samples(run.data, target.tokenizer, cache=run.output / "samples", vocab_size=target.vocab_size)
    assert run.features.directory is not None
    source = StoredFeatures.open(
        run.features.directory, samples, (1, 3, 5), soft=False, device="cpu", dtype=torch.float32
    )
    rows = [[samples[index]] for index in range(4)]
    wanted = OnlineFeatures(target, (1, 3, 5), soft=False).features(rows).taps
    assert (source.features(rows).taps - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_second_run_finds_everything_there(config: Path, run_dflash: Run) -> None:
    run_dflash("data", "features", "--config", config)
    again = run_dflash("data", "features", "--config", config)
    assert again.returncode == 0
    assert re.search(r"shards\s+1 of 1, 1 of them were there", again.out)


def test_soft_labels_are_written_where_the_loss_needs_them(config: Path, run_dflash: Run) -> None:
    directory = config.parent
    run_file(directory, directory / "target", objective={"loss": "kl", "gamma": 4.0})
    done = run_dflash("data", "features", "--config", config, "--directory", directory / "soft")
    assert done.returncode == 0, done.err
    assert "last hidden states" in done.out
    assert read_index(directory / "soft").soft


def test_an_online_run_has_no_place_for_them(config: Path, run_dflash: Run) -> None:
    run_file(config.parent, config.parent / "target", features={})
    done = run_dflash("data", "features", "--config", config)
    assert done.returncode == 2
    assert "features.mode is online, which keeps nothing; set offline and features.directory" in done.err


def test_a_tap_on_the_last_block_is_refused(config: Path, run_dflash: Run) -> None:
    nested = DRAFTER["dflash_config"] | {"target_layer_ids": [1, 3, 7]}
    (config.parent / "drafter.json").write_text(json.dumps(DRAFTER | {"dflash_config": nested}))
    done = run_dflash("data", "features", "--config", config)
    assert done.returncode == 1
    assert "names the target's last layer 7: its hidden state is normed in some engines and raw in others" in done.err
    assert not (config.parent / "features").exists()
