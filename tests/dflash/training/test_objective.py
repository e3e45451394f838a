"""The trainer's forward pass against the naive one, and against what must not reach it."""

import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash import naive
from dflash.masks import layer_masks
from dflash.training.objective import TILE, TrainingModel, block_embeddings, compiled_length, with_noise
from tests.dflash.training.rows import ANCHORS, BORDER, LENGTH, VARIANTS, Bench

variants = pytest.mark.parametrize("variant", VARIANTS)
BLOCKS = [(row, block) for row, block in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist()]
REAL = [(row, block) for row, block in BLOCKS if ANCHORS[row, block] >= 0]


@pytest.fixture(autouse=True)
def _uncompiled_flex_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def document(row: int, anchor: int) -> slice:
    """The positions of the anchor's document in its row."""
    if row == 0:
        return slice(0, LENGTH)
    return slice(BORDER, LENGTH) if anchor >= BORDER else slice(0, BORDER)


@variants
@torch.no_grad()
def test_a_block_of_a_row_is_the_naive_drafters_block_of_its_document(variant: str) -> None:
    bench = Bench.of(variant)
    logits = bench.words.logits(bench.hidden())
    weights = bench.drafter.state_dict()
    for row, block in REAL:
        anchor = int(ANCHORS[row, block])
        span = document(row, anchor)
        ids, taps = bench.features.ids[row, span].tolist(), bench.features.taps[row, span]
        words = bench.words
        slow = naive.draft_logits(
            weights, VARIANTS[variant], words.embedding, words.head, taps, ids, anchor - span.start
        )
        torch.testing.assert_close(logits[row, block], slow, rtol=1e-4, atol=1e-4)


@variants
@torch.no_grad()
def test_flex_masks_give_the_dense_masks_states(variant: str) -> None:
    bench = Bench.of(variant)
    torch.testing.assert_close(bench.hidden("flex"), bench.hidden("dense"), rtol=1e-5, atol=1e-5)


@variants
def test_no_gradient_from_the_anchor_on_from_another_document_nor_from_another_block(variant: str) -> None:
    """Exactly zero for dense masks; what is before the anchor and in the block does reach the logits."""
    bench = Bench.of(variant)
    taps = bench.features.taps.clone().requires_grad_()
    embeddings = bench.embeddings().requires_grad_()
    logits = bench.words.logits(bench.hidden(taps=taps, embeddings=embeddings))
    for row, block in REAL:
        anchor = int(ANCHORS[row, block])
        at_taps, at_slots = torch.autograd.grad(
            logits[row, block].square().sum(), (taps, embeddings), retain_graph=True
        )
        seen = torch.zeros(2, LENGTH, dtype=torch.bool)
        seen[row, document(row, anchor).start : anchor] = True
        assert not at_taps[~seen].any()
        assert anchor == document(row, anchor).start or at_taps[row, anchor - 1].abs().max() > 0
        own = torch.zeros(2, 4, dtype=torch.bool)
        own[row, block] = True
        at_blocks = at_slots.unflatten(1, (4, -1))
        assert not at_blocks[~own].any()
        assert (at_blocks[own].abs().amax(-1) > 0).any()


@pytest.mark.parametrize(
    ("attention", "variant"),
    [
        *(("dense", variant) for variant in VARIANTS),
        ("flex", "sliding causal and full"),
        ("flex", "sliding bidirectional"),
    ],
)
@torch.no_grad()
def test_what_a_block_must_not_see_does_not_move_it_by_a_bit(variant: str, attention: str) -> None:
    """Flex attention has no backward pass on the CPU: everything hidden is replaced, and then one visible state."""
    bench = Bench.of(variant)
    taps, embeddings = bench.features.taps, bench.embeddings()
    still = bench.hidden(attention)
    for row, block in REAL:
        anchor = int(ANCHORS[row, block])
        span = document(row, anchor)
        hidden = torch.ones(2, LENGTH, dtype=torch.bool)
        hidden[row, span.start : anchor] = False
        others = torch.ones(2, 4, dtype=torch.bool)
        others[row, block] = False
        other_slots = others.repeat_interleave(bench.config.block_size, 1)
        moved = bench.hidden(
            attention,
            taps=torch.where(hidden[..., None], 100 * torch.randn_like(taps), taps),
            embeddings=torch.where(other_slots[..., None], 100 * torch.randn_like(embeddings), embeddings),
        )
        assert torch.equal(moved[row, block], still[row, block])
        if anchor > span.start:
            nudged = taps.clone()
            nudged[row, anchor - 1] += 1
            assert not torch.equal(bench.hidden(attention, taps=nudged)[row, block], still[row, block])


def test_a_filler_gives_finite_states_and_reaches_every_weight() -> None:
    bench = Bench.of()
    bench.blocks = replace(bench.blocks, anchors=torch.full_like(ANCHORS, -1), starts=torch.zeros_like(ANCHORS))
    hidden = bench.hidden()
    assert hidden.isfinite().all()
    (hidden * 0).sum().backward()
    assert all(weight.grad is not None for weight in bench.drafter.parameters())


