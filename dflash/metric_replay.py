"""One training batch and the trainer's own metrics on it, so that the evaluator's code can compute them again.

If these figures come out alike, drafter, masks, positions, labels and loss are the trainer's here too, and bad figures
on fresh prompts are the training's fault; if not, the evaluation is wrong. ``replay.safetensors`` (version 1) holds

=================  ===================  ===============================================================================
``ids``            [N, S] int64         texts, padded with any token
``loss_mask``      [N, S] bool          tokens that count as labels; False on padding
``anchors``        [N, n] int64         anchor of each block, -1 for a filler
``taps``           [N, S, K·H]          the target's states, without noise
``soft_ids``       [N, n, B-1, k] int64 with soft labels only: the k likeliest tokens of each slot *as the training
                                        step's own labels gave them*, noise and all
``soft_logprobs``  [N, n, B-1, k]       their log-probabilities at the recipe's temperature
=================  ===================  ===============================================================================

and as metadata recipe, kernel, dtype, the target's fingerprint and the metrics of the drafter *after* the update,
computed without noise: ``loss``, ``accuracy``, ``streak1``, ``streak8``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash.batch import LOGITS, Vocabulary
from dflash.drafter import Drafter
from dflash.errors import DFlashError
from dflash.losses import reduce, slot_losses
from dflash.masks import layer_masks
from dflash.probe import read_versioned
from dflash.recipes import Recipe, RecipeError
from dflash.target import Target

VERSION = 1
SOFT_LABELS = 16
"""Likeliest tokens kept of each slot's soft label."""
METRICS = ("loss", "accuracy", "streak1", "streak8")
_FORMAT = "dflash-replay"


class MetricReplayError(DFlashError):
    """A recorded training batch cannot be read, contradicts itself, or is of another version."""


@dataclass(frozen=True)
class SoftLabels:
    """``ids`` int64 and ``logprobs`` float32, both [N, n, B-1, k]: the likeliest tokens of each slot."""

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class TrainedBatch:
    """What the table of this module describes."""

    ids: Tensor
    loss_mask: Tensor
    anchors: Tensor
    taps: Tensor
    metrics: dict[str, float]
    recipe: Recipe
    kernel: str
    dtype: str
    target_fingerprint: str
    soft: SoftLabels | None = None


@torch.no_grad()
def batch_metrics(
    drafter: Drafter, vocabulary: Vocabulary, batch: TrainedBatch, teacher: Tensor | None
) -> dict[str, float]:
    """Loss, accuracy and streaks of ``drafter`` on the batch; the trainer's figures when it calls this after a step.

    ``teacher`` [N, S, H] are the target's last hidden states, normed, which with the vocabulary's head make the soft
    labels (:func:`last_hidden`); without it a recipe with soft labels has no ``loss`` in the answer. Accuracy is over
    scored slots; a streak is the mean over blocks of the leading scored slots whose right token is among the drafter's
    1 or 8 best, ties by id.
    """
    recipe, device = batch.recipe, drafter.fc.weight.device
    anchors = batch.anchors.to(device)
    places, right, scored = _labels(batch, device)
    hidden = _block_hidden(drafter, vocabulary, batch, anchors.clamp(min=0))
    soft = recipe.soft_labels and teacher is not None
    losses, ranks = torch.zeros(right.shape, device=device), torch.zeros_like(right)
    for rows in _chunks(right.numel(), drafter.config.vocab_size):
        logits = vocabulary.logits(hidden.flatten(0, 2)[rows]).float()
        wanted = right.flatten()[rows]
        theirs = vocabulary.logits(_teacher_rows(teacher, places, rows)) if soft and teacher is not None else None
        if theirs is not None or not recipe.soft_labels:
            losses.view(-1)[rows] = slot_losses(recipe, logits, wanted, theirs)
        value, ids = logits.gather(1, wanted[:, None]), torch.arange(logits.shape[1], device=device)
        better = (logits > value) | ((logits == value) & (ids < wanted[:, None]))
        ranks.view(-1)[rows] = better.sum(dim=1)
    blocks = (anchors >= 0).sum().clamp(min=1)
    figures = {
        "accuracy": ((ranks == 0) & scored).sum() / scored.sum().clamp(min=1),
        "streak1": ((ranks < 1) & scored).int().cumprod(-1).sum() / blocks,
        "streak8": ((ranks < 8) & scored).int().cumprod(-1).sum() / blocks,
    }
    if soft or not recipe.soft_labels:
        figures["loss"] = reduce(recipe, losses, scored)
    return {name: float(figures[name]) for name in METRICS if name in figures}


