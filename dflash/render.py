"""``report.md``: the report for people, made from the report model and nothing else."""

from collections.abc import Callable, Sequence

from dflash.errors import one_line
from dflash.report import Comparison, Metrics, Report, Speedup


def to_markdown(report: Report) -> str:
    """The whole report as markdown: headline, figures beside the reference's, positions, prompts, checks, settings."""
    parts = [
        f"# {report.headline()}",
        _facts(report),
        _figures(report),
        _positions(report.metrics),
        _histogram(report.metrics),
        _prompts(report),
        _checks(report),
        _timings(report),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(report: Report) -> str:
    checkpoint, target, settings = report.checkpoint, report.target, report.settings
    lines = [
        f"- checkpoint `{checkpoint.path}` ({checkpoint.format}, step {_or_dash(checkpoint.step)}), "
        f"sha256 `{checkpoint.sha256}`, config from {checkpoint.config_source}",
        f"- target `{target.path}` ({target.class_name}, {target.tensors} tensors, kernel {target.kernel}, "
        f"{target.dtype}, {settings.device}{_host(report)}"
        f"{', layers streamed from its files' if settings.offload else ''})",
    ]
    if report.reference is not None:
        lines.append(f"- reference `{report.reference.path}`, sha256 `{report.reference.sha256}`")
    if report.relay is not None:
        lines.append(f"- relayed from `{report.relay.source}`, {report.relay.bytes} bytes")
    if report.left_out:
        lines.append(f"- left out, for they were in the training data: {', '.join(report.left_out)}")
    if report.served is not None:
        told = ", ".join(f"{name} {value}" for name, value in report.served.settings.items())
        lines.append(
            f"- counted by the {report.served.kind} server {settings.completions}, whose own τ is "
            f"{report.served.tau_raw:.3f}{', prefill token included' if report.served.kind == 'sglang' else ''}; "
            f"{told or 'it tells no settings'}"
        )
    lines += [
        f"- {settings.num_prompts} prompts of `{settings.prompts}`, {_completions(report)}, at "
        f"most {settings.max_new_tokens} tokens{', end of sequence ignored' if settings.ignore_eos else ''}"
        f"{'' if settings.max_blocks is None else f', only the first {settings.max_blocks} rounds of each'}",
        f"- {_MODES[settings.mode]}, block {settings.block_size}, "
        f"taps {', '.join(map(str, settings.target_layer_ids))}, "
        f"thinking {'not asked' if settings.thinking is None else 'on' if settings.thinking else 'off'}",
        f"- measured {report.created:%Y-%m-%d %H:%M:%S %Z} with "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    ]
    if report.training is not None:
        said = {name: value for name, value in report.training.model_dump().items() if value is not None}
        lines.append("- training says " + ", ".join(f"{name} {value}" for name, value in said.items()))
    return "\n".join(map(one_line, lines))


def _host(report: Report) -> str:
    return "" if report.settings.host is None else f" of {report.settings.host}"


_MODES = {
    "replay": "replay: blocks are walked over completions already written",
    "decode": "decode: the target verified every block",
    "served": "served: the running server's own counts",
}


def _completions(report: Report) -> str:
    """Who wrote the completions, how, and how far the loaded target agrees."""
    settings = report.settings
    if settings.temperature:
        return f"sampled at temperature {settings.temperature:g} ({settings.sampler})"
    model = f" ({settings.served_model})" if settings.served_model else ""
    parts = [f"greedy completions by {settings.completions}{model}"]
    if settings.completion_agreement is not None:
        parts.append(f"{settings.completion_agreement:.2%} of their tokens the loaded target's argmax")
    if settings.retokenized:
        parts.append(f"{settings.retokenized} of them came as text and were tokenised here")
    return ", ".join(parts)


def _figures(report: Report) -> str:
    columns = [report.metrics] + ([report.reference_metrics] if report.reference_metrics else [])
    names = ["", "drafter", "reference"][: len(columns) + 1]
    rows = [[name, *(value(one) for one in columns), what] for name, what, value in _FIGURES]
    if any(one.lossless_prompts is not None for one in columns):
        values = [str(_or_dash(one.lossless_prompts)) for one in columns]
        rows.append(["lossless prompts", *values, "prompts decoded exactly as the greedy completion"])
    for nodes in report.metrics.ddtree or ():
        values = [_number((one.ddtree or {}).get(nodes)) for one in columns]
        rows.append(
            [f"DDTree({nodes})", *values, f"τ of a draft tree of {nodes} nodes besides the root, on its own walk"]
        )
    for width in report.metrics.streak:
        values = [_number(one.streak.get(width)) for one in columns]
        what = f"leading slots whose right token is among the {width} best: an oracle, not to be compared with τ"
        rows.append(
            [
                f"top-{width} streak",
                *values,
                "leading slots whose right token is the drafter's best, no bonus" if width == "1" else what,
            ]
        )
    if any(one.speedup for one in columns):
        what = "τ · step / (draft + verify), times measured here, one text at a time"
        rows.append(["expected speed-up", *(_speedup(one.speedup) for one in columns), what])
    return "## Figures\n\n" + _table([*names, "what it is"], rows) + _comparison(report.comparison)


def _comparison(one: Comparison | None) -> str:
    if one is None:
        return ""
    return (
        f"\n\nτ pooled less the reference's: {one.difference:+.3f}, 95 % interval {_interval(one.ci95)} by a bootstrap "
        f"over {one.prompts} prompts, the same for both: {one.verdict or 'no verdict'}."
    )


_FIGURES: tuple[tuple[str, str, Callable[[Metrics], str]], ...] = (
    ("τ pooled", "Σ advance / rounds over all prompts; the bonus token counts", lambda one: f"{one.tau.pooled:.3f}"),
    ("95 % interval", "of the pooled τ, bootstrap over prompts", lambda one: _interval(one.tau.ci95)),
    ("τ macro", "mean over prompts of each prompt's τ", lambda one: f"{one.tau.macro:.3f}"),
    (
        "τ at random anchors",
        "blocks where training sees them, not where serving stands",
        lambda one: _number(one.random_anchor_tau),
    ),
    ("random anchors less the walk", "what that choice of blocks is worth", lambda one: _difference(one)),
    ("rounds", "drafts with their verifications", lambda one: str(one.rounds)),
    ("cut rounds", "their bonus lies beyond the end of the completion", lambda one: str(one.cut_rounds)),
    ("tokens", "walked, those of the prefills included", lambda one: str(one.tokens)),
)


def _speedup(one: Speedup | None) -> str:
    if one is None:
        return "–"
    milliseconds = ", ".join(
        f"{name} {1000 * seconds:.1f} ms"
        for name, seconds in (("step", one.step), ("draft", one.draft), ("verify", one.verify))
    )
    return f"{one.expected:.2f} ({milliseconds})"


def _difference(metrics: Metrics) -> str:
    return "–" if metrics.random_anchor_tau is None else f"{metrics.random_anchor_tau - metrics.tau.pooled:+.3f}"


def _positions(metrics: Metrics) -> str:
    columns = (metrics.acceptance_by_position, metrics.conditional_by_position, metrics.accuracy_by_position)
    rows = [
        [str(slot + 1), str(count), *(_percent(values[slot] if values else None) for values in columns)]
        for slot, count in enumerate(metrics.accepted_by_position)
    ]
    note = (
        "Acceptance: slots 1…k all right. Conditional: right when the slots before it were. Accuracy: right whatever "
        "came before. Slots beyond the end of a completion count nowhere."
    )
    return f"## By position\n\n{note}\n\n" + _table(["slot", "accepted", "acceptance", "conditional", "accuracy"], rows)


def _histogram(metrics: Metrics) -> str:
    rows = [
        [str(advance), str(count), f"{count / metrics.rounds:.1%}" if metrics.rounds else "–"]
        for advance, count in enumerate(metrics.histogram, start=1)
    ]
    return "## Rounds by advance\n\n" + _table(["advance", "rounds", "share"], rows)


def _prompts(report: Report) -> str:
    rows = [[one.id, str(one.tokens), str(one.rounds), _number(one.tau)] for one in report.prompts]
    return "## Prompts\n\n" + _table(["prompt", "tokens", "rounds", "τ"], rows)


def _checks(report: Report) -> str:
    rows = [
        [check.name, _STATUS[check.status], _or_dash(check.measured), _or_dash(check.limit), check.explanation]
        for check in report.checks
    ]
    return "## Checks\n\n" + _table(["check", "status", "measured", "limit", ""], rows)


def _timings(report: Report) -> str:
    rows = [[phase, f"{seconds:.1f} s"] for phase, seconds in report.timings.items()]
    return "## Time\n\n" + _table(["phase", "time"], rows)


_STATUS = {"pass": "pass", "warn": "**warn**", "fail": "**FAIL**", "skipped": "not verified"}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ((one_line(cell).replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _interval(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.3f} … {interval[1]:.3f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _or_dash(value: object) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
