"""Random targets of both families, small enough that transformers' own generate can be asked for every answer."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.config import DrafterConfig
from dflash.hidden_states import LoadedTaps
from dflash.target import Target, TargetLoadError, TargetMismatchError
from tests.dflash.test_config import changed

VOCABULARY, HIDDEN, LAYERS, END = 97, 32, 8, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "initializer_range": 0.3,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def hybrid() -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **DELTA_NET))


def dense() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def vision_language() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    text = {**SIZES, **DELTA_NET, "rope_parameters": rope}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=VISION))


def saved(make: Callable[[], PreTrainedModel], directory: Path) -> tuple[Path, PreTrainedModel]:
    torch.manual_seed(0)
    model = make().train(False)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return directory, model


@pytest.fixture(scope="module", params=[hybrid, dense], ids=["hybrid", "dense"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Any]:
    directory, model = saved(request.param, tmp_path_factory.mktemp("target"))
    return Target.load(directory), model


def token_rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def test_taps_are_the_outputs_of_the_tapped_blocks(pair: tuple[Target, Any]) -> None:
    target, model = pair
    ids = torch.tensor(token_rows([70, 70]))
    result = target.taps(ids, (1, 3, 5), shortfall=True)
    output = model(input_ids=ids, output_hidden_states=True)
    assert torch.equal(result.taps, torch.cat([output.hidden_states[layer + 1] for layer in (1, 3, 5)], dim=-1))
    logits = output.logits[:, :-1]
    expected = logits.amax(-1) - logits.gather(-1, ids[:, 1:, None])[..., 0]
    assert result.shortfall is not None
    torch.testing.assert_close(result.shortfall[:, :-1], expected, rtol=1e-4, atol=1e-4)
    assert result.shortfall[:, -1].tolist() == [0, 0]


def test_taps_leave_no_hook_behind(pair: tuple[Target, Any]) -> None:
    target, _ = pair
    target.taps(torch.tensor([[1, 2, 3]]), (1, 3))
    assert not any(layer._forward_hooks for layer in target.layers)


def test_padding_on_the_right_reaches_no_tap(pair: tuple[Target, Any]) -> None:
    target, _ = pair
    ids = torch.tensor(token_rows([130, 130]))
    alone = target.taps(ids[:1, :70], (1, 5)).taps
    torch.testing.assert_close(target.taps(ids, (1, 5)).taps[:1, :70], alone, rtol=1e-3, atol=1e-2)


def test_a_tap_beyond_the_target_or_on_its_last_layer_is_refused(pair: tuple[Target, Any]) -> None:
    target, _ = pair
    for layer in (LAYERS - 1, LAYERS, -1):
        with pytest.raises(TargetMismatchError, match=f"tap {layer} is not a layer before the last"):
            target.taps(torch.tensor([[1, 2]]), (1, layer))


def test_greedy_in_a_padded_batch_equals_transformers_one_at_a_time(pair: tuple[Target, Any]) -> None:
    """Lengths on both sides of the delta rule's chunk of 64, so that padding would show in the recurrent state."""
    target, model = pair
    prompts = token_rows([3, 63, 65, 130])
    batched = target.generate_greedy(prompts, 16, ignore_eos=True)
    for prompt, completion in zip(prompts, batched, strict=True):
        ids = torch.tensor([prompt])
        alone: Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert completion == alone[0, len(prompt) :].tolist()


def test_greedy_ends_with_the_end_token_and_counts_what_it_wrote(pair: tuple[Target, Any]) -> None:
    target, _ = pair
    prompts = token_rows([4] * 32, seed=1)
    written: list[int] = []
    long = target.generate_greedy(prompts, 20, ignore_eos=True)
    ended = target.generate_greedy(prompts, 20, progress=written.append)
    assert ended == [row[: row.index(END) + 1] if END in row else row for row in long]
    assert any(END in row for row in long)
    assert sum(written) == sum(map(len, ended))


