"""A look into a folder of checkpoints: what counts as whole, what is read for it, and what is remembered."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash.manifest import DRAFTER, MANIFEST
from tasks import ends, looking
from tasks.ends import LocalReader
from tasks.errors import FileChanged
from tasks.gate import ByteStream
from tasks.inventory import Location
from tasks.look_memory import Memory
from tasks.looking import Look, NoSuchFolderError, TooManyFoldersError, look, step_of
from tasks.ssh import ConnectionFailed
from tests.sshds import Operator
from tests.tasks import checkpoints
from tests.tasks.checkpoints import written


class Folder:
    """A watched folder, its memory, and the clock of the looks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = Memory()
        self.now = 1_000_000.0

    def look(self, after: float = 60.0) -> Look:
        self.now += after
        found = look(None, Location(None, str(self.path)), None, self.memory, self.now)  # type: ignore[arg-type]
        # what is kept over a restart is enough to go on
        self.memory = Memory.load(json.loads(json.dumps(self.memory.dump())))
        return found

    def settled(self) -> Look:
        """The second look of two, and what the first found with it."""
        first, second = self.look(), self.look()
        return Look((*first.appeared, *second.appeared), (), second.whole, second.unfinished, second.left)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "checkpoints").mkdir()
    return Folder(tmp_path / "checkpoints")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests by their verb."""
    counted: Counter[str] = Counter()

    class Counting(LocalReader):
        def stat(self, path: str) -> Any:
            counted["stat"] += 1
            return super().stat(path)

        def list(self, path: str) -> Any:
            counted["list"] += 1
            return super().list(path)

        @contextmanager
        def read(self, path: str, offset: int, length: int) -> Iterator[ByteStream]:
            counted["read"] += 1
            with super().read(path, offset, length) as stream:
                yield stream

    monkeypatch.setattr(ends, "LocalReader", Counting)
    return counted


def names(found: Look) -> list[str]:
    return sorted(Path(whole.path).name for whole in found.appeared)


def test_a_sealed_checkpoint_counts_at_the_first_look_and_once(folder: Folder) -> None:
    written(checkpoints.step(folder.path, 400), 1234.5)
    found = folder.look()
    (whole,) = found.appeared
    assert (whole.path, whole.step, whole.written) == (str(folder.path / "step_400"), 400, 1234.5)
    assert whole.identity.startswith("manifest:")
    again = folder.look()
    assert (again.appeared, again.vanished, again.whole) == ((), (), 1)


def test_a_step_without_its_manifest_never_counts_and_says_why(folder: Folder) -> None:
    directory = checkpoints.step(folder.path, 1, whole=False)
    for _ in range(5):
        found = folder.look()
    assert found.whole == 0
    assert "being written" in found.unfinished[str(directory)]


def test_a_step_counts_when_its_manifest_has_come(folder: Folder) -> None:
    directory = checkpoints.step(folder.path, 1, whole=False)
    folder.look()
    shutil.copy(checkpoints.step(folder.path.parent / "made", 1) / MANIFEST, directory)
    shutil.copy(folder.path.parent / "made" / "step_1" / "model.safetensors.index.json", directory)
    assert names(folder.look()) == ["step_1"]


def test_a_temporary_name_is_not_looked_at(folder: Folder, asked: Counter[str]) -> None:
    checkpoints.step(folder.path, 1).rename(folder.path / ".step_1.partial")
    found = folder.look()
    assert (found.whole, found.unfinished) == (0, {})
    assert asked == {"list": 1}


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_nothing_seals_counts_when_two_looks_agree(folder: Folder, kind: str) -> None:
    if kind == "file":
        checkpoints.weights(folder.path / "step_7.safetensors")
    else:
        checkpoints.zlab(folder.path, "step_7")
    assert folder.look().whole == 0
    assert folder.look(after=1).whole == 0
    found = folder.look()
    assert [whole.step for whole in found.appeared] == [7]
    assert folder.look().appeared == ()


def test_what_is_still_written_to_is_not_read(folder: Folder, asked: Counter[str]) -> None:
    file = folder.path / "step_1.safetensors"
    whole = checkpoints.weights(folder.path.parent / "whole.safetensors").read_bytes()
    for length in range(1, len(whole)):
        file.write_bytes(whole[:length])
        assert folder.look().whole == 0
    assert asked["read"] == 0
    file.write_bytes(whole)
    assert names(folder.settled()) == ["step_1.safetensors"]


def test_what_stopped_growing_before_its_end_does_not_count_and_is_asked_less_and_less(
    folder: Folder, asked: Counter[str]
) -> None:
    whole = checkpoints.weights(folder.path.parent / "whole.safetensors").read_bytes()
    (folder.path / "step_1.safetensors").write_bytes(whole[:-1])
    reads = []
    for _ in range(120):
        found = folder.look()
        reads.append(asked["read"])
    assert found.whole == 0
    assert "step_1.safetensors" in str(found.unfinished)
    assert reads[-1] - reads[60] <= reads[60] / 3
    (folder.path / "step_1.safetensors").write_bytes(whole)
    assert names(folder.settled()) == ["step_1.safetensors"]


def test_a_folder_that_stays_as_it_is_costs_one_request_a_look(folder: Folder, asked: Counter[str]) -> None:
    for number in range(30):
        checkpoints.step(folder.path, number)
    (folder.path / "logs").mkdir()
    (folder.path / "logs" / "events.out").write_text("x")
    folder.look()
    asked.clear()
    for _ in range(10):
        assert folder.look().whole == 30
    assert asked == {"list": 10}


def test_at_most_so_many_are_read_in_one_look_and_the_newest_first(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "MOST_EXAMINED", 2)
    for number in (1, 2, 3, 4, 5):
        written(checkpoints.step(folder.path, number), 1000.0 + number)
    found = [folder.look() for _ in range(3)]
    assert [names(one) for one in found] == [["step_4", "step_5"], ["step_2", "step_3"], ["step_1"]]
    assert [one.left for one in found] == [3, 1, 0]


def test_runs_lie_in_folders_of_their_own(folder: Folder) -> None:
    checkpoints.step(folder.path / "run_a" / "checkpoints", 1)
    checkpoints.weights(folder.path / "run_a" / "step_2.safetensors")
    checkpoints.step(folder.path / "run_b", 1000).joinpath("more").mkdir()
    assert names(folder.settled()) == ["step_1", "step_1000", "step_2.safetensors"]
    checkpoints.step(folder.path / "run_b", 1001)
    assert names(folder.look()) == ["step_1001"]


def test_other_files_are_left_alone(folder: Folder, asked: Counter[str]) -> None:
    for name in ("run.yaml", "train.log", "optimizer.bin"):
        (folder.path / name).write_text("no checkpoint")
    os.symlink(checkpoints.step(folder.path.parent, 1), folder.path / "latest")
    os.mkfifo(folder.path / "pipe.pt")
    found = folder.settled()
    assert (found.whole, found.unfinished) == (0, {})
    assert asked["read"] == 0


def test_a_file_that_only_sounds_like_a_checkpoint_is_named_with_what_it_is(folder: Folder) -> None:
    (folder.path / "notes.pt").write_text("these are notes, and they are long enough to be looked at")
    found = folder.settled()
    assert found.whole == 0
    assert "neither a torch.save file nor safetensors" in found.unfinished[str(folder.path / "notes.pt")]


@pytest.mark.parametrize("name", ["run\n2", "la\u0308uft"])
def test_what_no_action_can_name_does_not_count_and_says_why(folder: Folder, operator: Operator, name: str) -> None:
    checkpoints.step(folder.path / name, 1)
    # this machine's own files need no action
    assert names(folder.look()) == ["step_1"]
    # remembered or not
    for _ in range(2):
        found = look(operator.connector, Location(operator.infer, str(folder.path)), None, folder.memory, folder.now)
        assert (found.appeared, found.whole, found.left) == ((), 0, 0)
        (reason,) = found.unfinished.values()
        assert "rename it" in reason


def test_what_is_deleted_has_vanished_and_comes_back_as_itself(folder: Folder) -> None:
    directory = checkpoints.step(folder.path, 1)
    (whole,) = folder.look().appeared
    directory.rename(folder.path.parent / "away")
    assert folder.look().vanished == (whole.identity,)
    assert folder.look().vanished == ()
    (folder.path.parent / "away").rename(directory)
    assert folder.look().appeared == (whole,)


def test_what_is_moved_within_the_folder_is_the_same_at_another_place(folder: Folder) -> None:
    directory = checkpoints.step(folder.path, 1)
    (whole,) = folder.look().appeared
    directory.rename(folder.path / "best")
    found = folder.look()
    assert found.vanished == ()
    assert [(one.path, one.identity) for one in found.appeared] == [(str(folder.path / "best"), whole.identity)]


def test_of_two_copies_the_one_that_is_left_is_named_again(folder: Folder) -> None:
    first = checkpoints.step(folder.path, 1)
    shutil.copytree(first, folder.path / "copy_of_1")
    assert len({whole.identity for whole in folder.look().appeared}) == 1
    shutil.rmtree(first)
    found = folder.look()
    assert (names(found), found.vanished) == (["copy_of_1"], ())


def test_a_file_that_is_written_over_is_another_checkpoint(folder: Folder) -> None:
    checkpoints.weights(folder.path / "latest.safetensors", 1)
    (before,) = folder.settled().appeared
    checkpoints.weights(folder.path / "latest.safetensors", 2)
    gone = folder.look()
    assert gone.vanished == (before.identity,)
    (after,) = folder.look().appeared
    assert (after.path, after.identity == before.identity) == (before.path, False)


def test_a_directory_whose_files_are_written_over_in_place_is_noticed(folder: Folder) -> None:
    directory = checkpoints.zlab(folder.path, "latest", 1)
    (before,) = folder.settled().appeared
    state = directory.stat()
    checkpoints.weights(directory / "model.safetensors", 2)
    os.utime(directory, ns=(state.st_atime_ns, state.st_mtime_ns))
    seen = [folder.look() for _ in range(3)]
    assert [one.vanished for one in seen if one.vanished] == [(before.identity,)]
    (after,) = [whole for one in seen for whole in one.appeared]
    assert after.identity != before.identity


def test_many_open_directories_are_gone_into_in_turns(
    folder: Folder, asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "RECHECKED", 3)
    for number in range(10):
        checkpoints.zlab(folder.path, f"step_{number}", number)
    assert folder.settled().whole == 10
    asked.clear()
    memory = folder.memory
    for _ in range(4):
        look(None, Location(None, str(folder.path)), None, memory, folder.now)  # type: ignore[arg-type]
    assert asked["list"] == 4 + 4 * 3
    assert memory.rechecked == 10 + 2


def test_a_checkpoint_that_goes_while_it_is_looked_at_is_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoints.step(folder.path, 1)
    original = looking.ReadSource

    def removed(*arguments: Any) -> Any:
        shutil.rmtree(directory)
        return original(*arguments)

    monkeypatch.setattr(looking, "ReadSource", removed)
    found = folder.look()
    assert (found.whole, found.unfinished) == (0, {})


def test_a_damaged_checkpoint_is_named_and_keeps_no_other_from_counting(folder: Folder) -> None:
    damaged = checkpoints.step(folder.path, 1)
    with (damaged / DRAFTER).open("ab") as file:
        file.write(b"more")
    checkpoints.step(folder.path, 2)
    found = folder.look()
    assert names(found) == ["step_2"]
    assert "the manifest says" in found.unfinished[str(damaged)]


def test_a_folder_that_is_not_there_is_named(folder: Folder) -> None:
    checkpoints.step(folder.path, 1)
    folder.look()
    folder.path.rename(folder.path.parent / "elsewhere")
    with pytest.raises(NoSuchFolderError, match="is its disk mounted") as caught:
        folder.look()
    assert caught.value.state_name == "NoSuchFolder"
    (folder.path.parent / "elsewhere").rename(folder.path)
    found = folder.look()
    # nothing was taken for deleted
    assert (found.appeared, found.vanished, found.whole) == ((), (), 1)


def test_a_look_that_breaks_in_the_middle_has_seen_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = checkpoints.step(folder.path, 1)
    (before,) = folder.look().appeared
    shutil.rmtree(gone)
    for number in (2, 3):
        checkpoints.step(folder.path, number)
    original, opened = looking.select, []

    def breaking(*arguments: Any) -> Any:
        opened.append(arguments)
        if len(opened) == 2:
            raise ConnectionFailed("the link went down")
        return original(*arguments)

    monkeypatch.setattr(looking, "select", breaking)
    with pytest.raises(ConnectionFailed):
        folder.look()
    found = folder.look()
    assert (names(found), found.vanished) == (["step_2", "step_3"], (before.identity,))


def test_a_file_that_changes_while_it_is_read_costs_its_session_and_keeps_no_other_from_counting(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        written(checkpoints.step(folder.path, number), 1000.0 + number)
    original, ended = looking.select, []

    def refused(place: Any) -> Any:
        if place.place.endswith("step_2") and not ended:
            ended.append(place)
            raise FileChanged("it is not the file that was first seen")
        return original(place)

    monkeypatch.setattr(looking, "select", refused)
    assert names(folder.look()) == ["step_1", "step_3"]
    assert names(folder.settled()) == ["step_2"]


def test_too_many_folders_are_said_not_crawled(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "MOST_FOLDERS", 5)
    for number in range(6):
        (folder.path / f"project_{number}").mkdir()
    with pytest.raises(TooManyFoldersError, match="watch the folder of a run") as caught:
        folder.look()
    assert caught.value.state_name == "TooManyFolders"


def test_a_memory_of_another_version_costs_a_longer_look_and_nothing_else(folder: Folder) -> None:
    checkpoints.step(folder.path, 1)
    folder.look()
    folder.memory = Memory.load({"entries": {"step_1": {"unknown": 1}}})
    assert names(folder.look()) == ["step_1"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_400.pt", 400),
        ("run7/checkpoint-12", 12),
        ("epoch_3_step_1200.safetensors", 1200),
        ("latest.pt", None),
        ("step_" + "9" * 40, None),
        ("qwen3/step_5/", 5),
    ],
)
def test_the_step_is_the_last_number_of_the_name(name: str, step: int | None) -> None:
    assert step_of(name) == step
