"""The course of a run as a Prefect artifact: best, regressions and reports that are not valid, without a click."""

from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from dflash.trend import Trend, read_trend
from dflash.trend_text import trend_markdown

KEY = "trend"


def leave_trend(reports: Path, *, key: str = KEY) -> Trend:
    """Read every report below ``reports`` and leave their trend under ``key``, a version a call.

    Returns the trend. Raises :class:`~dflash.trend.NoReportsError` when there is none.
    """
    trend = read_trend(reports)
    create_markdown_artifact(trend_markdown(trend), key=key, description=trend.series[0].headline())
    return trend
