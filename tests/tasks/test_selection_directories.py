"""Directories of safetensors: a training step, a released drafter, shards, and layouts that carry the target along."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.checkpoint_layout import ChangedError, CheckpointError, DamagedError, NotACheckpointError
from dflash.checkpoints import read_checkpoint
from dflash.manifest import seal
from tasks.selection import select
from tasks.sources import LocalSource, require_settled
from tests.tasks.selections import DRAFTER, CountedSource, assert_equal, weights, write_out

CONFIG = json.loads((DRAFTER / "config.json").read_text())


def made(place: Path, folder: Path, **how: Any) -> Path:
    source = LocalSource(place)
    return write_out(select(source, **how), source, folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A ``step_400/`` as the trainer seals it, with four times the drafter in optimizer state."""
    folder = tmp_path / "step_400"
    folder.mkdir()
    save_file(weights(""), folder / "drafter.safetensors")
    save_file({"probe": torch.ones(3)}, folder / "probe.safetensors")
    (folder / "training_state.pt").write_bytes(bytes(4 * (folder / "drafter.safetensors").stat().st_size))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    seal(folder, step=400, metrics={"loss": 2.5, "kernel": "torch"})
    return folder


def test_of_a_step_the_optimizer_stays_behind(step: Path, tmp_path: Path) -> None:
    source = CountedSource(step)
    selection = select(source)
    out = write_out(selection, source, tmp_path / "step_400_here")
    assert names(out) == [
        "config.json", "drafter.safetensors", "manifest.json", "model.safetensors.index.json", "probe.safetensors",
    ]  # fmt: skip
    assert selection.sealed
    assert source.moved == selection.moved_bytes < 0.3 * selection.source_bytes
    whole, relayed = read_checkpoint(step), read_checkpoint(out)
    assert relayed.sha256 == whole.sha256
    assert relayed.manifest == whole.manifest
    assert relayed.probe is not None


def test_the_hashes_of_the_manifest_are_what_must_arrive(step: Path) -> None:
    for what in ("drafter", "all"):
        outputs = {output.name: output for output in select(LocalSource(step), what=what).outputs}
        found = hashlib.sha256((step / "drafter.safetensors").read_bytes()).hexdigest()
        assert outputs["drafter.safetensors"].sha256 == found
        assert outputs["manifest.json"].sha256 is None
        assert ("training_state.pt" in outputs) == (what == "all")


def test_a_step_is_known_by_its_manifest(step: Path) -> None:
    digest = hashlib.sha256((step / "manifest.json").read_bytes()).hexdigest()
    assert select(LocalSource(step)).identity == f"manifest:{digest}"


def test_all_of_a_directory_is_the_directory(step: Path, tmp_path: Path) -> None:
    (step / "logs").mkdir()
    (step / "logs" / "empty.txt").touch()
    out = made(step, tmp_path / "out", what="all")
    for path in step.rglob("*"):
        if path.is_file():
            assert (out / path.relative_to(step)).read_bytes() == path.read_bytes()


def test_a_narrowed_step_is_a_plain_drafter(step: Path, tmp_path: Path) -> None:
    out = made(step, tmp_path / "out", dtype="bfloat16")
    assert names(out) == ["config.json", "model.safetensors"]
    relayed = read_checkpoint(out)
    assert_equal(relayed.weights, {name: tensor.bfloat16() for name, tensor in weights("").items()})
    assert relayed.step == 400


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda step: (step / "manifest.json").unlink(), "has training_state.pt and no manifest.json"),
        (lambda step: (step / "drafter.safetensors").unlink(), "has no drafter.safetensors"),
        (lambda step: (step / "config.json").write_text("{}"), "config.json has 2 bytes, the manifest says"),
        (lambda step: (step / "manifest.json").write_text("{"), "is not readable JSON"),
        (lambda step: (step / "manifest.json").write_bytes(b""), "is empty"),
        (lambda step: (step / "manifest.json").write_bytes(b" " * (17 << 20)), "16777216 are read of a file"),
        (lambda step: (step / "drafter.safetensors").write_bytes(b"\xff" * 888_969), "drafter.safetensors has"),
    ],
    ids=["no manifest", "no drafter", "other config", "broken", "empty", "huge manifest", "other size"],
)
def test_an_unfinished_or_damaged_step_is_named(step: Path, damage: Any, says: str) -> None:
    damage(step)
    with pytest.raises(CheckpointError, match=says):
        select(LocalSource(step))


