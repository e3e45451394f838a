import os
import shlex
from pathlib import Path

from flows.demo import take_down


def test_what_takes_the_lab_down_can_be_pasted_into_any_shell(tmp_path: Path) -> None:
    state, program, *arguments = shlex.split(take_down(tmp_path / "a state's folder"))
    assert state == f"DFLASH_STATE={tmp_path}/a state's folder"
    assert os.access(program, os.X_OK)
    assert arguments == ["lab", "down"]
