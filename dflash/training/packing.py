"""Documents in rows: which share one, and where each lies in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.errors import DFlashError
from dflash.training.batch import Sample

OPEN_ROWS = 32
"""Rows that still wait for a document that fits. More fill better and carry a document further from its neighbours."""


class PackingError(DFlashError):
    """A document is longer than the rows that documents are packed into."""


@dataclass(frozen=True)
class Layout:
    """Rows as tensors, padded on the right to the longest: what :class:`dflash.training.batch.Features` says of them.

    ``ids`` and ``starts`` [N, S] int64, ``loss_mask`` [N, S] bool, all on the CPU. ``lengths`` counts each row's tokens
    before the padding; padding is a document of its own.
    """

    ids: Tensor
    loss_mask: Tensor
    starts: Tensor
    lengths: list[int]
    samples: list[list[int]]

    @property
    def positions(self) -> Tensor:
        """[N, S] int64, counted from the start of each document."""
        return torch.arange(self.ids.shape[1]) - self.starts

    def borders(self, row: int) -> Tensor:
        """[D + 1] int64: where each of the row's D documents begins, and where the last one ends."""
        starts: Tensor = torch.unique_consecutive(self.starts[row, : self.lengths[row]])
        return torch.cat((starts, torch.tensor([self.lengths[row]])))


def first_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Places of ``lengths`` in rows of at most ``length``: each goes into the first row it fits into.

    At most :data:`OPEN_ROWS` rows are open at a time, the oldest closes first; so a row's documents are near each other
    in the order given, which they keep, and the time is linear. Rows come in the order of their first document. Raises
    :class:`PackingError` for a document that no row holds.
    """
    longest = max(lengths, default=0)
    if longest > length:
        raise PackingError(
            f"a sample has {longest} tokens, and a packed row has {length}; truncate samples to data.max_length or "
            f"leave features.packing out"
        )
    rows: list[list[int]] = []
    room: dict[int, int] = {}  # of the open rows, oldest first
    for place, tokens in enumerate(lengths):
        row = next((one for one, left in room.items() if tokens <= left), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room[row] = length
            if len(room) > OPEN_ROWS:
                del room[next(iter(room))]
        rows[row].append(place)
        room[row] -= tokens
        if room[row] <= 0:
            del room[row]
    return rows


def lay_out(rows: Sequence[Sequence[Sample]]) -> Layout:
    """``rows`` of one or more documents as tensors."""
    lengths = [sum(len(document.ids) for document in row) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    loss_mask = torch.zeros_like(ids, dtype=torch.bool)
    starts = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        start = 0
        for document in row:
            end = start + len(document.ids)
            ids[place, start:end] = document.ids
            loss_mask[place, start:end] = document.loss_mask
            starts[place, start:end] = start
            start = end
        starts[place, start:] = start
    return Layout(ids, loss_mask, starts, lengths, [[document.index for document in row] for row in rows])