@torch.no_grad()
def last_hidden(target: Target, ids: Tensor) -> Tensor:
    """The target's last hidden states [N, S, H] for ``ids`` [N, S], normed as its head takes them, a text at a time."""
    model = target.model.get_submodule("model")
    rows = [model(input_ids=row[None].to(target.device), use_cache=False).last_hidden_state for row in ids]
    return torch.cat(rows)


@torch.no_grad()
def soft_labels(vocabulary: Vocabulary, batch: TrainedBatch, teacher: Tensor, *, vocab_size: int) -> SoftLabels:
    """The labels that ``teacher`` [N, S, H] (:func:`last_hidden`) gives the batch's slots, at its recipe's temperature.

    Slot k of a block at anchor a stands for position a + k, whose distribution the target states at a + k - 1.
    """
    places, right, _ = _labels(batch, teacher.device)
    count = min(SOFT_LABELS, vocab_size)
    ids = torch.zeros(right.numel(), count, dtype=torch.long)
    logprobs = torch.zeros(right.numel(), count)
    for rows in _chunks(right.numel(), vocab_size):
        logits = vocabulary.logits(_teacher_rows(teacher, places, rows)).float()
        best = torch.log_softmax(logits / (batch.recipe.temperature or 1.0), dim=-1).topk(count, dim=-1)
        ids[rows], logprobs[rows] = best.indices.cpu(), best.values.cpu()
    return SoftLabels(ids.view(*right.shape, count), logprobs.view(*right.shape, count))


@torch.no_grad()
def label_noise(vocabulary: Vocabulary, batch: TrainedBatch, teacher: Tensor, *, vocab_size: int) -> float:
    """How far the batch's stored soft labels are from the clean ones: mean over scored slots of ½ Σ |p - p'|.

    The sum runs over the stored tokens, so it is a lower bound of the total variation distance, 0 … 1.
    """
    assert batch.soft is not None
    places, right, scored = _labels(batch, teacher.device)
    kept = batch.soft.ids.shape[-1]
    stored_ids, stored = batch.soft.ids.view(-1, kept), batch.soft.logprobs.view(-1, kept)
    distance = torch.zeros(right.numel(), device=teacher.device)
    for rows in _chunks(right.numel(), vocab_size):
        logits = vocabulary.logits(_teacher_rows(teacher, places, rows)).float()
        clean = torch.softmax(logits / (batch.recipe.temperature or 1.0), dim=-1)
        theirs = clean.gather(1, stored_ids[rows].to(clean.device))
        distance[rows] = 0.5 * (theirs - stored[rows].to(clean.device).float().exp()).abs().sum(-1)
    return float((distance.view(right.shape) * scored).sum() / scored.sum().clamp(min=1))


def write_replay(path: Path, batch: TrainedBatch) -> None:
    """Write ``batch``; the caller names a path that nobody reads yet and renames it."""
    tensors = {"ids": batch.ids, "loss_mask": batch.loss_mask.bool(), "anchors": batch.anchors, "taps": batch.taps}
    if batch.soft is not None:
        tensors |= {"soft_ids": batch.soft.ids, "soft_logprobs": batch.soft.logprobs}
    about = {
        "metrics": batch.metrics,
        "recipe": batch.recipe.model_dump(exclude_none=True),
        "kernel": batch.kernel,
        "dtype": batch.dtype,
        "target_fingerprint": batch.target_fingerprint,
    }
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": _FORMAT, "version": str(VERSION), "about": json.dumps(about)},
    )


