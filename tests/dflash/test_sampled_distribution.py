"""Sampled continuations follow the target's own distribution: chi-square tests against its exact probabilities.

Five words, so that every continuation of two tokens is a cell whose probability p(x1) p(x2 | x1) the target says in
passes without a cache. The quick tests draw 20 000 continuations through the :class:`dflash.decode.Session` and the
samplers that :func:`dflash.decode.decode` is made of, rows that agree sharing a pass; the slow one runs ``decode``.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from dflash.config import DrafterConfig
from dflash.decode import Session, decode
from dflash.drafter import Drafter
from dflash.kernels import select_kernel
from dflash.sampling import Sampler, make_sampler
from dflash.target import Target

WORDS, DRAFTS = 5, 2
PROMPT, ANCHOR = [3, 1, 4, 1, 0, 2, 3, 3], 2
COUNT, SEED = 20_000, 7
PASSES, FAILS = 1e-3, 1e-9
"""p-values: what a right sampler exceeds (with this seed, always), and what a wrong one stays below."""
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "eos_token_id": None,
}
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DRAFTER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "num_target_layers": 2,
    "block_size": DRAFTS + 1,
    "dflash_config": {"mask_token_id": WORDS - 1, "target_layer_ids": [0]},
}
Pair = tuple[Drafter, Target]


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def pair(request: pytest.FixtureRequest) -> Pair:
    torch.manual_seed(1)
    if request.param == "hybrid":
        select_kernel("torch", device="cpu")
        model: Any = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **DELTA_NET))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    target = Target("tiny", model.config, model.eval(), None, "torch", 0)  # type: ignore[arg-type]
    drafter = Drafter(DrafterConfig.from_dict(DRAFTER, source="test")).eval()
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return drafter, target


def probabilities(target: Target, tokens: Sequence[int]) -> Tensor:
    """The target's distribution [V] behind ``tokens``, in a pass without a cache."""
    with torch.inference_mode():
        return target.model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].double().softmax(-1)


