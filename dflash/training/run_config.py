"""A training run as ``dflash train --config run.yaml`` reads it. Imports no torch.

Strict: an unknown key, a value that cannot be, or two that contradict each other is an error that names the key and
the mend, before a GPU is touched. Paths are relative to the directory the command runs in.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from dflash.errors import UsageError
from dflash.recipes import PAPER_GAMMA, Loss, Recipe
from dflash.training import strict_yaml


class RunConfigError(UsageError):
    """A training config cannot be read, has an unknown key, or contradicts itself."""


class Section(BaseModel):
    """What all parts of a run share: unknown keys are errors, nothing changes once it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


LocalPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""A path as a shell would take it: nobody wants a directory that is called ~."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class TargetSection(Section):
    """The frozen model whose output is drafted. ``device`` "auto": CUDA where it is there, else the CPU."""

    path: Annotated[str, AfterValidator(os.path.expanduser)]
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    kernel: Literal["auto", "fla", "torch"] = "auto"
    device: str = "auto"


class DrafterSection(Section):
    """The drafter: ``config`` is a file in z-lab's config.json layout.

    ``init`` is a checkpoint whose weights to start from (a warm start: step 0, fresh optimizer); random without it.
    """

    config: LocalPath
    init: LocalPath | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the drafter computes in, and what its checkpoints hold. The optimizer's masters are float32 either way."""


class DataSection(Section):
    """JSON lines of chats, prompt and response pairs, or exact token ids; ``datasets`` are Hugging Face names.

    ``thinking`` is the mode the target will be served in; chats need it said. ``max_length`` truncates, a sample with
    fewer than ``min_loss_tokens`` tokens of loss is left out; both are counted and reported.
    """

    files: tuple[LocalPath, ...] = ()
    datasets: tuple[str, ...] = ()
    split: str = "train"
    thinking: bool | None = None
    max_length: PositiveInt = 3072
    min_loss_tokens: PositiveInt = 2
    cache: LocalPath | None = None
    """Where the tokenised samples are kept; inside the run's output without it."""

    @model_validator(mode="after")
    def _some_data(self) -> Self:
        if not self.files and not self.datasets:
            raise ValueError("give files or datasets; there is nothing to train on")
        if self.min_loss_tokens > self.max_length:
            raise ValueError(
                f"min_loss_tokens {self.min_loss_tokens} is more than the max_length {self.max_length} that a sample "
                f"may have; make it smaller"
            )
        return self


class FeaturesSection(Section):
    """``online``: the frozen target runs beside the drafter. ``offline``: taps written by ``dflash data features``.

    ``packing`` puts several documents into a row of ``data.max_length`` tokens; a hybrid target needs fla for it.
    """

    mode: Literal["online", "offline"] = "online"
    directory: LocalPath | None = None
    packing: bool = False

    @model_validator(mode="after")
    def _directory(self) -> Self:
        if (self.mode == "offline") != (self.directory is not None):
            raise ValueError("mode offline reads taps from directory, mode online has none; give both or neither")
        return self


class ObjectiveSection(Section):
    """What is minimised. ``gamma`` left out: the paper's for the block size (16→7, 10→5, 8→4).

    ``noise`` is the standard deviation of Gaussian noise on the input of ``fc``, and on nothing else. ``composite`` is
    the old loss (70 % KL at T = 2, 30 % cross-entropy, γ = 10 unless said otherwise), under its own name.
    """

    loss: Loss = "ce"
    gamma: PositiveFloat | None = None
    num_anchors: PositiveInt = 512
    temperature: PositiveFloat | None = None
    kl_weight: float | None = Field(default=None, ge=0, le=1)
    alpha: float | None = Field(default=None, ge=0, le=1)
    noise: NonNegativeFloat = 0.0
    chunk_tokens: PositiveInt = 2048
    """Slots whose logits exist at once; 2048 rows of 248 320 logits are 2 GB in float32."""

    @model_validator(mode="after")
    def _own_options(self) -> Self:
        owners = {"temperature": ("kl", "composite"), "kl_weight": ("composite",), "alpha": ("dpace",)}
        for name, losses in owners.items():
            if getattr(self, name) is not None and self.loss not in losses:
                raise ValueError(
                    f"{name} belongs to the loss {' or '.join(losses)}, this one is {self.loss}; leave it out"
                )
        if self.gamma is not None and self.loss == "dpace":
            raise ValueError(
                "gamma and the loss dpace exclude each other: its weights come from the drafter; leave it out"
            )
        return self

    def recipe(self, block_size: int) -> Recipe:
        """The recipe as a manifest states it. :class:`RunConfigError` for a block size without a known γ."""
        if self.loss == "dpace":
            return Recipe(
                name="d-pace", loss="dpace", alpha=0.5 if self.alpha is None else self.alpha, block_size=block_size
            )
        composite = self.loss == "composite"
        gamma = self.gamma or (10.0 if composite else PAPER_GAMMA.get(block_size))
        if gamma is None:
            known = ", ".join(f"{size}: {value:g}" for size, value in PAPER_GAMMA.items())
            raise RunConfigError(
                f"objective.gamma is not given, and the paper has none for blocks of {block_size} (it has {known}); "
                f"say which"
            )
        soft = self.loss in ("kl", "composite")
        return Recipe(
            name={"ce": None, "kl": "forward-kl", "composite": "composite", "dpace": None}[self.loss],
            loss=self.loss,
            gamma=gamma,
            block_size=block_size,
            temperature=(self.temperature or (2.0 if composite else 1.0)) if soft else None,
            kl_weight=(0.7 if self.kl_weight is None else self.kl_weight) if composite else None,
        )


