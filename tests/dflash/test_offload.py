"""Layers read one at a time against the loaded model, on random targets in every layout that a checkpoint can have."""

import gc
import json
import subprocess  # peak memory is that of a fresh process
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from dflash import hidden_states, offload
from dflash.hidden_states import HiddenStateError, LoadedTaps, TextLengthError
from dflash.kernels import KernelError
from dflash.memory import MemoryShortageError
from dflash.offload import StreamedTaps, decode_estimate
from dflash.target import Target, TargetLoadError, TargetMismatchError
from tests.dflash.test_target import DELTA_NET, SIZES, dense, hybrid, saved, token_rows, vision_language

LAYERS = (1, 3, 5)
LENGTHS = [70, 3, 130, 12, 64, 65]


def tied():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


def sliding():
    types = ["sliding_attention", "full_attention"] * 4
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=16, layer_types=types))


MODELS = {"dense": dense, "hybrid": hybrid, "tied": tied, "sliding": sliding, "vision-language": vision_language}


def shard(directory: Path) -> None:
    """The weights over several files with an index, as large targets come."""
    model = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(model)
    parts = [names[start::3] for start in range(3)]
    index = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file({name: model[name] for name in part}, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def assert_same(streamed, loaded):
    for one, other in zip(streamed, loaded, strict=True):
        assert one.taps.dtype == other.taps.dtype
        assert torch.equal(one.taps, other.taps)
        assert one.shortfall is None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_streamed_taps_are_bit_for_bit_those_of_the_loaded_target(tmp_path, monkeypatch, name, dtype):
    """In three batches of different width, so that masks, positions and padding are those of the batch at hand."""
    monkeypatch.setattr(hidden_states, "PASS_TOKENS", 200)
    monkeypatch.setattr(offload, "PASS_TOKENS", 200)
    directory, _ = saved(MODELS[name], tmp_path)
    texts = token_rows(LENGTHS)
    loaded = LoadedTaps(Target.load(directory, dtype=dtype))
    streamed = StreamedTaps.open(directory, dtype=dtype)
    assert_same(streamed.tap(texts, LAYERS), loaded.tap(texts, LAYERS))
    assert streamed.facts == loaded.facts


def test_a_sharded_checkpoint_in_bfloat16(tmp_path):
    directory, model = saved(hybrid, tmp_path)
    model.bfloat16().save_pretrained(directory)
    shard(directory)
    texts = token_rows(LENGTHS)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = LoadedTaps(Target.load(directory, dtype=dtype))
        assert_same(StreamedTaps.open(directory, dtype=dtype).tap(texts, LAYERS), loaded.tap(texts, LAYERS))


def test_columns_follow_the_order_that_was_asked_for(tmp_path):
    directory, _ = saved(dense, tmp_path)
    texts = token_rows([9])
    streamed = StreamedTaps.open(directory)
    first, second = streamed.tap(texts, (1, 4))[0].taps.split(SIZES["hidden_size"], dim=1)
    assert torch.equal(streamed.tap(texts, (4, 1))[0].taps, torch.cat((second, first), dim=1))


def test_nothing_behind_the_last_tap_is_read_and_every_layer_before_it_once(tmp_path, monkeypatch):
    directory, _ = saved(dense, tmp_path)
    read = []
    whole = offload.Reader.tensor

    def counting(self, name, **settings):
        read.append(name)
        return whole(self, name, **settings)

    monkeypatch.setattr(offload.Reader, "tensor", counting)
    monkeypatch.setattr(offload, "PASS_TOKENS", 100)
    streamed = StreamedTaps.open(directory)
    steps = []
    streamed.tap(token_rows(LENGTHS), (1, 3), progress=lambda done, total: steps.append((done, total)))
    assert sorted(read) == sorted(name for layer in range(4) for name in streamed.shards.layer(layer))
    assert steps[-1][0] == steps[-1][1] == len(steps)


def test_a_layer_is_dropped_before_the_next_is_read(tmp_path, monkeypatch):
    """By the tensors alive: one layer's worth of weights whenever a layer has been read."""
    directory, _ = saved(dense, tmp_path)
    shape = (SIZES["intermediate_size"], SIZES["hidden_size"])

    def matrices():
        tensors = (one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter))
        return len({one.data_ptr() for one in tensors if one.device.type == "cpu" and one.shape == shape})

    alive = []
    whole = offload.StreamedTaps._read

    def counting(self, *arguments, **settings):
        weights = whole(self, *arguments, **settings)
        alive.append(matrices() - before)
        return weights

    monkeypatch.setattr(offload.StreamedTaps, "_read", counting)
    gc.collect()
    before = matrices()
    StreamedTaps.open(directory).tap(token_rows([5]), (3,))
    assert alive == [2] * 4  # up_proj and gate_proj


