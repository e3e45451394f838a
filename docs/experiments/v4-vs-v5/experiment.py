"""Two recipes, one budget: the faulty one that this project was made for, and the corrected one, on the tiny pair.

    python docs/experiments/v4-vs-v5/experiment.py run          trains, measures, writes results.json, plots, README
    python docs/experiments/v4-vs-v5/experiment.py render       only the plot and the README, from results.json

Both are trained by ``dflash train``'s own code on the same texts, with the same noise on the input of fc, for as many
steps, from three seeds. The faulty one has three faults: four of the five taps feed fc, consistently in config and
weights; the loss is the old composite; and the noise is there before the target's logits are taken, so that the soft
labels are noisy. The first two are a config; the third no config can say, so it is planted here, around the features.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.config import default_tap_ids
from dflash.evaluate import PHASES, measure
from dflash.metrics import SEED, Round, by_prompt, compare, tau
from dflash.progress import Phases
from dflash.replay import replay
from dflash.request import Request
from dflash.target import Target
from dflash.training import preparation
from dflash.training.batch import Features, FeatureSource, Sample
from dflash.training.features import write_features
from dflash.training.metric_log import METRICS, read_metrics
from dflash.training.preflight import PreflightError
from dflash.training.randomness import generator
from dflash.training.run_config import EvaluationSection, RunConfig
from dflash.training.samples import load_samples
from dflash.training.trainer import train
from dflash.training.validation import HeldOut

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))

from tests.fixtures.make_prompts import beginnings  # noqa: E402  # the checkout's, behind its path

Version = Literal["v4", "v5"]
VERSIONS: tuple[Version, ...] = ("v4", "v5")
TARGET = ROOT / "tests/fixtures/tiny-hybrid"
TEXT = ROOT / "tests/fixtures/tiny-hybrid-text.jsonl"
DRAFTER = ROOT / "configs/tiny-drafter.json"
TAPS = default_tap_ids(8, 5)
TEXTS = 576
"""Of the file's lines; the target's pass over all of them would take longer than a run."""
SEEDS = (1, 2, 3)
STEPS = 300
ROWS = 8
ANCHORS = 16
NOISE = 2.0
"""A tenth of the size of the target's states at the taps, whose RMS is around 20."""
LABEL_NOISE = 0.1
"""The same share on its last hidden states, which make the soft labels."""
PROMPTS = 64
PROMPT_SEED = 77_001
NEW_TOKENS = 96
LOG_INTERVAL = 10
ALLOW = {"v4": ["taps-as-reference"], "v5": []}
"""What the faulty run's config must say for preflight to let it run."""


@dataclass(frozen=True)
class NoisyLabels:
    """Features whose last hidden states carry noise, as where it is added before the target's logits are taken."""

    source: FeatureSource
    seed: int

    def features(self, rows: Sequence[Sequence[Sample]]) -> Features:
        """As of the source, with other soft labels."""
        features = self.source.features(rows)
        assert features.hidden is not None
        drawn = generator(self.seed, *(sample for row in features.samples for sample in row), "labels")
        noise = torch.randn(features.hidden.shape, generator=drawn)
        size = features.hidden.square().mean().sqrt()
        return replace(features, hidden=features.hidden + LABEL_NOISE * size * noise)


@contextmanager
def noise_before_labels(seed: int) -> Iterator[None]:
    """While open, the trainer's features have noisy soft labels."""
    made = preparation._source
    preparation._source = lambda *args: NoisyLabels(made(*args), seed)  # type: ignore[assignment]
    try:
        yield
    finally:
        preparation._source = made


def config_of(version: Version, seed: int, steps: int, work: Path, *, allow: Sequence[str]) -> RunConfig:
    """A run as its YAML would say it."""
    raw = json.loads(DRAFTER.read_text(encoding="utf-8"))
    raw["dflash_config"]["target_layer_ids"] = list(TAPS if version == "v5" else TAPS[:-1])
    drafter = work / f"{version}-drafter.json"
    drafter.write_text(json.dumps(raw), encoding="utf-8")
    return RunConfig.from_dict(
        {
            "output": str(work / f"{version}-{seed}"),
            "seed": seed,
            "target": {"path": str(TARGET), "dtype": "float32", "kernel": "torch", "device": "cpu"},
            "drafter": {"config": str(drafter), "dtype": "float32"},
            "data": {"files": [str(work / "text.jsonl")], "max_length": 288, "cache": str(work / "samples")},
            "features": {"mode": "offline", "directory": str(work / "features")},
            "objective": {
                "loss": "composite" if version == "v4" else "ce",
                "num_anchors": ANCHORS,
                "noise": NOISE,
            },
            "optimizer": {"learning_rate": 3e-3, "max_steps": steps, "rows": ROWS},
            "checkpoints": {"save_interval": steps, "keep_last": 1},
            "tracking": {"tensorboard": False, "log_interval": LOG_INTERVAL},
            "preflight": {"allow": list(allow)},
        },
        source="experiment",
    )


