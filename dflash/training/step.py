"""One step of training: its micro-batches, the sums that all ranks share, and the update.

Micro-batches add the gradients of Σ w·m·loss, and only then are they divided, by Σ w·m over all ranks and
micro-batches: a short sample weighs as much as it has supervised slots, however the rows are shared out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from dflash.batch import Vocabulary
from dflash.config import DrafterConfig
from dflash.errors import DFlashError
from dflash.recipes import Recipe
from dflash.training.batch import Features, FeatureSource, Sample, SampleSet
from dflash.training.blocks import Blocks, draw_blocks
from dflash.training.distributed import Ranks, synchronised
from dflash.training.features import StoredFeatures
from dflash.training.head_loss import LossSums, head_loss
from dflash.training.objective import block_embeddings, with_noise
from dflash.training.optimizer import clip_gradients, learning_rate, scale_gradients, set_learning_rate
from dflash.training.order import Order, Place
from dflash.training.run_config import RunConfig


class NotFiniteError(DFlashError):
    """The ``what`` of step ``number`` is NaN or infinite; nothing was updated.

    ``places`` are this rank's micro-batches at fault: none where the fault is another rank's.
    """

    def __init__(self, number: int, what: str, places: Sequence[int]) -> None:
        super().__init__(f"the {what} of step {number + 1} is not finite")
        self.number, self.what, self.places = number, what, list(places)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass of this rank took. ``anchorless`` counts its rows in which no block could be drawn."""

    features: Features
    blocks: Blocks
    epoch: int
    anchorless: int


@dataclass(frozen=True)
class Sums:
    """What a step adds up, as one float64 vector on the device; each entry a sum over micro-batches, then ranks."""

    vector: Tensor
    slots: int

    @classmethod
    def of(cls, sums: LossSums, batch: MicroBatch) -> Self:
        """Of one micro-batch."""
        scalars = torch.stack((sums.numerator.detach(), sums.weight, sums.blocks, sums.streak1, sums.streak8))
        counts = scalars.new_tensor([float(batch.features.ids.numel()), float(batch.anchorless), 0.0])
        return cls(torch.cat((scalars, counts, sums.scored, sums.correct)).double(), len(sums.scored))

    def __add__(self, other: Self) -> Self:
        return replace(self, vector=self.vector + other.vector)

    def asking_to_stop(self, asked: bool) -> Self:
        """With this rank's wish to stop, so that it costs no exchange of its own."""
        vector = self.vector.clone()
        vector[7] = float(asked)
        return replace(self, vector=vector)

    def over(self, ranks: Ranks) -> "Figures":
        """The figures of the whole step, once every rank has added its sums."""
        values = ranks.sum(self.vector).tolist()
        numerator, weight, blocks, streak1, streak8, tokens, anchorless, stops = values[:8]
        return Figures(
            numerator=numerator,
            weight=weight,
            blocks=round(blocks),
            streak1=streak1,
            streak8=streak8,
            tokens=round(tokens),
            anchorless=round(anchorless),
            stop=stops > 0,
            scored=tuple(values[8 : 8 + self.slots]),
            correct=tuple(values[8 + self.slots :]),
        )


@dataclass(frozen=True)
class Figures:
    """Sums of a step over all ranks, before its update. ``stop``: some rank was asked to. ``tokens``: with padding."""

    numerator: float
    weight: float
    blocks: int
    streak1: float
    streak8: float
    tokens: int
    anchorless: int
    stop: bool
    scored: tuple[float, ...]
    correct: tuple[float, ...]
    rate: float = 0.0
    norm: float = 0.0

    @property
    def skipped(self) -> bool:
        """Nothing was supervised on any rank, so there was nothing to learn."""
        return self.weight == 0

    @property
    def loss(self) -> float:
        return self.numerator / self.weight

    def values(self) -> dict[str, float]:
        """As :class:`~dflash.training.metric_log.MetricLog` takes them; a share of nothing is left out.

        A slot that is not supervised is neither right nor wrong: it ends the block's streak and is in no accuracy.
        """
        values = {"learning_rate": self.rate, "tokens": float(self.tokens), "blocks": float(self.blocks)}
        if self.skipped:
            return values
        values |= {
            "loss": self.loss,
            "grad_norm": self.norm,
            "accuracy": sum(self.correct) / sum(self.scored),
            "streak1": self.streak1 / self.blocks,
            "streak8": self.streak8 / self.blocks,
        }
        slots = enumerate(zip(self.correct, self.scored, strict=True), start=1)
        return values | {f"accuracy_{slot}": right / scored for slot, (right, scored) in slots if scored}