def test_a_batch_too_large_for_the_device_is_run_by_halves(tmp_path, monkeypatch):
    directory, _ = saved(hybrid, tmp_path)
    texts = token_rows([20] * 5)
    whole = offload._Caller.__call__
    rows = []

    def small(self, block, layer, states):
        rows.append(len(states))
        if len(states) > 2:
            raise torch.OutOfMemoryError
        return whole(self, block, layer, states)

    expected = StreamedTaps.open(directory).tap(texts, LAYERS)
    monkeypatch.setattr(offload._Caller, "__call__", small)
    found = StreamedTaps.open(directory).tap(texts, LAYERS)
    assert max(rows) == 5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.taps, other.taps)


def test_batches_shrink_with_the_memory_that_is_free_and_too_little_is_an_error(tmp_path, monkeypatch):
    directory, _ = saved(hybrid, tmp_path)
    streamed = StreamedTaps.open(directory)
    layer = max(streamed.shards.layer_bytes(torch.float32))
    working = offload._working_bytes(streamed.shards.config, torch.float32)
    states = 5 * 600 * SIZES["hidden_size"] * 4
    free = states + layer + 150 * working
    monkeypatch.setattr(offload, "free_bytes", lambda device: free)
    assert streamed._pass_tokens([100] * 6, LAYERS) == 150
    with pytest.raises(
        MemoryShortageError, match=r"one layer .* and one text of 160 tokens need .* free; .* measure shorter"
    ):
        streamed._pass_tokens([160, 160, 160, 120], LAYERS)
    with pytest.raises(MemoryShortageError, match=r"the states of 2000000 tokens take .* fewer prompts"):
        streamed._pass_tokens([100] * 20_000, LAYERS)


@pytest.mark.parametrize(
    ("remove", "add", "says"),
    [
        ("model.layers.0.mlp.up_proj.weight", {}, "missing model.layers.0.mlp.up_proj.weight"),
        (None, {"model.layers.8.mlp.up_proj.weight": torch.zeros(2)}, "unexpected model.layers.8.mlp.up_proj.weight"),
        (None, {"lm_head.weight": torch.zeros(96, 32)}, r"misshaped lm_head.weight \[96, 32\] for \[97, 32\]"),
        ("lm_head.weight", {}, "missing lm_head.weight"),
    ],
)
def test_every_weight_at_fault_is_named_from_the_headers(tmp_path, remove, add, says):
    directory, _ = saved(dense, tmp_path)
    weights = load_file(directory / "model.safetensors") | add
    weights.pop(remove or "", None)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetLoadError, match=says):
        StreamedTaps.open(directory)


def test_cut_and_missing_shards_are_named(tmp_path):
    directory, _ = saved(dense, tmp_path)
    shard(directory)
    second = directory / "model-00002-of-00003.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-50])
    with pytest.raises(TargetLoadError, match=r"model-00002-of-00003.safetensors has \d+ bytes, its header describes"):
        StreamedTaps.open(directory)
    second.unlink()
    with pytest.raises(TargetLoadError, match=r"names model-00002-of-00003\.safetensors, which is not in"):
        StreamedTaps.open(directory)


def test_nan_in_a_weight_names_layer_and_weight(tmp_path):
    directory, _ = saved(hybrid, tmp_path)
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HiddenStateError, match=r"hidden states of layer 2 .* model.layers.2.mlp.up_proj.weight holds"):
        StreamedTaps.open(directory).tap(token_rows([9]), (1, 5))


