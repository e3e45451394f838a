"""The plain forward: small, on its own, and wrong on purpose where it is asked to be."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash import naive
from dflash.checkpoints import DrafterCheckpoint, build_drafter, read_checkpoint
from dflash.masks import layer_masks
from tests.dflash.pairs import write_drafter

ANCHOR, LENGTH = 14, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> DrafterCheckpoint:
    return read_checkpoint(write_drafter(tmp_path_factory.mktemp("drafter") / "drafter"))


@pytest.fixture(scope="module")
def drawn(checkpoint: DrafterCheckpoint) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weights": checkpoint.weights,
        "config": checkpoint.raw_config,
        "embed": torch.randn(64, 32, generator=generator),
        "head": torch.randn(64, 32, generator=generator),
        "taps": torch.randn(LENGTH, 96, generator=generator),
        "tokens": torch.randint(2, 64, (LENGTH,), generator=generator).tolist(),
        "anchor": ANCHOR,
    }


def test_it_is_short_and_imports_nothing_of_the_project() -> None:
    source = Path(naive.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 120
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names == {"collections.abc", "typing", "torch"}


def test_states_from_the_anchor_on_are_not_read(drawn: dict[str, Any]) -> None:
    spoiled = drawn["taps"].clone()
    spoiled[ANCHOR:] = float("nan")
    assert torch.equal(naive.draft_logits(**drawn), naive.draft_logits(**drawn | {"taps": spoiled}))


def test_rows_of_the_embedding_are_enough_and_the_head_may_come_in_chunks(
    drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = naive.draft_logits(**drawn)
    asked: list[int] = []

    def rows(ids: torch.Tensor) -> torch.Tensor:
        asked.extend(ids.tolist())
        embedded: torch.Tensor = drawn["embed"][ids]
        return embedded

    monkeypatch.setattr(naive, "HEAD_ROWS", 7)
    torch.testing.assert_close(naive.draft_logits(**drawn | {"embed": rows}), whole)
    assert asked == [drawn["tokens"][ANCHOR]] + [1] * 5


@pytest.mark.parametrize("shift", [-1, 0, 1])
@torch.no_grad()
def test_a_shift_moves_the_block_against_its_context(
    checkpoint: DrafterCheckpoint, drawn: dict[str, Any], shift: int
) -> None:
    """The drafter with its block's position ids moved by as much, under the mask of the right positions."""
    drafter = build_drafter(checkpoint, device="cpu", dtype=torch.float32)
    ids = torch.tensor([[drawn["tokens"][ANCHOR], *[1] * 5]])
    context = drafter.context_kv(drafter.project_context(drawn["taps"][None]), torch.arange(LENGTH))
    masks = layer_masks(checkpoint.config, torch.tensor([[ANCHOR]]), LENGTH)
    positions = ANCHOR + shift + torch.arange(6)[None]
    hidden = drafter(drawn["embed"][ids], positions, context, masks)[0, 1:]
    torch.testing.assert_close(
        naive.draft_logits(**drawn, block_shift=shift), hidden @ drawn["head"].T, rtol=1e-4, atol=1e-4
    )


def test_tiled_heads_are_interleaved_ones_with_the_query_heads_permuted(
    checkpoint: DrafterCheckpoint, drawn: dict[str, Any]
) -> None:
    """With 4 query and 2 K/V heads of 8, tiling pairs 0, 2 and 1, 3 where interleaving pairs 0, 1 and 2, 3."""
    order = torch.tensor([0, 2, 1, 3])
    permuted = dict(checkpoint.weights)
    for name, weight in checkpoint.weights.items():
        if name.endswith("q_proj.weight"):
            permuted[name] = weight.view(4, 8, -1)[order].reshape(32, -1)
        if name.endswith("o_proj.weight"):
            permuted[name] = weight.view(-1, 4, 8)[:, order].reshape(-1, 32)
    tiled = naive.draft_logits(**drawn, tiled=True)
    assert not torch.allclose(tiled, naive.draft_logits(**drawn), atol=0.1)
    torch.testing.assert_close(naive.draft_logits(**drawn | {"weights": permuted}), tiled, rtol=1e-4, atol=1e-4)


def test_half_precision_weights_are_computed_in_float32(drawn: dict[str, Any]) -> None:
    half = {name: weight.bfloat16() for name, weight in drawn["weights"].items()}
    wide = {name: weight.float() for name, weight in half.items()}
    assert torch.equal(naive.draft_logits(**drawn | {"weights": half}), naive.draft_logits(**drawn | {"weights": wide}))
