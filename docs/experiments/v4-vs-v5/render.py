"""The plot and the README of the experiment, made from its results.json and from nothing else."""

import statistics
from pathlib import Path
from typing import Any

VERSIONS = {"v4": "faulty", "v5": "corrected"}
COLOURS = {"v4": "#b3472f", "v5": "#2f6db3"}
FAULTS = {
    "taps-as-reference": "four of five taps",
    "clean-targets": "noise before the soft labels",
    "recipe": "composite loss",
}


def render(results: dict[str, Any], output: Path) -> None:
    """Write ``tau.png`` and ``README.md`` into ``output``."""
    plot(results, output / "tau.png")
    (output / "README.md").write_text(readme(results), encoding="utf-8")


def plot(results: dict[str, Any], path: Path) -> None:
    """τ of every run with its interval, and the streak that training logged on its way there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for version, name in VERSIONS.items():
        runs = _runs(results, version)
        for number, run in enumerate(runs):
            label = f"{version}, {name}" if number == 0 else None
            left.plot(run["curve"]["step"], run["curve"]["streak1"], color=COLOURS[version], alpha=0.7, label=label)
        places = [run["seed"] + (0.06 if version == "v5" else -0.06) for run in runs]
        taus = [run["tau"]["pooled"] for run in runs]
        spans = [[abs(tau - run["tau"]["ci95"][end]) for tau, run in zip(taus, runs, strict=True)] for end in (0, 1)]
        right.errorbar(places, taus, yerr=spans, fmt="o", capsize=4, color=COLOURS[version], label=f"{version}, {name}")
    left.set(xlabel="step", ylabel="streak at training's own anchors", title="What training logs")
    right.set(xlabel="seed", ylabel="τ", title="τ on fresh prompts, 95 %", xticks=[run["seed"] for run in runs])
    left.legend(frameon=False)
    right.legend(frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def readme(results: dict[str, Any]) -> str:
    """What was done and what came out."""
    settings, versions = results["settings"], results["versions"]
    return README.format(
        **settings,
        taps_v4=_listed(settings["taps"]["v4"]),
        taps_v5=_listed(settings["taps"]["v5"]),
        table="\n".join(_table(results)),
        outcome=_outcome(results),
        refusal=results["preflight_refusal"],
        first_seed=results["runs"][0]["seed"],
        verdicts="\n".join(_verdicts(results)),
        other_seeds=_other_seeds(results),
        minutes=results["seconds"] / 60,
        python=versions["python"],
        torch=versions["torch"],
        pooled_v4=results["pooled"]["v4"],
        pooled_v5=results["pooled"]["v5"],
    )


README = """\
# The faulty recipe and the corrected one

<!-- Made by render.py from results.json; do not edit. -->

Two recipes train a drafter for the tiny hybrid target with this project's trainer: the faulty one of the story (v4),
and the corrected one (v5).

| | v4, faulty | v5, corrected |
|---|---|---|
| taps into `fc` | {taps_v4} (one missing, in config and weights alike) | {taps_v5} |
| loss | 70 % KL at T = 2 + 30 % cross-entropy, γ = 10 | cross-entropy on the data tokens, γ = 4 |
| soft labels | from last hidden states with {label_noise:.0%} noise | none |

