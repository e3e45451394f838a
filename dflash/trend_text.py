"""A trend as markdown, for places that show a table and no page. Imports no torch."""

import html

from dflash.errors import one_line
from dflash.trend import Point, Series, Trend, training_tau

BARS = "▁▂▃▄▅▆▇█"
MOST_ROWS = 50
"""Steps that a table lists, the latest ones; more are in the page."""


def trend_markdown(trend: Trend) -> str:
    """Each series with its headline, τ as small bars over the steps, and a table, the latest step first."""
    parts = [_series(series) for series in trend.series]
    if trend.problems:
        parts.append("Not used:\n\n" + "\n".join(f"- {_cell(problem)}" for problem in trend.problems))
    return "\n\n".join(parts) + "\n"


def _series(series: Series) -> str:
    rows = [_row(point) for point in series.points[: -MOST_ROWS - 1 : -1]]
    head = ["| step | τ | 95 % interval | reference | training says | |", "| ---: | ---: | --- | ---: | ---: | --- |"]
    left_out = len(series.points) - len(rows)
    return "\n\n".join(
        [
            f"## {_cell(series.headline())}",
            f"{_cell(series.title)}",
            f"`{bars(series)}`",
            "\n".join(head + rows) + (f"\n\n{left_out} earlier steps are in the page." if left_out else ""),
        ]
    )


def bars(series: Series) -> str:
    """One character a step, its height τ from 1 to the series' best; ``×`` where a report is not valid."""
    highest = max((point.tau.pooled for point in series.points if point.valid), default=1.0)
    return "".join(
        BARS[min(len(BARS) - 1, int(len(BARS) * (point.tau.pooled - 1) / max(1e-9, highest - 1)))]
        if point.valid
        else "×"
        for point in series.points
    )


def _row(point: Point) -> str:
    said = training_tau(point.training)
    if not point.valid:
        cells = [str(point.step), "not valid", _cell(", ".join(point.invalid_because)), "–", "–", "✕"]
    else:
        mark = "★ best" if point.best else "▼ regression" if point.regression else ""
        interval = "–" if point.tau.ci95 is None else f"{point.tau.ci95[0]:.3f} to {point.tau.ci95[1]:.3f}"
        reference = "–" if point.reference is None else f"{point.reference.pooled:.3f}"
        told = "–" if said is None else f"{said:.3f}"
        cells = [str(point.step), f"{point.tau.pooled:.3f}", interval, reference, told, mark]
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Text of a file without effect on the markdown or the HTML around it."""
    shown = html.escape(one_line(text), quote=False)
    return "".join(f"\\{character}" if character in "\\`*_{}[]#|" else character for character in shown)
