"""Checkpoints appear whole or not at all, are told from damaged ones, and are not too many."""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash.training.checkpointing import (
    STATE,
    DiskFullError,
    SaveError,
    best,
    newest_whole,
    remove_partial,
    retain,
    save,
    steps_of,
)
from dflash.training.run_config import CheckpointSection
from tests.disks import small_disk


def _fill(size: int = 8, **metrics: Any) -> Callable[[Path], Mapping[str, Any]]:
    def fill(directory: Path) -> Mapping[str, Any]:
        save_file({"fc.weight": torch.ones(size, 4)}, directory / "drafter.safetensors")
        (directory / "config.json").write_text("{}")
        with (directory / STATE).open("wb") as file:
            torch.save({"masters": torch.ones(size, 4)}, file)
        return metrics

    return fill


def _save(output: Path, *steps: int, tau: float | None = None) -> None:
    for step in steps:
        save(output, step, _fill(**({} if tau is None else {"tau": tau})), recipe={"loss": "ce"})


def _no_warning(line: str) -> None:
    raise AssertionError(line)


def test_a_checkpoint_is_renamed_only_when_it_is_sealed(tmp_path: Path) -> None:
    def looks_around(directory: Path) -> Mapping[str, Any]:
        assert steps_of(tmp_path) == []
        assert directory.parent == tmp_path
        return _fill()(directory)

    path = save(tmp_path, 7, looks_around, recipe={"loss": "ce"})
    assert path == tmp_path / "step_7"
    assert json.loads((path / "manifest.json").read_text())["step"] == 7
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_7"]


def test_an_error_while_filling_leaves_nothing_and_is_passed_on(tmp_path: Path) -> None:
    def breaks(directory: Path) -> Mapping[str, Any]:
        (directory / "half").write_text("x")
        raise KeyError("a bug is no full disk")

    with pytest.raises(KeyError):
        save(tmp_path, 1, breaks, recipe={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFullError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), DiskFullError),
        (RuntimeError("I/O error: No space left on device (os error 28)"), DiskFullError),
        (OSError(errno.EACCES, "Permission denied"), SaveError),
    ],
)
def test_what_the_machine_refuses_is_told_apart(tmp_path: Path, error: Exception, kind: type[SaveError]) -> None:
    def refused(directory: Path) -> Mapping[str, Any]:
        raise error

    with pytest.raises(SaveError) as raised:
        save(tmp_path, 1, refused, recipe={})
    assert type(raised.value) is kind
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "256k") as place:
        yield place


@pytest.mark.parametrize("culprit", ["drafter", "state"])
def test_a_disk_that_is_really_full_keeps_the_checkpoint_before(disk: Path, culprit: str) -> None:
    def large(directory: Path) -> Mapping[str, Any]:
        _fill()(directory)
        if culprit == "drafter":  # safetensors has its own way to fail
            save_file({"fc.weight": torch.ones(100_000)}, directory / "drafter.safetensors")
        else:  # and so has torch
            with (directory / STATE).open("wb") as file:
                torch.save({"masters": torch.ones(100_000)}, file)
        return {}

    _save(disk, 1)
    with pytest.raises(DiskFullError, match="step_2 could not be written: the disk is full"):
        save(disk, 2, large, recipe={})
    whole = newest_whole(disk, warn=_no_warning)
    assert whole is not None
    assert whole.path.name == "step_1"
    assert [path.name for path in disk.iterdir()] == ["step_1"]
    _save(disk, 2)


def test_the_newest_whole_one_is_found_by_number(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "nowhere", warn=_no_warning) is None
    _save(tmp_path, 9, 10, 2)
    whole = newest_whole(tmp_path, warn=_no_warning)
    assert whole is not None
    assert (whole.path.name, whole.manifest.step) == ("step_10", 10)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
@pytest.mark.parametrize("name", ["drafter.safetensors", "config.json", STATE, "manifest.json"])
def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    _save(tmp_path, 1, 2)
    damage(tmp_path / "step_2" / name)
    warnings: list[str] = []
    whole = newest_whole(tmp_path, warn=warnings.append)
    assert whole is not None
    assert whole.path.name == "step_1"
    assert len(warnings) == 1
    assert "step_2 is damaged and passed over" in warnings[0]


def test_a_checkpoint_without_its_training_state_is_not_gone_on_from(tmp_path: Path) -> None:
    def relayed(directory: Path) -> Mapping[str, Any]:
        _fill()(directory)
        (directory / STATE).unlink()
        return {}

    save(tmp_path, 1, relayed, recipe={})
    warnings: list[str] = []
    assert newest_whole(tmp_path, warn=warnings.append) is None
    assert "training_state.pt" in warnings[0]


def test_a_damaged_one_of_the_same_step_makes_room(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    (tmp_path / "step_1" / "manifest.json").unlink()
    _save(tmp_path, 1)
    assert newest_whole(tmp_path, warn=_no_warning) is not None


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    (tmp_path / ".step_2.abc").mkdir()
    (tmp_path / ".step_2.abc" / "drafter.safetensors").write_text("half")
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_the_last_every_so_often_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, tau in ((10, 2.0), (20, 3.5), (30, 3.0), (40, None), (50, 3.2), (60, None)):
        _save(tmp_path, step, tau=tau)
    section = CheckpointSection(keep_last=2, keep_every=30)
    assert [path.name for path in retain(tmp_path, section, until=60)] == ["step_10", "step_40"]
    assert steps_of(tmp_path) == [20, 30, 50, 60]
    highest = best(tmp_path, until=60)
    assert highest is not None
    assert highest.path.name == "step_20"
    assert [path.name for path in retain(tmp_path, CheckpointSection(keep_last=1, keep_best=False), until=60)] == [
        "step_20",
        "step_30",
        "step_50",
    ]


def test_of_equal_checkpoints_the_earliest_is_the_best(tmp_path: Path) -> None:
    _save(tmp_path, 1, 2, tau=2.0)
    highest = best(tmp_path, until=60)
    assert highest is not None
    assert highest.path.name == "step_1"


def test_a_damaged_one_does_not_count_as_kept_and_is_not_removed(tmp_path: Path) -> None:
    _save(tmp_path, 1, 2, 3)
    (tmp_path / "step_3" / "manifest.json").write_text("{")
    retain(tmp_path, CheckpointSection(keep_last=1), until=3)
    assert steps_of(tmp_path) == [2, 3]


def test_those_behind_the_step_a_run_is_at_neither_count_as_kept_nor_as_best(tmp_path: Path) -> None:
    _save(tmp_path, 1, tau=1.5)
    _save(tmp_path, 9, tau=3.0)
    _flip(tmp_path / "step_9" / "drafter.safetensors")  # what the manifest does not show
    _save(tmp_path, 2, 3, tau=2.0)
    assert [path.name for path in retain(tmp_path, CheckpointSection(keep_last=1), until=3)] == ["step_1"]
    assert steps_of(tmp_path) == [2, 3, 9]
    highest = best(tmp_path, until=3)
    assert highest is not None
    assert highest.path.name == "step_2"


def test_one_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    _save(tmp_path, 1, 2)
    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(SaveError, match="step_1 could not be removed"):
        retain(tmp_path, CheckpointSection(keep_last=1), until=2)
