"""What Prefect's screen shows of the numbers: artifacts of a checkpoint, a night and a run's course, linked together.

Artifacts are found by their keys, and every new one under a key is its next version; so a link leads to the newest.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from dflash.checkpoint_layout import step_in_name
from dflash.render import to_markdown
from dflash.report import Report
from dflash.trend import Trend, read_trend
from dflash.trend_text import trend_markdown
from tasks.night_record import Night
from tasks.night_text import page

NIGHT_KEY, TREND_KEY = "nightly-comparison", "trend"


def title(source: str) -> str:
    """What people call the checkpoint ``source`` (HOST:/path): its step, where its name tells one."""
    step = step_in_name(source)
    return PurePosixPath(source).name if step is None else f"step {step}"


def leave_evaluation(report: Report, source: str) -> None:
    """Leave the numbers of the checkpoint ``source``: a table that answers at a glance, and the whole report."""
    key = _key(source)
    create_table_artifact(acceptance_table(report), key=f"acceptance-{key}", description=report.headline())
    links = [_link("at a glance", f"acceptance-{key}"), _link("the last night", NIGHT_KEY), _link("the run", TREND_KEY)]
    create_markdown_artifact(f"{to_markdown(report)}\n{' · '.join(links)}\n", key=f"report-{key}", description=source)


def leave_night(night: Night) -> None:
    """Leave a night's comparison, with links to the reports of its drafters."""
    drafters = {one.identity: one for one in (night.newest, night.best) if one is not None}
    links = [_link(one.name, f"report-{_key(one.source)}") for one in drafters.values()]
    links.append(_link("the run", TREND_KEY))
    create_markdown_artifact(f"{page(night)}\n{' · '.join(links)}\n", key=NIGHT_KEY, description=night.verdict)


def leave_trend(reports: Path) -> Trend:
    """Read every report below ``reports`` and leave the course of the run.

    Returns the trend. Raises :class:`~dflash.trend.NoReportsError` when there is none.
    """
    trend = read_trend(reports)
    text = f"{trend_markdown(trend)}\n{_link('the last night', NIGHT_KEY)}\n"
    create_markdown_artifact(text, key=TREND_KEY, description=trend.series[0].headline())
    return trend


def acceptance_table(report: Report) -> list[dict[str, Any]]:
    """One row a drafter: its pooled τ with interval, τ macro, rounds and tokens."""
    measured = {"checkpoint": report.metrics, "reference": report.reference_metrics}
    return [
        {
            "drafter": name,
            "τ": f"{metrics.tau.pooled:.3f}" if report.valid else "not valid",
            "95 %": "–" if metrics.tau.ci95 is None else f"{metrics.tau.ci95[0]:.3f} … {metrics.tau.ci95[1]:.3f}",
            "τ macro": f"{metrics.tau.macro:.3f}",
            "rounds": str(metrics.rounds),
            "tokens": str(metrics.tokens),
        }
        for name, metrics in measured.items()
        if metrics is not None
    ]


def _key(source: str) -> str:
    """A key of ``source``: Prefect takes small letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", source.lower()).strip("-")


def _link(text: str, key: str) -> str:
    """A link within Prefect's page, wherever that page is served."""
    shown = text.translate({ord(sign): f"\\{sign}" for sign in "\\[]|"})
    return f"[{shown}](/artifacts/key/{key})"
