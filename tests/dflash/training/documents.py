"""Samples of random tokens, for what does not care what a text says."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.training.batch import Sample, SampleSet
from dflash.training.packing import first_fit


@dataclass(frozen=True)
class Documents:
    """A sample set in memory."""

    samples: list[Sample]
    sha256: str = "of these documents"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(sample.ids) for sample in self.samples])


def documents(lengths: Sequence[int], *, vocabulary: int, seed: int = 0) -> Documents:
    """One document of each length; the first third of each is not the target's."""
    drawn = torch.Generator().manual_seed(seed)
    return Documents(
        [
            Sample(index, torch.randint(vocabulary, (length,), generator=drawn), torch.arange(length) >= length // 3)
            for index, length in enumerate(lengths)
        ]
    )


def rows_of(samples: SampleSet, indices: Sequence[int], *, length: int, packing: bool) -> list[list[Sample]]:
    """The documents ``indices`` in rows: one in each, or packed into rows of at most ``length`` tokens.

    The same samples and indices give the same rows everywhere. As of :func:`first_fit`.
    """
    documents = [samples[index] for index in indices]
    if not packing:
        return [[document] for document in documents]
    rows = first_fit([len(document.ids) for document in documents], length)
    return [[documents[place] for place in row] for row in rows]
