"""``report.html``: one evaluation as a page, made from the report, and from its rounds where they are at hand."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from dflash.metrics import FEWEST_PROMPTS, Round
from dflash.pages.document import document, masthead, section
from dflash.pages.markup import NONE, Html, interval, join, number, percent, tag, text, visible
from dflash.pages.prompt_list import prompt_row, prompt_tools
from dflash.pages.report_charts import curves, lengths, positions
from dflash.pages.report_record import STATUS_WORDS, checks, pill, provenance
from dflash.pages.rounds_view import misses_by_rank, walk
from dflash.report import Metrics, Report
from dflash.trend import training_tau

SECTIONS = [
    ("overview", "Overview"),
    ("positions", "Positions"),
    ("lengths", "Rounds"),
    ("prompts", "Prompts"),
    ("curves", "Trees"),
    ("checks", "Checks"),
    ("provenance", "Provenance"),
]


def report_page(report: Report, rounds: Sequence[Round] = ()) -> str:
    """The page; without ``rounds`` the completions are plain text."""
    name = _name(report)
    body = join(
        masthead("DFlash report", name, SECTIONS),
        tag(
            "main",
            _overview(report),
            positions(report),
            lengths(report, rounds),
            _prompts(report, rounds),
            curves(report),
            checks(report),
            provenance(report),
            id="content",
        ),
    )
    return document(
        f"{report.headline()} · {name}",
        body,
        scripts=["page.js", "prompts.js", "report.js"],
        data=_data(report, rounds),
    )


def _name(report: Report) -> str:
    path, step = report.checkpoint.path.rstrip("/").rpartition("/")[2], report.checkpoint.step
    return path if step is None or str(step) in re.findall(r"\d+", path) else f"{path} step {step}"


def _overview(report: Report) -> Html:
    metrics, reference = report.metrics, report.reference_metrics
    valid, name = report.valid, "drafter"
    hero = tag(
        "div",
        tag("div", text("acceptance length τ"), class_="what"),
        tag(
            "div",
            tag("span", number(metrics.tau.pooled), class_="value", id="tau"),
            tag("span", f"95 % interval {interval(metrics.tau.ci95)}", class_="interval", id="tau-interval"),
            class_="figure",
        ),
        class_="hero" if valid else "hero not-valid",
    )
    return tag(
        "section",
        tag("h1", _headline(report), class_="headline" if valid else "headline bad", id="headline"),
        _chips(report),
        None if valid else _why_not(report),
        tag("div", hero, _ruler(report, name), class_="top"),
        tag("p", _sentence(report), class_="lead", id="sentence"),
        tag("div", *_cards(metrics, reference), class_="cards"),
        id="overview",
        aria_label="Overview",
    )


def _headline(report: Report) -> str:
    if not report.valid:
        return f"not valid: {', '.join(report.invalid_because)}"
    tau = report.metrics.tau
    line = f"τ {number(tau.pooled)}"
    if report.reference_metrics is not None:
        line += f" beside the reference's {number(report.reference_metrics.tau.pooled)}"
    return line


def _chips(report: Report) -> Html:
    """How the checks went, and the few facts that tell one report from another."""
    counts: Counter[str] = Counter(check.status for check in report.checks)
    settings, target = report.settings, report.target
    facts = [
        f"{settings.mode} of {len(report.prompts)} prompts",
        f"block {settings.block_size}",
        f"{target.kernel} kernel, {target.dtype}",
        f"{report.created:%Y-%m-%d}",
    ]
    if report.checkpoint.step is not None:
        facts.insert(0, f"step {report.checkpoint.step}")
    pills = (pill(status, f"{counts[status]} {said}") for status, said in STATUS_WORDS.items() if counts[status])
    return tag(
        "p", tag("a", *pills, href="#checks", aria_label="Checks"), " · ".join(facts), class_="chips", id="facts"
    )


def _why_not(report: Report) -> Html:
    """What failed, and that the figures below must not be used."""
    failed = [check for check in report.checks if check.status == "fail"]
    return tag(
        "div",
        tag("p", tag("strong", "The figures below were measured and must not be believed."), " Something was wrong:"),
        tag("ul", *(tag("li", tag("strong", check.name), f": {check.explanation}") for check in failed)),
        class_="alarm",
        role="note",
    )


def _sentence(report: Report) -> str:
    tau, comparison = report.metrics.tau, report.comparison
    said = "" if report.valid else "As measured, and not to be believed. "
    said += f"A round emits {number(tau.pooled, 2)} tokens on average: the accepted drafts and one of the target's own."
    if report.reference_metrics is not None and report.reference_metrics.tau.pooled:
        share = tau.pooled / report.reference_metrics.tau.pooled
        said += (
            f" That is {percent(share, 0)} of the reference drafter's {number(report.reference_metrics.tau.pooled, 2)}"
        )
        if comparison is not None:
            said += (
                f"; the difference is {number(comparison.difference, sign='+')}, 95 % interval "
                f"{interval(comparison.ci95, sign='+')} over {comparison.prompts} prompts: "
                f"{comparison.verdict or 'no verdict'}"
            )
            if comparison.verdict == "too few prompts":
                said += f" for a verdict, which takes {FEWEST_PROMPTS}"
        said += "."
    return said


def _ruler(report: Report, name: str) -> Html:
    """Both drafters' τ with intervals on the scale from 1 to the block size."""
    size = report.settings.block_size
    rows = [(name, report.metrics, "drafter")]
    if report.reference_metrics is not None:
        rows.append(("reference", report.reference_metrics, "reference"))
    return tag(
        "div",
        *(_ruler_row(label, metrics, size, class_) for label, metrics, class_ in rows),
        tag(
            "div",
            tag("span"),
            tag("div", *(tag("span", tick, style=f"left:{_at(tick, size):.2f}%") for tick in _ticks(size))),
            class_="scale",
        ),
        tag("p", f"tokens per round, 1 to {size}; the line is the 95 % interval", class_="unit"),
        class_="ruler" if report.valid else "ruler not-valid",
        role="img",
        aria_label="; ".join(
            f"{label}: τ {number(metrics.tau.pooled)}, 95 % interval {interval(metrics.tau.ci95)}"
            for label, metrics, _ in rows
        ),
    )


