"""Every mutation of mask, position and head code in the measuring path is found by ``independent-forward``."""

from dataclasses import replace

import pytest
import torch

from dflash import batch, checks, drafter, masks
from dflash.target import Target
from tests.dflash.checks.bench import Bench
from tests.dflash.checks.injections import KEYS_AND_VALUES, MINUS_ONE, PLUS_ONE, TILED, WITH_ANCHOR, measured
from tests.dflash.checks.mutate import mutate
from tests.dflash.pairs import write_drafter, write_target

MASK = (masks, "block_mask_mod")
BLOCK = (batch.Batch, "hidden")
ATTENTION = (drafter.Attention, "forward")
QUERIES = "self._heads(self.q_proj(x))"
KEYS = "self._heads(self.k_proj(x))"
MUTANTS = {
    "mask: the anchor is seen": (*MASK, *WITH_ANCHOR),
    "mask: the last state before the anchor is not seen": (*MASK, "key < anchor", "key < anchor - 1"),
    "mask: all blocks see one another": (*MASK, "key_block == query_block", "key_block >= 0"),
    "mask: no layer is causal": (*MASK, "if rule.causal:", "if False:"),
    "mask: every layer is causal": (*MASK, "if rule.causal:", "if True:"),
    "mask: slots do not see themselves": (*MASK, "(key_position <= query_position)", "(key_position < query_position)"),
    "mask: windows are one wider": (*MASK, "< rule.window", "<= rule.window"),
    "mask: windows are one narrower": (*MASK, "< rule.window", "< rule.window - 1"),
    "mask: no window": (*MASK, "if rule.window is not None:", "if False:"),
    "positions: block one late": (*BLOCK, *PLUS_ONE),
    "positions: block one early": (*BLOCK, *MINUS_ONE),
    "positions: context one late": (batch.Batch, "of", "torch.arange(longest", "1 + torch.arange(longest"),
    "positions: all slots at the anchor": (*BLOCK, "positions = at[..., None] +", "positions = at[..., None] + 0 *"),
    "rotary: another base": (drafter, "rotary", "theta**exponents", "(2 * theta)**exponents"),
    "rotary: neighbours are paired": (
        drafter, "rotary", "torch.cat((angles, angles), dim=-1)", "angles.repeat_interleave(2, dim=-1)",
    ),
    "rotary: turned backwards": (drafter, "rotate", "(-high, low)", "(high, -low)"),
    "rotary: queries are not turned": (
        *ATTENTION, f"rotate(self.q_norm({QUERIES}), rotation)", f"self.q_norm({QUERIES})",
    ),
    "heads: K/V tiled": (drafter, "attend", KEYS_AND_VALUES, TILED),
    "heads: queries without their norm": (*ATTENTION, f"self.q_norm({QUERIES})", QUERIES),
    "heads: keys without their norm": (drafter.Attention, "key_value", f"self.k_norm({KEYS})", KEYS),
    "norm: zero-centred": (drafter.RMSNorm, "forward", "self.weight *", "(1 + self.weight) *"),
    "norm: context without its norm": (
        drafter.Drafter, "project_context", "self.hidden_norm(self.fc(taps))", "self.fc(taps)",
    ),
    "block: anchor's token one early": (*BLOCK, "self.tokens.gather(1, at)", "self.tokens.gather(1, at - 1)"),
    "block: another mask token": (*BLOCK, "config.mask_token_id", "config.mask_token_id + 1"),
    "block: slots one early": (*BLOCK, "[:, :, 1:]", "[:, :, :-1]"),
    "head: the embedding's rows": (
        Target, "logits", 'self.model.get_submodule("lm_head")(hidden)', "hidden @ self._embedding.weight.T",
    ),
    "head: tokens one off": (batch, "best_tokens", "logits.argmax(dim=1)", "logits.argmax(dim=1) - 1"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A random pair, whose drafts hang on every detail: windows of 9, one causal layer, blocks of 6."""
    directory = tmp_path_factory.mktemp("random")
    target, checkpoint = write_target(directory / "target"), write_drafter(directory / "drafter")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 64, (20 + 7 * place,), generator=generator).tolist() for place in range(3)]
    return Bench.of(target, checkpoint, prompts, directory, new_tokens=10)


def test_the_path_as_it_is_drafts_what_the_plain_forward_does(bench: Bench) -> None:
    check = measured("independent-forward")(replace(bench, memo={}))
    assert (check.status, check.measured) == ("pass", 1.0), check.explanation


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutate(monkeypatch, *MUTANTS[name])
    check = measured("independent-forward")(replace(bench, memo={}))
    assert check.status == "fail", check.explanation
    assert "first in prompt p" in check.explanation


@pytest.mark.parametrize("name", [name for name in MUTANTS if name.startswith(("mask: the anchor", "positions"))])
def test_what_a_block_may_see_is_told_apart_from_where_it_stands(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mutate(monkeypatch, *MUTANTS[name])
    evidence = replace(bench, memo={}).evidence()
    leak, stand = (checks.CHECKS[check](evidence) for check in ("context-strictly-before-anchor", "position-ids"))
    if name.startswith("mask"):
        assert (leak.status, stand.status) == ("fail", "pass")
        assert leak.measured > 0.01
    else:
        assert leak.status == "pass", leak.explanation


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("key_block == query_block", "key_block >= 0"),
        ("key < anchor", "key < anchors.max()"),
        ("key < anchor", "key < anchors[row, (query_block + 2) % anchors.shape[1]]"),
        ("key < anchor", "key < anchor + (3 if anchors.shape[1] > 1 else 0)"),
    ],
)
def test_a_leak_between_blocks_side_by_side_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    evidence = replace(bench, memo={}).evidence()
    assert checks.CHECKS["context-strictly-before-anchor"](evidence).status == "pass"
    mutate(monkeypatch, *MASK, old, new)
    assert checks.CHECKS["context-strictly-before-anchor"](evidence).status == "fail"
