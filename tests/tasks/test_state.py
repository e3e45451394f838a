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