def _ruler_row(label: str, metrics: Metrics, size: int, class_: str) -> Html:
    low, high = metrics.tau.ci95 or (metrics.tau.pooled, metrics.tau.pooled)
    left = _at(low, size)
    return tag(
        "div",
        tag("span", label, class_="label"),
        tag(
            "div",
            tag("i", class_="bar", style=f"width:{_at(metrics.tau.pooled, size):.2f}%"),
            tag("i", class_="range", style=f"left:{left:.2f}%;width:{_at(high, size) - left:.2f}%"),
            tag("i", class_="dot", style=f"left:{_at(metrics.tau.pooled, size):.2f}%"),
            tag("b", number(metrics.tau.pooled), style=f"left:{_at(high, size):.2f}%"),
            class_="track",
        ),
        class_=f"row {class_}",
    )


def _at(value: float, size: int) -> float:
    """Percent of the way from 1 to the block size, kept on the scale."""
    return min(100.0, max(0.0, 100 * (value - 1) / max(1, size - 1)))


def _ticks(size: int) -> list[int]:
    step = 1 if size <= 8 else 3 if (size - 1) % 3 == 0 else 5
    return [*range(1, size + 1, step)]


def _cards(metrics: Metrics, reference: Metrics | None) -> Iterable[Html]:
    tree = "64"
    cards: list[tuple[str, str, str, Any]] = [
        ("macro", "τ macro", "mean over prompts of each prompt's τ", lambda one: number(one.tau.macro)),
        ("random", "τ at random anchors", "blocks as training sees them", lambda one: number(one.random_anchor_tau)),
        (
            "tree",
            f"DDTree({tree})",
            f"τ of a tree of {tree} nodes, on its own walk",
            lambda one: number((one.ddtree or {}).get(tree)),
        ),
        ("rounds", "rounds", "a draft and its verification each", lambda one: f"{one.rounds:,}"),
        ("tokens", "tokens", "walked, the prefills' among them", lambda one: f"{one.tokens:,}"),
    ]
    if metrics.lossless_prompts is not None:
        cards.append(
            ("lossless", "lossless prompts", "decoded as plain decoding would", lambda one: str(one.lossless_prompts))
        )
    if metrics.speedup is not None:
        said = "over plain decoding, from times measured here, one text at a time"
        cards.append(
            ("speedup", "expected speed-up", said, lambda one: f"{number(one.speedup and one.speedup.expected, 2)}×")
        )
    for key, title, said, of in cards:
        if of(metrics) == NONE:
            continue
        yield tag(
            "div",
            tag("span", title, class_="title"),
            tag("span", of(metrics), class_="value", id=f"card-{key}"),
            None if reference is None else tag("span", f"reference {of(reference)}", class_="beside"),
            tag("span", said, class_="said"),
            class_="card",
        )