def run(steps: int, seeds: Sequence[int], prompts: int, texts: int) -> dict[str, Any]:
    """All runs and their measurements, as results.json has them."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="v4-vs-v5-") as name:
        work = Path(name)
        target = Target.load(TARGET, kernel="torch")
        written = _write_features(target, texts, work)
        _write_prompts(work / "prompts.jsonl", prompts)
        refused = _refusal(config_of("v4", 0, steps, work, allow=()))
        runs, rounds = [], {}
        for seed in seeds:
            for version in VERSIONS:
                one, walked = _one_run(version, seed, steps, target, work)
                runs.append(one)
                rounds[version, seed] = walked
        totals = {version: _summed([rounds[version, seed] for seed in seeds]) for version in VERSIONS}
        compared = compare(totals["v5"], totals["v4"], seed=SEED)
    return {
        "settings": {
            "target": str(TARGET.relative_to(ROOT)),
            "samples": written,
            "steps": steps,
            "rows": ROWS,
            "anchors": ANCHORS,
            "noise": NOISE,
            "label_noise": LABEL_NOISE,
            "prompts": prompts,
            "new_tokens": NEW_TOKENS,
            "taps": {version: list(TAPS if version == "v5" else TAPS[:-1]) for version in VERSIONS},
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "preflight_refusal": refused,
        "runs": runs,
        "pooled": {version: _pooled(totals[version]) for version in VERSIONS},
        "comparison": compared.model_dump(mode="json"),
        "seconds": round(time.monotonic() - started),
    }


def _one_run(version: Version, seed: int, steps: int, target: Target, work: Path) -> tuple[dict[str, Any], list[Round]]:
    """Train, then measure as anybody would measure the checkpoint."""
    config = config_of(version, seed, steps, work, allow=ALLOW[version])
    if version == "v4":
        with noise_before_labels(seed):
            train(config)
    else:
        train(config)
    checkpoint = config.output / f"step_{steps}"
    lines = [line for line in read_metrics(config.output / METRICS) if line["kind"] == "train"]
    walked = _walk(checkpoint, target, work)
    found = tau(by_prompt(walked), seed=SEED).model_dump(mode="json")
    return {"version": version, "seed": seed, "tau": found, **_doctor(checkpoint, work), "curve": _curve(lines)}, walked


def _walk(checkpoint: Path, target: Target, work: Path) -> list[Round]:
    """The walk's rounds over the fresh prompts, which the target completes once for all runs."""
    read = read_checkpoint(checkpoint)
    prompts = EvaluationSection(prompts=work / "prompts.jsonl", max_new_tokens=NEW_TOKENS, ignore_eos=True)
    held_out = HeldOut.prepare(
        prompts, target, read.config.target_layer_ids, thinking=None, directory=work / "held_out"
    )
    drafter = build_drafter(read, device="cpu", dtype=torch.float32)
    walked = replay(drafter, target, held_out.texts, max_blocks=None, seed=SEED, progress=lambda done, total: None)
    return walked.walk


def _doctor(checkpoint: Path, work: Path) -> dict[str, Any]:
    """What ``dflash doctor`` says of a checkpoint, on as many prompts and tokens as it takes."""
    request = Request(
        target=TARGET,
        checkpoint=checkpoint,
        prompts=work / "prompts.jsonl",
        output=work / "unused",
        num_prompts=8,
        max_new_tokens=64,
        ignore_eos=True,
        dtype="float32",
        device="cpu",
        kernel="torch",
    )
    report, _ = measure(request, Phases(PHASES["replay"]))
    return {
        "training": report.training.model_dump(mode="json", exclude_none=True) if report.training else {},
        "valid": report.valid,
        "invalid_because": report.invalid_because,
        "checks": [check.model_dump(mode="json") for check in report.checks],
    }


def _curve(lines: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [line.get(name) for line in lines] for name in ("step", "loss", "accuracy", "streak1")}


def _write_features(target: Target, texts: int, work: Path) -> int:
    """The states of every sample, all five taps and the last hidden state, written once for all runs."""
    lines = TEXT.read_text(encoding="utf-8").splitlines(keepends=True)[:texts]
    (work / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    config = config_of("v5", 0, 1, work, allow=())
    samples = load_samples(config.data, target.tokenizer, cache=work / "samples", vocab_size=target.vocab_size)
    write_features(work / "features", target, samples, TAPS, soft=True)
    return len(samples)


def _write_prompts(path: Path, count: int) -> None:
    """Prompts that neither the target nor a drafter has seen; the shipped ones are of another seed."""
    lines = (
        json.dumps({"id": f"fresh_{number:02}", "prompt": prompt}) + "\n"
        for number, prompt in enumerate(beginnings(count, PROMPT_SEED, unseen_in=TEXT.read_text(encoding="utf-8")), 1)
    )
    path.write_text("".join(lines), encoding="utf-8")


def _refusal(config: RunConfig) -> str:
    """What preflight says to the faulty run when nothing is allowed."""
    try:
        with noise_before_labels(0):
            train(config)
    except PreflightError as error:
        return str(error)
    raise AssertionError("preflight let the faulty run start")


def _summed(walks: Sequence[Sequence[Round]]) -> dict[str, tuple[int, int]]:
    """Σ advance and rounds of each prompt over the seeds, so that a bootstrap over prompts keeps seeds together."""
    totals: dict[str, tuple[int, int]] = {}
    for walk in walks:
        for prompt, (advance, count) in by_prompt(walk).items():
            before = totals.get(prompt, (0, 0))
            totals[prompt] = (before[0] + advance, before[1] + count)
    return totals


def _pooled(totals: dict[str, tuple[int, int]]) -> float:
    advance, rounds = np.array(list(totals.values())).sum(axis=0)
    return float(advance / rounds)


def main() -> None:
    from render import render  # beside this script

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "render"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    results = options.output / "results.json"
    if options.what == "run":
        disable_progress_bar()
        found = run(options.steps, options.seeds, options.prompts, options.texts)
        options.output.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    render(json.loads(results.read_text(encoding="utf-8")), options.output)


if __name__ == "__main__":
    main()
