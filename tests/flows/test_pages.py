"""What Prefect's screen shows of numbers: who it is about, and the way from each page to the others."""

from pathlib import Path
from typing import Any

import pytest

from dflash.trend_text import trend_markdown
from flows import pages
from tasks.night_record import Drafter, Night
from tests.dflash.pages.reports import made, words, write

SOURCE = "kpro6:/runs/A [1]/step_20000.pt"


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The artifacts that were left, by their keys."""
    found: dict[str, dict[str, Any]] = {}

    def leave(content: Any, *, key: str, description: str) -> None:
        found[key] = {"content": content, "description": description}

    monkeypatch.setattr(pages, "create_markdown_artifact", leave)
    monkeypatch.setattr(pages, "create_table_artifact", leave)
    return found


@pytest.mark.parametrize(
    ("source", "called"),
    [
        (SOURCE, "step 20000"),
        ("kpro6:/runs/step_00500", "step 500"),
        ("kpro6:/runs/final.pt", "final.pt"),
        ("/here/step-7.safetensors", "step 7"),
    ],
)
def test_a_checkpoint_is_called_by_its_step(source: str, called: str) -> None:
    assert pages.title(source) == called


def test_pages_lead_to_each_other(left: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    report, _ = made({"a": words(40)})
    pages.leave_evaluation(report, SOURCE)
    best = Drafter(identity="1", step=None, source=SOURCE)
    pages.leave_night(Night(date="2026-11-30", outcome="no checkpoint", verdict="none", newest=best, best=best))
    write(tmp_path / "step_1", report)
    trend = pages.leave_trend(tmp_path)

    key = "kpro6-runs-a-1-step-20000-pt"
    assert set(left) == {f"acceptance-{key}", f"report-{key}", "nightly-comparison", "trend"}
    assert left[f"acceptance-{key}"]["description"] == report.headline()
    evaluation = left[f"report-{key}"]["content"]
    assert [name for name in left if f"(/artifacts/key/{name})" in evaluation] == [
        f"acceptance-{key}",
        *("nightly-comparison", "trend"),
    ]
    night = left["nightly-comparison"]["content"]
    assert night.count(f"[kpro6:/runs/A \\[1\\]/step_20000.pt](/artifacts/key/report-{key})") == 1
    assert "(/artifacts/key/trend)" in night
    assert left["trend"]["content"].startswith(trend_markdown(trend))
    assert left["trend"]["description"] == trend.series[0].headline()


def test_a_report_that_is_not_valid_has_no_figure_at_a_glance() -> None:
    report, _ = made({"a": words(40)})
    (row,) = pages.acceptance_table(report)
    assert row["τ"] == f"{report.metrics.tau.pooled:.3f}"
    (row,) = pages.acceptance_table(report.model_copy(update={"valid": False}))
    assert row["τ"] == "not valid"
