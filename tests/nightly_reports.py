"""Reports of drafters whose strength is known, on as many prompts as a verdict needs."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from dflash.compare import totals
from dflash.metrics import tau
from dflash.report import CheckpointInfo, Metrics, PromptResult, Report, Settings, TargetInfo

PROMPTS = 72
TOKENS = 256


def report(
    step: int, level: float = 1.0, *, prompts_sha256: str = "22", fingerprint: str = "11", invalid: str | None = None
) -> Report:
    """A drafter that is ``level`` times as good as others; the reference is 1.3 times as good.

    Of a served model, whose report has totals and no rounds.
    """
    random = np.random.default_rng(step)
    ease = np.exp(np.random.default_rng(0).normal(1.4, 0.4, PROMPTS))
    rounds = np.round((TOKENS - 1) / (ease * level * np.exp(random.normal(0, 0.02, PROMPTS)))).astype(int)
    theirs = np.round((TOKENS - 1) / (1.3 * ease)).astype(int)
    prompts = [
        PromptResult(
            id=f"p{place}",
            text="x",
            tokens=TOKENS,
            rounds=int(ours),
            tau=(TOKENS - 1) / int(ours),
            token_ids=[1],
            reference_tau=(TOKENS - 1) / int(other),
        )
        for place, (ours, other) in enumerate(zip(rounds, theirs, strict=True))
    ]
    settings = {"mode": "served", "max_new_tokens": TOKENS, "ignore_eos": True, "thinking": None, "block_size": 16}
    settings |= {"mask_token_id": 1, "target_layer_ids": [1], "prompts": "p", "prompts_sha256": prompts_sha256}
    settings |= {"num_prompts": PROMPTS, "max_blocks": None, "completions": "target", "completion_agreement": 1.0}
    target = {"path": "t", "class": "C", "tensors": 3, "kernel": "fla", "dtype": "bfloat16", "fingerprint": fingerprint}
    made = Report(
        created=datetime(2027, 1, 31, tzinfo=UTC),
        valid=invalid is None,
        invalid_because=[] if invalid is None else [invalid],
        checkpoint=CheckpointInfo(path=f"step_{step}", sha256="00", format="pt", step=step, config_source="key config"),
        target=TargetInfo.model_validate(target),
        settings=Settings.model_validate(settings | {"device": "cpu", "seed": 0}),
        versions={},
        metrics=_metrics(),
        prompts=prompts,
        checks=[],
        timings={},
    )
    measured = tau(totals(made), seed=0)
    return made.model_copy(update={"metrics": made.metrics.model_copy(update={"tau": measured})})


def write(made: Report, folder: Path) -> Path:
    """The files of a finished evaluation in ``folder``."""
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(made.to_json())
    (folder / "rounds.jsonl").touch()
    (folder / "report.md").write_text("# a report\n")
    return folder


def _metrics() -> Metrics:
    empty: dict[str, object] = {
        "tau": {"pooled": 1.0, "macro": 1.0, "ci95": None},
        "rounds": 1,
        "tokens": 1,
        "cut_rounds": 0,
        "accepted_by_position": [],
        "acceptance_by_position": [],
        "conditional_by_position": [],
        "accuracy_by_position": [],
        "histogram": [1],
        "streak": {"1": 1.0},
        "random_anchor_tau": None,
    }
    return Metrics.model_validate(empty)
