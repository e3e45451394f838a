"""Progress of a phase: how far, how fast, how long still."""

import pytest

from dflash import progress
from dflash.evaluate import _part
from dflash.progress import Phases, show_rate, show_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the phase's clock shows."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_says_how_far_how_fast_and_how_long_still(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Phases(5).phase("k", "title", unit="tokens") as report:
        report(100, 1000)  # was there before
        clock[0] = 2.0
        report(120, 1000)
        clock[0] = 10.0
        report(300, 1000)
    said = capsys.readouterr().err.splitlines()
    assert said == ["[1/5] title …", "      300/1000 tokens after 10 s, 20/s, 35 s left"]


def test_the_rate_is_of_what_is_counted_now(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(1).phase("k", "title") as report:
        report(0, 1000)
        clock[0] = 10.0
        report(1000, 1000)
        report(1, 3)  # texts instead of tokens
        clock[0] = 20.0
        report(2, 3)
    assert capsys.readouterr().err.splitlines()[-1] == "      2/3 after 20 s, 10 s each, 10 s left"


def test_a_bar_has_the_same_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    with Phases(2).phase("k", "title", unit="prompts") as report:
        for done in range(5):
            report(done, 4)
    drawn = capsys.readouterr().err
    assert "4/4 prompts, " in drawn
    assert "/s 0:00:00" in drawn
    assert max(len(line) for line in drawn.replace("\r", "\n").split("\n") if "prompts" in line) < 100


def test_the_drafters_of_one_phase_share_its_bar() -> None:
    seen: list[tuple[int, int]] = []
    for place in range(2):
        for done in (5, 10):
            _part(lambda *at: seen.append(at), place, 2)(done, 10)
    assert seen == [(5, 20), (10, 20), (15, 20), (20, 20)]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0, "0.0 s"), (3.14, "3.1 s"), (61, "61 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_times_are_as_exact_as_anybody_wants_them(seconds: float, said: str) -> None:
    assert show_seconds(seconds) == said


@pytest.mark.parametrize(
    ("rate", "said"), [(29.6, "30/s"), (4.2, "4.2/s"), (0.25, "4.0 s each"), (0.002, "8 min each")]
)
def test_what_is_slower_than_one_a_second_is_said_as_the_time_of_one(rate: float, said: str) -> None:
    assert show_rate(rate) == said
