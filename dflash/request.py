"""What to measure, and everything that is read for it before the target works."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dflash.checkpoints import DrafterCheckpoint, read_checkpoint
from dflash.errors import UsageError
from dflash.gpu_share import Share
from dflash.overlap import overlapping
from dflash.prompts import ChatPrompt, PromptSet, RawPrompt, read_prompts, tokenize
from dflash.target import load_tokenizer

Mode = Literal["replay", "decode", "served"]
COLDEST, HOTTEST = 1e-3, 1e3
"""Temperatures outside make of every logit infinity or the same number."""


@dataclass(frozen=True)
class Request:
    """What to measure. ``device`` and ``dtype`` "auto": CUDA in bfloat16 where it is there, else the CPU in float32.

    ``max_blocks`` bounds the rounds of each prompt. ``temperature`` over 0 is for ``mode`` "decode" alone.
    ``training_data``: prompts that are in there are left out. ``offload`` "auto": when the target does not fit.
    ``share``: the machine is others' too, see :mod:`dflash.gpu_share`.
    """

    target: Path
    checkpoint: Path
    prompts: Path
    output: Path
    drafter_config: Path | None = None
    reference: Path | None = None
    server: str | None = None
    mode: Mode = "replay"
    temperature: float = 0.0
    sampler: Literal["rejection", "target-match"] = "rejection"
    max_new_tokens: int = 256
    ignore_eos: bool = False
    thinking: bool | None = None
    num_prompts: int | None = None
    max_blocks: int | None = None
    training_data: Path | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kernel: Literal["auto", "fla", "torch"] = "auto"
    offload: bool | Literal["auto"] = False
    cache: Path | None = None
    share: Share | None = None

    def require_consistent(self) -> None:
        """:class:`UsageError` for options that exclude each other."""
        if self.mode == "served" and self.server is None:
            raise UsageError("--mode served measures a running server; say which with --server URL")
        if self.mode == "served" and (
            self.reference or self.offload or self.cache or self.max_blocks or self.share is not None
        ):
            raise UsageError(
                "--mode served measures the drafter that the server runs, with its own target; leave out --reference, "
                "--offload, --cache, --max-blocks and --reserve-gib"
            )
        if self.mode == "served" and (self.dtype != "auto" or self.kernel != "auto"):
            raise UsageError("--mode served runs no model here, so --dtype and --kernel are the server's to choose")
        if self.temperature and not COLDEST <= self.temperature <= HOTTEST:
            raise UsageError(f"--temperature {self.temperature}: expected 0 (greedy), or {COLDEST:g} to {HOTTEST:g}")
        if self.temperature and self.mode != "decode":
            raise UsageError(f"--temperature {self.temperature} needs --mode decode: a replay is of greedy completions")
        if self.temperature and self.server is not None:
            raise UsageError("--server writes greedy completions, and with --temperature there is no use for any")
        if self.sampler != "rejection" and not self.temperature:
            raise UsageError(f"--sampler {self.sampler} needs --temperature: without one decoding is greedy")

    def torch_device(self) -> torch.device:
        """Raises :class:`UsageError` for one that torch does not see."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device: torch.device | None = torch.device(self.device)
        except RuntimeError:
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise UsageError(f"--device {self.device}: expected auto, cpu, cuda or cuda:N")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"--device {self.device}: torch sees no CUDA device here; use --device cpu")
        return device

    def torch_dtype(self) -> torch.dtype:
        """The dtype of target and drafter."""
        if self.dtype == "auto":
            return torch.bfloat16 if self.torch_device().type == "cuda" else torch.float32
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32


@dataclass(frozen=True)
class Inputs:
    """Prompts as token ids, the checkpoint, and the reference drafter.

    ``left_out`` are the ids of prompts that were in the training data, None where that was not asked.
    """

    prompt_set: PromptSet
    kept: Sequence[RawPrompt | ChatPrompt]
    left_out: list[str] | None
    tokenizer: Any
    prompts: list[list[int]]
    checkpoint: DrafterCheckpoint
    reference: DrafterCheckpoint | None

    @property
    def drafters(self) -> list[DrafterCheckpoint]:
        """The checkpoint, and the reference drafter if there is one."""
        return [self.checkpoint] + ([self.reference] if self.reference else [])

    @property
    def layer_ids(self) -> list[int]:
        """The taps of all drafters, ascending."""
        return sorted({layer for drafter in self.drafters for layer in drafter.config.target_layer_ids})

    @property
    def ids(self) -> list[str]:
        """The prompts' own ids, in their order."""
        return [prompt.id for prompt in self.kept]


def read_inputs(request: Request) -> Inputs:
    """All files but the target's weights, so that a wrong one is named before the target has worked for it."""
    prompt_set = read_prompts(request.prompts, limit=request.num_prompts)
    left_out = overlapping(prompt_set.prompts, request.training_data) if request.training_data else None
    kept = [prompt for prompt in prompt_set.prompts if prompt.id not in (left_out or ())]
    if not kept:
        raise UsageError(
            f"every prompt of {request.prompts} is in the training data {request.training_data}; τ on those would not "
            f"say how the drafter does on new text: use other prompts"
        )
    tokenizer = load_tokenizer(str(request.target))
    prompts = tokenize(kept, tokenizer, thinking=request.thinking)
    checkpoint = read_checkpoint(request.checkpoint, drafter_config=request.drafter_config, reference=request.reference)
    reference = read_checkpoint(request.reference) if request.reference else None
    return Inputs(prompt_set, kept, left_out, tokenizer, prompts, checkpoint, reference)
