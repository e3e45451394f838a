"""Configs and names of the other layouts, read into and written from z-lab's."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import ConfigError, DrafterConfig
from dflash.formats import ExportFormat, our_name, read_config, their_name, write_config
from tests.dflash.test_config import RAW, changed, read

# What speculators 0.9.0 (transformers 5.19) itself wrote for the drafter of the tests' hybrid target.
SAVED_BY_SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 4, 6],
    "block_size": 8,
    "draft_vocab_size": 512,
    "dtype": "bfloat16",
    "mask_token_id": 510,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3_5ForCausalLM"], "name_or_path": "Qwen/Qwen3.5-tiny"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 384,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 2048,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 64,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": 512,
    },
    "transformers_version": "5.19.0",
}
HYBRID = Path(__file__).parents[1] / "fixtures" / "tiny-hybrid-dflash" / "config.json"


def speculators(**changes: Any) -> dict[str, Any]:
    """SAVED_BY_SPECULATORS with keys replaced, or removed where the value is None; ``layer`` updates the nested one."""
    raw = copy.deepcopy(SAVED_BY_SPECULATORS)
    raw["transformer_layer_config"] |= changes.pop("layer", {})
    raw |= changes
    return {key: value for key, value in raw.items() if value is not None}


def read_as(format: Any, raw: dict[str, Any], **given: Any) -> Any:
    return read_config(format, raw, source="config.json", given=given)


def test_a_speculators_config_reads_as_the_z_lab_config_of_the_same_drafter() -> None:
    found = read_as("speculators", SAVED_BY_SPECULATORS, num_target_layers=8)
    assert found.config == read(json.loads(HYBRID.read_text()))
    assert found.config.target_layer_ids == (1, 3, 5)
    assert found.config.causal == (True, False)
    assert read(found.raw) == found.config
    assert any("window" in note for note in found.notes)


def test_a_layout_without_the_targets_depth_says_who_can_supply_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing num_target_layers.*Qwen/Qwen3.5-tiny.*give --drafter-config"):
        read_as("speculators", SAVED_BY_SPECULATORS)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 8}}))
    section = copy.deepcopy(SAVED_BY_SPECULATORS["speculators_config"])
    section["verifier"]["name_or_path"] = str(tmp_path)
    raw = speculators(speculators_config=section)
    assert read_as("speculators", raw).config.num_target_layers == 8
    with pytest.raises(ConfigError, match=r"missing num_target_layers, vocab_size"):
        read_as("transformers", {"layer_types": ["full_attention"]})


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({"sliding_window_non_causal": True}, (False, False)),
        ({"sliding_window_non_causal": False}, (True, False)),
        ({"layer": {"layer_types": ["full_attention"] * 2}, "sliding_window_non_causal": None}, (False, False)),
        ({"layer": {"layer_types": ["sliding_attention"] * 2}}, (True, True)),
    ],
)
def test_speculators_flag_speaks_of_sliding_layers_only(changes: dict[str, Any], causal: tuple[bool, ...]) -> None:
    assert read_as("speculators", speculators(**changes), num_target_layers=8).config.causal == causal


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"draft_vocab_size": 300}, "draft_vocab_size is 300 and the target's vocab_size 512; a reduced vocabulary"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
        ({"sliding_window_non_causal": None}, "sliding_window_non_causal is not stated"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "names 0, the embedding's output"),
        ({"aux_hidden_state_layer_ids": [2, 8]}, "the target's last layer 7"),
        ({"aux_hidden_state_layer_ids": [2, 9]}, "names layer 8, but the target has layers 0..7"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
        ({"target_hidden_size": 256}, "target_hidden_size is 256"),
        ({"mask_token_id": None}, "missing dflash_config.mask_token_id"),
        ({"mask_token_id": 512}, "mask_token_id 512 is outside the vocabulary"),
        ({"layer": {"eos_token_id": 510}}, "eos_token_id has 510, which is the drafter's mask_token_id"),
        ({"layer": {"is_causal": True}}, "transformer_layer_config.is_causal is True"),
        ({"layer": {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}}, "partial_rotary_factor"),
        ({"transformer_layer_config": [1]}, r"transformer_layer_config is [1]"),
        ({"layer": {"block_size": 7}}, "but transformer_layer_config.block_size is 7; keep the right one"),
        (
            {"layer": {"num_target_layers": 9}},
            "num_target_layers is 8 but transformer_layer_config.num_target_layers is 9",
        ),
    ],
)
def test_what_a_speculators_config_means_otherwise_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_as("speculators", speculators(**changes), num_target_layers=8)
    assert says in str(caught.value)
    assert str(caught.value).startswith("config.json")


def test_full_layers_are_written_so_that_vllm_serves_them_bidirectional() -> None:
    """vLLM takes the flag's negation for the causality of every layer, the library for sliding ones alone."""
    full = read(changed(layer_types=["full_attention"] * 3, sliding_window=None))
    sliding = read(changed(layer_types=["sliding_attention"] * 3))
    for config, flag, notes in ((full, True, 0), (sliding, False, 0), (read(RAW), False, 1)):
        raw, said = write_config("speculators", config, dtype="bfloat16", verifier="target")
        assert raw["sliding_window_non_causal"] is flag
        assert len(said) == notes
        assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == config.block_size - 1
        assert raw["aux_hidden_state_layer_ids"] == [tap + 1 for tap in config.target_layer_ids]


