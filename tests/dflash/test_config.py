import copy
from typing import Any

import pytest

from dflash.config import ConfigError, DrafterConfig, default_tap_ids, require_mask_not_eos

RAW: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "vocab_size": 50,
    "max_position_embeddings": 512,
    "block_size": 8,
    "num_target_layers": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 5, 9]},
}


def changed(**changes: Any) -> dict[str, Any]:
    """RAW with top-level keys replaced, or removed where the value is None; ``nested`` updates dflash_config."""
    raw = copy.deepcopy(RAW)
    raw["dflash_config"] |= changes.pop("nested", {})
    raw |= changes
    return {key: value for key, value in raw.items() if value is not None}


def read(raw: dict[str, Any]) -> DrafterConfig:
    return DrafterConfig.from_dict(raw, source="config.json")


def test_round_trip_through_z_lab_layout() -> None:
    config = read(RAW)
    assert read(config.to_dict()) == config
    assert config.to_dict()["rope_parameters"]["rope_theta"] == config.to_dict()["rope_theta"] == 10000


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, (True, True, False)),
        ({"is_causal": False}, (False, False, False)),
        ({"is_causal": True}, (True, True, True)),
        ({"nested": {"causal": False}}, (False, False, False)),
        ({"is_causal": False, "nested": {"causal": True}}, (False, False, False)),
    ],
)
def test_causality_is_resolved_in_the_engines_order(changes: dict[str, Any], causal: tuple[bool, ...]) -> None:
    config = read(changed(**changes))
    assert config.causal == causal
    assert read(config.to_dict()).causal == causal


@pytest.mark.parametrize(
    ("layer_types", "causal", "written"),
    [
        (["sliding_attention"] * 4 + ["full_attention"], (True,) * 4 + (False,), None),  # Qwen3.6-27B-DFlash
        (["full_attention"] * 5, (False,) * 5, False),
        (["sliding_attention"] * 5, (False,) * 5, False),
        (["sliding_attention"] * 5, (True,) * 5, True),
        (["full_attention"] * 5, (True,) * 5, True),
        (["sliding_attention"] * 4 + ["full_attention"], (False,) * 5, False),
    ],
)
def test_is_causal_is_written_only_where_it_says_the_same_of_every_layer(
    layer_types: list[str], causal: tuple[bool, ...], written: bool | None
) -> None:
    plain = read(changed(num_hidden_layers=5, layer_types=layer_types))
    config = DrafterConfig.model_validate(plain.model_dump() | {"causal": causal})
    raw = config.to_dict()
    assert raw.get("is_causal") is written
    assert ("is_causal" in raw) is (written is not None)
    assert read(raw) == config


def test_causality_that_neither_key_nor_types_express_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot be expressed"):
        read(RAW).model_copy(update={"causal": (True, False, False)}).to_dict()


@pytest.mark.parametrize(
    ("nested", "layer_types", "causal"),
    [
        ({"use_swa": True, "swa_window_size": 16, "causal": False}, ["full_attention"] * 3, (False,) * 3),
        ({"use_swa": True, "swa_window_size": 16}, None, (False,) * 3),
        ({"use_swa": True, "swa_window_size": 16}, RAW["layer_types"], (True, True, False)),
    ],
)
def test_windows_of_model_optimizers_exports(
    nested: dict[str, Any], layer_types: list[str] | None, causal: tuple[bool, ...]
) -> None:
    """``use_swa`` slides every layer unless some are called sliding, and causality goes by what the types say."""
    config = read(changed(layer_types=layer_types, nested=nested))
    assert config.layer_types == (tuple(RAW["layer_types"]) if layer_types == RAW["layer_types"] else _SLIDING)
    assert (config.sliding_window, config.causal) == (16, causal)
    assert read(config.to_dict()) == config


_SLIDING = ("sliding_attention",) * 3


def test_block_size_and_rope_are_read_from_either_place() -> None:
    assert read(changed(block_size=None, nested={"block_size": 8})) == read(RAW)
    assert read(changed(rope_theta=None, rope_parameters={"rope_theta": 10000.0})) == read(RAW)


def test_mask_and_taps_are_read_from_either_place() -> None:
    moved = changed(mask_token_id=49, target_layer_ids=[1, 5, 9])
    moved["dflash_config"] = {"projector_type": "dflash", "attention_mode": "gqa"}
    assert read(moved) == read(RAW)


