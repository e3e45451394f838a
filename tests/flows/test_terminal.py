import io
import sys

import pytest

from dflash.errors import run_cli
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


def test_a_long_path_leaves_the_figures_their_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    with shown_progress(f"kpro6:/workspace/{'deep/' * 20}step_20000.pt") as progress:
        progress(1_234_500_000, 12_345_600_000)
    shown = capsys.readouterr().err
    assert "step_20000.pt" in shown
    assert "1.2/12.3 GB" in shown
    assert ":--" in shown


def test_what_a_terminal_has_no_letter_for_is_printed_as_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1", write_through=True))
    run_cli(lambda: print("/dätä/с"))
    assert printed.getvalue() == "/dätä/\\u0441\n".encode("latin-1")
