"""Which rows a step takes: a pure function of the seed and the step's number, so the number is the whole cursor.

Each epoch is a keyed permutation of all rows, cut into micro-batches that the ranks share::

    epoch's rows   │ micro-batch 0                 │ micro-batch 1                 │ …
                   │ rank 0 rows │ rank 1 rows │ … │ rank 0 rows │ rank 1 rows │ … │

Two ranks of r rows take what one rank of 2r rows takes. The last step of an epoch is filled with blanks, rows without
a supervised token: every row is seen once an epoch, every rank runs as often as the others, and the loss is divided by
the weight of what is there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dflash.training.randomness import generator


@dataclass(frozen=True)
class Place:
    """A row by its number. A ``blank`` one only keeps the shapes: nothing of it is supervised."""

    row: int
    blank: bool


@dataclass(frozen=True)
class Order:
    """The order of ``total`` rows. A step takes ``rows`` of them on each of ``world`` ranks, ``accumulate`` times."""

    total: int
    rows: int
    accumulate: int
    seed: int
    rank: int = 0
    world: int = 1

    @property
    def rows_per_step(self) -> int:
        """Rows of a step over all ranks."""
        return self.rows * self.world * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.total // self.rows_per_step)

    def steps(self, num_epochs: int | None, max_steps: int | None) -> int:
        """The steps of a run that ends after ``num_epochs`` or ``max_steps``, whichever comes first."""
        ends = [max_steps] if max_steps is not None else []
        if num_epochs is not None:
            ends.append(num_epochs * self.steps_per_epoch)
        return min(ends)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that ``step``, from 0, belongs to."""
        return step // self.steps_per_epoch

    def micro_batches(self, step: int) -> Iterator[list[Place]]:
        """What this rank takes at ``step``: ``accumulate`` lists of ``rows`` places."""
        permutation = self._permutation(self.epoch(step))
        first = step % self.steps_per_epoch * self.rows_per_step + self.rank * self.rows
        for _ in range(self.accumulate):
            yield [self._place(permutation, at) for at in range(first, first + self.rows)]
            first += self.rows * self.world

    def _place(self, permutation: Tensor, at: int) -> Place:
        blank = at >= self.total
        return Place(int(permutation[0 if blank else at]), blank)

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._kept:
            self._kept.clear()
            self._kept[epoch] = torch.randperm(self.total, generator=generator(self.seed, epoch, "order"))
        return self._kept[epoch]

    @cached_property
    def _kept(self) -> dict[int, Tensor]:
        """The permutation of the epoch that is under way."""
        return {}
