"""Walk blocks over completions the target has already written: real greedy acceptance without running the target again.

Greedy verification accepts a drafted token exactly when it is the token the target wrote there, so the walk over a
greedy completion visits the anchors, and emits the advances, that serving would. All texts of a batch walk together;
each text's context keys and values are computed once, and the mask cuts them at the anchor.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dflash.drafter import Drafter, KeyValue
from dflash.errors import DFlashError
from dflash.masks import layer_masks
from dflash.metrics import Round, judge

RANDOM_ANCHORS = 16
"""Anchors sampled in each text for the figures that look at blocks as training does."""
CONTEXT_TOKENS = 1 << 18
"""Padded context tokens of one batch: 5 GiB of keys and values for a drafter of 5 layers with 8 K/V heads of 128."""
LOGITS = 1 << 26
"""Logits held at once: 256 MiB in float32."""


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
class Replay:
    """The rounds of the walk, by text and anchor, and the blocks at random anchors that no end of a text cuts."""

    walk: list[Round]
    random: list[Round]


def replay(
    drafter: Drafter,
    vocabulary: Vocabulary,
    texts: Sequence[Text],
    *,
    max_blocks: int | None,
    seed: int,
    progress: Callable[[int, int], None],
) -> Replay:
    """Walk every text to its end, or for ``max_blocks`` rounds, and draft at :data:`RANDOM_ANCHORS` anchors of each.

    ``progress(done, total)`` counts completion tokens. Raises :class:`DraftError` on NaN or infinite hidden states.
    """
    total = sum(len(text.tokens) - text.prompt_length for text in texts)
    walked: list[Round] = []
    random: list[Round] = []
    rng = np.random.default_rng(seed)
    done = 0
    for group in _groups(texts):
        batch = Batch.of(drafter, vocabulary, group)
        done += len(group)  # the tokens that the prefills gave
        for rounds in walk(batch, max_blocks=max_blocks):
            walked += rounds
            done += sum(one.advance for one in rounds)
            progress(done, total)
        random += at_random_anchors(batch, rng)
    order = {text.id: place for place, text in enumerate(texts)}
    return Replay(*(sorted(rounds, key=lambda one: (order[one.prompt], one.anchor)) for rounds in (walked, random)))


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
    def draft(self, anchors: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """One block a row at ``anchors`` [N]: each row's B-1 drafted tokens and the ranks of the text's own tokens."""
        hidden = self.hidden(anchors)
        slots = hidden.shape[1]
        places = torch.tensor(anchors, device=hidden.device)[:, None] + torch.arange(1, slots + 1, device=hidden.device)
        right = self.tokens.gather(1, places)
        rows = max(1, LOGITS // self.drafter.config.vocab_size)
        drafted, ranks = _best_tokens(self.vocabulary, hidden.flatten(0, 1), right.flatten(), rows)
        return list(zip(drafted.view(-1, slots).tolist(), ranks.view(-1, slots).tolist(), strict=True))

    @torch.inference_mode()
    def hidden(self, anchors: Sequence[int]) -> Tensor:
        """Hidden states [N, B-1, H] of slots 1…B-1 of one block a row. Raises :class:`DraftError`."""
        config = self.drafter.config
        at = torch.tensor(anchors, device=self.tokens.device)[:, None]
        ids = torch.full((len(anchors), config.block_size), config.mask_token_id, device=self.tokens.device)
        ids[:, :1] = self.tokens.gather(1, at)
        positions = at + torch.arange(config.block_size, device=at.device)
        masks = layer_masks(config, at, self.context[0][0].shape[2])
        blocks = self.vocabulary.embed(ids).to(self.drafter.fc.weight.dtype)
        hidden: Tensor = self.drafter(blocks, positions, self.context, masks)[:, 1:]
        finite = hidden.isfinite().flatten(1).all(dim=1)
        if not finite.all():
            row = int(finite.logical_not().nonzero()[0])
            raise DraftError(
                f"prompt {self.texts[row].id}: the drafter's output at position {anchors[row]} is not finite; "
                f"look for NaN in the target's weights or overflow in the dtype"
            )
        return hidden


def walk(batch: Batch, *, max_blocks: int | None) -> Iterator[list[Round]]:
    """Draft where serving would: each round starts at the last token the round before emitted. Yields step by step."""
    anchors = [text.prompt_length for text in batch.texts]
    steps = 0
    while max_blocks is None or steps < max_blocks:
        active = [row for row, text in enumerate(batch.texts) if anchors[row] + 1 < len(text.tokens)]
        if not active:
            return
        if 2 * len(active) <= len(anchors):  # halving keeps the copies below one batch in all
            batch, anchors = batch.narrowed(active), [anchors[row] for row in active]
            continue
        drafts = batch.draft(anchors)
        rounds = [_judge(batch.texts[row], anchors[row], *drafts[row]) for row in active]
        for row, one in zip(active, rounds, strict=True):
            anchors[row] += one.advance
        steps += 1
        yield rounds


def at_random_anchors(batch: Batch, rng: np.random.Generator) -> list[Round]:
    """Draft at anchors drawn uniformly, with replacement, among those whose block and bonus lie inside the text."""
    starts = [text.prompt_length for text in batch.texts]
    ends = [len(text.tokens) - batch.drafter.config.block_size for text in batch.texts]
    rows = [row for row in range(len(starts)) if starts[row] < ends[row]]
    if not rows:
        return []
    if len(rows) < len(starts):
        batch = batch.narrowed(rows)
    drawn = rng.integers([starts[row] for row in rows], [ends[row] for row in rows], (RANDOM_ANCHORS, len(rows)))
    rounds = []
    for anchors in drawn.tolist():
        drafts = batch.draft(anchors)
        rounds += [_judge(text, at, *draft) for text, at, draft in zip(batch.texts, anchors, drafts, strict=True)]
    return rounds


def _judge(text: Text, anchor: int, drafted: list[int], ranks: list[int]) -> Round:
    return judge(text.id, anchor, drafted, ranks, text.tokens[anchor + 1 : anchor + 2 + len(drafted)])


def _best_tokens(vocabulary: Vocabulary, hidden: Tensor, right: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens and ranks of the tokens ``right`` [R], both [R], for ``hidden`` [R, H], ``rows`` at a time.

    Equal logits rank by id, as argmax takes the first, so rank 0 is exactly "drafted".
    """
    drafted, ranks = torch.empty_like(right), torch.empty_like(right)
    for start in range(0, len(right), rows):
        chunk = slice(start, start + rows)
        logits = vocabulary.logits(hidden[chunk]).float()
        wanted = right[chunk, None]
        value = logits.gather(1, wanted)
        ids = torch.arange(logits.shape[1], device=logits.device)
        drafted[chunk] = logits.argmax(dim=1)
        ranks[chunk] = ((logits > value) | ((logits == value) & (ids < wanted))).sum(dim=1)
    return drafted, ranks


def _groups(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Texts by falling length, in batches of at most :data:`CONTEXT_TOKENS` padded tokens."""
    group: list[Text] = []
    for text in sorted(texts, key=lambda one: -len(one.tokens)):
        if group and (len(group) + 1) * len(group[0].tokens) > CONTEXT_TOKENS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
