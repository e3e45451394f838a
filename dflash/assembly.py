"""A report from what was measured: settings, versions and descriptions around the figures."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch
from pydantic import ValidationError

from dflash.batch import Text
from dflash.checkpoints import DrafterCheckpoint
from dflash.hidden_states import TargetFacts
from dflash.metrics import SEED, Totals
from dflash.prompts import has_chats
from dflash.report import Check, CheckpointInfo, PromptResult, Report, Settings, TargetInfo, TrainingInfo
from dflash.request import Inputs, Request


def make_report(
    request: Request,
    inputs: Inputs,
    facts: TargetFacts,
    found: list[Check],
    timings: dict[str, float],
    *,
    served_model: str | None,
    retokenized: int = 0,
    agreement: float | None = None,
    **measured: Any,
) -> Report:
    """The report of a measurement; ``measured`` are its remaining fields. A check that failed makes it not valid."""
    failed = [check.name for check in found if check.status == "fail"]
    target = facts.model_dump(include={"path", "tensors", "kernel", "dtype", "fingerprint"})
    config = inputs.checkpoint.config
    settings = Settings(
        mode=request.mode,
        temperature=request.temperature,
        sampler=request.sampler if request.temperature else "greedy",
        max_new_tokens=request.max_new_tokens,
        ignore_eos=request.ignore_eos,
        thinking=request.thinking if has_chats(inputs.kept) else None,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=list(config.target_layer_ids),
        prompts=str(request.prompts),
        prompts_sha256=inputs.prompt_set.sha256,
        num_prompts=len(inputs.prompts),
        max_blocks=request.max_blocks,
        completions=request.server or "target",
        served_model=served_model,
        retokenized=retokenized,
        completion_agreement=agreement,
        offload=request.offload is True,
        device=_device(request),
        host=platform.node() or None,
        seed=SEED,
    )
    return Report(
        created=datetime.now(UTC),
        valid=not failed,
        invalid_because=failed,
        checkpoint=_describe(inputs.checkpoint),
        training=_training(inputs.checkpoint),
        target=TargetInfo.model_validate(target | {"class": facts.class_name}),
        reference=_describe(inputs.reference) if inputs.reference else None,
        settings=settings,
        versions=_versions(),
        left_out=inputs.left_out or [],
        checks=found,
        timings=timings,
        **measured,
    )


def _device(request: Request) -> str:
    if request.mode == "served":
        return "the server's"
    device = request.torch_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _describe(checkpoint: DrafterCheckpoint) -> CheckpointInfo:
    return CheckpointInfo(
        path=str(checkpoint.path),
        sha256=checkpoint.sha256,
        format=checkpoint.format,
        step=checkpoint.step,
        config_source=checkpoint.config_source,
    )


def _training(checkpoint: DrafterCheckpoint) -> TrainingInfo | None:
    """What the checkpoint says of its training; an entry of another type than the report's is left out."""
    said = dict(checkpoint.training)
    while said:
        try:
            return TrainingInfo.model_validate(said)
        except ValidationError as error:
            del said[str(error.errors()[0]["loc"][0])]
    return None


def prompt_results(
    texts: Sequence[Text], totals: Totals, tokenizer: Any, reference: Totals | None = None
) -> list[PromptResult]:
    """One entry a text, with Σ advance and rounds from ``totals``, and the reference drafter's τ."""
    results = []
    for text in texts:
        advance, count = totals.get(text.id, (0, 0))
        their_advance, their_count = (reference or {}).get(text.id, (0, 0))
        completion = text.tokens[text.prompt_length :]
        results.append(
            PromptResult(
                id=text.id,
                text=tokenizer.decode(completion),
                tokens=len(completion),
                rounds=count,
                tau=advance / count if count else None,
                token_ids=completion,
                reference_tau=their_advance / their_count if their_count else None,
            )
        )
    return results


def _versions() -> dict[str, str]:
    names = ("dflash-pipeline", "torch", "transformers", "tokenizers", "safetensors", "numpy", "flash-linear-attention")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
