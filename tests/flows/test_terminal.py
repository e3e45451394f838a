import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from rich.text import Text

from dflash import command_line
from dflash.errors import run_cli
from dflash.pages import report_page, write_page
from flows.cli_evaluate import show_evaluations
from flows.evaluate_checkpoint import Evaluation
from flows.terminal import console, say_progress, shown_progress, waiting
from tests.dflash.pages.reports import made, words


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


def test_what_is_waited_for_is_shown_at_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting("asking kpro6"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with waiting("asking [bold]\x1b[31mkpro6"):
        pass
    assert r"asking [bold]\x1b[31mkpro6 …" in capsys.readouterr().err


def test_quiet_leaves_out_how_far_something_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say_progress("half of it")
    assert capsys.readouterr().err == "half of it\n"
    monkeypatch.setattr(command_line, "_quiet", True)
    say_progress("half of it")
    with waiting("asking kpro6"):
        pass
    assert capsys.readouterr().err == ""


def test_evaluations_of_which_one_is_not_valid_fit_80_columns_and_say_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report, rounds = made({"a": words(30), "b": words(40)})
    bad = report.model_copy(update={"valid": False, "invalid_because": ["independent-forward", "[/red]\x1b[31m"]})
    write_page(tmp_path / "report.html", report_page(report, rounds))
    show_evaluations([Evaluation(report, tmp_path), Evaluation(bad, tmp_path / "other")])
    said = capsys.readouterr().out
    lines = said.splitlines()
    why = lines.index(r"step 400: not valid: independent-forward, [/red]\x1b[31m")
    assert max(map(len, lines[:why])) <= 80
    assert lines[-2:] == [str(tmp_path / "report.html"), str(tmp_path / "other" / "report.md")]


def test_what_is_piped_has_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    piped = io.StringIO()
    with redirect_stdout(piped):
        console().print(Text("GrantEnded", "bold red"))
    assert piped.getvalue() == "GrantEnded\n"
