"""Each check passes on a clean pair and fails on the fault it is there to find."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dflash import checks, drafter, replay
from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.config import DrafterConfig
from dflash.masks import layer_masks
from dflash.metrics import judge
from dflash.prompts import read_prompts
from dflash.target import Target
from tests.dflash.pairs import DRAFTER, write_drafter, write_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    target = Target.load(write_target(directory / "target"), device="cpu", dtype=torch.float32, kernel="torch")
    return target, read_checkpoint(write_drafter(directory / "drafter"))


def config_with(taps):
    raw = DRAFTER | {"num_target_layers": 64, "dflash_config": DRAFTER["dflash_config"] | {"target_layer_ids": taps}}
    return DrafterConfig.from_dict(raw, source="test")


FIVE = config_with([1, 16, 31, 46, 61])


@pytest.mark.parametrize(
    ("taps", "reference", "status", "words"),
    [
        ([1, 16, 31, 46, 61], FIVE, "pass", "the same target layers"),
        ([1, 16, 31, 46], FIVE, "fail", "tap 61 is missing"),
        ([1, 16, 30, 46, 61], FIVE, "fail", "tap 31 is missing and tap 30 is extra"),
        ([1, 16, 31, 46, 61], None, "pass", "for 5 taps of 64 layers"),
        ([1, 16, 31, 61], None, "fail", "tap 46 is missing compared with the rule for 5 taps"),
        ([5, 19, 33, 47, 61], None, "warn", "--reference"),
    ],
)
def test_taps_are_those_of_the_reference_or_the_rule(taps, reference, status, words):
    check = checks.taps_as_reference(config_with(taps), reference)
    assert check.status == status
    assert words in check.explanation


def test_fc_takes_every_tap(pair):
    _, checkpoint = pair
    assert checks.fc_shape(checkpoint).status == "pass"
    narrow = checkpoint.weights | {"fc.weight": checkpoint.weights["fc.weight"][:, :64]}
    check = checks.fc_shape(replace(checkpoint, weights=narrow))
    assert (check.status, check.measured, check.limit) == ("fail", 64, 96)


def test_target_is_the_causal_lm_class(pair):
    target, _ = pair
    check = checks.target_class(target)
    assert check.status == "pass"
    assert check.measured == f"Qwen3ForCausalLM, {target.tensors} tensors, 8 blocks"
    assert checks.target_class(replace(target, model=target.model.model)).status == "fail"


def tapped(target, layer_ids):
    """Texts with their taps, out of one padded pass."""
    texts = [list(range(2, 40)), list(range(40, 2, -2)), [7] * 3]
    padded = torch.zeros(3, 38, dtype=torch.long)
    for row, tokens in enumerate(texts):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    taps = target.taps(padded, layer_ids).taps
    return [replay.Text(f"p{row}", tokens, 1, taps[row, : len(tokens)]) for row, tokens in enumerate(texts)]


def test_taps_are_the_hidden_states_of_their_layer(pair):
    target, _ = pair
    check = checks.tap_source(target, [1, 3, 5], tapped(target, [1, 3, 5]))
    assert check.status == "pass"
    assert check.measured < 1e-5


@pytest.mark.parametrize(
    "fault",
    [
        lambda texts: [replace(text, taps=text.taps.roll(1, 0)) for text in texts],
        lambda texts: [replace(text, taps=text.taps.roll(32, 1)) for text in texts],
        lambda texts: [replace(texts[0], taps=texts[1].taps), replace(texts[1], taps=texts[0].taps[:19]), texts[2]],
        lambda texts: [*texts[:2], replace(texts[2], taps=texts[2].taps * float("nan"))],
    ],
    ids=["position", "columns", "text", "nan"],
)
def test_taps_of_another_place_are_found(pair, fault):
    target, _ = pair
    texts = fault(tapped(target, [1, 3, 5]))
    texts[0] = replace(texts[0], tokens=texts[0].tokens[: len(texts[0].taps)])
    assert checks.tap_source(target, [1, 3, 5], texts).status == "fail"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hook_on_the_next_layer_is_found(pair, monkeypatch, dtype):
    target = Target.load(pair[0].path, device="cpu", dtype=dtype, kernel="torch")
    assert checks.tap_source(target, [1, 3, 5], tapped(target, [1, 3, 5])).status == "pass"
    shifted = torch.nn.ModuleList([*target.layers[1:], target.layers[0]])
    monkeypatch.setattr(Target, "layers", property(lambda self: shifted))
    check = checks.tap_source(target, [1, 3, 5], tapped(target, [1, 3, 5]))
    assert check.status == "fail"
    assert "is not hidden_states[" in check.explanation


def blocks(slots_right, count=40):
    """Whole blocks in which slot k is right with probability ``slots_right[k - 1]``, independently of the others."""
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(count, len(slots_right), generator=generator) < torch.tensor(slots_right)
    following = list(range(1, len(slots_right) + 2))
    return [
        judge("a", 0, [k + 1 if hit else 99 for k, hit in enumerate(row)], [0] * len(row), following)
        for row in right.tolist()
    ]


@pytest.mark.parametrize(
    ("slots_right", "status"),
    [
        ([0.9, 0.7, 0.5, 0.3], "pass"),
        ([0.5, 0.5, 0.5, 0.5], "pass"),
        ([0.0, 0.0, 0.0, 0.0], "pass"),
        ([0.1, 0.9, 0.7, 0.5], "fail"),
        ([0.1, 0.1, 0.1, 0.8], "fail"),
    ],
)
def test_slot_one_is_the_best_within_noise(slots_right, status):
    assert checks.slot_profile(blocks(slots_right)).status == status


def test_slots_of_too_few_blocks_are_not_verified():
    for rounds in ([], blocks([0.1, 0.9], count=15), blocks([0.5])):
        check = checks.slot_profile(rounds)
        assert check.status == "skipped"
        assert check.explanation.startswith("not verified")


def random_prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 64, (50 + 7 * place,), generator=generator).tolist() for place in range(3)]


def walk(target, checkpoint, tokens=None, prompt_length=10):
    """Texts over the target's own taps, random by default, walked, and what independent-forward says about it."""
    texts = [
        replay.Text(
            f"p{place}",
            text,
            prompt_length,
            target.taps(torch.tensor([text]), checkpoint.config.target_layer_ids).taps[0],
        )
        for place, text in enumerate(tokens or random_prompts())
    ]
    model = build_drafter(checkpoint, device="cpu", dtype=target.dtype)
    rounds = replay.replay(model, target, texts, max_blocks=None, seed=0, progress=lambda *at: None).walk
    weights = target.model.state_dict()
    return checks.independent_forward(
        checkpoint,
        weights["model.embed_tokens.weight"],
        weights["lm_head.weight"],
        texts,
        rounds,
        exact=target.dtype == torch.float32,
        seed=0,
    )