def test_embedding_and_head_are_the_models(pair: tuple[Target, Any]) -> None:
    target, model = pair
    ids = torch.tensor([[1, 2, 3]])
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(target.embed(ids), embedded)
    assert torch.equal(target.logits(embedded), model.get_output_embeddings()(embedded))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (LAYERS, HIDDEN, VOCABULARY)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 64}, "the drafter's hidden_size is 64, the target"),
        ({"num_target_layers": 64}, "the drafter's num_target_layers is 64, the target"),
        ({"vocab_size": 200, "nested": {"mask_token_id": 150}}, "mask_token_id 150 is outside the target's vocabulary"),
    ],
)
def test_a_drafter_for_another_target_is_refused(pair: tuple[Target, Any], changes: dict[str, Any], says: str) -> None:
    target, _ = pair
    nested = {"target_layer_ids": [1, 3, 5]} | changes.get("nested", {})
    raw = changed(**({"num_target_layers": LAYERS} | changes | {"nested": nested}))
    with pytest.raises(TargetMismatchError, match=says) as caught:
        LoadedTaps(target).facts.require_fit(DrafterConfig.from_dict(raw, source="test"), source="step_4.pt")
    assert str(caught.value).startswith("step_4.pt: ")


def test_a_drafter_for_this_target_fits(pair: tuple[Target, Any]) -> None:
    raw = changed(num_target_layers=LAYERS, nested={"target_layer_ids": [1, 3, 5]})
    fitting = DrafterConfig.from_dict(raw, source="test")
    LoadedTaps(pair[0]).facts.require_fit(fitting, source="test")  # it raises for one that does not fit
    assert fitting.num_target_layers == pair[0].num_layers


def test_a_vision_language_checkpoint_loads_as_its_text_model(tmp_path: Path) -> None:
    directory, model = saved(vision_language, tmp_path)
    weights = load_file(directory / "model.safetensors")
    rewrite(directory, weights | {"mtp.fc.weight": torch.zeros(2, 2)})
    target = Target.load(directory)
    ids = torch.tensor(token_rows([40]))
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert target.class_name == "Qwen3_5ForCausalLM"
    assert target.tensors == sum(not name.startswith("model.visual.") for name in weights)
    assert torch.equal(target.taps(ids, (2, 4)).taps, torch.cat((states[3], states[5]), dim=-1))


def rewrite(directory: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("remove", "add", "says"),
    [
        ("model.layers.0.mlp.up_proj.weight", {}, "missing model.layers.0.mlp.up_proj.weight"),
        (None, {"model.layers.8.mlp.up_proj.weight": torch.zeros(2)}, "unexpected model.layers.8.mlp.up_proj.weight"),
        (None, {"lm_head.weight": torch.zeros(96, HIDDEN)}, "misshaped lm_head.weight [96, 32] for [97, 32]"),
    ],
)
def test_every_weight_at_fault_is_named(tmp_path: Path, remove: str | None, add: dict[str, Tensor], says: str) -> None:
    directory, _ = saved(dense, tmp_path)
    weights = load_file(directory / "model.safetensors") | add
    weights.pop(remove or "", None)
    rewrite(directory, weights)
    assert says in load_error(directory)


def test_truncated_missing_and_foreign_targets_are_named(tmp_path: Path) -> None:
    directory, _ = saved(dense, tmp_path)
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[:-100])
    assert "could not be loaded as Qwen3ForCausalLM" in load_error(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert "has model_type llama, expected one of qwen3, qwen3_5" in load_error(directory)
    quantized = config | {"quantization_config": {"quant_method": "fp8"}}
    (directory / "config.json").write_text(json.dumps(quantized))
    assert "is quantized (quantization_config in its config.json, quant_method fp8)" in load_error(directory)
    assert "is not a directory" in load_error(directory / "nowhere")


def load_error(directory: Path) -> str:
    with pytest.raises(TargetLoadError) as caught:
        Target.load(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)
    return str(caught.value)