def test_an_optimizer_cut_short_matters_only_where_it_moves(step: Path) -> None:
    (step / "training_state.pt").write_bytes(b"x")
    select(LocalSource(step))
    with pytest.raises(DamagedError, match=r"training_state\.pt has 1 bytes"):
        select(LocalSource(step), what="all")


def test_a_released_drafter_is_copied_as_it_is(tmp_path: Path) -> None:
    source = CountedSource(DRAFTER)
    selection = select(source)
    out = write_out(selection, source, tmp_path / "out")
    assert not selection.sealed
    assert names(out) == ["config.json", "model.safetensors"]
    for name in names(out):
        assert (out / name).read_bytes() == (DRAFTER / name).read_bytes()


def sharded(folder: Path, config: dict[str, Any], *shards: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_shards_move_as_they_are_and_become_one_file_when_converted(tmp_path: Path) -> None:
    state = weights("")
    half = len(state) // 2
    first, second = dict(list(state.items())[:half]), dict(list(state.items())[half:])
    place = sharded(tmp_path / "d", CONFIG, first, second)
    save_file({"x": torch.ones(2)}, place / "notes.safetensors")
    assert "notes.safetensors" not in names(made(place, tmp_path / "whole"))
    assert_equal(read_checkpoint(tmp_path / "whole").weights, state)
    narrowed = made(place, tmp_path / "narrow", dtype="bfloat16")
    assert names(narrowed) == ["config.json", "model.safetensors"]
    assert_equal(load_file(narrowed / "model.safetensors"), {name: tensor.bfloat16() for name, tensor in state.items()})


def test_what_lies_at_near_places_of_two_files_is_read_from_each(tmp_path: Path) -> None:
    first, second = {"a": torch.randn(100)}, {"p": torch.arange(80), "b": torch.randn(100)}
    out = made(sharded(tmp_path / "d", CONFIG, first, second), tmp_path / "out", dtype="bfloat16")
    expected = {"a": first["a"].bfloat16(), "b": second["b"].bfloat16(), "p": second["p"]}
    assert_equal(load_file(out / "model.safetensors"), expected)


def test_the_targets_own_tensors_stay_behind(tmp_path: Path) -> None:
    place = sharded(
        tmp_path / "d",
        CONFIG | {"_torchspec_version": "1.0"},
        {"embed_tokens.weight": torch.zeros(1000, 32), "final_norm.weight": torch.ones(32)},
        {"context_proj.weight": torch.randn(32, 96)},
    )
    source = CountedSource(place)
    selection = select(source)
    found = load_file(write_out(selection, source, tmp_path / "out") / "model.safetensors")
    assert selection.format == "torchspec"
    assert sorted(found) == ["context_proj.weight", "final_norm.weight"]
    assert source.moved < 20_000
    assert "embed_tokens.weight" in load_file(
        made(place, tmp_path / "model", what="model") / "model-00001-of-00002.safetensors"
    )


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    place = sharded(tmp_path / "d", CONFIG, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (place / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotACheckpointError, match=r"has no model-00002-of-00002\.safetensors"):
        select(LocalSource(place))


def test_one_file_of_weights_moves_with_the_config_beside(tmp_path: Path) -> None:
    source = LocalSource(DRAFTER / "model.safetensors")
    selection = select(source)
    assert selection.format == "safetensors"
    assert names(write_out(selection, source, tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_weights_rewritten_in_place_have_another_identity(tmp_path: Path) -> None:
    place = tmp_path / "d"
    shutil.copytree(DRAFTER, place)
    source = LocalSource(place)
    first = select(source)
    with (place / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x77")
    assert select(source).identity != first.identity
    with pytest.raises(ChangedError, match=r"model\.safetensors changed"):
        first.require_unchanged(source.look())
    with pytest.raises(ChangedError):
        require_settled(source.place, first.look, source.look())
