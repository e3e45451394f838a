"""The batched walk against a plain loop over the naive forward, on a random drafter."""

from dataclasses import replace

import pytest
import torch

from dflash import batch as batch_module
from dflash import naive
from dflash import replay as replay_module
from dflash.batch import Batch, DraftError, Text
from dflash.config import DrafterConfig
from dflash.drafter import Drafter
from dflash.metrics import judge, tau_pooled
from dflash.replay import RANDOM_ANCHORS, replay
from dflash.trees import best_first

VOCABULARY, HIDDEN, TAPS, BLOCK = 61, 32, 2, 6
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "num_target_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [1, 5]},
}


class RandomVocabulary:
    """Embedding and head of a target, random. ``rows`` is the most rows its head was asked for at once."""

    def __init__(self):
        self.embedding = torch.randn(VOCABULARY, HIDDEN)
        self.head = torch.randn(VOCABULARY, HIDDEN)
        self.rows = 0

    def embed(self, ids):
        return self.embedding[ids]

    def logits(self, hidden):
        self.rows = max(self.rows, len(hidden))
        return hidden @ self.head.T


@pytest.fixture
def pair():
    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig.from_dict(CONFIG, source="test")).eval()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else torch.nn.init.uniform_(parameter, 0.5, 2)
    return drafter, RandomVocabulary()


def run(pair, texts, *, max_blocks=None, seed=0, trees=(), progress=lambda done, total: None):
    return replay(*pair, texts, max_blocks=max_blocks, seed=seed, trees=trees, progress=progress)


def random_texts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Text(
            f"p{place}",
            torch.randint(0, VOCABULARY - 1, (prompt + completion,), generator=generator).tolist(),
            prompt,
            torch.randn(prompt + completion, TAPS * HIDDEN, generator=generator),
        )
        for place, (prompt, completion) in enumerate(lengths)
    ]


def naive_logits(pair, text, anchor):
    drafter, vocabulary = pair
    weights = drafter.state_dict()
    return naive.draft_logits(weights, CONFIG, vocabulary.embedding, vocabulary.head, text.taps, text.tokens, anchor)


def plant_right_drafts(pair, texts):
    """Rewrite the completions to what the drafter drafts, with seeded errors, so that rounds of all lengths occur."""
    generator = torch.Generator().manual_seed(1)
    for text in texts:
        anchor = text.prompt_length
        while anchor + 1 < len(text.tokens):
            good = int(torch.randint(0, BLOCK, (1,), generator=generator))
            drafted = naive_logits(pair, text, anchor).argmax(-1).tolist()
            for slot in range(min(good, len(text.tokens) - 1 - anchor)):
                text.tokens[anchor + 1 + slot] = drafted[slot]
            anchor += good + 1


def test_the_batched_walk_is_the_plain_loop(pair):
    texts = random_texts([(3, 40), (17, 25), (1, 2), (30, 33), (8, 1), (5, 18)])
    plant_right_drafts(pair, texts)
    expected = []
    for text in texts:
        anchor = text.prompt_length
        while anchor + 1 < len(text.tokens):
            following = text.tokens[anchor + 1 : anchor + 1 + BLOCK]
            order = naive_logits(pair, text, anchor).argsort(dim=-1, descending=True, stable=True).tolist()
            ranks = [order[slot].index(token) for slot, token in enumerate(following[: BLOCK - 1])]
            one = judge(text.id, anchor, [row[0] for row in order], ranks, following)
            expected.append(one)
            anchor += one.advance
    walked = run(pair, texts).walk
    assert walked == expected
    assert len({one.advance for one in walked}) >= 4
    assert any(one.cut for one in walked)


