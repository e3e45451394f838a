"""Texts side by side, and the drafter's blocks at any of their anchors.

Each text's context keys and values are computed once, and the mask cuts them at the anchor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash.drafter import Drafter, KeyValue
from dflash.errors import DFlashError
from dflash.masks import layer_masks

LOGITS = 1 << 24
"""Logits held at once: 64 MiB in float32, and up to five times as much for what is computed from them."""


class DraftError(DFlashError):
    """The drafter's output is not finite."""


class Vocabulary(Protocol):
    """The frozen parts of the target that a drafter borrows."""

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of ``ids`` [...]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of the target's head for ``hidden`` [..., H]."""
        ...


@dataclass(frozen=True)
class Text:
    """A prompt with its greedy completion. ``taps`` [S, K·H] are the target's states at its S tokens, on any device."""

    id: str
    tokens: list[int]
    prompt_length: int
    taps: Tensor


@dataclass(frozen=True)
class Drafts:
    """``drafted`` tokens and ``ranks`` of the text's own tokens, [..., B-1], and ``log_probs`` of the best tokens.

    ``log_probs`` [..., B-1, min(tree nodes, V)] is float32, falling.
    """

    drafted: NDArray[np.int64]
    ranks: NDArray[np.int64]
    log_probs: NDArray[np.float32]

    def at(self, places: Sequence[tuple[int, int]]) -> "Drafts":
        """Those of [N, n] blocks that stand at ``places`` (row, block), [P]."""
        index = tuple(np.array(places).T)
        return Drafts(self.drafted[index], self.ranks[index], self.log_probs[index])


@dataclass(frozen=True)
class Batch:
    """Texts of similar length with their context keys and values, each [N, n_kv, S, hd], padded to the longest."""

    drafter: Drafter
    vocabulary: Vocabulary
    texts: list[Text]
    tokens: Tensor  # [N, S + B], zeros behind the end
    context: list[KeyValue]

    @classmethod
    @torch.inference_mode()
    def of(cls, drafter: Drafter, vocabulary: Vocabulary, texts: Sequence[Text]) -> "Batch":
        """Compute the context once per text; padding holds garbage that no mask shows."""
        weight = drafter.fc.weight
        longest = max(len(text.tokens) for text in texts)
        tokens = torch.zeros(len(texts), longest + drafter.config.block_size, dtype=torch.long)
        context = weight.new_zeros(len(texts), longest, drafter.config.hidden_size)
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
            context[row, : len(text.tokens)] = drafter.project_context(text.taps.to(weight))
        kv = drafter.context_kv(context, torch.arange(longest, device=weight.device))
        return cls(drafter, vocabulary, list(texts), tokens.to(weight.device), kv)

    def narrowed(self, rows: Sequence[int]) -> "Batch":
        """The batch of these rows only."""
        index = torch.tensor(rows, device=self.tokens.device)
        context = [(keys[index], values[index]) for keys, values in self.context]
        return Batch(self.drafter, self.vocabulary, [self.texts[row] for row in rows], self.tokens[index], context)

    @torch.inference_mode()
    def draft(self, anchors: Sequence[Sequence[int]], *, tree_nodes: int = 0) -> Drafts:
        """Blocks at ``anchors`` [N, n]; ``tree_nodes`` is the largest tree that will be asked of them."""
        hidden = self.hidden(anchors)  # [N, n, B-1, H]
        slots = hidden.shape[2]
        places = torch.tensor(anchors, device=hidden.device)[..., None] + torch.arange(
            1, slots + 1, device=hidden.device
        )
        right = self.tokens.gather(1, places.flatten(1))
        best = best_tokens(self.vocabulary, hidden.flatten(0, 2), right.flatten(), keep=tree_nodes)
        return Drafts(
            best.drafted.view(places.shape).cpu().numpy(),
            best.ranks.view(places.shape).cpu().numpy(),
            best.log_probs.view(*places.shape, -1).cpu().numpy(),
        )

    def hidden(self, anchors: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states [N, n, B-1, H] of slots 1…B-1 of blocks at ``anchors`` [N, n]. Raises :class:`DraftError`."""
        config = self.drafter.config
        at = torch.tensor(anchors, device=self.tokens.device)
        ids = torch.full((*at.shape, config.block_size), config.mask_token_id, device=at.device)
        ids[..., 0] = self.tokens.gather(1, at)
        positions = at[..., None] + torch.arange(config.block_size, device=at.device)
        # No block sees what is behind its anchor. A block's length is left there, so that one which did would show.
        reach = min(int(at.max()) + config.block_size, self.context[0][0].shape[2])
        context = [(keys[:, :, :reach], values[:, :, :reach]) for keys, values in self.context]
        masks = layer_masks(config, at, reach)
        blocks = self.vocabulary.embed(ids.flatten(1)).to(self.drafter.fc.weight.dtype)
        out: Tensor = self.drafter(blocks, positions.flatten(1), context, masks)
        hidden = out.view(*ids.shape, -1)[:, :, 1:]
        finite = hidden.isfinite().flatten(2).all(dim=2)
        if not finite.all():
            row, place = finite.logical_not().nonzero()[0].tolist()
            raise DraftError(
                f"prompt {self.texts[row].id}: the drafter's output at position {anchors[row][place]} is not finite; "
                f"look for NaN in the target's weights or overflow in the dtype"
            )
        return hidden


@dataclass(frozen=True)
class BestTokens:
    """For R slots: greedy tokens ``drafted`` [R], ``ranks`` [R] of the wanted tokens, 0 for the greedy one.

    ``log_probs`` [R, min(keep, V)] float32 of the best tokens, falling.
    """

    drafted: Tensor
    ranks: Tensor
    log_probs: Tensor


def best_tokens(vocabulary: Vocabulary, hidden: Tensor, wanted: Tensor, *, keep: int = 0) -> BestTokens:
    """What the head makes of ``hidden`` [R, H], compared with the tokens ``wanted`` [R]; logits are held in chunks."""
    chunks = []
    start, rows = 0, 1
    while start < len(wanted):
        logits = vocabulary.logits(hidden[start : start + rows]).float()
        ranks = ranks_of(wanted[start : start + rows], logits)
        kept = _largest(logits, keep)
        chunks.append((logits.argmax(dim=1), ranks, kept - logits.logsumexp(dim=1, keepdim=True)))
        start += rows
        rows = max(1, LOGITS // logits.shape[1])
    return BestTokens(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def ranks_of(tokens: Tensor, logits: Tensor) -> Tensor:
    """Places [R], from 0, of ``tokens`` [R] in the order of ``logits`` [R, V].

    Equal logits rank by id, as argmax takes the first, so rank 0 is exactly what is drafted greedily.
    """
    value = logits.gather(1, tokens[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    better = logits > value
    better |= (logits == value) & (ids < tokens[:, None])
    return better.sum(dim=1)


def _largest(logits: Tensor, keep: int) -> Tensor:
    """[R, min(keep, V)]: the largest of each row of ``logits`` [R, V], falling."""
    keep = min(keep, logits.shape[1])
    if logits.device.type != "cpu" or not keep:
        return logits.topk(keep).values
    # numpy's vectorised sort is ten times as fast as torch's on the CPU
    values = logits.numpy()
    kept = values if keep == values.shape[1] else np.partition(values, -keep, axis=1)[:, -keep:]
    return torch.from_numpy(np.sort(kept, axis=1)[:, ::-1].copy())