def test_an_export_states_block_size_and_rope_where_each_loader_looks() -> None:
    raw = read(RAW).to_dict()
    assert raw["block_size"] == 8
    assert (raw["rope_theta"], raw["rope_scaling"], raw["rope_parameters"]["rope_theta"]) == (10000, None, 10000)


@pytest.mark.parametrize("ids", [49, [3, 49]])
def test_a_mask_that_ends_sequences_is_an_error(ids: Any) -> None:
    with pytest.raises(ConfigError, match=r"config.json: eos_token_id has 49, which is the drafter's mask_token_id"):
        read(changed(eos_token_id=ids))
    config = read(changed(eos_token_id=[3, 5]))
    require_mask_not_eos(config, [3, 5], source="the target")
    with pytest.raises(ConfigError, match=r"the target has 49"):
        require_mask_not_eos(config, [49, 5], source="the target")


def test_layers_are_full_where_the_config_does_not_speak_of_windows() -> None:
    config = read(changed(layer_types=None, sliding_window=None))
    assert config.layer_types == ("full_attention",) * 3
    assert config.causal == (False,) * 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nested": {"block_size": 16}}, "block_size is 8 but dflash_config.block_size is 16"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000 but rope_parameters.rope_theta is 1000000"),
        ({"nested": {"mask_token_id": 50}}, "mask_token_id 50 is outside the vocabulary of 50"),
        ({"nested": {"target_layer_ids": [1, 5, 12]}}, "names layer 12, but the target has layers 0..11"),
        ({"nested": {"target_layer_ids": [1, 5, 11]}}, "the target's last layer 11"),
        ({"nested": {"target_layer_ids": [1, 9, 5]}}, "must be ascending without repeats"),
        ({"nested": {"target_layer_ids": [1, 5, 5]}}, "must be ascending without repeats"),
        ({"nested": {"target_layer_ids": []}}, "at least one tap"),
        ({"head_dim": None, "nested": {"mask_token_id": None}}, "missing head_dim, dflash_config.mask_token_id"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"sliding_window": None}, "sliding_window is not set"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 3"),
        ({"layer_types": ["full_attention", "full_attention", "linear_attention"]}, "layer_types.2 is 'linear"),
        ({"layer_types": None, "use_sliding_window": True}, "without layer_types"),
        ({"use_sliding_window": False}, "use_sliding_window is false but layer_types has sliding_attention"),
        ({"block_size": 1}, "block_size is 1"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_hidden_layers": "3", "layer_types": None}, "num_hidden_layers is '3'"),
        ({"dflash_config": [1]}, "dflash_config is"),
        ({"rope_scaling": {"factor": 4}}, "rope_scaling is"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"output_multiplier": 0.196}, "output_multiplier is 0.196"),
        ({"final_logit_softcapping": 20.0}, "final_logit_softcapping is 20.0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"architectures": ["DFlash2DraftModel"]}, "only DFlash-1"),
        ({"nested": {"final_logit_softcapping": 20.0}}, "dflash_config.final_logit_softcapping is set"),
        ({"nested": {"projector_type": "domino"}}, "dflash_config.projector_type is set"),
        ({"nested": {"mask_token_id": -1}}, "mask_token_id -1 is outside the vocabulary"),
        ({"mask_token_id": 48}, "mask_token_id is 48 but dflash_config.mask_token_id is 49"),
        (
            {"nested": {"mask_token_id": None, "mask_token": "<|MASK|>"}},
            "mask_token is '<|MASK|>' and mask_token_id is",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor is 0.25"),
        ({"rope_parameters": {"mrope_section": [11, 11, 10]}}, "rope_parameters.mrope_section is set"),
        ({"nested": {"swa_window_size": 32}}, "sliding_window is 16 but dflash_config.swa_window_size is 32"),
    ],
)
def test_faults_are_named_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(changed(**changes))
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert says in message
    assert "\n" not in message


def test_tensor_count_is_eleven_a_layer_and_three() -> None:
    shapes = read(RAW).tensor_shapes()
    assert len(shapes) == 11 * 3 + 3
    assert shapes["fc.weight"] == (32, 96)


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (64, (1, 16, 31, 46, 61)),
        (36, (1, 9, 17, 25, 33)),
        (32, (1, 8, 15, 22, 29)),
        (40, (1, 10, 19, 28, 37)),
        (52, (1, 13, 25, 37, 49)),
    ],
)
def test_default_taps_are_those_of_the_released_drafters(layers: int, taps: tuple[int, ...]) -> None:
    assert default_tap_ids(layers, 5) == taps


def test_single_tap_is_the_middle() -> None:
    assert default_tap_ids(64, 1) == (32,)