def test_the_independent_forward_drafts_the_same(pair):
    check = walk(*pair)
    assert (check.status, check.measured) == ("pass", 1.0)
    assert check.explanation.startswith("160 of 160 tokens of 32 blocks")


def see_the_anchor(monkeypatch):
    monkeypatch.setattr(replay, "layer_masks", lambda config, anchors, length: layer_masks(config, anchors + 1, length))


def shift_block_positions(monkeypatch):
    forward = drafter.Drafter.forward
    monkeypatch.setattr(
        drafter.Drafter,
        "forward",
        lambda self, blocks, positions, *rest: forward(self, blocks, positions + 1, *rest),
    )


def tile_kv_heads(monkeypatch):
    def tiled(queries, keys, values, *, attn_mask, enable_gqa):
        times = (1, queries.shape[1] // keys.shape[1], 1, 1)
        return F.scaled_dot_product_attention(queries, keys.repeat(times), values.repeat(times), attn_mask=attn_mask)

    monkeypatch.setattr(drafter, "F", SimpleNamespace(scaled_dot_product_attention=tiled, silu=F.silu))


def forget_causality(monkeypatch):
    monkeypatch.setattr(
        replay,
        "layer_masks",
        lambda config, *rest: layer_masks(config.model_copy(update={"causal": (False, False)}), *rest),
    )


@pytest.mark.parametrize("fault", [see_the_anchor, shift_block_positions, tile_kv_heads, forget_causality])
def test_a_fault_in_the_fast_path_is_found(pair, monkeypatch, fault):
    fault(monkeypatch)
    check = walk(*pair)
    assert check.status == "fail"
    assert check.measured < 1.0
    assert "first in prompt p" in check.explanation


@pytest.mark.parametrize("fault", [None, see_the_anchor, shift_block_positions, tile_kv_heads])
def test_in_bfloat16_a_trained_drafter_passes_and_its_faults_do_not(tiny_dense, monkeypatch, fault):
    target = Target.load(tiny_dense.target, dtype=torch.bfloat16, kernel="torch")
    prompt = target.tokenizer(read_prompts(tiny_dense.prompts).prompts[0].prompt)["input_ids"]
    [completion] = target.generate_greedy([prompt], 150, ignore_eos=True)
    if fault is not None:
        fault(monkeypatch)
    check = walk(target, read_checkpoint(tiny_dense.drafter), [prompt + completion], len(prompt))
    assert check.status == ("pass" if fault is None else "fail"), check.explanation