def exact(target: Target, known: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of ``length`` tokens behind ``known``."""
    cells: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        rows = {cell: probabilities(target, [*known, *cell]).tolist() for cell in cells}
        cells = {(*cell, word): cells[cell] * rows[cell][word] for cell in cells for word in range(WORDS)}
    return cells


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's chi-square; cells in which fewer than five are expected are pooled into one."""
    total = sum(counts.values())
    assert counts.keys() <= expected.keys()
    cells = [(counts[cell], chance * total) for cell, chance in expected.items() if chance * total >= 5]
    seen, awaited = (sum(column) for column in zip(*cells, strict=True))
    if total - awaited >= 5:
        cells.append((total - seen, total - awaited))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def continuations(pair: Pair, sampler: Sampler, count: int) -> Counter[tuple[int, ...]]:
    """``count`` continuations of two tokens behind PROMPT and ANCHOR, in one or two rounds each.

    All rows of a round draft behind the same tokens, so they share its draft; rows with the same block share its
    verification, which is then taken back whole for the next block.
    """
    session = opened(pair)
    drafted, verdict = one_round(session, sampler, count)
    found: Counter[tuple[int, ...]] = Counter()
    again: Counter[int] = Counter()
    blocks = {}
    for block, accepted, token in zip(drafted.tolist(), verdict.accepted.tolist(), verdict.token.tolist(), strict=True):
        if accepted:
            found[tuple([*block[:accepted], token][:2])] += 1
        else:
            again[token] += 1
            blocks[token] = block
    for token, rows in sorted(again.items()):
        session = opened(pair)
        session.verify(blocks[token])
        session.commit(0, [token])
        drafted, verdict = one_round(session, sampler, rows)
        second = torch.where(verdict.accepted > 0, drafted[:, 0], verdict.token)
        found.update((token, word) for word in second.tolist())
    return found


def opened(pair: Pair) -> Session:
    session = Session(*pair, "p0", PROMPT, room=8)
    session.tokens.append(ANCHOR)
    return session


def one_round(session: Session, sampler: Sampler, rows: int) -> tuple[Tensor, Any]:
    _, draft_logits = session.draft()
    draft_logits = draft_logits.expand(rows, -1, -1)
    drafted = sampler.draft(draft_logits)
    blocks, places = drafted.unique(dim=0, return_inverse=True)
    behind = []
    for block in blocks.tolist():
        behind.append(session.verify(block)[0])
        session.cache.keep(0)
    return drafted, sampler.verify(drafted, draft_logits, torch.stack(behind)[places])


@pytest.mark.parametrize("name", ["rejection", "target-match"])
def test_continuations_follow_the_targets_distribution(pair: Pair, name: Any) -> None:
    expected = exact(pair[1], [*PROMPT, ANCHOR], 2)
    counts = continuations(pair, make_sampler(name, temperature=1.0, seed=SEED), COUNT)
    assert sum(counts.values()) == COUNT
    assert p_value(counts, expected) > PASSES


def test_a_wrong_residual_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = exact(pair[1], [*PROMPT, ANCHOR], 2)
    monkeypatch.setattr("dflash.sampling.residual", lambda p, q: p)
    assert p_value(continuations(pair, make_sampler("rejection", temperature=1.0, seed=SEED), COUNT), expected) < FAILS


def test_states_that_are_not_rolled_back_are_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sampler emits is right only behind the target's own state: the test sees the whole round."""
    expected = exact(pair[1], [*PROMPT, ANCHOR], 2)
    monkeypatch.setattr("dflash.rollback._Net.restore", lambda net: None)
    monkeypatch.setattr("dflash.rollback.RoomyLayer.crop", lambda layer, count: None)
    assert p_value(continuations(pair, make_sampler("rejection", temperature=1.0, seed=SEED), COUNT), expected) < FAILS


def test_the_chi_square_is_pearsons() -> None:
    expected = {(0,): 0.5, (1,): 0.25, (2,): 0.249, (3,): 0.001}
    even = Counter({(0,): 500, (1,): 250, (2,): 249, (3,): 1})
    assert p_value(even, expected) == pytest.approx(1.0)
    # statistic 4 with 2 degrees of freedom: exp(-2)
    thirds = {(word,): 1 / 3 for word in range(3)}
    assert p_value(Counter({(0,): 120, (1,): 100, (2,): 80}), thirds) == pytest.approx(0.018316, rel=1e-3)
    assert set(product(range(WORDS), repeat=2)) == set(exact_cells())


def exact_cells() -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    target = Target("tiny", model.config, model.eval(), None, "none", 0)  # type: ignore[arg-type]
    cells = exact(target, [1], 2)
    assert sum(cells.values()) == pytest.approx(1.0)
    return list(cells)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["rejection", "target-match"])
def test_decode_itself_follows_the_targets_distribution(pair: Pair, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens, the first from the prefill, so that the last two come from rounds of every kind."""
    monkeypatch.setattr("dflash.decode.STEPS", 0)  # nothing to time
    expected = exact(pair[1], PROMPT, 3)
    assert p_value(decoded(pair, name, 4_000), expected) > PASSES


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_decode_itself_with_a_wrong_residual_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = exact(pair[1], PROMPT, 3)
    monkeypatch.setattr("dflash.decode.STEPS", 0)
    monkeypatch.setattr("dflash.sampling.residual", lambda p, q: p)
    assert p_value(decoded(pair, "rejection", 4_000), expected) < FAILS


def decoded(pair: Pair, name: Any, count: int) -> Counter[tuple[int, ...]]:
    decoding = decode(
        *pair,
        [(f"p{place}", PROMPT) for place in range(count)],
        max_new_tokens=3,
        end=frozenset(),
        sampler=make_sampler(name, temperature=1.0, seed=SEED),
        max_blocks=None,
        progress=lambda done, total: None,
    )
    return Counter(tuple(text.tokens[len(PROMPT) :]) for text in decoding.texts)
