"""A trend where no page is shown: as markdown."""

from pathlib import Path

import pytest

from dflash.trend import read_trend
from dflash.trend_text import BARS, bars, trend_markdown
from tests.dflash.pages.reports import made, words, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps: one better than the first, one not valid, whose failed check has a name that is markup."""
    for step, better, valid in ((100, 0, True), (200, 4, True), (300, 5, False)):
        report, _ = made({"a": words(40)}, better=better)
        checkpoint = report.checkpoint.model_copy(update={"step": step})
        failed = [] if valid else ["<img src=x>|*kernel*"]
        report = report.model_copy(update={"checkpoint": checkpoint, "valid": valid, "invalid_because": failed})
        write(tmp_path / f"step_{step}", report)
    return tmp_path


def test_the_table_says_each_step_and_nothing_in_it_is_markup(run: Path) -> None:
    trend = read_trend(run)
    (series,) = trend.series
    text = trend_markdown(trend)
    best = series.points[1]
    assert best.tau.ci95 is None
    assert f"| 200 | {best.tau.pooled:.3f} | – | – | – | ★ best |" in text
    assert "| 300 | not valid | &lt;img src=x&gt;\\|\\*kernel\\* |" in text
    assert text.index("| 300 |") < text.index("| 200 |") < text.index("| 100 |")


def test_the_bars_rise_with_tau_and_show_no_height_of_what_is_not_valid(run: Path) -> None:
    shown = bars(read_trend(run).series[0])
    assert len(shown) == 3
    assert BARS.index(shown[0]) < BARS.index(shown[1]) == len(BARS) - 1
    assert shown[2] == "×"