class OptimizerSection(Section):
    """AdamW under a learning rate that warms up linearly, then falls by ``schedule``.

    A step takes ``rows`` rows on each rank, ``accumulate`` times. ``max_steps`` ends the run early; with ``num_epochs``
    left out it alone says how long the run is.
    """

    learning_rate: PositiveFloat = 6e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    schedule: Literal["cosine", "constant"] = "cosine"
    max_grad_norm: PositiveFloat = 1.0
    num_epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    rows: PositiveInt = 1
    accumulate: PositiveInt = 1

    @model_validator(mode="after")
    def _an_end(self) -> Self:
        if self.num_epochs is None and self.max_steps is None:
            raise ValueError("give num_epochs or max_steps; the schedule needs an end")
        return self


class ParallelSection(Section):
    """How ranks share the drafter; torchrun says how many there are. ``attention`` "auto": flex on CUDA, else dense."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    attention: Literal["auto", "flex", "dense"] = "auto"
    compile: bool = False


class CheckpointSection(Section):
    """What is kept: the last ``keep_last``, every one whose step is a multiple of ``keep_every``, the best by τ."""

    save_interval: PositiveInt = 500
    keep_last: PositiveInt = 3
    keep_every: PositiveInt | None = None
    keep_best: bool = True
    on_full_disk: Literal["stop", "continue"] = "stop"
    resume: Literal["auto", "never"] = "auto"
    """``auto`` goes on from the newest whole checkpoint of the output directory, where there is one."""


class EvaluationSection(Section):
    """Real walk τ on held-out prompts every ``eval_interval`` steps, by the evaluator's own code."""

    prompts: LocalPath
    eval_interval: PositiveInt = 500
    num_prompts: PositiveInt | None = None
    max_new_tokens: PositiveInt = 256
    thinking: bool | None = None
    """As ``data.thinking`` without it."""
    ignore_eos: bool = False


class TrackingSection(Section):
    """Metrics always go to ``metrics.jsonl`` of the output. ``wandb`` names a project, ``mlflow`` an experiment."""

    log_interval: PositiveInt = 10
    tensorboard: bool = True
    wandb: str | None = None
    mlflow: str | None = None


class PreflightSection(Section):
    """``allow`` names checks that may fail without stopping the run; the failure is still printed and recorded."""

    allow: tuple[str, ...] = ()


class RunConfig(Section):
    """A whole run. Everything it writes lies under ``output``."""

    output: LocalPath
    seed: NonNegativeInt = 0
    target: TargetSection
    drafter: DrafterSection
    data: DataSection
    features: FeaturesSection = FeaturesSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection
    parallel: ParallelSection = ParallelSection()
    checkpoints: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection | None = None
    tracking: TrackingSection = TrackingSection()
    preflight: PreflightSection = PreflightSection()

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.evaluation is None and self.checkpoints.keep_best and "keep_best" in self.checkpoints.model_fields_set:
            raise ValueError(
                "checkpoints.keep_best goes by τ, and there is no evaluation section; add one or leave it out"
            )
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a YAML file. Raises :class:`RunConfigError` that names the file, the key and what is wrong with it."""
        try:
            raw = strict_yaml.load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunConfigError(f"{path}: cannot be read ({error.strerror}); give a YAML file") from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise RunConfigError(f"{path}: is not YAML ({' '.join(str(error).split())})") from None
        if not isinstance(raw, dict):
            raise RunConfigError(f"{path}: expected sections such as target, drafter, data and optimizer")
        return cls.from_dict(raw, source=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, source: str) -> Self:
        """Check ``raw``. Raises :class:`RunConfigError` that names ``source``, each key at fault, and the mend."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise RunConfigError("; ".join(_said(source, problem) for problem in error.errors())) from None


def _said(source: str, problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{source}: {key} is not known; {_nearest(problem['loc'])}"
    if problem["type"] == "missing":
        return f"{source}: {key} is missing; add it"
    if problem["type"] == "value_error":  # ours, in whole sentences
        message = problem["msg"].removeprefix("Value error, ")
        return f"{source}: {key}: {message}" if key else f"{source}: {message}"
    if problem["type"] == "tuple_type":
        return f"{source}: {key} is {problem['input']!r}, expected a list; write it in brackets: [{problem['input']}]"
    return f"{source}: {key} is {problem['input']!r}: {problem['msg']}"


def _nearest(place: tuple[int | str, ...]) -> str:
    """What the section of an unknown key does know, the likeliest meant first."""
    from difflib import get_close_matches

    section: Any = RunConfig
    for part in place[:-1]:
        section = _section_type(section.model_fields[str(part)].annotation)
    known = list(section.model_fields)
    close = get_close_matches(str(place[-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known there: {', '.join(known)}"


def _section_type(annotation: Any) -> Any:
    """The section of a field that may be optional."""
    options = getattr(annotation, "__args__", (annotation,))
    return next(option for option in options if isinstance(option, type) and issubclass(option, Section))
