import os
from pathlib import Path

import pytest

from tasks.errors import Refused
from tasks.state import state_dir


def test_a_state_folder_that_cannot_be_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        monkeypatch.setenv("DFLASH_STATE", str(tmp_path / place))
        with pytest.raises(Refused, match=r"state folder .*: (File exists|Not a directory); .*DFLASH_STATE"):
            state_dir()


def test_a_user_without_a_home_names_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_STATE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(Refused, match=r"no home folder.*DFLASH_STATE"):
        state_dir()
