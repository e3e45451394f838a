"""``report.html``: one evaluation as a page, made from the report, and from its rounds where they are at hand."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from dflash.metrics import FEWEST_PROMPTS, Round
from dflash.pages.document import chart, document, masthead, section
from dflash.pages.markup import NONE, Html, interval, join, number, percent, table, tag, text, visible
from dflash.pages.prompt_list import prompt_row, prompt_tools
from dflash.pages.rounds_view import commonest_misses, misses_by_rank, walk
from dflash.report import Check, Metrics, Report
from dflash.trend import training_tau

SHOWN_MISSES = 12
STATUS_WORDS = {"fail": "failed", "warn": "warning", "skipped": "not verified", "pass": "passed"}
"""In the order in which somebody has to look at them."""
_SIGNS = {"fail": "✕", "warn": "!", "skipped": "–", "pass": "✓"}

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
            _positions(report),
            _lengths(report, rounds),
            _prompts(report, rounds),
            _curves(report),
            _checks(report),
            _provenance(report),
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
    path = report.checkpoint.path.rstrip("/").rpartition("/")[2]
    step = "" if report.checkpoint.step is None or str(report.checkpoint.step) in path else report.checkpoint.step
    return f"{path} step {step}" if step else path


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
    said = f"A round emits {number(tau.pooled, 2)} tokens on average: the accepted drafts and one of the target's own."
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
        class_="ruler",
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
        yield tag(
            "div",
            tag("span", title, class_="title"),
            tag("span", of(metrics), class_="value", id=f"card-{key}"),
            None if reference is None else tag("span", f"reference {of(reference)}", class_="beside"),
            tag("span", said, class_="said"),
            class_="card",
        )


_POSITION_FIGURES = (
    ("acceptance", "Acceptance", "slots 1 to k all right, of all rounds", "acceptance_by_position"),
    ("conditional", "Conditional", "slot k right where the slots before it were", "conditional_by_position"),
    ("accuracy", "Accuracy", "slot k right, whatever came before it", "accuracy_by_position"),
)


def _positions(report: Report) -> Html:
    metrics, reference = report.metrics, report.reference_metrics
    charts = []
    for key, title, said, field in _POSITION_FIGURES:
        ours = getattr(metrics, field)
        theirs = getattr(reference, field) if reference is not None else []
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
        tag("div", *charts, class_="grid three"),
        lead="How far into a block the drafts hold. Slot 0 is the anchor, the last known token; slots beyond the end "
        "of a completion count nowhere.",
    )


def _nth(values: Sequence[float | None], place: int) -> float | None:
    return values[place] if place < len(values) else None


def _lengths(report: Report, rounds: Sequence[Round]) -> Html:
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
    lead = join(
        "Each bar is a prompt's τ from 1 to the block size",
        ", the tick the reference's" if beside else "",
        ". Open one to see every round: ",
        tag("span", "accepted drafts", class_="key accepted"),
        ", ",
        tag("span", "the token that was right", class_="key missed"),
        " where a ",
        tag("del", "wrong draft", class_="key"),
        " ended the round. Its number is its place among the drafter's candidates: ",
        tag(
            "span",
            *(
                tag("span", said, class_="missed", data_far=far)
                for far, said in enumerate(("#2", "#3 to #8", "#9 to #64", "beyond"))
            ),
            class_="scale-of-ranks",
        ),
        ".",
    )
    left_out = (
        tag("p", f"Left out, for they were in the training data: {', '.join(report.left_out)}.", class_="note")
        if report.left_out
        else None
    )
    untold = (
        tag(
            "p",
            "The rounds of this measurement are not at hand, so completions are plain text."
            if report.settings.mode != "served"
            else "A server tells only its totals, so completions are plain text.",
            class_="note",
        )
        if not rounds or not report.token_texts
        else None
    )
    return section(
        "prompts",
        "By prompt",
        left_out,
        untold,
        tools,
        tag("ol", *rows, class_="prompts" if beside else "prompts alone"),
        lead=lead,
    )


def _curves(report: Report) -> Html:
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
                note="τ of a draft tree of N nodes besides the root, on its own walk, bonus included; the dotted line "
                "is the chain",
            )
        )
    if metrics.random_anchor_tau is not None or report.training is not None:
        charts.append(_anchors(report))
    if not charts:
        return section("curves", "Trees and other readings", tag("p", "A server does not tell these.", class_="note"))
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


def _checks(report: Report) -> Html:
    order = list(STATUS_WORDS)
    checks = sorted(report.checks, key=lambda one: order.index(one.status))
    counts = {status: len(list(group)) for status, group in groupby(checks, key=lambda one: one.status)}
    tally = [tag("span", pill(status), f" {count}", class_="tally") for status, count in counts.items()]
    rows = [
        tag(
            "tr",
            tag("th", check.name, scope="row"),
            tag("td", pill(check.status)),
            tag("td", _value(check.measured), class_="value"),
            tag("td", _value(check.limit), class_="value"),
            tag("td", check.explanation, class_="says"),
            class_=f"check {check.status}",
        )
        for check in checks
    ]
    head = tag(
        "tr", *(tag("th", one, scope="col") for one in ("check", "verdict", "measured", "limit", "what it says"))
    )
    body = tag(
        "table",
        tag("caption", "Checks", class_="unseen"),
        tag("thead", head),
        tag("tbody", *rows),
        class_="checks",
    )
    return section(
        "checks",
        "Checks",
        tag("p", *tally, class_="tallies") if tally else tag("p", "No check ran.", class_="note"),
        tag("div", body, class_="wide checks-wide", tabindex="0", role="region", aria_label="Checks"),
        lead="A number is believed when none of these failed. What could not be looked at is grey, never green.",
    )


def pill(status: str) -> Html:
    """A check's verdict as sign and word, so that colour is not all there is to it."""
    return tag(
        "span", tag("b", _SIGNS[status], aria_hidden="true"), f" {STATUS_WORDS[status]}", class_=f"pill {status}"
    )