@pytest.mark.parametrize("budgets", [(2, 8, 64), (2, 8, 32)], ids=["whole-vocabulary", "part-of-it"])
def test_each_tree_walks_on_its_own_as_the_plain_loop(pair, budgets):
    texts = random_texts([(3, 40), (17, 25), (1, 2), (8, 1)])
    plant_right_drafts(pair, texts)
    result = run(pair, texts, trees=budgets)
    for nodes, walked in result.trees.items():
        expected = []
        for text in texts:
            anchor = text.prompt_length
            while (left := len(text.tokens) - 1 - anchor) > 0:
                accepted = grown_tree(naive_logits(pair, text, anchor), text.tokens[anchor + 1 :], nodes)
                advance = min(accepted + 1, left)
                expected.append((text.id, anchor, accepted, advance))
                anchor += advance
        assert [(one.prompt, one.anchor, one.accepted, one.advance) for one in walked] == expected
    taus = [tau_pooled(walked) for walked in result.trees.values()]
    assert taus == sorted(taus)
    assert taus[0] < taus[-1]
    assert result.walk == run(pair, texts).walk, "trees change the chain"


def grown_tree(logits, following, nodes):
    """Drafts that DDTree(nodes) accepts, by growing it and walking down from the root."""
    log_probs, tokens = logits.log_softmax(-1).sort(dim=-1, descending=True)
    children = {}
    for number, node in enumerate(best_first(log_probs.tolist(), nodes), start=1):
        children[node.parent, int(tokens[node.depth - 1, node.rank])] = number
    at = depth = 0
    while depth < len(following) and (at, following[depth]) in children:
        at = children[at, following[depth]]
        depth += 1
    return depth


def test_what_a_text_drafts_does_not_depend_on_its_batch(pair):
    texts = random_texts([(3, 40), (17, 25), (30, 33)])
    plant_right_drafts(pair, texts)
    assert run(pair, texts).walk == [one for text in texts for one in run(pair, [text]).walk]


def hidden_with_noise_from(pair, text, anchors, start, end=None):
    """Hidden states of the text's blocks at ``anchors``, the states of positions ``start`` to ``end`` replaced."""
    taps = text.taps.clone()
    taps[start:end] = torch.randn(taps[start:end].shape, generator=torch.Generator().manual_seed(5))
    [hidden] = Batch.of(*pair, [replace(text, taps=taps)]).hidden([anchors])
    return hidden


def test_of_blocks_side_by_side_each_sees_the_context_before_its_own_anchor_alone(pair):
    """Not that of the other blocks of its row either, before or behind it in the row and in the text."""
    [text] = random_texts([(3, 40)])
    anchors = [20, 12, 13, 30]
    [hidden] = Batch.of(*pair, [text]).hidden([anchors])
    for place, anchor in enumerate(anchors):
        assert torch.equal(hidden_with_noise_from(pair, text, anchors, anchor)[place], hidden[place])
        assert not torch.equal(hidden_with_noise_from(pair, text, anchors, anchor - 1, anchor)[place], hidden[place])


@pytest.mark.parametrize("behind", range(BLOCK))
@pytest.mark.parametrize("anchors", [[20], [12, 20]])
def test_a_mask_that_shows_a_state_behind_the_anchor_is_given_that_state(pair, anchors, behind, monkeypatch):
    """Cutting the context to the blocks' reach must not make up for a wrong mask, or no check would find it."""
    [text] = random_texts([(3, 40)])
    masks = batch_module.layer_masks

    def leaking(config, at, reach):
        seen = torch.arange(reach + at.shape[1] * config.block_size) == at.max() + behind
        return tuple(mask | seen for mask in masks(config, at, reach))

    monkeypatch.setattr(batch_module, "layer_masks", leaking)
    [hidden] = Batch.of(*pair, [text]).hidden([anchors])
    assert not torch.equal(hidden_with_noise_from(pair, text, anchors, anchors[-1])[-1], hidden[-1])


def test_a_random_drafter_advances_by_about_one(pair):
    result = run(pair, random_texts([(10, 90)] * 12))
    assert sum(one.advance for one in result.walk) == 12 * 89, "a walk ends before its text"
    assert tau_pooled(result.walk) == pytest.approx(1, abs=0.1)
    assert tau_pooled(result.random) == pytest.approx(1, abs=0.1)


