"""The pictures of a report, a trend and a comparison, as PNG and SVG, for chats and papers. Needs matplotlib.

Colours are Okabe and Ito's, which the colour-blind tell apart, and no line is told from another by its colour alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from dflash.compare import ReportComparison
from dflash.errors import DFlashError, one_line
from dflash.metrics import Round
from dflash.output import OutputError
from dflash.pages.rounds_view import misses_by_rank
from dflash.report import Metrics, Report
from dflash.trend import Point, Series, training_tau

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAFTER, REFERENCE, THIRD, FOURTH, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#58616C"
DPI = 160
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#9aa2ab",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.color": "#e6e8eb",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",  # words stay words, for those who search or listen
    "svg.hashsalt": "dflash",
    "text.parse_math": False,  # names are names, whatever dollars they hold
}


class NoPlotsError(DFlashError):
    """Plots were asked for and matplotlib is not installed."""


def report_plots(report: Report, rounds: Sequence[Round], folder: Path) -> list[Path]:
    """Draw ``report``, ``positions``, ``lengths`` and ``curves``, what of them it has, into ``folder``.

    Returns the files. Raises :class:`NoPlotsError` without matplotlib.
    """
    return _save(folder, {name: figure for name, figure in _report_figures(report, rounds).items() if figure})


def trend_plots(series: Sequence[Series], folder: Path) -> list[Path]:
    """Draw ``trend``, ``trend-2`` and on, one for each series, into ``folder``; returns the files."""
    with _style():
        figures = {
            "trend" if place == 0 else f"trend-{place + 1}": _trend_figure(one) for place, one in enumerate(series)
        }
    return _save(folder, figures)


def comparison_plots(pairs: Sequence[ReportComparison], folder: Path) -> list[Path]:
    """Draw ``comparison`` into ``folder``: each difference with its interval; returns the files."""
    with _style():
        return _save(folder, {"comparison": _comparison_figure(pairs)})


def require_matplotlib() -> None:
    """Raise :class:`NoPlotsError` where matplotlib is not installed."""
    _style()


def _style() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise NoPlotsError(
            "plots need matplotlib, which is not installed here; pip install 'dflash-pipeline[model]', or leave out "
            "--plots: the page has the same charts"
        ) from None
    return matplotlib.rc_context(_STYLE)  # type: ignore[arg-type]


def _save(folder: Path, figures: Mapping[str, "Figure"]) -> list[Path]:
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _style():
            for name, figure in figures.items():
                for kind in ("png", "svg"):
                    path = folder / f"{name}.{kind}"
                    # without a date the same report gives the same bytes
                    figure.savefig(path, dpi=DPI, metadata={"Date": None} if kind == "svg" else {})
                    files.append(path)
    except OSError as error:
        raise OutputError(
            f"the plots could not be written to {folder} ({error.strerror or error}); make room, or name another folder"
        ) from None
    return files


def _figure(title: str, width: float, height: float, rows: int = 1, columns: int = 1) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(
        "\n".join(wrap(one_line(title), int(11 * width))), x=0.01, ha="left", fontsize=11, fontweight="bold"
    )
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()


# ---- a report -------------------------------------------------------------------------------------------------------


def _report_figures(report: Report, rounds: Sequence[Round]) -> dict[str, "Figure | None"]:
    with _style():
        both = [("drafter", report.metrics)]
        both += [("reference", report.reference_metrics)] if report.reference_metrics else []
        title = report.headline()
        whole, axes = _figure(title, 10, 6.4, 2, 2)
        _tau(axes[0], report, both)
        _by_position(axes[1], both, "acceptance_by_position", "Acceptance: slots 1 to k all right")
        _lengths(axes[2], both)
        _misses(axes[3], rounds) if rounds else _by_position(axes[3], both, "accuracy_by_position", "Accuracy")
        return {
            "report": whole,
            "positions": _positions_figure(title, both),
            "lengths": _lengths_figure(title, both, rounds),
            "curves": _curves_figure(report, both),
        }


def _positions_figure(title: str, both: Sequence[tuple[str, Metrics]]) -> "Figure | None":
    if not both[0][1].acceptance_by_position:
        return None
    figure, axes = _figure(title, 11, 3.4, 1, 3)
    for axis, field, said in zip(
        axes,
        ("acceptance_by_position", "conditional_by_position", "accuracy_by_position"),
        ("Acceptance: slots 1 to k all right", "Conditional: right where those before were", "Accuracy: slot k right"),
        strict=True,
    ):
        _by_position(axis, both, field, said)
    return figure


def _lengths_figure(title: str, both: Sequence[tuple[str, Metrics]], rounds: Sequence[Round]) -> "Figure":
    figure, axes = _figure(title, 10 if rounds else 6, 3.4, 1, 2 if rounds else 1)
    _lengths(axes[0], both)
    if rounds:
        _misses(axes[1], rounds)
    return figure


def _curves_figure(report: Report, both: Sequence[tuple[str, Metrics]]) -> "Figure | None":
    if not report.metrics.streak or not report.metrics.ddtree:
        return None
    figure, axes = _figure(report.headline(), 10, 3.4, 1, 2)
    for name, metrics in both:
        for axis, values in zip(axes, (metrics.streak, metrics.ddtree or {}), strict=True):
            axis.plot([int(key) for key in values], list(values.values()), label=name, **_line(name))
    axes[1].axhline(report.metrics.tau.pooled, color=GREY, linestyle=":", label="the drafter's chain τ")
    for axis, title, unit, said in (
        (axes[0], "Top-k streak: an oracle, never compared with τ", "mean streak in slots, no bonus", "k"),
        (axes[1], "DDTree(N) on its own walk", "τ in tokens per round", "nodes of the tree, N"),
    ):
        keys = report.metrics.streak if axis is axes[0] else report.metrics.ddtree
        axis.set_xscale("log", base=2)
        axis.set_xticks([int(key) for key in keys], labels=list(keys))
        axis.minorticks_off()
        axis.set(title=title, xlabel=said, ylabel=unit)
        axis.legend()
    return figure


def _tau(axis: "Axes", report: Report, both: Sequence[tuple[str, Metrics]]) -> None:
    for place, (name, metrics) in enumerate(both):
        low, high = metrics.tau.ci95 or (metrics.tau.pooled, metrics.tau.pooled)
        color = DRAFTER if name == "drafter" else REFERENCE
        axis.barh(place, metrics.tau.pooled - 1, left=1, height=0.5, color=color, alpha=0.2)
        axis.plot([low, high], [place, place], color=color, linewidth=2)
        inside = color if report.valid else "white"
        axis.plot(
            [metrics.tau.pooled],
            [place],
            color=color,
            marker=_line(name)["marker"],
            markersize=7,
            markerfacecolor=inside,
        )
        axis.annotate(
            f"{metrics.tau.pooled:.3f}", (high, place), xytext=(6, -3), textcoords="offset points", color=color
        )
    axis.set_yticks(range(len(both)), labels=[name for name, _ in both])
    axis.set_ylim(len(both) - 0.4, -0.6)
    axis.set_xlim(1, report.settings.block_size)
    axis.set(title="Acceptance length with 95 % interval", xlabel="τ in tokens per round")


def _by_position(axis: "Axes", both: Sequence[tuple[str, Metrics]], field: str, title: str) -> None:
    for name, metrics in both:
        shares = [None if value is None else 100 * value for value in getattr(metrics, field)]
        axis.plot(range(1, len(shares) + 1), shares, label=name, **_line(name))  # type: ignore[arg-type]
    axis.set_ylim(0, 102)
    axis.set(title=title, xlabel="slot of the block", ylabel="share of rounds in %")
    axis.legend()


def _lengths(axis: "Axes", both: Sequence[tuple[str, Metrics]]) -> None:
    width = 0.8 / len(both)
    for number, (name, metrics) in enumerate(both):
        places = [place + 1 + width * (number - (len(both) - 1) / 2) for place in range(len(metrics.histogram))]
        shares = [100 * count / metrics.rounds for count in metrics.histogram]
        hatch = None if name == "drafter" else "///"
        color = DRAFTER if name == "drafter" else "white"
        edge = DRAFTER if name == "drafter" else REFERENCE
        axis.bar(places, shares, width * 0.95, color=color, edgecolor=edge, hatch=hatch, label=name)
    axis.grid(axis="x", visible=False)
    axis.set(title="Rounds by tokens emitted", xlabel="tokens emitted by a round", ylabel="share of rounds in %")
    axis.legend()


def _misses(axis: "Axes", rounds: Sequence[Round]) -> None:
    bins = misses_by_rank(rounds)
    total = sum(count for _, count in bins) or 1
    drawn = axis.bar([label for label, _ in bins], [100 * count / total for _, count in bins], color=DRAFTER)
    axis.bar_label(drawn, fmt="%.0f", fontsize=8)
    axis.grid(axis="x", visible=False)
    axis.set(
        title="How narrowly the drafter fails",
        xlabel="place of the right token among its candidates",
        ylabel="share of the misses in %",
    )


def _line(name: str) -> dict[str, Any]:
    if name == "drafter":
        return {"color": DRAFTER, "marker": "o", "markersize": 4}
    return {"color": REFERENCE, "marker": "s", "markersize": 4, "linestyle": "--"}


# ---- a trend --------------------------------------------------------------------------------------------------------


def _trend_figure(series: Series) -> "Figure":
    figure, (axis,) = _figure(series.headline(), 10, 4.6)
    valid = [point for point in series.points if point.valid]
    if series.reference is not None:
        tau = series.reference
        axis.axhline(tau.pooled, color=REFERENCE, linestyle="--", label=f"reference {tau.pooled:.3f}")
        if tau.ci95 is not None:
            axis.axhspan(*tau.ci95, color=REFERENCE, alpha=0.12, linewidth=0)
    said = [(point.step, training_tau(point.training)) for point in series.points]
    _told(axis, said, color=FOURTH, marker="s", linestyle=(0, (7, 3)), label="training says (top-1 streak + 1)")
    random = [(point.step, point.random_anchor_tau) for point in valid]
    _told(axis, random, color=THIRD, marker="D", linestyle=":", label="τ at random anchors")
    axis.plot(
        [p.step for p in valid], [p.tau.pooled for p in valid], color=DRAFTER, marker="o", markersize=5, label="τ"
    )
    for point in series.points:
        if point.tau.ci95 is not None:
            axis.plot([point.step] * 2, point.tau.ci95, color=DRAFTER, linewidth=1.2)
    _marks(
        axis, [p for p in series.points if not p.valid], "not valid", marker="o", facecolor="white", edgecolor=DRAFTER
    )
    worse = [point for point in valid if point.regression]
    _marks(axis, worse, "worse than the best before it", marker="v", s=70, color="#AD1F1F")
    _marks(axis, [p for p in valid if p.best], "best", marker="*", s=260, color="#F0E442", edgecolor="black")
    axis.set(title=one_line(series.title), xlabel="training step", ylabel="τ in tokens per round")
    axis.set_ylim(bottom=1)
    axis.margins(x=0.03)
    axis.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    return figure


def _told(axis: "Axes", values: Sequence[tuple[int, float | None]], **how: Any) -> None:
    known = [(step, value) for step, value in values if value is not None]
    if known:
        axis.plot([step for step, _ in known], [value for _, value in known], markersize=4, linewidth=1.2, **how)


def _marks(axis: "Axes", points: Sequence[Point], label: str, **how: Any) -> None:
    if points:
        axis.scatter([one.step for one in points], [one.tau.pooled for one in points], label=label, zorder=4, **how)


# ---- a comparison ---------------------------------------------------------------------------------------------------


def _comparison_figure(pairs: Sequence[ReportComparison]) -> "Figure":
    figure, axes = _figure(pairs[0].headline(), 10, 1.6 + 0.55 * len(pairs) + 1.6, 1, 2)
    for place, pair in enumerate(pairs):
        one = pair.comparison
        low, high = one.ci95 or (one.difference, one.difference)
        color = DRAFTER if one.difference >= 0 else REFERENCE
        axes[0].plot([low, high], [place, place], color=color, linewidth=2)
        axes[0].plot([one.difference], [place], color=color, marker="o" if one.difference >= 0 else "s")
    axes[0].axvline(0, color=GREY, linewidth=1)
    axes[0].set_yticks(range(len(pairs)), labels=[_less(pair) for pair in pairs])
    axes[0].set_ylim(len(pairs) - 0.4, -0.6)
    axes[0].set(
        title=f"{one_line(_tail(pairs[0].ours))}, with 95 % intervals", xlabel="difference of τ in tokens per round"
    )
    differences = sorted(
        one.ours - one.theirs for one in pairs[0].prompts if one.ours is not None and one.theirs is not None
    )
    colors = [DRAFTER if difference >= 0 else REFERENCE for difference in differences]
    axes[1].bar(range(1, len(differences) + 1), differences, 1.0, color=colors)
    axes[1].set(
        title=f"Each prompt, less {one_line(_tail(pairs[0].theirs))}",
        xlabel="prompts, from the worst to the best",
        ylabel="difference of τ in tokens per round",
    )
    return figure


def _less(pair: ReportComparison) -> str:
    return f"less {one_line(_tail(pair.theirs))}:\n{pair.comparison.verdict or 'no verdict'}"


def _tail(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
