"""Taps beside the drafter: each document's own, whatever row, batch or kernel it went through the target with."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash import kernels
from dflash.hidden_states import TextLengthError
from dflash.kernels import KernelError, documents_apart, select_kernel
from dflash.target import Target, TargetMismatchError
from dflash.training import target_states
from dflash.training.features import OnlineFeatures
from tests.dflash.pairs import WORDS, write_target
from tests.dflash.training.documents import Documents, documents, rows_of

TAPS = (1, 3, 5)
LENGTHS = [70, 33, 120, 64, 9, 100]
HIDDEN = 32


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(write_target(tmp_path_factory.mktemp("dense")))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(write_target(tmp_path_factory.mktemp("hybrid"), hybrid=True))


@pytest.fixture(params=["dense", "hybrid"])
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def texts() -> Documents:
    return documents(LENGTHS, vocabulary=len(WORDS))


def alone(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers itself says of one document: taps [S, K·H] and normed last hidden states [S, H]."""
    states = target.model(input_ids=ids[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in TAPS], dim=-1), states[-1][0]


def assert_own_states(target: Target, texts: Documents, rows: Sequence[Sequence[Any]], *, soft: bool = True) -> None:
    """Each document of ``rows`` has the states it has alone, to 1e-5 of their size; padding has none."""
    found = OnlineFeatures(target, TAPS, soft=soft).features(rows)
    for place, row in enumerate(rows):
        start = 0
        for document in row:
            taps, hidden = alone(target, document.ids)
            span = slice(start, start + len(document.ids))
            assert ((found.taps[place, span] - taps).norm() / taps.norm()).item() < 1e-5
            assert (found.taps[place, span] - taps).abs().max() < 1e-5 * taps.abs().max()
            if found.hidden is not None:
                assert (found.hidden[place, span] - hidden).abs().max() < 1e-5 * hidden.abs().max()
            start += len(document.ids)
        assert not found.taps[place, start:].any()
    assert (found.hidden is not None) == soft


@pytest.mark.parametrize("soft", [True, False])
def test_a_document_a_row_has_the_states_it_has_alone(target: Target, texts: Documents, soft: bool) -> None:
    assert_own_states(target, texts, rows_of(texts, range(6), length=128, packing=False), soft=soft)


def test_a_batch_larger_than_a_pass_gives_the_same(
    dense: Target, texts: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_states, "PASS_TOKENS", 150)
    assert_own_states(dense, texts, rows_of(texts, range(6), length=128, packing=False))
    assert_own_states(dense, texts, rows_of(texts, range(6), length=200, packing=True))


def test_features_say_what_the_rows_hold(dense: Target, texts: Documents) -> None:
    rows = rows_of(texts, range(6), length=200, packing=True)
    found = OnlineFeatures(dense, TAPS, soft=True).features(rows)
    longest = max(sum(len(one.ids) for one in row) for row in rows)
    assert found.ids.shape == found.loss_mask.shape == found.starts.shape == (len(rows), longest)
    assert found.taps.shape == (len(rows), longest, len(TAPS) * HIDDEN)
    assert found.samples == [[one.index for one in row] for row in rows]
    for place, row in enumerate(rows):
        length = sum(len(one.ids) for one in row)
        assert torch.equal(found.ids[place, :length], torch.cat([one.ids for one in row]))
        assert torch.equal(found.loss_mask[place, :length], torch.cat([one.loss_mask for one in row]))
        assert not found.loss_mask[place, length:].any()


def test_taps_carry_no_gradient_and_can_be_trained_on(dense: Target, texts: Documents) -> None:
    found = OnlineFeatures(dense, TAPS, soft=True).features([[texts[0]]])
    weight = torch.ones(len(TAPS) * HIDDEN, requires_grad=True)
    (found.taps @ weight).sum().backward()
    assert weight.grad is not None
    assert not found.taps.requires_grad
    assert not any(parameter.grad is not None for parameter in dense.model.parameters())


def test_the_pass_ends_with_the_deepest_tap_unless_labels_are_soft(dense: Target, texts: Documents) -> None:
    ran: list[int] = []
    before = [len(layer._forward_hooks) for layer in dense.layers]
    hooks = [
        layer.register_forward_pre_hook(lambda *_args, number=number: ran.append(number))
        for number, layer in enumerate(dense.layers)
    ]
    OnlineFeatures(dense, (5, 1), soft=False).features([[texts[0]]])
    assert ran == [0, 1, 2, 3, 4, 5]
    OnlineFeatures(dense, (5, 1), soft=True).features([[texts[0]]])
    assert ran[6:] == list(range(8))
    for hook in hooks:
        hook.remove()
    assert [len(layer._forward_hooks) for layer in dense.layers] == before


def test_packed_documents_of_a_dense_target_have_the_states_they_have_alone(dense: Target, texts: Documents) -> None:
    rows = rows_of(texts, range(6), length=200, packing=True)
    assert max(map(len, rows)) > 2
    assert_own_states(dense, texts, rows)


