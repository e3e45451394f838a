import sys

import pytest

from flows.terminal import shown_progress


def test_progress_shows_a_hostile_name_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with shown_progress("kpro6:/{0.x}[bold]{task.y}\x1b[31m.pt") as progress:
        progress(50, 100)
        progress(100, 100)
    assert r"kpro6:/{0.x}[bold]{task.y}\x1b[31m.pt" in capsys.readouterr().err
