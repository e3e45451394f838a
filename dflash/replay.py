"""Walk blocks over completions the target has already written: real greedy acceptance without running the target again.

Greedy verification accepts a drafted token exactly when it is the token the target wrote there, so the walk over a
greedy completion visits the anchors, and emits the advances, that serving would. The same holds for a tree of drafts.
All texts of a batch walk together, the chain and the trees of every size side by side: they meet again and again, and
a block is drafted once for all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash.batch import Batch, Drafts, Text, Vocabulary
from dflash.drafter import Drafter
from dflash.metrics import Round, TreeRound, judge
from dflash.trees import BEYOND, right_paths

RANDOM_ANCHORS = 16
"""Most anchors sampled in a text for the figures that look at blocks as training does."""
RANDOM_BLOCKS = 512
"""Of these as many as in all texts together are enough, and a quarter of the most in each."""
BLOCKS_AT_ONCE = 4
"""Blocks of a text in one pass: its keys and values are read, and copied, once for all of them."""
PADDING = 1.5
"""The longest text of a batch over its shortest, at most, once the batch is worth a pass."""
WORTH_A_PASS = 1 << 13
"""Padded context tokens from which a batch is computing rather than starting kernels."""
CONTEXT_TOKENS = 1 << 18
"""Padded context tokens of one batch: 5 GiB of keys and values for a drafter of 5 layers with 8 K/V heads of 128."""


@dataclass(frozen=True)
class Replay:
    """The rounds of the walk and of each tree's own walk, by text and anchor, and the blocks at random anchors.

    ``trees`` has the rounds of DDTree(N) for each N asked for. No end of a text cuts a block of ``random``.
    """

    walk: list[Round]
    trees: dict[int, list[TreeRound]]
    random: list[Round]


def replay(
    drafter: Drafter,
    vocabulary: Vocabulary,
    texts: Sequence[Text],
    *,
    max_blocks: int | None,
    seed: int,
    progress: Callable[[int, int], None],
    trees: Sequence[int] = (),
) -> Replay:
    """Walk every text to its end, or for ``max_blocks`` rounds, and draft at random anchors of each.

    ``trees`` are budgets of nodes; the DDTree of each walks as well. ``progress(done, total)`` counts the completion
    tokens that the chain has passed. Raises :class:`DraftError` on NaN or infinite hidden states.
    """
    sampled = _random_anchors(texts, drafter.config.block_size, np.random.default_rng(seed))
    walks: dict[str, list[Walk]] = {}
    random: dict[str, list[Round]] = {}
    total = sum(len(text.tokens) - text.prompt_length for text in texts)
    for group in _groups(texts):
        blocks = Blocks(Batch.of(drafter, vocabulary, group), trees)
        walks |= {text.id: [Walk(text, walker, max_blocks) for walker in range(1 + len(trees))] for text in group}
        for _ in _draft_all(blocks, {text.id: walks[text.id] for text in group}, sampled):
            progress(sum(chain.passed for chain, *_ in walks.values()), total)
        random |= {text.id: [blocks.known[text.id][anchor].round() for anchor in sampled[text.id]] for text in group}
    order = [text.id for text in texts]
    return Replay(
        walk=[block.round() for id in order for block in walks[id][0].visited],
        trees={
            nodes: [block.tree_round(walker) for id in order for block in walks[id][walker].visited]
            for walker, nodes in enumerate(trees, start=1)
        },
        random=[one for id in order for one in random[id]],
    )


@dataclass(frozen=True, slots=True)
class Block:
    """A block as it was drafted at one anchor of ``text``: drafts and ranks of the text's own tokens, [B-1] each.

    ``accepted`` are the drafts that stand for each walker: the chain's, then those of each tree.
    """

    text: Text
    anchor: int
    drafted: list[int]
    ranks: list[int]
    accepted: list[int]

    def advance(self, walker: int) -> int:
        """Tokens that the round emits, the bonus among them unless the text ends before it."""
        return min(self.accepted[walker] + 1, len(self.text.tokens) - 1 - self.anchor)

    def round(self) -> Round:
        """The chain's round here."""
        following = self.text.tokens[self.anchor + 1 : self.anchor + 2 + len(self.drafted)]
        return judge(self.text.id, self.anchor, self.drafted, self.ranks, following)

    def tree_round(self, walker: int) -> TreeRound:
        """The round here of the tree that is this walker's."""
        return TreeRound(self.text.id, self.anchor, self.accepted[walker], self.advance(walker))