def test_nan_in_the_embedding_names_the_embedding(tmp_path):
    """Also where only the padding of a batch reads the row."""
    directory, _ = saved(dense, tmp_path)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][0] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HiddenStateError, match=r"its weight model\.embed_tokens\.weight holds NaN"):
        StreamedTaps.open(directory).tap([[1, 2, 3], [4]], (1, 5))


def test_a_token_without_a_row_is_refused_and_no_other_bytes_are_taken_for_it(tmp_path):
    directory, _ = saved(dense, tmp_path)
    for source in (StreamedTaps.open(directory), LoadedTaps(Target.load(directory))):
        for token in (-1, 97):
            with pytest.raises(
                TargetMismatchError, match=rf"token {token} is in a text, and the target .* has 97 rows"
            ):
                source.tap([[1, token, 3]], (1,))


def test_a_weight_under_two_names_or_in_two_files_is_named(tmp_path):
    directory, _ = saved(hybrid, tmp_path)
    weights = load_file(directory / "model.safetensors")
    name, nested = "model.layers.2.mlp.up_proj.weight", "model.language_model.layers.2.mlp.up_proj.weight"
    save_file(weights | {nested: 2 * weights[name]}, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetLoadError, match=rf"has {name} twice, as model\.la.* in model\.safetensors and"):
        StreamedTaps.open(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    shard(directory)
    save_file({name: 2 * weights[name]}, directory / "more.safetensors", metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["more"] = "more.safetensors"
    index.write_text(json.dumps(content))
    index.write_text(json.dumps({"weight_map": {"more": "x" * 300}}))
    with pytest.raises(TargetLoadError, match="is not an index of weight files"):
        StreamedTaps.open(directory)
    index.write_text(json.dumps(content))
    with pytest.raises(TargetLoadError, match=rf"has {name} twice, as {name} in .*more\.safetensors"):
        StreamedTaps.open(directory)


def test_wrong_layers_lengths_and_kernels_are_refused_before_anything_is_read(tmp_path, monkeypatch):
    directory, _ = saved(dense, tmp_path)
    monkeypatch.setattr(offload.Reader, "rows", None)
    streamed = StreamedTaps.open(directory)
    with pytest.raises(TargetMismatchError, match="tap 7 is not a layer before the last"):
        streamed.tap(token_rows([4]), (1, 7))
    with pytest.raises(TextLengthError, match=r"text 1 has 513 tokens, the target .* has 512 positions"):
        streamed.tap(token_rows([4, 513]), (1,))
    with pytest.raises(KernelError, match="has no linear attention"):
        StreamedTaps.open(directory, kernel="fla")


def test_the_decode_estimate_counts_every_weight_but_the_embedding_for_each_token(tmp_path, monkeypatch):
    directory, _ = saved(dense, tmp_path)
    weights = load_file(directory / "model.safetensors")
    expected = sum(weight.nbytes for name, weight in weights.items() if "embed_tokens" not in name)
    monkeypatch.setattr(offload, "_read_speed", lambda shards: 1000.0)
    estimate = decode_estimate(directory, 64)
    assert estimate.bytes_per_token == expected
    assert estimate.seconds == pytest.approx(64 * expected / 1000)
    assert "for each of 64 tokens" in str(estimate)


def test_the_read_speed_is_measured(tmp_path):
    directory, _ = saved(dense, tmp_path)
    assert decode_estimate(directory, 1).bytes_per_second > 1e5


@pytest.mark.slow
def test_the_peak_stays_under_one_layer_and_the_activations(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "benchmarks" / "offload_peak.py"), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ratios = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("ratio")]
    assert len(ratios) == 2
    assert max(ratios) < 1.3, done.stdout


def test_a_wide_head_and_many_heads_change_nothing(tmp_path):
    """Key heads fewer than value heads, in the delta nets, and a head wider than a layer."""
    sizes = SIZES | {"vocab_size": 4096}
    directory, _ = saved(
        lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **(DELTA_NET | {"linear_num_value_heads": 6}))), tmp_path
    )
    texts = token_rows([40, 9])
    assert_same(StreamedTaps.open(directory).tap(texts, LAYERS), LoadedTaps(Target.load(directory)).tap(texts, LAYERS))
