"""The comparison page: two or more reports over the same prompts, the first one less each of the others."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from dflash.compare import PromptDifference, ReportComparison, compare_reports
from dflash.metrics import FEWEST_PROMPTS
from dflash.pages.document import chart, document, masthead, section
from dflash.pages.markup import NONE, Html, interval, join, number, table, tag, visible
from dflash.pages.prompt_list import prompt_row, prompt_tools
from dflash.report import Comparison, Report
from dflash.trend import step_of

_SAID = {
    "better": "{0} is better than {1} by τ {2}",
    "worse": "{0} is worse than {1} by τ {2}",
    "no difference shown": "no difference shown between {0} and {1}: τ {2}",
    "too few prompts": "τ {2} between {0} and {1}, of too few prompts for a verdict",
    None: "τ {2} between {0} and {1}, no verdict",
}
SHOWN = 5
"""Winners and losers that are named before the whole list."""


def comparison_page(reports: Sequence[Report]) -> str:
    """The page of the first report against each of the others, and of every pair where there are more than two.

    Raises :class:`~dflash.compare.NotComparableError` where they measured different things or one is not valid, and
    :class:`ValueError` on fewer than two.
    """
    if len(reports) < 2:
        raise ValueError("a comparison takes two reports")
    names = [f"{letter_of(place)} {_short(report)}" for place, report in enumerate(reports)]
    pairs = [compare_reports(reports[0], other) for other in reports[1:]]
    one = pairs[0].comparison
    title = _SAID[one.verdict].format(names[0], names[1], number(one.difference, sign="+"))
    against = [
        (f"against-{letter_of(place)}", f"{letter_of(0)} − {letter_of(place)}") for place in range(1, len(reports))
    ]
    body = join(
        masthead("DFlash comparison", " · ".join(names), [("overview", "Overview"), *against]),
        tag(
            "main",
            _overview(reports, pairs, title),
            _matrix(reports) if len(reports) > 2 else None,
            *(_against(pair, letter_of(place), names) for place, pair in enumerate(pairs, start=1)),
            id="content",
        ),
    )
    scripts = ["page.js", "prompts.js", "comparison.js"]
    return document(title, body, scripts=scripts, data=_data(reports, pairs, names))


def letter_of(place: int) -> str:
    """What the page calls the report at ``place``: A to Z, then AA and on."""
    return (letter_of(place // 26 - 1) if place >= 26 else "") + chr(ord("A") + place % 26)


def _short(report: Report) -> str:
    step = step_of(report)
    return f"step {step}" if step is not None else report.checkpoint.path.rstrip("/").rpartition("/")[2]


def _overview(reports: Sequence[Report], pairs: Sequence[ReportComparison], title: str) -> Html:
    rows: list[list[object]] = [
        [
            letter_of(place),
            report.checkpoint.path,
            NONE if step_of(report) is None else step_of(report),
            number(report.metrics.tau.pooled),
            interval(report.metrics.tau.ci95),
            number(report.metrics.tau.macro),
            number(report.reference_metrics.tau.pooled if report.reference_metrics else None),
            f"{report.metrics.rounds:,}",
            tag("code", report.checkpoint.sha256[:12], class_="digest"),
            f"{report.created:%Y-%m-%d %H:%M}",
        ]
        for place, report in enumerate(reports)
    ]
    head: list[object] = ["", "checkpoint", "step", "τ", "95 % interval", "macro", "reference", "rounds", "sha256"]
    prompts = pairs[0].comparison.prompts
    return tag(
        "section",
        tag("h1", title, class_="headline"),
        tag(
            "p",
            f"Acceptance length τ over the same {prompts} prompts, the first report less the other, with a paired "
            f"bootstrap over the prompts. Under {FEWEST_PROMPTS} prompts there is no verdict.",
            class_="lead",
        ),
        _forest(pairs),
        tag(
            "p",
            f"Each of the {len(pairs)} intervals holds 95 % by itself; of many, some leave out zero by chance.",
            class_="note",
        )
        if len(pairs) > 1
        else None,
        tag("div", table([*head, "measured"], rows, caption="The reports"), class_="panel reports"),
        *(tag("p", note, class_="note") for note in sorted({note for pair in pairs for note in pair.notes})),
        id="overview",
        aria_label="Overview",
    )


def _forest(pairs: Sequence[ReportComparison]) -> Html:
    """Each difference with its interval on one scale, zero in the middle."""
    ends = [abs(end) for pair in pairs for end in (pair.comparison.difference, *(pair.comparison.ci95 or ()))]
    widest = max(ends) * 1.15 or 1.0

    def at(value: float) -> float:
        return 50 + 50 * value / widest

    rows = []
    for place, pair in enumerate(pairs, start=1):
        one = pair.comparison
        low, high = one.ci95 or (one.difference, one.difference)
        rows.append(
            tag(
                "div",
                tag("span", f"{letter_of(0)} − {letter_of(place)}", class_="label"),
                tag(
                    "div",
                    tag("i", class_="zero", style="left:50%"),
                    tag("i", class_="range", style=f"left:{at(low):.2f}%;width:{at(high) - at(low):.2f}%"),
                    tag("i", class_="dot", style=f"left:{at(one.difference):.2f}%"),
                    class_="track",
                ),
                tag("span", _difference(one), class_="told", id=f"difference-{letter_of(place)}"),
                class_=f"row {'reference' if one.difference < 0 else 'drafter'}",
            )
        )
    return tag(
        "div",
        *rows,
        tag(
            "div",
            tag("span"),
            tag(
                "div",
                *(
                    tag("span", number(value, 2, sign="+") if value else "0", style=f"left:{at(value):.2f}%")
                    for value in (-widest / 1.15, 0.0, widest / 1.15)
                ),
            ),
            class_="scale",
        ),
        tag("p", f"difference of τ in tokens per round; right of zero {letter_of(0)} is better", class_="unit"),
        class_="ruler forest",
    )


def _difference(one: Comparison) -> str:
    return f"{number(one.difference, sign='+')} [{interval(one.ci95, sign='+')}] {one.verdict or 'no verdict'}"


def _matrix(reports: Sequence[Report]) -> Html:
    """Every pair, row less column."""
    count = len(reports)
    cells: dict[tuple[int, int], Comparison] = {}
    for row, column in combinations(range(count), 2):
        cells[row, column] = compare_reports(reports[row], reports[column]).comparison
        cells[column, row] = compare_reports(reports[column], reports[row]).comparison
    rows: list[list[object]] = [
        [
            f"{letter_of(row)} {_short(reports[row])}",
            *(_cell(cells.get((row, column))) for column in range(count)),
        ]
        for row in range(count)
    ]
    head: list[object] = ["row less column", *(letter_of(place) for place in range(count))]
    return section("pairs", "Every pair", tag("div", table(head, rows, caption="Every pair"), class_="panel"))


def _cell(one: Comparison | None) -> object:
    if one is None:
        return NONE
    class_ = {"better": "pill pass", "worse": "pill fail"}.get(one.verdict or "", "pill skipped")
    return join(tag("span", number(one.difference, sign="+"), class_=class_), f" {one.verdict or 'no verdict'}")


def _against(pair: ReportComparison, letter: str, names: Sequence[str]) -> Html:
    ours, theirs = letter_of(0), letter
    both = [(one, one.ours - one.theirs) for one in pair.prompts if one.ours is not None and one.theirs is not None]
    won, lost = sum(difference > 0 for _, difference in both), sum(difference < 0 for _, difference in both)
    widest = max((abs(difference) for _, difference in both), default=0) or 1.0
    place_of = {one.id: place for place, one in enumerate(pair.prompts)}
    rows = []
    for one in sorted(pair.prompts, key=_falling):
        place = place_of[one.id]
        difference = None if one.ours is None or one.theirs is None else one.ours - one.theirs
        bars: list[Html | None] = [tag("i", class_="zero", style="left:50%")]
        if difference is not None:
            width = 50 * abs(difference) / widest
            left = 50 if difference >= 0 else 50 - width
            class_ = "bar" if difference >= 0 else "bar less"
            bars.append(tag("i", class_=class_, style=f"left:{left:.2f}%;width:{width:.2f}%"))
        figures = [
            tag("span", number(difference, sign="+"), class_="tau"),
            tag("span", f"{number(one.ours)} − {number(one.theirs)}", class_="difference"),
            tag("span", "" if one.same_completion else "another completion", class_="counts"),
        ]
        sorted_by = {"difference": difference, "ours": one.ours, "theirs": one.theirs}
        rows.append(prompt_row(place, one.id, bars, figures, sorted_by, list_=f"text-{letter}"))
    keys = [("difference", "difference"), ("ours", f"{ours}'s τ"), ("theirs", f"{theirs}'s τ")]
    keys += [("id", "name"), ("order", "as measured")]
    ranked = sorted(both, key=lambda item: item[1])
    losers = [(one.id, difference) for one, difference in ranked if difference < 0][:SHOWN]
    winners = [(one.id, difference) for one, difference in reversed(ranked) if difference > 0][:SHOWN]
    scatter: list[list[object]] = [[one.id, number(one.ours), number(one.theirs)] for one in pair.prompts]
    return section(
        f"against-{letter}",
        f"{names[0]} against {names[_place(letter, names)]}",
        tag(
            "div",
            chart(
                f"chart-{letter}",
                "Prompt by prompt",
                table(["prompt", ours, theirs], scatter, caption="τ of each prompt"),
                note=f"above the line {ours} is better",
                height=300,
            ),
            tag(
                "div",
                _named(f"Where {ours} wins most", winners, place_of, letter),
                _named(f"Where {ours} loses most", losers, place_of, letter),
                class_="panel",
            ),
            class_="grid two top-grid",
        ),
        prompt_tools(keys, len(rows)),
        tag("ol", *rows, class_="prompts against"),
        lead=f"{_difference(pair.comparison)}. {ours} is ahead on {won} prompts, behind on {lost}, as good on "
        f"{len(both) - won - lost}.",
    )


def _falling(one: PromptDifference) -> tuple[bool, float]:
    """Wins before losses, and prompts without a round last."""
    if one.ours is None or one.theirs is None:
        return True, 0.0
    return False, one.theirs - one.ours


def _place(letter: str, names: Sequence[str]) -> int:
    return next(place for place, name in enumerate(names) if name.split(" ")[0] == letter)


def _named(title: str, found: Sequence[tuple[str, float]], place_of: dict[str, int], letter: str) -> Html:
    rows: list[list[object]] = [
        [tag("a", id, href=f"#text-{letter}-{place_of[id]}"), number(difference, sign="+")] for id, difference in found
    ]
    return join(
        tag("h3", title),
        table(["prompt", "difference of τ"], rows, caption=title) if rows else tag("p", "nowhere", class_="note"),
    )


def _data(reports: Sequence[Report], pairs: Sequence[ReportComparison], names: Sequence[str]) -> dict[str, Any]:
    blocks: dict[str, Any] = {
        "comparison": {
            "names": [visible(name) for name in names],
            "blockSize": reports[0].settings.block_size,
            "ids": [visible(one.id) for one in pairs[0].prompts],
            "pairs": [
                {
                    "letter": letter_of(place),
                    "ours": [one.ours for one in pair.prompts],
                    "theirs": [one.theirs for one in pair.prompts],
                    "same": [one.same_completion for one in pair.prompts],
                }
                for place, pair in enumerate(pairs, start=1)
            ],
        }
    }
    others = [{one.id: one.text for one in report.prompts} for report in reports]
    for place, one in enumerate(pairs[0].prompts):
        blocks[f"prompt-{place}"] = [visible(texts.get(one.id, "")) for texts in others]
    return blocks
