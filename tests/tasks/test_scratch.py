"""Folders of processes that were killed, and of those that live."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tasks.scratch import OLD_SECONDS, Scratch, sweep

PREFIX = "dflash-test-"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def killed() -> str:
    """The name of a folder whose process was killed."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        scratch = Scratch(PREFIX)
        Path(scratch.name, "config").write_text("Host far")
        there.send(os.path.basename(scratch.name))
        signal.pause()

    child = context.Process(target=run)
    child.start()
    name: str = here.recv()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    return name


def test_folder_goes_with_its_process(temporary: Path) -> None:
    scratch = Scratch(PREFIX)
    assert Path(scratch.name).stat().st_mode & 0o777 == 0o700
    del scratch
    assert os.listdir(temporary) == []


def test_what_a_killed_process_left_goes_with_the_next(temporary: Path) -> None:
    name = killed()
    assert os.listdir(temporary) == [name]
    scratch = Scratch(PREFIX)
    assert os.listdir(temporary) == [os.path.basename(scratch.name)]


def test_folder_of_a_process_that_lives_stays(temporary: Path) -> None:
    scratch = Scratch(PREFIX)
    assert sweep(PREFIX) == []
    assert os.path.basename(scratch.name) in os.listdir(temporary)


def test_nothing_else_is_removed(temporary: Path) -> None:
    """Not one that is being made, nor what only has a name like it, nor where a link leads."""
    (temporary / f"{PREFIX}abcdefgh").mkdir()
    (temporary / f"{PREFIX}notes").mkdir()
    (temporary / "kept").mkdir()
    (temporary / "kept" / "in-use").touch()
    (temporary / f"{PREFIX}linklink").symlink_to("kept")
    old = temporary / f"{PREFIX}oldoldol"
    old.mkdir()
    os.utime(old, (0, os.stat(temporary).st_mtime - OLD_SECONDS - 10))
    assert sweep(PREFIX) == [old.name]
    assert (temporary / "kept" / "in-use").exists()
    assert len(os.listdir(temporary)) == 4
