"""An output belongs to one run at a time."""

import os
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

from dflash.training.claim import OutputInUseError, RunOutputError, sole_writer


def test_a_second_run_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    with (
        sole_writer(tmp_path / "output"),
        pytest.raises(OutputInUseError, match=f"another run writes into .*output .process {os.getpid()} on "),
        sole_writer(tmp_path / "output"),
    ):
        pass
    with sole_writer(tmp_path / "output"):
        pass


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    def killed() -> None:
        with sole_writer(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    process = get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with sole_writer(tmp_path):
        pass


def test_an_output_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("")
    with pytest.raises(RunOutputError, match="cannot be written into"), sole_writer(tmp_path / "output"):
        pass
