"""A random drafter with rows of random documents, for tests of the objective."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.drafter import Drafter
from dflash.training.batch import Features
from dflash.training.blocks import Blocks, blocks_at
from dflash.training.objective import TrainingModel, block_embeddings
from tests.dflash.test_config import changed
from tests.dflash.test_drafter import random_drafter, vocabulary

LENGTH = 26
BORDER = 12
"""Where the second document of a packed row begins."""
VARIANTS = {
    "sliding causal and full": changed(sliding_window=6),
    "all full": changed(layer_types=["full_attention"] * 3, sliding_window=None),
    "sliding bidirectional": changed(is_causal=False, sliding_window=11),
    "window narrower than the block": changed(sliding_window=3),
}
ANCHORS = torch.tensor([[1, 7, 20, -1], [5, 14, 19, 24]])
"""Of an unpacked row with a filler, and of a packed one."""


@dataclass(frozen=True)
class Words:
    """A vocabulary of two matrices [V, H]."""

    embedding: Tensor
    head: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding[ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.to(hidden.dtype).T


@dataclass
class Bench:
    """A drafter, a vocabulary, and two rows: one document, and two documents packed."""

    drafter: Drafter
    words: Words
    features: Features
    blocks: Blocks

    @classmethod
    def of(cls, variant: str = "sliding causal and full", *, packed: bool = True, scored: float = 0.9) -> "Bench":
        drafter = random_drafter(VARIANTS[variant])
        words = Words(*vocabulary(drafter))
        config = drafter.config
        ids = torch.randint(0, 49, (2, LENGTH))
        starts = torch.zeros_like(ids)
        if packed:
            starts[1, BORDER:] = BORDER
        mask = torch.rand(ids.shape) < scored
        taps, last = torch.randn(*ids.shape, config.tap_width), torch.randn(*ids.shape, config.hidden_size)
        samples = [[3], [5, 8]] if packed else [[3], [5]]
        features = Features(ids, mask, starts, taps, samples, last)
        return cls(drafter, words, features, blocks_at(features, config, ANCHORS))

    @property
    def config(self) -> DrafterConfig:
        return self.drafter.config

    def embeddings(self) -> Tensor:
        return block_embeddings(self.words, self.blocks, self.features.ids, self.config)

    def hidden(
        self,
        attention: str = "dense",
        *,
        taps: Tensor | None = None,
        embeddings: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """[N, n, B-1, H] of the training model."""
        model = TrainingModel(self.drafter, compute_dtype=dtype, attention=attention)  # type: ignore[arg-type]
        taps = self.features.taps if taps is None else taps
        embeddings = self.embeddings() if embeddings is None else embeddings
        hidden: Tensor = model(taps, self.blocks, self.features.starts, embeddings)
        return hidden