Everything else is the same: {samples} texts that the target wrote, {steps} steps of {rows} rows with {anchors} anchors
each, blocks of 8, AdamW at 3e-3 with warm-up and cosine, noise of σ = {noise:g} (a tenth of the states' size) on the
input of `fc`. τ is the walk's on {prompts} prompts that neither target nor drafter has seen, {new_tokens} new tokens
each, with a bootstrap interval over prompts. Taps and loss are a config; no config can put noise before the soft
labels, so `experiment.py` plants that around the trainer.

## τ

{table}

{outcome}

![What training logs, and τ on fresh prompts](tau.png)

## What the checks say

Preflight does not start the faulty run:

> {refusal}

With that allowed by name in its config it runs. The doctor of each checkpoint, seed {first_seed}:

{verdicts}

{other_seeds}

## Again

```
python docs/experiments/v4-vs-v5/experiment.py run
```

It took {minutes:.0f} minutes (Python {python}, torch {torch}, CPU). This is one target of two million parameters with
blocks of 8. It shows what the three faults together do here, pooled over seeds {pooled_v4:.2f} against {pooled_v5:.2f},
and what names them; not what they do to a large model.
"""


def _table(results: dict[str, Any]) -> list[str]:
    lines = ["| seed | v4: τ | v5: τ | v4: streak in training | v5: streak in training |", "|---|---|---|---|---|"]
    pairs = zip(_runs(results, "v4"), _runs(results, "v5"), strict=True)
    for old, new in pairs:
        streaks = " | ".join(f"{run['training']['streak1']:.2f}" for run in (old, new))
        lines.append(f"| {old['seed']} | {_tau(old)} | {_tau(new)} | {streaks} |")
    means = " | ".join(
        f"**{statistics.mean(run['tau']['pooled'] for run in _runs(results, version)):.2f}**" for version in VERSIONS
    )
    return [*lines, f"| mean | {means} | | |"]


def _outcome(results: dict[str, Any]) -> str:
    compared = results["comparison"]
    low, high = compared["ci95"]
    said = (
        f"Over the same prompts, seeds taken together, v5's pooled τ less v4's is {compared['difference']:+.3f} "
        f"[{low:+.3f}, {high:+.3f}]: "
    )
    spread = {version: [run["tau"]["pooled"] for run in _runs(results, version)] for version in VERSIONS}
    if low > 0:
        said += "the corrected recipe drafts better."
    elif high < 0:
        said += "the corrected recipe drafts worse here, at this budget."
    else:
        said += "no difference is shown at this budget."
    apart = min(spread["v5"]) > max(spread["v4"]) or max(spread["v5"]) < min(spread["v4"])
    return said + (" No seed of one reaches the other's." if apart else " The seeds of the two overlap.")


def _verdicts(results: dict[str, Any]) -> list[str]:
    chosen = {version: _runs(results, version)[0] for version in VERSIONS}
    lines = ["| check | there to find | v4 | v5 |", "|---|---|---|---|"]
    for check, fault in FAULTS.items():
        told = [_said(_check(chosen[version], check)) for version in VERSIONS]
        lines.append(f"| `{check}` | {fault} | {told[0]} | {told[1]} |")
    others = sorted(
        {
            check["name"]
            for run in chosen.values()
            for check in run["checks"]
            if check["status"] in ("fail", "warn") and check["name"] not in FAULTS
        }
    )
    lines += [
        f"| `{name}` | | {_said(_check(chosen['v4'], name))} | {_said(_check(chosen['v5'], name))} |" for name in others
    ]
    lines.append(f"| verdict | | {_verdict(chosen['v4'])} | {_verdict(chosen['v5'])} |")
    return lines


def _other_seeds(results: dict[str, Any]) -> str:
    """Whether the verdict of the seeds that are not shown is another."""
    differing = {}
    for version in VERSIONS:
        first, *others = _runs(results, version)
        differing[version] = [run["seed"] for run in others if run["invalid_because"] != first["invalid_because"]]
    told = [
        f"Of {version} the verdict is another for seed {_listed(seeds)}, see results.json."
        for version, seeds in differing.items()
        if seeds
    ]
    return " ".join(told) or "The verdicts are the same for every seed."


def _runs(results: dict[str, Any], version: str) -> list[dict[str, Any]]:
    return [run for run in results["runs"] if run["version"] == version]


def _check(run: dict[str, Any], name: str) -> dict[str, Any]:
    return next((check for check in run["checks"] if check["name"] == name), {"status": "–", "explanation": ""})


def _said(check: dict[str, Any]) -> str:
    status = {"skipped": "not verified", "fail": "**fail**", "warn": "*warn*"}.get(check["status"], check["status"])
    explanation = check["explanation"].removeprefix("not verified: ").split(";")[0].replace("|", "\\|")
    return f"{status}: {explanation}" if explanation else status


def _verdict(run: dict[str, Any]) -> str:
    return "valid" if run["valid"] else f"**not valid**: {', '.join(run['invalid_because'])}"


def _tau(run: dict[str, Any]) -> str:
    low, high = run["tau"]["ci95"]
    return f"{run['tau']['pooled']:.3f} [{low:.3f}, {high:.3f}]"


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
