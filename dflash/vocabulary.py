"""What a drafter borrows of the target without the target: the embedding rows in use, and the head.

Both are read by slices of the checkpoint. A head that does not fit beside what else is on the device stays in host
memory, and its logits are computed a block of the vocabulary at a time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from dflash.errors import DFlashError
from dflash.head import best_and_ranks, blocks_of
from dflash.memory import free_bytes, show_bytes
from dflash.shards import Reader, Shards

SPARE = 2
"""The head stays off a device unless this many times its size is free there: the drafter and its context need room."""


class VocabularyError(DFlashError):
    """A token whose embedding was not read, or weights that fit nowhere or are not finite."""


@dataclass(frozen=True)
class SlicedVocabulary:
    """Embedding rows of some tokens and the whole head; satisfies :class:`dflash.batch.Vocabulary`.

    ``head`` [V, H] is on ``device``, or on the CPU where it does not fit there (then :attr:`streamed`).
    """

    device: torch.device
    head: Tensor
    _rows: Tensor  # [T, H] on the device
    _place: Tensor  # [V] on the device: row of each token, -1 where it was not read

    @classmethod
    def open(
        cls,
        directory: str | Path,
        token_ids: Iterable[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Read the embedding of ``token_ids`` and the head. Raises :class:`TargetLoadError`, :class:`VocabularyError`.

        Names and shapes of all weights are compared with the target's class, from the headers.
        """
        device = torch.device(device)
        shards = Shards.open(directory)
        vocab_size, hidden_size = shards.tensors[shards.head_name].shape
        wanted = sorted(set(token_ids))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < vocab_size:
            strange = wanted[0] if wanted[0] < 0 else wanted[-1]
            raise VocabularyError(f"token {strange} is outside the {vocab_size} rows of the target {directory}")
        rows = torch.empty(len(wanted), hidden_size, dtype=dtype)
        place = torch.full((vocab_size,), -1, dtype=torch.long)
        place[wanted] = torch.arange(len(wanted))
        size = vocab_size * hidden_size * dtype.itemsize
        with shards.reader() as reader:
            _read_rows(reader, shards.embedding_name, wanted, rows)
            home = _home(size, device, source=str(directory))
            head = reader.tensor(shards.head_name, dtype=dtype, device=home)
        for name, weight in ((shards.embedding_name, rows), (shards.head_name, head)):
            if not all(bool(block.isfinite().all()) for _, block in blocks_of(weight)()):
                raise VocabularyError(f"target {directory}: {name} holds NaN or infinity; copy the target again")
        return cls(device, head, rows.to(device), place.to(device))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; more than the tokenizer has tokens."""
        return len(self.head)

    @property
    def streamed(self) -> bool:
        """The head is in host memory and goes to the device block by block."""
        return self.head.device != self.device

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of ``ids`` [...]. Raises :class:`VocabularyError` for a token that was not read."""
        place = self._place[ids.to(self.device)]
        if bool((place < 0).any()):
            missing = ids.to(self.device)[place < 0][0]
            raise VocabularyError(
                f"the embedding of token {int(missing)} was not read: {len(self._rows)} tokens were asked for, and it "
                f"is not among them; open the vocabulary with it"
            )
        return self._rows[place]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of normed hidden states [..., H], on their device and in their dtype."""
        if not self.streamed:
            return functional.linear(hidden, self.head)
        logits = hidden.new_empty(*hidden.shape[:-1], self.vocab_size)
        for start, block in blocks_of(self.head, hidden.device)():
            logits[..., start : start + len(block)] = functional.linear(hidden, block)
        return logits

    def best_and_ranks(self, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy tokens and ranks of the tokens ``wanted``, [R] each, for ``hidden`` [R, H], never with all logits."""
        return best_and_ranks(hidden, wanted, blocks_of(self.head, hidden.device))


def _home(size: int, device: torch.device, *, source: str) -> torch.device:
    """Where a head of ``size`` bytes is kept: the device if it leaves as much room again, else host memory."""
    if device.type != "cpu" and free_bytes(device) >= SPARE * size:
        return device
    free = free_bytes("cpu")
    if free < size:
        raise VocabularyError(
            f"the head of {source} takes {show_bytes(size)}, {show_bytes(free)} of host memory are free; stop "
            f"something or use a smaller dtype"
        )
    return torch.device("cpu")


def _read_rows(reader: Reader, name: str, tokens: list[int], out: Tensor) -> None:
    """Rows ``tokens``, ascending, into ``out``; neighbours in one read."""
    first = 0
    for place in range(1, len(tokens) + 1):
        if place == len(tokens) or tokens[place] != tokens[place - 1] + 1:
            reader.rows(name, tokens[first], tokens[place - 1] + 1, out=out[first:place])
            first = place
