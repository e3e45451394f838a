"""What ``report.html`` says of its own figures: the checks, where everything came from, and how to measure it again."""

import shlex
from collections import Counter
from collections.abc import Sequence

from dflash.pages.document import section
from dflash.pages.markup import NONE, Html, join, number, percent, tag
from dflash.report import Report

STATUS_WORDS = {"fail": "failed", "warn": "warning", "skipped": "not verified", "pass": "passed"}
"""In the order in which somebody has to look at them."""
_SIGNS = {"fail": "✕", "warn": "!", "skipped": "–", "pass": "✓"}


def checks(report: Report) -> Html:
    """Every check with its verdict, the failed ones first."""
    order = list(STATUS_WORDS)
    ordered = sorted(report.checks, key=lambda one: order.index(one.status))
    counts = Counter(one.status for one in ordered)
    tally = [pill(status, f"{count} {STATUS_WORDS[status]}") for status, count in counts.items()]
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
        for check in ordered
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


def pill(status: str, said: str | None = None) -> Html:
    """A check's verdict as sign and word, so that colour is not all there is to it."""
    sign = tag("b", _SIGNS[status], aria_hidden="true")
    return tag("span", sign, f" {said or STATUS_WORDS[status]}", class_=f"pill {status}")


def _value(value: float | int | str | None) -> str:
    if value is None:
        return NONE
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def provenance(report: Report) -> Html:
    """Digests, versions, kernel, host, relay and settings, and the command that measures again."""
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
        said: list[tuple[str, object]] = [(key, _value(value)) for key, value in report.training.model_dump().items()]
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
        ("host", NONE if settings.host is None else settings.host),
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
    """The command that measures the same again, on the machine where these paths are.

    A report does not say which file left prompts out, nor which one a config was taken from; capitals stand for those.
    """
    settings, checkpoint = report.settings, report.checkpoint
    parts = ["dflash", "evaluate", "--target", report.target.path, "--checkpoint", checkpoint.path]
    parts += ["--prompts", settings.prompts, "--num-prompts", str(settings.num_prompts + len(report.left_out))]
    parts += ["--mode", settings.mode, "--max-new-tokens", str(settings.max_new_tokens)]
    if report.reference is not None:
        parts += ["--reference", report.reference.path]
    if checkpoint.config_source == "--drafter-config":
        parts += ["--drafter-config", "CONFIG.json"]
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
    if report.left_out:
        parts += ["--training-data", "TRAINING.jsonl"]
    return shlex.join([*parts, "--output", "again"])
