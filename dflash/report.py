"""The result of an evaluation: one versioned model that every reader and every rendering shares. Imports no torch."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash.errors import DFlashError
from dflash.json_text import json_text

SCHEMA = 2

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""How often something was. Bounded, because pages divide by it, and an edited report could hold any integer."""
LARGEST_BLOCK = 2**16
Acceptance = Annotated[float, Field(ge=0, le=LARGEST_BLOCK, allow_inf_nan=False)]
"""Tokens a round. Bounded by what a block could hold, for the same reason."""
Width = Annotated[str, Field(pattern="^[1-9][0-9]{0,8}$")]
"""A number of candidates or nodes, as the key of a figure."""
Moment = Annotated[datetime, AfterValidator(lambda at: at if at.tzinfo is not None else at.replace(tzinfo=UTC))]
"""UTC where no zone is said, so that any two can be put in order."""


class ReportError(DFlashError):
    """A file that should be a report is missing, is not one, or was written by a newer version."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CheckpointInfo(_Record):
    """Which drafter was measured. ``sha256`` is of the file, or of the weight files of a directory."""

    path: str
    sha256: str
    format: str
    step: int | None = None
    config_source: str


class TrainingInfo(_Record):
    """What the checkpoint says about its own training; null where it says nothing."""

    step: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    streak1: float | None = None
    streak8: float | None = None
    kernel: str | None = None
    recipe: str | None = None


class RelayInfo(_Record):
    """How the checkpoint came here; filled in by whoever relayed it. ``bytes`` is what crossed the network."""

    source: str
    sha256: str
    selected: str
    bytes: int


class TargetInfo(_Record):
    """The verified-against model as it was loaded; ``fingerprint`` identifies its files without reading all of them."""

    path: str
    class_name: str = Field(alias="class")
    tensors: int
    kernel: str
    dtype: str
    fingerprint: str


class Settings(_Record):
    """Everything that must be equal for two evaluations to be comparable, and where they ran."""

    mode: Literal["replay", "decode", "served"]
    temperature: float = 0.0
    sampler: Literal["greedy", "rejection", "target-match"] = "greedy"
    max_new_tokens: int
    ignore_eos: bool
    thinking: bool | None
    block_size: int = Field(ge=1, lt=LARGEST_BLOCK)
    mask_token_id: int
    target_layer_ids: list[int]
    prompts: str
    prompts_sha256: str
    num_prompts: int
    max_blocks: int | None
    completions: str = Field(description='"target", or the URL of the server that wrote the completions')
    served_model: str | None = Field(default=None, description="what that server calls its model")
    retokenized: int = Field(default=0, description="completions that came as text and were tokenised here")
    completion_agreement: float | None = Field(
        description="share of the completion tokens that are the argmax of the target's teacher-forced pass; null "
        "where no such pass ran to the head"
    )
    offload: bool = Field(default=False, description="the target's layers were streamed from its files")
    device: str
    host: str | None = Field(
        default=None, description="what the machine that measured calls itself; null in reports from before it was kept"
    )
    seed: int = Field(ge=0)


class Speedup(_Record):
    """Expected speed-up over plain decoding, from times measured on this machine, in seconds.

    ``expected`` = τ · step / (draft + verify): a round costs one draft and one verification, replay of the accepted
    part included, and emits τ tokens, each of which plain decoding pays one step for.
    """

    draft: float
    verify: float
    step: float
    expected: float


class Tau(_Record):
    """Acceptance length, bonus token included, 1…B. ``ci95`` is of the pooled value; null below two prompts."""

    pooled: Acceptance
    macro: Acceptance
    ci95: tuple[float, float] | None


class Metrics(_Record):
    """Everything counted over the rounds of one drafter; definitions in :mod:`dflash.metrics`.

    Lists by position and ``streak`` are empty where a server told no more than its totals.
    """

    tau: Tau
    rounds: Count
    tokens: Count
    cut_rounds: Count
    lossless_prompts: Count | None = None
    accepted_by_position: list[Count]
    acceptance_by_position: list[float | None]
    conditional_by_position: list[float | None]
    accuracy_by_position: list[float | None]
    histogram: list[Count] = Field(description="rounds by advance, 1…B")
    streak: dict[Width, float | None]
    ddtree: dict[Width, float | None] | None = Field(
        default=None, description="τ of a draft tree of N nodes on its own walk"
    )
    random_anchor_tau: float | None
    speedup: Speedup | None = None


class Served(_Record):
    """What the running server counted while the prompts passed through it.

    ``tau_raw`` is its own figure, which for SGLang counts the token that the prefill gave; ``metrics.tau`` does not.
    """

    kind: Literal["sglang", "vllm"]
    tau_raw: float
    settings: dict[str, Any] = Field(description="how the server says that it speculates")


Verdict = Literal["better", "worse", "no difference shown", "too few prompts"]


class Comparison(_Record):
    """Pooled τ minus the other's over the same prompts, with a paired bootstrap interval.

    The verdict is of 95 %; under 64 prompts there is none, whatever the interval.
    """

    difference: float
    ci95: tuple[float, float] | None
    prompts: int
    verdict: Verdict | None = Field(default=None, description="null in reports from before there were any")


class PromptResult(_Record):
    """One prompt: its completion as text and ids, and how it was drafted. ``tau`` is null without a round.

    ``reference_tau`` is the reference drafter's on the same prompt; null without one, and in reports of schema 1.
    """

    id: str
    text: str
    tokens: Count
    rounds: Count
    tau: Acceptance | None
    token_ids: list[int]
    reference_tau: Acceptance | None = None

    @model_validator(mode="after")
    def _tau_is_of_rounds(self) -> Self:
        if (self.tau is None) != (self.rounds == 0):
            raise ValueError("tau is null where there is no round, and only there")
        return self


class Check(_Record):
    """One check: what was measured, against what limit, and what it means. ``skipped`` reads "not verified"."""

    name: str
    status: Literal["pass", "warn", "fail", "skipped"]
    measured: float | int | str | None
    limit: float | int | str | None
    explanation: str


class Report(_Record):
    """``report.json``. ``valid`` is false exactly when a check failed; those are named in ``invalid_because``."""

    schema_version: int = Field(default=SCHEMA, alias="schema")
    created: Moment
    valid: bool
    invalid_because: list[str]
    checkpoint: CheckpointInfo
    training: TrainingInfo | None = None
    relay: RelayInfo | None = None
    target: TargetInfo
    reference: CheckpointInfo | None = None
    settings: Settings
    versions: dict[str, str]
    metrics: Metrics
    served: Served | None = None
    reference_metrics: Metrics | None = None
    comparison: Comparison | None = None
    prompts: list[PromptResult]
    token_texts: dict[int, str] = Field(
        default={}, description="text of every token that a completion or a draft has; empty in reports of schema 1"
    )
    left_out: list[str] = Field(default=[], description="prompts that were in the training data; in no figure")
    checks: list[Check]
    timings: dict[str, float] = Field(description="seconds by phase")

    def to_json(self) -> str:
        """The text of ``report.json``; in ASCII where a path is no text, as a file's name need not be."""
        return json_text(self, indent=1) + "\n"

    def headline(self) -> str:
        """One line: the number beside the reference's, or why there is none to believe."""
        if not self.valid:
            return f"not valid: {', '.join(self.invalid_because)}"
        line = f"τ {_with_interval(self.metrics.tau.pooled, self.metrics.tau.ci95)}"
        if self.reference_metrics is not None and self.comparison is not None:
            reference, comparison = self.reference_metrics.tau, self.comparison
            line += f", reference {_with_interval(reference.pooled, reference.ci95)}"
            line += f", difference {_with_interval(comparison.difference, comparison.ci95, sign='+')}"
        return line + f" ({self.metrics.rounds} rounds, {len(self.prompts)} prompts)"


def read_report(path: Path) -> Report:
    """Read ``report.json``, also one of an older schema. NaN and infinity, no numbers of JSON, are missing values.

    Raises :class:`ReportError`, also where a value is missing without which there is no report.
    """
    try:
        raw = json.loads(path.read_bytes(), parse_constant=_missing)
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror}); expected a report.json") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: is not JSON ({error}); expected a report.json") from None
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema == 1:  # had no reference_tau and no token_texts, which are missing in what is made of it
        raw["schema"] = SCHEMA
    elif schema != SCHEMA:
        raise ReportError(
            f"{path}: has schema {schema!r}, this version reads 1 to {SCHEMA}; update dflash or measure again"
        )
    try:
        return Report.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ReportError(f"{path}: {place}: {first['msg']}; the file is not a report this version wrote") from None


def _missing(constant: str) -> None:
    """What NaN and Infinity are read as: a figure that could not be had."""


def _with_interval(value: float, interval: tuple[float, float] | None, sign: str = "") -> str:
    text = f"{value:{sign}.3f}"
    return text if interval is None else f"{text} [{interval[0]:{sign}.3f}, {interval[1]:{sign}.3f}]"
