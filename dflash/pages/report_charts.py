"""The charts of ``report.html`` above their tables: by position, by length, trees and other readings."""

from collections.abc import Sequence

from dflash.metrics import Round
from dflash.pages.document import chart, section
from dflash.pages.markup import NONE, Html, number, percent, table, tag
from dflash.pages.rounds_view import commonest_misses, misses_by_rank
from dflash.report import Report
from dflash.trend import training_tau

SHOWN_MISSES = 12
UNTOLD = "A server does not tell these."


_POSITION_FIGURES = (
    ("acceptance", "Acceptance", "slots 1 to k all right, of all rounds", "acceptance_by_position"),
    ("conditional", "Conditional", "slot k right where the slots before it were", "conditional_by_position"),
    ("accuracy", "Accuracy", "slot k right, whatever came before it", "accuracy_by_position"),
)


def positions(report: Report) -> Html:
    """Acceptance, conditional and accuracy by slot, of both drafters."""
    metrics, reference = report.metrics, report.reference_metrics
    charts = []
    for key, title, said, field in _POSITION_FIGURES:
        ours = getattr(metrics, field)
        theirs = getattr(reference, field) if reference is not None else []
        if not ours and not theirs:  # a server does not tell this one
            continue
        head: list[object] = ["slot", "drafter", *(["reference"] if reference is not None else [])]
        slots = max(len(ours), len(theirs))
        rows: list[list[object]] = [
            [
                slot + 1,
                percent(_nth(ours, slot)),
                *([percent(_nth(theirs, slot))] if reference is not None else []),
            ]
            for slot in range(slots)
        ]
        charts.append(chart(f"chart-{key}", title, table(head, rows, caption=f"{title} by slot"), note=said))
    return section(
        "positions",
        "By position in the block",
        tag("div", *charts, class_="grid three") if charts else tag("p", UNTOLD, class_="note"),
        lead="How far into a block the drafts hold. Slot 0 is the anchor, the last known token; slots beyond the end "
        "of a completion count nowhere.",
    )


def _nth(values: Sequence[float | None], place: int) -> float | None:
    return values[place] if place < len(values) else None


def lengths(report: Report, rounds: Sequence[Round]) -> Html:
    """Rounds by what they emitted, and how narrowly those failed that a wrong draft ended."""
    metrics, reference = report.metrics, report.reference_metrics
    head: list[object] = ["tokens emitted", "rounds", "share"]
    head += ["reference's rounds", "share"] if reference is not None else []
    rows: list[list[object]] = []
    for place, count in enumerate(metrics.histogram):
        row: list[object] = [place + 1, f"{count:,}", percent(count / metrics.rounds if metrics.rounds else None)]
        if reference is not None:
            theirs = reference.histogram[place] if place < len(reference.histogram) else 0
            row += [f"{theirs:,}", percent(theirs / reference.rounds if reference.rounds else None)]
        rows.append(row)
    charts = [
        chart(
            "chart-histogram",
            "Rounds by tokens emitted",
            table(head, rows, caption="Rounds by tokens emitted"),
            note="accepted drafts and the bonus token; the last bar is a whole block",
        )
    ]
    if rounds:
        misses = misses_by_rank(rounds)
        total = sum(count for _, count in misses)
        cells: list[list[object]] = [
            [label, f"{count:,}", percent(count / total if total else None)] for label, count in misses
        ]
        charts.append(
            chart(
                "chart-misses",
                "How narrowly the drafter fails",
                table(["place of the right token", "rounds", "share"], cells, caption="Misses by rank"),
                note="where a wrong draft ended the round: place of the right token among the drafter's candidates, 1 "
                "is its best",
            )
        )
    return section("lengths", "How long rounds get", tag("div", *charts, class_="grid two"), _misses(report, rounds))


def _misses(report: Report, rounds: Sequence[Round]) -> Html | None:
    found = commonest_misses(rounds, SHOWN_MISSES)
    if not found or not report.token_texts:
        return None
    rows: list[list[object]] = [
        [
            tag("code", _quoted(report, one.drafted), class_="wrong"),
            tag("code", _quoted(report, one.right), class_="right"),
            f"{one.count:,}",
            f"#{one.rank + 1}",
        ]
        for one in found
    ]
    return tag(
        "details",
        tag("summary", "What it takes for what: the commonest misses"),
        table(["drafted", "right", "rounds", "median place of the right one"], rows, caption="The commonest misses"),
        class_="panel",
    )


def _quoted(report: Report, token: int) -> str:
    said = report.token_texts.get(token)
    return f"⟨{token}⟩" if not said else said.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def curves(report: Report) -> Html:
    """Top-k streaks, draft trees, and the walk against random anchors."""
    metrics, reference = report.metrics, report.reference_metrics
    both = reference is not None
    head: list[object] = ["", "drafter", *(["reference"] if both else [])]
    streaks: list[list[object]] = [
        [f"top-{width}", number(value), *([number(reference.streak.get(width))] if reference is not None else [])]
        for width, value in metrics.streak.items()
    ]
    charts = []
    if streaks:
        charts.append(
            chart(
                "chart-streak",
                "Top-k streak",
                table(head, streaks, caption="Top-k streak"),
                note="leading slots whose right token is among the drafter's k best: drafts only, no bonus; an oracle, "
                "never compared with τ",
            )
        )
    if metrics.ddtree:
        trees: list[list[object]] = [
            [
                f"{nodes} nodes",
                number(value),
                *([number((reference.ddtree or {}).get(nodes))] if reference is not None else []),
            ]
            for nodes, value in metrics.ddtree.items()
        ]
        charts.append(
            chart(
                "chart-ddtree",
                "DDTree(N)",
                table(head, trees, caption="τ of draft trees"),
                note="τ of a draft tree of N nodes besides the root, on its own walk, bonus included; the dashed line "
                "is the chain",
            )
        )
    if metrics.random_anchor_tau is not None or report.training is not None:
        charts.append(_anchors(report))
    if not charts:
        return section("curves", "Trees and other readings", tag("p", UNTOLD, class_="note"))
    return section("curves", "Trees and other readings", tag("div", *charts, class_="grid three"))


def _anchors(report: Report) -> Html:
    """The walk against random anchors, and against what training said of its own blocks."""
    metrics, reference = report.metrics, report.reference_metrics
    both = reference is not None
    rows: list[list[object]] = [
        ["walk", number(metrics.tau.pooled), *([number(reference.tau.pooled)] if reference is not None else [])],
        [
            "random anchors",
            number(metrics.random_anchor_tau),
            *([number(reference.random_anchor_tau)] if reference is not None else []),
        ],
    ]
    if training_tau(report.training) is not None:
        rows.append(["training says", number(training_tau(report.training)), *([NONE] if both else [])])
    return chart(
        "chart-anchors",
        "Walk against random anchors",
        table(["τ", "drafter", *(["reference"] if both else [])], rows, caption="Walk against random anchors"),
        note="the walk stands where serving does; random anchors are blocks as training sees them, and training's own "
        "figure is its top-1 streak + 1",
    )