def test_only_the_drafters_weights_are_parameters() -> None:
    bench = Bench.of()
    model = TrainingModel(bench.drafter, compute_dtype=torch.bfloat16, attention="dense")
    names = {f"drafter.{name}" for name in bench.config.tensor_shapes()}
    assert {name for name, _ in model.named_parameters()} == names
    assert set(model.state_dict()) == names
    assert sum(1 for _ in model.parameters()) == len(names)


def test_computing_in_bfloat16_is_a_drafter_loaded_in_bfloat16() -> None:
    bench = Bench.of(packed=False)
    hidden = bench.hidden(dtype=torch.bfloat16)
    loaded = deepcopy(bench.drafter).to(torch.bfloat16)
    context = loaded.project_context(bench.features.taps.bfloat16())
    positions = (ANCHORS.clamp(min=0)[..., None] + torch.arange(bench.config.block_size)).flatten(1)
    masks = layer_masks(bench.config, ANCHORS, LENGTH)
    kv = loaded.context_kv(context, torch.arange(LENGTH))
    expected = loaded(bench.embeddings().bfloat16(), positions, kv, masks).unflatten(1, (4, -1))[:, :, 1:]
    assert torch.equal(hidden, expected)
    hidden.float().sum().backward()
    assert all(
        weight.dtype == torch.float32 and weight.grad is not None and weight.grad.dtype == torch.float32
        for weight in bench.drafter.parameters()
    )


def test_blocks_are_the_anchor_and_masks() -> None:
    bench = Bench.of()
    embeddings = bench.embeddings().unflatten(1, (4, -1))
    for row, block in REAL:
        token = bench.features.ids[row, ANCHORS[row, block]]
        assert torch.equal(embeddings[row, block, 0], bench.words.embedding[token])
        assert (embeddings[row, block, 1:] == bench.words.embedding[bench.config.mask_token_id]).all()


def test_noise_goes_into_the_taps_handed_to_fc_and_nowhere_else() -> None:
    bench = Bench.of()
    before = deepcopy(bench.features)
    noisy = with_noise(bench.features.taps, bench.features, 0.5, seed=0, epoch=0)
    added = noisy - bench.features.taps
    assert added.std() == pytest.approx(0.5, rel=0.05)
    assert added.mean() == pytest.approx(0, abs=0.03)
    for name in ("ids", "loss_mask", "starts", "taps", "hidden"):
        assert torch.equal(getattr(bench.features, name), getattr(before, name))
    assert torch.equal(
        block_embeddings(bench.words, bench.blocks, bench.features.ids, bench.config), bench.embeddings()
    )


def test_without_noise_the_taps_are_the_targets() -> None:
    bench = Bench.of()
    assert with_noise(bench.features.taps, bench.features, 0.0, seed=0, epoch=0) is bench.features.taps


def test_a_samples_noise_does_not_depend_on_its_row_or_what_is_behind_it() -> None:
    bench = Bench.of()
    packed = bench.features

    def noise(features: object, epoch: int = 0) -> Tensor:
        taps = torch.zeros_like(features.taps)  # type: ignore[attr-defined]
        return with_noise(taps, features, 1.0, seed=0, epoch=epoch)  # type: ignore[arg-type]

    def alone(sample: int, length: int) -> object:
        return replace(
            packed,
            ids=packed.ids[:1, :length],
            loss_mask=packed.loss_mask[:1, :length],
            starts=torch.zeros(1, length, dtype=torch.long),
            taps=packed.taps[:1, :length],
            samples=[[sample]],
        )

    together = noise(packed)
    assert torch.equal(together[1, :BORDER], noise(alone(5, BORDER))[0])
    assert torch.equal(together[1, BORDER:], noise(alone(8, LENGTH - BORDER))[0])
    assert torch.equal(noise(alone(8, LENGTH))[0, :9], noise(alone(8, 9))[0])
    assert not torch.equal(noise(packed, epoch=1), together)


def test_contexts_of_any_length_are_compiled_for_a_few_lengths() -> None:
    padded = [compiled_length(length) for length in range(1, 4097)]
    assert all(found >= length and found % TILE == 0 for length, found in enumerate(padded, start=1))
    assert len(set(padded)) <= 8  # torch._dynamo.config.recompile_limit
    assert compiled_length(3072) == 4096


@pytest.mark.slow  # the compiler takes a minute
def test_compiled_layers_give_the_same_states_and_gradients() -> None:
    bench = Bench.of()
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        model = TrainingModel(bench.drafter, compute_dtype=dtype, attention="dense")
        expected = bench.hidden(dtype=dtype)
        model.compile()
        found = model(bench.features.taps, bench.blocks, bench.features.starts, bench.embeddings())
        torch.testing.assert_close(found, expected, rtol=close, atol=close)
        weight = bench.drafter.fc.weight
        theirs, ours = (torch.autograd.grad(one.float().square().mean(), weight)[0] for one in (expected, found))
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close * float(theirs.abs().max()))
