"""The trend page: τ over the steps of a training run, beside the reference and what training said of itself."""

import os
from typing import Any
from urllib.parse import quote

from dflash.pages.document import chart, document, masthead, section
from dflash.pages.markup import NONE, Html, interval, join, number, table, tag
from dflash.pages.report_record import pill
from dflash.trend import PAGE, Point, Series, Trend, training_tau


def trend_page(trend: Trend, name: str, *, base: str = ".") -> str:
    """The page of ``trend``; ``name`` is what its folder is called, ``base`` the way from the page to that folder."""
    several = len(trend.series) > 1
    sections = [(f"series-{place}", f"Series {place + 1}") for place in range(len(trend.series))] if several else []
    if trend.problems:
        sections.append(("problems", "Not shown"))
    body = join(
        masthead("DFlash trend", name, sections),
        tag(
            "main",
            *(_series(one, place, base, several=several) for place, one in enumerate(trend.series)),
            _problems(trend) if trend.problems else None,
            id="content",
        ),
    )
    data = {"series": [_data(one, base) for one in trend.series]}
    title = f"{trend.series[0].headline()} · {name}"
    return document(title, body, scripts=["page.js", "trend.js"], data=data)


def _series(series: Series, place: int, base: str, *, several: bool) -> Html:
    charts = [chart(f"chart-tau-{place}", "τ over steps", None, note=_NOTE, height=340)]
    small = [
        chart(f"chart-{key}-{place}", title, _training_table(series, key), note=note, height=200)
        for key, title, note in _TRAINING
        if any(getattr(point.training, key, None) is not None for point in series.points)
    ]
    return tag(
        "section",
        tag("p", f"Series {place + 1} of those that measured alike", class_="lead") if several else None,
        tag("h2" if place else "h1", _headline(series), class_="headline" if series.best() else "headline bad"),
        tag("p", f"{len(series.points)} reports over {series.title}.", class_="lead"),
        tag("div", *_cards(series), class_="cards"),
        *charts,
        tag("div", *small, class_="grid two below") if small else None,
        tag("div", tag("h3", "Reports"), _table(series, base), class_="panel"),
        id=f"series-{place}",
    )


_NOTE = (
    "whiskers are 95 % intervals over prompts; ★ the best, ▼ worse than the best before it by a paired bootstrap; "
    "hollow: not valid, in no comparison"
)
_TRAINING = (
    ("loss", "Training loss", "what the trainer wrote into each checkpoint"),
    ("accuracy", "Training accuracy", "share of right slots, in training's own blocks"),
)


def _headline(series: Series) -> str:
    best = series.best()
    if best is None:
        return "no valid report"
    beside = "" if series.reference is None else f", the reference {number(series.reference.pooled)}"
    return f"best: step {best.step} with τ {number(best.tau.pooled)}{beside}"


def _cards(series: Series) -> list[Html]:
    best, last = series.best(), series.last()
    worse = [point for point in series.points if point.regression]
    invalid = [point for point in series.points if not point.valid]
    said: list[tuple[str, str, str, str | None]] = [
        (
            "best",
            number(best.tau.pooled) if best else NONE,
            f"step {best.step}, {interval(best.tau.ci95)}" if best else "no report is valid",
            None if best is None or series.reference is None else f"reference {number(series.reference.pooled)}",
        ),
        (
            "last",
            number(last.tau.pooled) if last.valid else "not valid",
            f"step {last.step}, {interval(last.tau.ci95) if last.valid else ', '.join(last.invalid_because)}",
            None,
        ),
        ("regressions", str(len(worse)), _steps(worse) or "no step is worse than the best before it", None),
        ("not valid", str(len(invalid)), _steps(invalid) or "every report may be believed", None),
    ]
    return [
        tag(
            "div",
            tag("span", title, class_="title"),
            tag("span", value, class_="value"),
            tag("span", beside, class_="beside") if beside else None,
            tag("span", text, class_="said"),
            class_="card",
        )
        for title, value, text, beside in said
    ]


def _steps(points: list[Point]) -> str:
    return f"step {', '.join(str(point.step) for point in points)}" if points else ""


def _table(series: Series, base: str) -> Html:
    rows: list[list[object]] = [
        [
            _link(point, base),
            _verdict(point),
            _measured(point, number(point.tau.pooled)),
            _measured(point, interval(point.tau.ci95)),
            _measured(point, number(point.reference.pooled if point.reference else None)),
            _against(point),
            _measured(point, number(point.random_anchor_tau)),
            number(training_tau(point.training)),
            number(point.training.loss if point.training else None, 4),
            f"{point.created:%Y-%m-%d %H:%M}",
        ]
        for point in reversed(series.points)
    ]
    head: list[object] = ["step", "", "τ", "95 % interval", "reference", "against the best before", "random anchors"]
    caption = "Reports, the latest step first"
    return table([*head, "training says", "training loss", "measured"], rows, caption=caption, class_="figures course")


def _measured(point: Point, figure: str) -> object:
    """``figure``, struck out where the report is not valid: it was measured and must not be believed."""
    return figure if point.valid or figure == NONE else tag("del", figure, class_="unbelieved")


def _link(point: Point, base: str) -> object:
    return tag("a", point.step, href=_page_of(point, base)) if point.page else point.step


def _page_of(point: Point, base: str) -> str:
    """The address of the point's own page; a folder whose name has a colon must not read as a scheme."""
    return quote(os.fsencode(f"./{base}/{point.folder}/{PAGE}"))


def _verdict(point: Point) -> Html:
    if not point.valid:
        return join(pill("fail"), *(tag("span", f" {name}", class_="why") for name in point.invalid_because))
    marks = [tag("span", "★ best", class_="pill pass")] if point.best else []
    marks += [tag("span", "▼ regression", class_="pill warn")] if point.regression else []
    return join(*marks)


def _against(point: Point) -> str:
    one = point.against
    if one is None:
        return NONE
    between = "" if one.ci95 is None else f" [{interval(one.ci95, sign='+')}]"
    return f"{number(one.difference, sign='+')}{between} to step {point.against_step}: {one.verdict or 'no verdict'}"


def _training_table(series: Series, key: str) -> Html:
    rows: list[list[object]] = [
        [point.step, number(getattr(point.training, key, None), 4)] for point in reversed(series.points)
    ]
    return table(["step", key], rows, caption=f"Training {key}")


def _problems(trend: Trend) -> Html:
    return section(
        "problems",
        "Not shown",
        tag("ul", *(tag("li", problem) for problem in trend.problems), class_="note"),
        lead="Reports that were found and could not be used.",
    )


def _data(series: Series, base: str) -> dict[str, Any]:
    points = [
        {
            "step": point.step,
            "tau": point.tau.pooled,
            "ci95": point.tau.ci95,
            "valid": point.valid,
            "best": point.best,
            "regression": point.regression,
            "randomAnchors": point.random_anchor_tau,
            "training": training_tau(point.training),
            "loss": point.training.loss if point.training else None,
            "accuracy": point.training.accuracy if point.training else None,
            "why": ", ".join(point.invalid_because),
            "against": _against(point),
            "href": _page_of(point, base) if point.page else None,
        }
        for point in series.points
    ]
    return {
        "blockSize": series.block_size,
        "reference": series.reference.model_dump() if series.reference else None,
        "points": points,
    }
