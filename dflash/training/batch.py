"""What one micro-batch of training is made of; samples become rows, rows become blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One document: ``ids`` [S] int64 and ``loss_mask`` [S] bool, True on the tokens that the target wrote.

    ``index`` is its place in the data set: what its anchors and its noise are keyed by.
    """

    index: int
    ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class Features:
    """Rows of documents with the target's states, on the device the drafter is on, without any noise.

    ``ids`` [N, S] int64, padded on the right with any token; ``loss_mask`` [N, S] bool, False on padding. ``starts``
    [N, S] int64 holds for each position the row index at which its document begins, 0 everywhere in rows of one
    document; padding is a document of its own. ``taps`` [N, S, K·H]; ``hidden`` [N, S, H] the target's last hidden
    states, normed as its head takes them, where soft labels need them. ``samples`` are the indices of the documents of
    each row, in order.
    """

    ids: Tensor
    loss_mask: Tensor
    starts: Tensor
    taps: Tensor
    samples: list[list[int]]
    hidden: Tensor | None = None


class SampleSet(Protocol):
    """Samples by index, the same on every rank."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class FeatureSource(Protocol):
    """Where taps come from: the target beside the drafter, or files."""

    def features(self, rows: Sequence[Sequence[Sample]]) -> Features:
        """The features of ``rows``, each a sequence of documents (one, unless rows are packed)."""
        ...