@pytest.mark.parametrize("causal", [(True, True, True), (True, False, False), (False, False, True)])
def test_speculators_layout_has_no_word_for_causal_full_layers(causal: tuple[bool, ...]) -> None:
    config = DrafterConfig.model_validate(read(RAW).model_dump() | {"causal": causal})
    with pytest.raises(ConfigError, match="cannot be expressed in speculators' layout"):
        write_config("speculators", config, dtype="bfloat16", verifier=None)


def test_transformers_class_cannot_hold_causal_layers() -> None:
    with pytest.raises(ConfigError, match=r"layers 0, 1 are causal in a block"):
        write_config("transformers", read(RAW), dtype="bfloat16", verifier=None)


def test_transformers_window_does_not_count_the_query() -> None:
    raw, _ = write_config("transformers", read(changed(is_causal=False)), dtype="bfloat16", verifier=None)
    assert raw["sliding_window"] == RAW["sliding_window"] - 1
    assert read_as("transformers", raw).config.sliding_window == RAW["sliding_window"]
    with pytest.raises(ConfigError, match="sliding_window is True"):
        read_as("transformers", raw | {"sliding_window": True})


def test_torchspec_names_and_places() -> None:
    raw = changed(_torchspec_version="1", num_target_layers=3, target_num_hidden_layers=12, mask_token_id=49)
    raw["dflash_config"] = {"mask_token_id": None, "target_layer_ids": None}
    found = read_config("torchspec", raw, source="config.json", given={}, fc_width=3 * 32)
    assert found.config == read(RAW)  # 1, 5, 9 of 12 by the rule
    assert "taps 1, 5, 9 follow from TorchSpec's rule" in found.notes[0]
    assert read_config("torchspec", RAW, source="config.json", given={}).notes == ()
    assert our_name("torchspec", "context_proj.weight") == "fc.weight"
    assert our_name("torchspec", "embed_tokens.weight") is None
    with pytest.raises(ConfigError, match="markov_rank is 64"):
        read_config("torchspec", raw | {"markov_rank": 64}, source="config.json", given={})
    with pytest.raises(ConfigError, match=r"config\.json: dflash_config is \[1\], expected an object"):
        read_config("torchspec", raw | {"dflash_config": [1]}, source="config.json", given={})


def test_a_z_lab_directory_keeps_tensors_of_any_name_for_the_check() -> None:
    assert our_name("zlab", "lm_head.weight") == "lm_head.weight"
    assert our_name("speculators", "lm_head.weight") is None


@st.composite
def configs(draw: st.DrawFn) -> DrafterConfig:
    """Any drafter the z-lab layout expresses."""
    layers = draw(st.integers(1, 6))
    types = tuple(
        draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers))
    )
    by_type = tuple(kind == "sliding_attention" for kind in types)
    target_layers = draw(st.integers(4, 80))
    vocabulary = draw(st.integers(10, 300_000))
    heads = draw(st.sampled_from([(4, 2), (32, 8), (8, 8)]))
    return DrafterConfig(
        hidden_size=draw(st.integers(1, 8192)),
        intermediate_size=draw(st.integers(1, 30_000)),
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=draw(st.sampled_from([8, 64, 128])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope_theta=draw(st.sampled_from([1e4, 1e6, 1e7])),
        vocab_size=vocabulary,
        max_position_embeddings=draw(st.integers(64, 300_000)),
        block_size=draw(st.integers(2, 32)),
        mask_token_id=draw(st.integers(0, vocabulary - 1)),
        target_layer_ids=tuple(sorted(draw(st.sets(st.integers(0, target_layers - 2), min_size=1, max_size=8)))),
        num_target_layers=target_layers,
        layer_types=types,
        sliding_window=draw(st.integers(3, 4096)) if "sliding_attention" in types else None,
        causal=draw(st.sampled_from([by_type, (True,) * layers, (False,) * layers])),
    )


@settings(max_examples=150, deadline=None)
@given(config=configs(), format=st.sampled_from(["zlab", "speculators", "transformers"]))
def test_a_config_survives_the_way_there_and_back_or_is_refused(config: DrafterConfig, format: ExportFormat) -> None:
    full_causal = any(c and kind == "full_attention" for c, kind in zip(config.causal, config.layer_types, strict=True))
    refused = {"zlab": False, "speculators": full_causal, "transformers": any(config.causal)}[format]
    try:
        raw, _ = write_config(format, config, dtype="bfloat16", verifier=None)
    except ConfigError:
        assert refused
        return
    assert not refused
    found = read_as(format, json.loads(json.dumps(raw)))
    assert found.config == config
    assert read(found.raw) == config


@pytest.mark.parametrize("format", ["zlab", "speculators", "transformers"])
def test_every_tensor_has_a_name_of_its_own_that_leads_back(format: ExportFormat) -> None:
    names = list(read(RAW).tensor_shapes())
    theirs = [their_name(format, name) for name in names]
    assert len(set(theirs)) == len(names)
    assert [our_name(format, name) for name in theirs] == names