def read_replay(path: Path) -> TrainedBatch:
    """Read a recorded batch. Raises :class:`MetricReplayError` that names the file and what is wrong with it."""
    about, tensors = read_versioned(path, _FORMAT, VERSION, MetricReplayError)
    try:
        soft = SoftLabels(tensors["soft_ids"], tensors["soft_logprobs"]) if "soft_ids" in tensors else None
        batch = TrainedBatch(
            ids=tensors["ids"],
            loss_mask=tensors["loss_mask"],
            anchors=tensors["anchors"],
            taps=tensors["taps"],
            metrics={name: float(about["metrics"][name]) for name in METRICS},
            recipe=Recipe.from_dict(about["recipe"], source=str(path)),
            kernel=str(about["kernel"]),
            dtype=str(about["dtype"]),
            target_fingerprint=str(about["target_fingerprint"]),
            soft=soft,
        )
    except RecipeError as error:
        raise MetricReplayError(str(error)) from None
    except (KeyError, TypeError, ValueError) as error:
        raise MetricReplayError(f"{path}: {type(error).__name__} {error}; the file is no complete replay") from None
    if problem := _problem(batch):
        raise MetricReplayError(f"{path}: {problem}; it was not written by write_replay")
    return batch


def _problem(batch: TrainedBatch) -> str | None:
    ids, anchors, slots = batch.ids, batch.anchors, batch.recipe.block_size - 1
    if ids.ndim != 2 or batch.loss_mask.shape != ids.shape or batch.taps.shape[:-1] != ids.shape:
        return f"ids {list(ids.shape)}, loss_mask {list(batch.loss_mask.shape)}, taps {list(batch.taps.shape)} disagree"
    if anchors.ndim != 2 or len(anchors) != len(ids) or bool(((anchors < -1) | (anchors >= ids.shape[1])).any()):
        return f"anchors {list(anchors.shape)} are not positions of the texts {list(ids.shape)}"
    soft = batch.soft
    if soft is not None and (soft.ids.shape != soft.logprobs.shape or soft.ids.shape[:-1] != (*anchors.shape, slots)):
        return f"soft labels {list(soft.ids.shape)} are not [N, n, {slots}, k]"
    return None


def _labels(batch: TrainedBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Flat places a + k of slots 1 … B-1 in the [N·S] tokens, their tokens, and whether they count; all [N, n, B-1]."""
    rows, length = batch.ids.shape
    at = batch.anchors[..., None] + torch.arange(1, batch.recipe.block_size)
    inside = (batch.anchors[..., None] >= 0) & (at < length)
    flat = at.clamp(min=1, max=length - 1) + length * torch.arange(rows)[:, None, None]
    right = batch.ids.flatten()[flat]
    scored = inside & batch.loss_mask.flatten()[flat].bool()
    return flat.to(device), right.to(device), scored.to(device)


def _block_hidden(drafter: Drafter, vocabulary: Vocabulary, batch: TrainedBatch, anchors: Tensor) -> Tensor:
    """Hidden states [N, n, B-1, H] of the mask slots, all blocks of a text in one row."""
    config, weight, length = drafter.config, drafter.fc.weight, batch.ids.shape[1]
    context = drafter.project_context(batch.taps.to(weight))
    kv = drafter.context_kv(context, torch.arange(length, device=weight.device))
    slots = torch.arange(config.block_size, device=weight.device)
    positions = (anchors[..., None] + slots).flatten(1)
    blocks = torch.full((*anchors.shape, config.block_size), config.mask_token_id, device=weight.device)
    blocks[..., 0] = batch.ids.to(weight.device).gather(1, anchors)
    masks = layer_masks(config, anchors, length)
    hidden: Tensor = drafter(vocabulary.embed(blocks.flatten(1)).to(weight.dtype), positions, kv, masks)
    return hidden.view(*anchors.shape, config.block_size, -1)[:, :, 1:]


def _teacher_rows(teacher: Tensor, places: Tensor, rows: slice) -> Tensor:
    return teacher.flatten(0, 1)[places.flatten()[rows].to(teacher.device) - 1]


def _chunks(count: int, vocab_size: int) -> Iterator[slice]:
    size = max(1, LOGITS // vocab_size)
    return (slice(start, start + size) for start in range(0, count, size))