def _value(value: Check | float | int | str | None) -> str:
    if value is None:
        return NONE
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _provenance(report: Report) -> Html:
    checkpoint, target = report.checkpoint, report.target
    groups: list[tuple[str, list[tuple[str, object]]]] = [
        (
            "Checkpoint",
            [
                ("path", checkpoint.path),
                ("step", NONE if checkpoint.step is None else checkpoint.step),
                ("format", checkpoint.format),
                ("sha256", _digest(checkpoint.sha256)),
                ("config from", checkpoint.config_source),
            ],
        ),
        (
            "Target",
            [
                ("path", target.path),
                ("class", f"{target.class_name}, {target.tensors} tensors"),
                ("kernel", target.kernel),
                ("dtype", target.dtype),
                ("fingerprint", _digest(target.fingerprint)),
            ],
        ),
        ("Measurement", _measurement(report)),
    ]
    if report.reference is not None:
        reference = report.reference
        groups.append(("Reference", [("path", reference.path), ("sha256", _digest(reference.sha256))]))
    if report.training is not None:
        said: list[tuple[str, object]] = [
            (key, NONE if value is None else value) for key, value in report.training.model_dump().items()
        ]
        groups.append(("Training says", said))
    if report.relay is not None:
        relay = report.relay
        groups.append(
            (
                "Relay",
                [
                    ("from", relay.source),
                    ("selected", relay.selected),
                    ("bytes over the network", f"{relay.bytes:,}"),
                    ("sha256", _digest(relay.sha256)),
                ],
            )
        )
    if report.served is not None:
        served = report.served
        told: list[tuple[str, object]] = [("kind", served.kind), ("its own τ", number(served.tau_raw))]
        groups.append(("Server", told + [(str(key), value) for key, value in served.settings.items()]))
    groups.append(("Versions", list(report.versions.items())))
    groups.append(("Seconds", [(key, number(value, 1)) for key, value in report.timings.items()]))
    return section(
        "provenance",
        "Provenance",
        tag("div", *(_facts(title, facts) for title, facts in groups), class_="grid facts"),
        tag(
            "div",
            tag("h3", "Measure it again"),
            tag("pre", tag("code", command(report)), tabindex="0", class_="command"),
            class_="panel",
        ),
        lead="Where every figure on this page comes from.",
    )


def _measurement(report: Report) -> list[tuple[str, object]]:
    settings = report.settings
    agreement = settings.completion_agreement
    return [
        ("made", f"{report.created:%Y-%m-%d %H:%M:%S %Z}"),
        ("mode", settings.mode),
        ("on", settings.device),
        ("prompts", f"{settings.num_prompts} of {settings.prompts}"),
        ("prompts' sha256", _digest(settings.prompts_sha256)),
        (
            "completions",
            f"by {settings.completions}" + (f" ({settings.served_model})" if settings.served_model else ""),
        ),
        ("target's own argmax", percent(agreement, 2)),
        ("tokens each, at most", settings.max_new_tokens),
        ("rounds each, at most", "all" if settings.max_blocks is None else settings.max_blocks),
        ("end of sequence", "ignored" if settings.ignore_eos else "ends a completion"),
        ("thinking", "not asked" if settings.thinking is None else "on" if settings.thinking else "off"),
        ("sampler", f"{settings.sampler}, temperature {settings.temperature:g}"),
        ("block", f"{settings.block_size}, mask token {settings.mask_token_id}"),
        ("taps", ", ".join(map(str, settings.target_layer_ids))),
        ("layers streamed", "yes" if settings.offload else "no"),
        ("seed", settings.seed),
        ("report schema", report.schema_version),
    ]


def _digest(value: str) -> Html:
    return tag("code", value, class_="digest")


def _facts(title: str, facts: Sequence[tuple[str, object]]) -> Html:
    entries = join(*(join(tag("dt", key), tag("dd", value)) for key, value in facts))
    return tag("div", tag("h3", title), tag("dl", entries), class_="panel")


def command(report: Report) -> str:
    """The command that measures the same again, on the machine where these paths are."""
    settings = report.settings
    parts = ["dflash", "evaluate", "--target", report.target.path, "--checkpoint", report.checkpoint.path]
    parts += ["--prompts", settings.prompts, "--mode", settings.mode, "--max-new-tokens", str(settings.max_new_tokens)]
    if report.reference is not None:
        parts += ["--reference", report.reference.path]
    if settings.completions != "target":
        parts += ["--server", settings.completions]
    if settings.temperature:
        parts += ["--temperature", f"{settings.temperature:g}", "--sampler", settings.sampler]
    if settings.ignore_eos:
        parts.append("--ignore-eos")
    if settings.thinking is not None:
        parts += ["--thinking", "on" if settings.thinking else "off"]
    if settings.max_blocks is not None:
        parts += ["--max-blocks", str(settings.max_blocks)]
    if settings.mode != "served":
        parts += ["--dtype", report.target.dtype, "--kernel", report.target.kernel]
    if settings.offload:
        parts.append("--offload")
    return shlex.join([*parts, "--output", "again"])


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
