"""What a checkpoint carries so that another machine can tell whether it computes what the trainer computed.

``probe.safetensors`` are the target's states on fixed tokens (:mod:`dflash.probe`), ``replay.safetensors`` a few texts
of the last step with the drafter's figures on them *after* the update and without noise (:mod:`dflash.metric_replay`),
made by the evaluator's own :func:`~dflash.metric_replay.batch_metrics`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dflash.batch import Vocabulary
from dflash.drafter import Drafter
from dflash.hidden_states import LoadedTaps, TargetFacts
from dflash.manifest import PROBE, REPLAY
from dflash.metric_replay import SoftLabels, TrainedBatch, batch_metrics, soft_labels, write_replay
from dflash.probe import Probe, make_probe, write_probe
from dflash.recipes import Recipe
from dflash.target import Target
from dflash.training.batch import Features, SampleSet
from dflash.training.blocks import Blocks, documents

PROBE_TOKENS = 256
MOST_BYTES = 1 << 28
"""Of the taps in a replay; one text of 3072 tokens with five taps of 5120 channels has 150 MiB in bfloat16."""
MOST_DOCUMENTS = 16
"""More say no more: what is compared is code, and a dozen texts go through all of it."""


def record(
    directory: Path,
    *,
    drafter: Drafter,
    vocabulary: Vocabulary,
    target: Target | TargetFacts,
    features: Features,
    blocks: Blocks,
    recipe: Recipe,
    soft: SoftLabels | None,
    probe: Probe | None,
) -> dict[str, float]:
    """Write both files into ``directory``, which nobody reads yet; returns loss, accuracy, streak1 and streak8.

    ``drafter`` is as the checkpoint will be read: after the update, in the dtype it is saved in. ``features`` and
    ``blocks`` are the last micro-batch's, without noise; ``features.hidden`` must be there for a recipe with soft
    labels. ``soft`` are the soft labels [N, n, B-1, k] as the step itself used them, where they did not come from
    ``features.hidden``. Without any anchor among the blocks there is nothing to replay, and no figure either.
    """
    if probe is not None:
        write_probe(directory / PROBE, probe)
    facts = LoadedTaps(target).facts if isinstance(target, Target) else target
    if not picked(features, blocks):
        return {}
    batch, teacher = as_texts(features, blocks, recipe=recipe, facts=facts, soft=soft)
    batch = replace(batch, dtype=str(drafter.fc.weight.dtype).removeprefix("torch."))
    if recipe.soft_labels:
        if teacher is None:
            raise ValueError(f"the loss {recipe.loss} has soft labels, and the features come without hidden states")
        if batch.soft is None:
            rows = drafter.config.vocab_size
            batch = replace(batch, soft=soft_labels(vocabulary, batch, teacher, vocab_size=rows))
    metrics = batch_metrics(drafter, vocabulary, batch, teacher)
    write_replay(directory / REPLAY, replace(batch, metrics=metrics))
    return metrics


def probe_tokens(samples: SampleSet, count: int = PROBE_TOKENS) -> list[int]:
    """The first ``count`` tokens of the samples, one after the other, over again where there are fewer.

    Fixed for a data set, in the target's own language, and part of no prompt that is held out.
    """
    ids: list[int] = []
    place = 0
    while len(ids) < count:
        ids += samples[place].ids[: count - len(ids)].tolist()
        place = (place + 1) % len(samples)
    return ids


def run_probe(target: Target, samples: SampleSet, layer_ids: Sequence[int]) -> Probe:
    """The probe of a run, made once: it depends on target and data and not on the step."""
    return make_probe(target, probe_tokens(samples), layer_ids, fingerprint=LoadedTaps(target).facts.fingerprint)


@dataclass(frozen=True)
class Document:
    """Where a text with blocks lies: its row, its positions there, and which of the row's blocks are its own."""

    row: int
    span: slice
    blocks: Tensor  # [n] bool


def picked(features: Features, blocks: Blocks) -> list[Document]:
    """The first texts that have blocks, as many as the bounds allow and at least one."""
    anchors = blocks.anchors.cpu()
    size = features.taps.shape[-1] * features.taps.element_size()
    found: list[Document] = []
    longest = 0
    for row, span, _ in documents(features):
        own = (anchors[row] >= span.start) & (anchors[row] < span.stop)
        if not bool(own.any()):
            continue
        longest = max(longest, span.stop - span.start)
        if found and (len(found) == MOST_DOCUMENTS or (len(found) + 1) * longest * size > MOST_BYTES):
            break
        found.append(Document(row, span, own))
    return found


def as_texts(
    features: Features,
    blocks: Blocks,
    *,
    recipe: Recipe,
    facts: TargetFacts,
    soft: SoftLabels | None,
) -> tuple[TrainedBatch, Tensor | None]:
    """Each picked document as a row of its own, positions counted from its start, and the hidden states [N, S, H].

    Metrics and dtype are the caller's to fill in.
    """
    texts = picked(features, blocks)
    count = max(int(one.blocks.sum()) for one in texts)
    anchors = torch.full((len(texts), count), -1)
    for place, one in enumerate(texts):
        own = blocks.anchors[one.row].cpu()[one.blocks]
        anchors[place, : len(own)] = own - one.span.start
    batch = TrainedBatch(
        ids=_stacked(features.ids, texts).cpu(),
        loss_mask=_stacked(features.loss_mask, texts).cpu(),
        anchors=anchors,
        taps=_stacked(features.taps, texts),
        metrics={},
        recipe=recipe.model_copy(update={"layer_rules": None}),  # the manifest's to state
        kernel=facts.kernel,
        dtype="",
        target_fingerprint=facts.fingerprint,
        soft=None if soft is None else _own_labels(soft, texts, count),
    )
    return batch, None if features.hidden is None else _stacked(features.hidden, texts)


def _stacked(rows: Tensor, texts: Sequence[Document]) -> Tensor:
    """[D, S, …] of [N, S, …]: the documents, padded on the right with zeros."""
    longest = max(one.span.stop - one.span.start for one in texts)
    stacked = rows.new_zeros(len(texts), longest, *rows.shape[2:])
    for place, one in enumerate(texts):
        stacked[place, : one.span.stop - one.span.start] = rows[one.row, one.span]
    return stacked


def _own_labels(soft: SoftLabels, texts: Sequence[Document], count: int) -> SoftLabels:
    """[D, n, B-1, k] of [N, n, B-1, k]: the blocks of each document, in their order."""
    ids = soft.ids.new_zeros(len(texts), count, *soft.ids.shape[2:])
    logprobs = soft.logprobs.new_zeros(ids.shape)
    for place, one in enumerate(texts):
        own = one.blocks.to(soft.ids.device)
        total = int(one.blocks.sum())
        ids[place, :total] = soft.ids[one.row][own]
        logprobs[place, :total] = soft.logprobs[one.row][own]
    return SoftLabels(ids, logprobs)