class Walk:
    """One text walked by the chain (``walker`` 0) or by one of the trees, as far as its blocks are known.

    Each round starts at the last token that the round before emitted, as in serving.
    """

    def __init__(self, text: Text, walker: int, max_blocks: int | None) -> None:
        self.visited: list[Block] = []
        self.anchor = text.prompt_length
        self._walker = walker
        self._start, self._last = text.prompt_length, len(text.tokens) - 1
        self._most = self._last if max_blocks is None else max_blocks

    @property
    def open(self) -> bool:
        """Whether a round is left."""
        return self.anchor < self._last and len(self.visited) < self._most

    @property
    def passed(self) -> int:
        """Completion tokens emitted, with the first one, which the prefill gave."""
        return self.anchor + 1 - self._start

    def go_on(self, known: Mapping[int, Block]) -> None:
        """Take every round whose block is among ``known``, by anchor."""
        while self.open and (block := known.get(self.anchor)) is not None:
            self.visited.append(block)
            self.anchor += block.advance(self._walker)


class Blocks:
    """The blocks of a batch that have been drafted, for each text's id by anchor."""

    def __init__(self, batch: Batch, trees: Sequence[int]) -> None:
        self.known: dict[str, dict[int, Block]] = {text.id: {} for text in batch.texts}
        self._batch = batch
        self._trees = trees

    def draft(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """Draft at the wanted anchors of each id. A text that is left out will not be asked for again."""
        rows = [row for row, text in enumerate(self._batch.texts) if text.id in wanted]
        if 2 * len(rows) <= len(self._batch.texts):  # halving keeps the copies below one batch in all
            self._batch = self._batch.narrowed(rows)
        texts, most = self._batch.texts, max(map(len, wanted.values()))
        asked = [list(wanted.get(text.id, ())) for text in texts]
        filled = [
            anchors + most * (anchors or [text.prompt_length])[:1] for text, anchors in zip(texts, asked, strict=True)
        ]
        drafts = self._batch.draft([anchors[:most] for anchors in filled], tree_nodes=max(self._trees, default=0))
        places = [(row, place) for row, anchors in enumerate(asked) for place in range(len(anchors))]
        for block in self._judged([(texts[row], asked[row][place]) for row, place in places], drafts.at(places)):
            self.known[block.text.id][block.anchor] = block

    def _judged(self, at: Sequence[tuple[Text, int]], drafts: Drafts) -> Iterator[Block]:
        """The blocks drafted ``at`` these texts and anchors, with what each walker accepts of them."""
        left = np.array([len(text.tokens) - 1 - anchor for text, anchor in at])
        slots = drafts.ranks.shape[1]
        ranks = np.where(np.arange(slots) < left[:, None], drafts.ranks, BEYOND)
        accepted = [np.logical_and.accumulate(ranks == 0, axis=1).sum(axis=1)]
        if self._trees:
            numbers = right_paths(drafts.log_probs, ranks, max(self._trees))
            accepted += [(numbers <= nodes).sum(axis=1) for nodes in self._trees]
        rows = zip(at, drafts.drafted.tolist(), drafts.ranks.tolist(), np.stack(accepted, axis=1).tolist(), strict=True)
        for (text, anchor), drafted, own_ranks, own_accepted in rows:
            yield Block(text, anchor, drafted, own_ranks, own_accepted)


def _draft_all(
    blocks: Blocks, walks: Mapping[str, Sequence[Walk]], sampled: Mapping[str, Sequence[int]]
) -> Iterator[None]:
    """Draft, step by step, every block that a walk comes to and every sampled one.

    Of each text the foremost few are taken: walks that are behind catch up with those ahead and go on together.
    """
    while True:
        for id, text_walks in walks.items():
            for one in text_walks:
                one.go_on(blocks.known[id])
        yield
        wanted = {}
        for id, text_walks in walks.items():
            missing = {one.anchor for one in text_walks if one.open} | (set(sampled[id]) - blocks.known[id].keys())
            if missing:
                wanted[id] = sorted(missing)[:BLOCKS_AT_ONCE]
        if not wanted:
            return
        blocks.draft(wanted)


def _random_anchors(texts: Sequence[Text], block_size: int, rng: np.random.Generator) -> dict[str, list[int]]:
    """Anchors of each text drawn uniformly, with replacement, among those whose block and bonus lie inside it."""
    each = min(RANDOM_ANCHORS, max(RANDOM_ANCHORS // 4, -(-RANDOM_BLOCKS // max(len(texts), 1))))
    anchors: dict[str, list[int]] = {}
    for text in texts:
        start, end = text.prompt_length, len(text.tokens) - block_size
        anchors[text.id] = rng.integers(start, end, each).tolist() if start < end else []
    return anchors


def _groups(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Texts by falling length, in batches of little padding and at most :data:`CONTEXT_TOKENS` padded tokens."""
    group: list[Text] = []
    for text in sorted(texts, key=lambda one: -len(one.tokens)):
        longest = len(group[0].tokens) if group else 0
        padded = len(group) * longest > WORTH_A_PASS and longest > PADDING * len(text.tokens)
        if padded or (len(group) + 1) * longest > CONTEXT_TOKENS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