@dataclass(frozen=True)
class Steps:
    """Everything a step is a function of. ``rows`` are the documents of each row, by their index."""

    config: RunConfig
    drafter: DrafterConfig
    recipe: Recipe
    samples: SampleSet
    rows: Sequence[Sequence[int]]
    source: FeatureSource
    vocabulary: Vocabulary
    model: nn.Module
    """The drafter's :class:`~dflash.training.objective.TrainingModel`, as DDP or FSDP wraps it."""
    optimizer: AdamW
    order: Order
    total: int
    ranks: Ranks

    def take(self, number: int, *, stop: bool = False) -> tuple[Figures, MicroBatch]:
        """Take step ``number``, from 0; ``stop`` tells the other ranks that this one was asked to end.

        Also returns the last of this rank's micro-batches that had a block. Raises :class:`NotFiniteError` before
        anything is updated.
        """
        rate = learning_rate(self.config.optimizer, number, self.total)
        every: list[Sums] = []
        kept: MicroBatch | None = None
        batches = list(self.order.micro_batches(number))
        for place, rows in enumerate(batches):
            batch = self.micro_batch(number, rows)
            self._read_ahead(number, batches[place + 1 :])
            sums = self._backward(number, batch, last=place == len(batches) - 1)
            every.append(Sums.of(sums, batch))
            if kept is None or batch.anchorless < len(rows):
                kept = batch
        assert kept is not None
        added = sum(every[1:], start=every[0])
        figures = added.asking_to_stop(stop).over(self.ranks)
        if not math.isfinite(figures.numerator):
            raise NotFiniteError(number, "loss", [place for place, one in enumerate(every) if not _finite(one)])
        figures = self._update(number, figures, rate)
        return figures, kept

    def micro_batch(self, number: int, places: Sequence[Place]) -> MicroBatch:
        """What this rank's forward pass of step ``number`` takes at ``places``; the same whenever it is asked."""
        features = self.source.features(self._documents(places))
        if features.hidden is not None:
            # through the head in the drafter's dtype; the target's own may be another
            features = replace(features, hidden=features.hidden.to(getattr(torch, self.config.drafter.dtype)))
        blocks = draw_blocks(
            features,
            self.drafter,
            num_anchors=self.config.objective.num_anchors,
            seed=self.config.seed,
            epoch=self.order.epoch(number),
        )
        empty = (blocks.anchors < 0).all(dim=1).tolist()
        anchorless = sum(none and not place.blank for none, place in zip(empty, places, strict=True))
        return MicroBatch(features, blocks, self.order.epoch(number), anchorless)

    def _documents(self, places: Sequence[Place]) -> list[list[Sample]]:
        rows = []
        for place in places:
            documents = [self.samples[index] for index in self.rows[place.row]]
            if place.blank:
                documents = [replace(one, loss_mask=torch.zeros_like(one.loss_mask)) for one in documents]
            rows.append(documents)
        return rows

    def _read_ahead(self, number: int, rest: Sequence[Sequence[Place]]) -> None:
        """Let files be read for the next micro-batch, of this step or the next, while this one is computed."""
        if isinstance(self.source, StoredFeatures):
            self.source.prefetch(self._documents(rest[0] if rest else next(self.order.micro_batches(number + 1))))

    def _backward(self, number: int, batch: MicroBatch, *, last: bool) -> LossSums:
        features, blocks, objective = batch.features, batch.blocks, self.config.objective
        taps = with_noise(features.taps, features, objective.noise, self.config.seed, self.order.epoch(number))
        embeddings = block_embeddings(self.vocabulary, blocks, features.ids, self.drafter)
        with synchronised(self.model, last):
            hidden = self.model(taps, blocks, features.starts, embeddings)
            sums = head_loss(
                hidden,
                blocks,
                self.recipe,
                self.vocabulary,
                teacher=features.hidden,
                chunk_tokens=objective.chunk_tokens,
            )
            sums.numerator.backward()  # type: ignore[no-untyped-call]
        return sums

    def _update(self, number: int, figures: Figures, rate: float) -> Figures:
        """Divide, clip, update. DDP and FSDP have left the mean over ranks where the sum is meant."""
        norm = 0.0
        if not figures.skipped:
            parameters = list(self.model.parameters())
            scale_gradients(parameters, self.ranks.world / figures.weight)
            norm = clip_gradients(parameters, self.config.optimizer.max_grad_norm)
            if not math.isfinite(norm):
                raise NotFiniteError(number, "gradient", [self.order.accumulate - 1])
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return replace(figures, rate=rate, norm=norm)


def _finite(sums: Sums) -> bool:
    return bool(sums.vector[0].isfinite())