def _prompts(report: Report, rounds: Sequence[Round]) -> Html:
    beside = any(one.reference_tau is not None for one in report.prompts)
    size = report.settings.block_size
    keys = [("order", "as measured"), ("tau", "τ"), ("id", "name"), ("tokens", "tokens"), ("rounds", "rounds")]
    keys += [("difference", "difference from the reference")] if beside else []
    tools = prompt_tools(keys, len(report.prompts))
    rows = []
    for place, one in enumerate(report.prompts):
        difference = None if one.tau is None or one.reference_tau is None else one.tau - one.reference_tau
        said = f"{one.tokens} tokens, {one.rounds} rounds"
        bars = [
            None if one.tau is None else tag("i", class_="bar", style=f"width:{_at(one.tau, size):.2f}%"),
            None
            if one.reference_tau is None
            else tag("i", class_="tick", style=f"left:{_at(one.reference_tau, size):.2f}%"),
        ]
        figures = [tag("span", number(one.tau), class_="tau")]
        figures += [tag("span", number(difference, sign="+"), class_="difference")] if beside else []
        figures.append(tag("span", said, class_="counts"))
        sorted_by = {"tau": one.tau, "difference": difference, "tokens": one.tokens, "rounds": one.rounds}
        rows.append(prompt_row(place, one.id, bars, figures, sorted_by))
    walked = bool(rounds) and bool(report.token_texts)
    lead = join(
        "Each bar is a prompt's τ from 1 to the block size",
        ", the tick the reference's. " if beside else ". ",
        _legend() if walked else "Open one to read its completion.",
    )
    left_out = (
        tag("p", f"Left out, for they were in the training data: {', '.join(report.left_out)}.", class_="note")
        if report.left_out
        else None
    )
    return section(
        "prompts",
        "By prompt",
        left_out,
        None if walked else tag("p", _why_plain(report, rounds), class_="note"),
        tools,
        tag("ol", *rows, class_="prompts" if beside else "prompts alone"),
        lead=lead,
    )


def _why_plain(report: Report, rounds: Sequence[Round]) -> str:
    if report.settings.mode == "served":
        return "A server tells only its totals, so completions are plain text."
    if not rounds:
        return "The rounds of this measurement are not at hand, so completions are plain text."
    return "This report does not say what its tokens read as, so completions are plain text; measure again."


def _legend() -> Html:
    """What the colours and signs of an opened prompt mean."""
    ranks = ("#2", "#3 to #8", "#9 to #64", "beyond")
    return join(
        "Open one to see every round: ",
        tag("span", "accepted drafts", class_="key accepted"),
        ", ",
        tag("span", "the bonus token", class_="bonus"),
        " behind a whole block, and ",
        tag("span", "the token that was right", class_="key missed"),
        " where a ",
        tag("del", "wrong draft", class_="key"),
        " ended the round, with its place among the drafter's candidates: ",
        tag(
            "span",
            *(tag("span", said, class_="missed", data_far=far) for far, said in enumerate(ranks)),
            class_="scale-of-ranks",
        ),
    )


def _data(report: Report, rounds: Sequence[Round]) -> dict[str, Any]:
    """The blocks that the script reads: figures for the charts, and each prompt's walk, read when it is opened."""
    blocks: dict[str, Any] = {
        "figures": {
            "valid": report.valid,
            "blockSize": report.settings.block_size,
            "drafter": _figures(report.metrics),
            "reference": None if report.reference_metrics is None else _figures(report.reference_metrics),
            "trainingTau": training_tau(report.training),
            "misses": misses_by_rank(rounds) if rounds else None,
            "ids": [visible(one.id) for one in report.prompts],
        }
    }
    walked = bool(rounds) and bool(report.token_texts)
    if walked:
        blocks["tokens"] = {token: visible(said) for token, said in report.token_texts.items()}
    by_id: dict[str, list[Round]] = {}
    for one in rounds:
        by_id.setdefault(one.prompt, []).append(one)
    for place, prompt in enumerate(report.prompts):
        blocks[f"prompt-{place}"] = {"text": visible(prompt.text)} | (
            walk(prompt, by_id.get(prompt.id, [])) if walked else {}
        )
    return blocks


def _figures(metrics: Metrics) -> dict[str, Any]:
    return metrics.model_dump(exclude={"speedup", "lossless_prompts"})