def test_the_torch_kernel_refuses_packed_rows_of_a_hybrid_target(hybrid: Target, texts: Documents) -> None:
    rows = rows_of(texts, range(6), length=200, packing=True)
    with pytest.raises(KernelError, match=r"features\.packing .* the torch kernel would carry .* use kernel fla"):
        OnlineFeatures(hybrid, TAPS, soft=False).features(rows)


@pytest.fixture
def like_fla(hybrid: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """The hybrid target as bound for fla, whose delta rule is stood in for by transformers', document by document."""
    torch_rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    monkeypatch.setattr(kernels, "_obstacle_to_fla", lambda device: None)
    select_kernel("fla", device="cuda")

    def rule(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if cu_seqlens is None:
            return torch_rule(query, key, value, g=g, beta=beta, **kwargs)
        assert len(query) == 1, "fla takes packed rows one at a time"
        assert cu_seqlens.dtype == torch.long
        assert (int(cu_seqlens[0]), int(cu_seqlens[-1])) == (0, query.shape[1])
        spans = [slice(int(begin), int(end)) for begin, end in pairwise(cu_seqlens)]
        each = [
            torch_rule(query[:, at], key[:, at], value[:, at], g=g[:, at], beta=beta[:, at], **kwargs)[0]
            for at in spans
        ]
        return torch.cat(each, dim=1), None

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", rule)
    yield replace(hybrid, kernel="fla")
    select_kernel("torch", device="cpu")


def test_packed_documents_of_a_hybrid_target_have_the_states_they_have_alone(
    like_fla: Target, texts: Documents
) -> None:
    rows = rows_of(texts, range(6), length=200, packing=True)
    assert sorted(map(len, rows)) == [1, 1, 4]  # packed rows and others in one batch
    assert_own_states(like_fla, texts, rows)
    assert_own_states(like_fla, texts, rows, soft=False)


def test_without_a_convolution_that_keeps_documents_apart_their_first_tokens_would_differ(
    like_fla: Target, texts: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers does by itself with borders, fla's delta rule and no package for the convolution."""
    rows = rows_of(texts, range(6), length=200, packing=True)
    apart = OnlineFeatures(like_fla, TAPS, soft=False).features(rows)
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", kernels._AS_IMPORTED["causal_conv1d_fn"])
    mixed = OnlineFeatures(like_fla, TAPS, soft=False).features(rows)
    differs = (apart.taps - mixed.taps).abs().amax(-1) > 1e-3 * apart.taps.abs().max()
    packed = next(place for place, row in enumerate(rows) if len(row) > 1)
    first = len(rows[packed][0].ids)
    assert not differs[packed, :first].any()
    assert differs[packed, first : first + 3].all()


def test_the_convolution_sees_zeros_before_each_document() -> None:
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    states = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(1))

    def convolution(states: Tensor, weight: Tensor, bias: None = None, activation: str | None = None) -> Tensor:
        return modeling_qwen3_5.causal_conv1d_fn(states, weight, bias, activation=activation)

    found = documents_apart(convolution)(
        states, weight, None, activation="silu", cu_seq_lens_q=torch.tensor([0, 1, 6, 12])
    )
    each = [convolution(part, weight, activation="silu") for part in states.split((1, 5, 6), dim=2)]
    torch.testing.assert_close(found, torch.cat(each, dim=2))
    whole = documents_apart(convolution)(states, weight, None, activation="silu")
    assert torch.equal(whole, convolution(states, weight, activation="silu"))


@pytest.mark.parametrize("layer", [7, 8, -1])
def test_a_tap_on_the_last_block_or_beyond_is_refused(dense: Target, layer: int) -> None:
    with pytest.raises(TargetMismatchError, match=rf"tap {layer} is not a layer before the last .* normed in one"):
        OnlineFeatures(dense, (1, layer), soft=False)


def test_positions_count_by_document_not_by_row(dense: Target) -> None:
    texts = documents([400, 300, 513], vocabulary=len(WORDS))
    assert_own_states(dense, texts, [[texts[0], texts[1]]])  # 700 tokens, the target has 512 positions
    with pytest.raises(TextLengthError, match=r"sample 2 has 513 tokens, the target .* has 512 positions"):
        OnlineFeatures(dense, TAPS, soft=False).features([[texts[1], texts[2]]])


def test_a_token_of_another_vocabulary_is_refused(dense: Target) -> None:
    texts = documents([20], vocabulary=len(WORDS))
    texts[0].ids[3] = len(WORDS)
    with pytest.raises(TargetMismatchError, match=f"token {len(WORDS)} is in a text"):
        OnlineFeatures(dense, TAPS, soft=False).features([[texts[0]]])


def test_the_states_have_the_targets_dtype(tmp_path: Path) -> None:
    target = Target.load(write_target(tmp_path / "target"), dtype=torch.bfloat16)
    found = OnlineFeatures(target, TAPS, soft=True).features([[documents([20], vocabulary=60)[0]]])
    assert found.taps.dtype == torch.bfloat16
    assert found.hidden is not None
    assert found.hidden.dtype == torch.bfloat16