def test_max_blocks_bounds_the_rounds_of_each_text(pair):
    walked = run(pair, random_texts([(3, 40), (4, 3)]), max_blocks=5).walk
    assert [one.prompt for one in walked].count("p0") == 5
    assert [one.prompt for one in walked].count("p1") == 2


def test_random_anchors_are_seeded_and_their_blocks_lie_whole_inside_the_text(pair):
    texts = random_texts([(3, 40), (17, BLOCK), (9, BLOCK + 1)])

    def anchors(seed):
        return [(one.prompt, one.anchor) for one in run(pair, texts, max_blocks=1, seed=seed).random]

    drawn = anchors(seed=0)
    assert drawn == anchors(seed=0) != anchors(seed=1)
    assert [prompt for prompt, _ in drawn] == ["p0"] * RANDOM_ANCHORS + ["p2"] * RANDOM_ANCHORS
    # Anchor 9 of p2 is the only one with B tokens behind it.
    assert {anchor for prompt, anchor in drawn if prompt == "p2"} == {9}
    assert all(3 <= anchor < 43 - BLOCK for prompt, anchor in drawn if prompt == "p0")


def test_the_head_runs_in_chunks_and_batches_are_bounded(pair, monkeypatch):
    texts = random_texts([(3, 40), (17, 25), (30, 33), (8, 20)])
    expected = run(pair, texts).walk
    monkeypatch.setattr(batch_module, "LOGITS", 3 * VOCABULARY)
    monkeypatch.setattr(replay_module, "CONTEXT_TOKENS", 100)
    pair[1].rows = 0
    assert run(pair, texts).walk == expected
    assert pair[1].rows == 3


def test_context_is_computed_once_a_text(pair, monkeypatch):
    calls = []
    project = pair[0].project_context
    monkeypatch.setattr(pair[0], "project_context", lambda taps: calls.append(len(taps)) or project(taps))
    run(pair, random_texts([(3, 40), (17, 25)]))
    assert sorted(calls) == [42, 43]


def test_equal_logits_rank_by_id_so_that_rank_zero_is_the_draft(pair):
    drafter, vocabulary = pair
    vocabulary.head = torch.zeros(VOCABULARY, HIDDEN)
    text = random_texts([(3, 8)])[0]
    drafts = Batch.of(drafter, vocabulary, [text]).draft([[3]])
    assert drafts.drafted.tolist() == [[[0] * (BLOCK - 1)]]
    assert drafts.ranks.tolist() == [[text.tokens[4 : 4 + BLOCK - 1]]]


def test_log_probabilities_are_float32_whatever_the_head_gives():
    vocabulary = RandomVocabulary()
    vocabulary.head = vocabulary.head.bfloat16()
    hidden = torch.randn(5, HIDDEN).bfloat16()
    best = batch_module.best_tokens(vocabulary, hidden, torch.arange(5), keep=8)
    expected = vocabulary.logits(hidden).float().log_softmax(-1).sort(dim=-1, descending=True).values[:, :8]
    torch.testing.assert_close(best.log_probs, expected, atol=1e-5, rtol=0)


def test_a_drafter_that_is_not_finite_is_named_with_prompt_and_place(pair):
    texts = random_texts([(3, 40), (17, 25)])
    texts[1].taps[2] = float("nan")
    with pytest.raises(DraftError, match=r"prompt p1: .* position 17 is not finite"):
        run(pair, texts)


def test_a_drafter_of_which_one_number_is_not_finite_is_named_too(pair):
    with torch.no_grad():
        pair[0].norm.weight[3] = float("nan")
    with pytest.raises(DraftError, match=r"prompt p0: .* position 3 is not finite"):
        run(pair, random_texts([(3, 40)]))


def test_progress_counts_completion_tokens_to_the_end(pair):
    seen = []
    run(pair, random_texts([(3, 40), (17, 25)]), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (65, 65)
    assert seen == sorted(seen)
