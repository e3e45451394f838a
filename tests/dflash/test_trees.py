"""DDTree: the order in which a tree grows, by brute force, and the numbers of the right prefixes, by growing it."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.trees import BEYOND, TIE, best_first, right_paths

SLOTS, WIDTH = st.integers(1, 5), st.integers(1, 6)


@st.composite
def marginals(draw, slots, width):
    """Log-probabilities [B-1, V], falling, from flat to certain, with ties, and the ranks of the right tokens."""
    shape = draw(slots), draw(width)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal(shape) * draw(st.sampled_from([0.0, 0.3, 2.0, 20.0]))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    # to thousandths: sums are equal or far apart, so nothing hangs on how a sum is rounded
    log_probs = np.round(log_probs, draw(st.sampled_from([0, 3])))
    # a rank beyond the last token is a slot beyond the end of the text
    ranks = np.minimum(rng.geometric(0.5, shape[0]) - 1, shape[1])
    return np.sort(log_probs.astype(np.float32), axis=1)[:, ::-1], ranks


def prefix_of(nodes, number):
    """Ranks from the root to node ``number``."""
    ranks = []
    while number:
        ranks.append(nodes[number - 1].rank)
        number = nodes[number - 1].parent
    return tuple(reversed(ranks))


def tree(log_probs, budget):
    nodes = list(best_first(log_probs.astype(np.float64).tolist(), budget))
    return [(prefix_of(nodes, number), node.log_prob) for number, node in enumerate(nodes, start=1)]


@given(marginals(slots=st.integers(1, 3), width=st.integers(1, 4)), st.integers(1, 100))
def test_the_tree_holds_the_most_probable_prefixes_of_all(drawn, budget):
    log_probs, _ = drawn
    slots, width = log_probs.shape
    every = [ranks for depth in range(1, slots + 1) for ranks in product(range(width), repeat=depth)]
    score = {ranks: sum(float(log_probs[slot, rank]) for slot, rank in enumerate(ranks)) for ranks in every}
    grown = tree(log_probs, budget)
    assert len({ranks for ranks, _ in grown}) == len(grown) == min(budget, len(every))
    np.testing.assert_allclose([one for _, one in grown], [score[ranks] for ranks, _ in grown], atol=1e-9)
    best = sorted(score.values(), reverse=True)[:budget]
    np.testing.assert_allclose([score[ranks] for ranks, _ in grown], best, atol=1e-9)
    assert all(ranks[:-1] in {one for one, _ in grown} | {()} for ranks, _ in grown), "a node without its parent"


@given(marginals(SLOTS, WIDTH), st.integers(1, 200))
def test_trees_are_nested(drawn, budget):
    log_probs, _ = drawn
    assert tree(log_probs, budget + 7)[:budget] == tree(log_probs, budget)


@settings(max_examples=200)
@given(st.lists(marginals(slots=st.just(4), width=st.just(5)), min_size=1, max_size=6), st.integers(1, 300))
def test_numbers_are_those_of_the_grown_tree_up_to_the_order_of_ties(drawn, budget):
    numbers = right_paths(np.stack([one for one, _ in drawn]), np.stack([ranks for _, ranks in drawn]), budget)
    for (log_probs, ranks), row in zip(drawn, numbers, strict=True):
        grown = tree(log_probs, budget)
        scores = np.array([score for _, score in grown])
        right = 0.0
        for depth, number in enumerate(row):
            beyond = ranks[depth] >= log_probs.shape[1]
            right += -np.inf if beyond else float(log_probs[depth, ranks[depth]])
            # the first place among nodes as probable, but behind its ancestors and their better siblings
            first = max(int((scores > right + TIE).sum()) + 1, int(ranks[: depth + 1].sum()) + depth + 1)
            assert number == (first if first <= budget and not beyond else BEYOND)
            if number == BEYOND:
                assert (row[depth:] == BEYOND).all()
                break


@given(marginals(SLOTS, WIDTH), st.integers(1, 64))
def test_what_holds_for_every_block_and_tree(drawn, nodes):
    log_probs, ranks = drawn
    slots, width = log_probs.shape
    [numbers] = right_paths(log_probs[None], ranks[None], 64)
    accepted = [int((numbers <= size).sum()) for size in (nodes, nodes + 1)]
    streak = 0
    while streak < slots and ranks[streak] < min(nodes, width):
        streak += 1
    assert accepted[0] <= accepted[1], "a larger tree accepts less"
    assert accepted[0] + 1 <= min(slots + 1, nodes + 1), "a path of more nodes than the tree has"
    assert accepted[0] <= streak, "a node beyond the N best of its slot"
    chain = np.cumsum(log_probs[:nodes, 0].astype(np.float64))
    grown = [score for _, score in tree(log_probs, nodes)]
    assert np.exp(grown).sum() >= np.exp(chain).sum() - 1e-6, "less expected acceptance than the chain"


def test_a_tree_can_be_shorter_than_the_chain_on_observed_tokens():
    flat = np.log(np.array([[0.4, 0.35, 0.25]] * 6, dtype=np.float32))
    [numbers] = right_paths(flat[None], np.zeros((1, 6), np.int64), 512)
    assert (numbers <= 6).sum() < 6


def test_numbers_of_wide_slots_agree_with_the_grown_tree():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((60, 7, 300)) * np.array([1.0, 3.0, 8.0])[np.arange(60) % 3][:, None, None]
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    log_probs = -np.sort(-log_probs, axis=-1).astype(np.float32)
    ranks = np.minimum(rng.geometric(0.4, (60, 7)) - 1, 299)
    for one, right, numbers in zip(log_probs, ranks, right_paths(log_probs, ranks, 256), strict=True):
        parent, path = 0, []
        for number, node in enumerate(best_first(one.astype(np.float64).tolist(), 256), start=1):
            if node.parent == parent and node.rank == right[node.depth - 1]:
                path.append(number)
                parent = number
        assert path == numbers[numbers <= 256].tolist()
