import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel

import dflash.checkpoints
from dflash.checkpoint_layout import ChangedError, CheckpointError, DamagedError, NotACheckpointError
from dflash.checkpoints import TensorsError, build_drafter, read_checkpoint
from dflash.config import ConfigError
from dflash.formats import their_name, write_config
from dflash.inspect import inspect_checkpoint
from dflash.manifest import seal
from tests.dflash.test_config import RAW, changed, read
from tests.dflash.test_drafter import random_drafter

Weights = dict[str, Tensor]


def random_weights() -> Weights:
    return {name: tensor.clone() for name, tensor in random_drafter(RAW).state_dict().items()}


def save_pt(path: Path, weights: Weights, prefix: str = "module.", **extra: Any) -> Path:
    """An old single-file checkpoint as a trainer leaves it: prefixed float32 weights beside Adam's state."""
    parameters = [torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(parameters)
    parameters[0].sum().backward()
    optimizer.step()
    content = {
        "model_state_dict": {f"{prefix}{name}": tensor for name, tensor in weights.items()},
        "optimizer_state_dict": optimizer.state_dict(),
        "config": RAW,
    }
    torch.save({key: value for key, value in (content | extra).items() if value is not None}, path)
    return path


def save_zlab(directory: Path, weights: Weights, config: dict[str, Any] = RAW) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_step(directory: Path, weights: Weights, step: int = 400) -> Path:
    """A training checkpoint as our trainer leaves it."""
    directory.mkdir()
    save_file(weights, directory / "drafter.safetensors")
    save_file({"ids": torch.arange(5)}, directory / "probe.safetensors")
    save_file({"ids": torch.arange(7)}, directory / "replay.safetensors")
    (directory / "training_state.pt").write_bytes(b"optimizer")
    (directory / "config.json").write_text(json.dumps(read(RAW).to_dict()))
    seal(directory, step=step, metrics={"loss": 1.5, "streak1": 2.0}, recipe={"loss": "ce", "gamma": 7})
    return directory


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_orig_mod.draft_model."])
def test_single_file_is_read_without_prefixes(tmp_path: Path, prefix: str) -> None:
    weights = random_weights()
    path = save_pt(tmp_path / "last.pt", weights, prefix, step=400, loss=1.5, kernel="torch", accuracy=torch.ones(()))
    checkpoint = read_checkpoint(path)
    assert (checkpoint.format, checkpoint.step, checkpoint.config_source) == ("pt", 400, "key config")
    assert checkpoint.training == {"step": 400, "loss": 1.5, "kernel": "torch"}
    assert checkpoint.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert checkpoint.weights.keys() == weights.keys()
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in weights.items())


def test_z_lab_directory_is_read_in_its_dtype(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in random_weights().items()}
    path = save_zlab(tmp_path / "drafter", weights)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.format, checkpoint.step, checkpoint.config_source) == ("zlab", None, "config.json beside")
    assert checkpoint.sha256 == hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in weights.items())


def test_turned_tied_and_sliced_tensors_come_out_as_they_were(tmp_path: Path) -> None:
    weights = random_weights()
    gate = "layers.0.mlp.gate_proj.weight"
    weights[gate] = weights[gate].T.contiguous().T
    weights["layers.1.mlp.gate_proj.weight"] = weights[gate]
    weights["norm.weight"] = torch.randn(3, 32)[1]
    checkpoint = read_checkpoint(save_pt(tmp_path / "a.pt", weights))
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in weights.items())
    assert all(tensor.is_contiguous() for tensor in checkpoint.weights.values())


def test_drafter_is_built_frozen_in_the_asked_dtype(tmp_path: Path) -> None:
    weights = random_weights()
    drafter = build_drafter(read_checkpoint(save_pt(tmp_path / "a.pt", weights)), device="cpu", dtype=torch.bfloat16)
    assert torch.equal(drafter.fc.weight, weights["fc.weight"].bfloat16())
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in drafter.parameters())


def test_step_is_read_from_the_name_where_the_file_does_not_say(tmp_path: Path) -> None:
    assert read_checkpoint(save_pt(tmp_path / "step_1200.pt", random_weights())).step == 1200


def test_config_comes_from_the_file_then_beside_then_the_option_then_the_reference(tmp_path: Path) -> None:
    path = save_pt(tmp_path / "a.pt", random_weights(), config=None)
    reference = save_zlab(tmp_path / "reference", random_weights())
    option = tmp_path / "drafter.json"
    option.write_text(json.dumps(RAW))
    with pytest.raises(ConfigError, match=r"dflash_config.mask_token_id and .* are missing; give --drafter-config"):
        read_checkpoint(path)
    assert read_checkpoint(path, reference=reference).config_source == "reference"
    assert read_checkpoint(path, drafter_config=option, reference=reference).config_source == "--drafter-config"
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert read_checkpoint(path, drafter_config=option, reference=reference).config_source == "config.json beside"
    own = save_pt(path, random_weights(), config=RAW)
    assert read_checkpoint(own, drafter_config=option, reference=reference).config_source == "key config"


def test_trainer_settings_under_the_same_key_are_not_a_drafter_config(tmp_path: Path) -> None:
    path = save_pt(tmp_path / "a.pt", random_weights(), config={"lr": 6e-4, "epochs": 6})
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert read_checkpoint(path).config_source == "config.json beside"


def test_an_option_that_contradicts_the_file_is_an_error(tmp_path: Path) -> None:
    path = save_pt(tmp_path / "a.pt", random_weights())
    option = tmp_path / "drafter.json"
    option.write_text(json.dumps(changed(block_size=16)))
    with pytest.raises(ConfigError, match=r"says block_size 8, .*drafter.json says 16"):
        read_checkpoint(path, drafter_config=option)


def renamed(weights: Weights) -> None:
    weights["layers.0.mlp.gate.weight"] = weights.pop("layers.0.mlp.gate_proj.weight")


def four_taps(weights: Weights) -> None:
    weights["fc.weight"] = weights["fc.weight"][:, :64].clone()


def poisoned(value: float) -> Callable[[Weights], None]:
    def poison(weights: Weights) -> None:
        weights["layers.2.self_attn.q_norm.weight"][3] = value

    return poison


@pytest.mark.parametrize("save", [save_pt, save_zlab])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda w: w.pop("layers.1.self_attn.k_norm.weight"), "missing layers.1.self_attn.k_norm.weight"),
        (lambda w: w.update({"embed_tokens.weight": torch.ones(2)}), "unexpected embed_tokens.weight"),
        (renamed, "layers.0.mlp.gate.weight was found where layers.0.mlp.gate_proj.weight was expected"),
        (lambda w: w.update({"norm.weight": torch.ones(31)}), "norm.weight has shape [31], the config makes it [32]"),
        (four_taps, "fc.weight is 32×64, which takes 2 taps of 32, but the config names 3 (1, 5, 9), 32×96"),
        (poisoned(float("nan")), "NaN or infinite values in layers.2.self_attn.q_norm.weight"),
        (poisoned(float("inf")), "NaN or infinite values in layers.2.self_attn.q_norm.weight"),
        (lambda w: w.update({"norm.weight": torch.ones(32).long()}), "norm.weight is int64"),
    ],
    ids=["missing", "extra", "renamed", "misshaped", "one tap too few", "nan", "inf", "integers"],
)
def test_every_tensor_at_fault_is_named(
    tmp_path: Path, save: Callable[..., Path], damage: Callable[[Weights], Any], says: str
) -> None:
    weights = random_weights()
    damage(weights)
    path = save(tmp_path / "drafter", weights)
    with pytest.raises(TensorsError) as caught:
        read_checkpoint(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert any(says in problem for problem in inspect_checkpoint(path).problems)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nested": {"block_size": 16}}, "block_size is 8 but dflash_config.block_size is 16"),
        ({"nested": {"mask_token_id": 50}}, "outside the vocabulary"),
        ({"nested": {"target_layer_ids": [1, 5, 12]}}, "names layer 12"),
        ({"hidden_size": None}, "missing hidden_size"),
    ],
)
def test_a_bad_config_is_named_with_its_file(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = save_zlab(tmp_path / "drafter", random_weights(), changed(**changes))
    with pytest.raises(ConfigError, match=says) as caught:
        read_checkpoint(path)
    assert str(path / "config.json") in str(caught.value)


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = save_zlab(tmp_path / "drafter", random_weights())
    (path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable JSON"):
        read_checkpoint(path)


def test_a_file_without_a_model_is_named(tmp_path: Path) -> None:
    torch.save({"weights": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(NotACheckpointError, match="holds keys weights, expected model_state_dict"):
        read_checkpoint(tmp_path / "a.pt")


def test_the_same_tensor_under_two_prefixes_is_an_error(tmp_path: Path) -> None:
    weights = random_weights()
    weights["module.norm.weight"] = weights["norm.weight"]
    with pytest.raises(TensorsError, match=r"norm\.weight is there twice"):
        read_checkpoint(save_pt(tmp_path / "a.pt", weights, prefix=""))


def test_a_checkpoint_that_grows_between_reads_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_pt(tmp_path / "a.pt", random_weights())
    original = dflash.checkpoints.read_tensors

    def read_while_the_trainer_writes(opened: dflash.checkpoints.Opened) -> Weights:
        with path.open("ab") as file:
            file.write(b"more")
        return original(opened)

    monkeypatch.setattr(dflash.checkpoints, "read_tensors", read_while_the_trainer_writes)
    with pytest.raises(ChangedError, match="still being written"):
        read_checkpoint(path)


def test_truncated_and_missing_checkpoints_are_named(tmp_path: Path) -> None:
    path = save_pt(tmp_path / "a.pt", random_weights())
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cut short or still being written"):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "missing.pt")


def test_inspection_does_not_unfold_a_tensor_of_another_shape(tmp_path: Path) -> None:
    weights = random_weights() | {"norm.weight": torch.ones(1).expand(10**7, 10**7)}
    poisoned(float("nan"))(weights)
    problems = inspect_checkpoint(save_pt(tmp_path / "a.pt", weights)).problems
    assert [problem.split()[0] for problem in problems] == ["norm.weight", "NaN"]


def test_inspection_of_a_sound_checkpoint(tmp_path: Path) -> None:
    weights = random_weights()
    inspection = inspect_checkpoint(save_pt(tmp_path / "step_7.pt", weights))
    assert inspection.problems == []
    assert inspection.step == 7
    assert inspection.parameters == sum(tensor.numel() for tensor in weights.values())
    assert {tensor.name: tensor.shape for tensor in inspection.tensors} == {
        n: tuple(t.shape) for n, t in weights.items()
    }


def test_a_step_directory_is_read_with_its_manifest(tmp_path: Path) -> None:
    weights = random_weights()
    path = save_step(tmp_path / "step_7", weights)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.format, checkpoint.step, checkpoint.config_source) == ("step", 400, "config.json beside")
    assert checkpoint.training == {"step": 400, "loss": 1.5, "streak1": 2.0}
    assert checkpoint.manifest is not None
    assert checkpoint.manifest["recipe"] == {"loss": "ce", "gamma": 7}
    assert checkpoint.sha256 == checkpoint.manifest["files"]["drafter.safetensors"]["sha256"]
    assert (checkpoint.probe, checkpoint.metric_replay) == (path / "probe.safetensors", path / "replay.safetensors")
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in weights.items())
    assert inspect_checkpoint(path).problems == []


def test_a_steps_recipe_is_told_in_a_line_and_nonsense_is_left_to_its_check(tmp_path: Path) -> None:
    path = save_step(tmp_path / "step_7", random_weights())
    seal(path, step=7, metrics={}, recipe={"loss": "ce", "gamma": 7.0, "block_size": 16, "name": None})
    assert read_checkpoint(path).training["recipe"] == "loss ce, gamma 7, block_size 16"
    seal(path, step=7, metrics={}, recipe={"loss": "magic"})
    assert "recipe" not in read_checkpoint(path).training


def test_a_step_is_read_where_only_what_an_evaluation_needs_was_brought(tmp_path: Path) -> None:
    path = save_step(tmp_path / "step_7", random_weights())
    for name in ("training_state.pt", "probe.safetensors"):
        (path / name).unlink()
    checkpoint = read_checkpoint(path)
    assert (checkpoint.probe, checkpoint.metric_replay) == (None, path / "replay.safetensors")


def test_a_step_is_loaded_as_it_is_by_who_knows_no_manifest(tmp_path: Path) -> None:
    """Loaders go by the index; without it transformers finds no weights and vLLM takes the probe for some."""
    weights = random_weights()
    path = save_step(tmp_path / "step_7", weights)
    model, said = AutoModel.from_pretrained(path, output_loading_info=True)
    assert model.config.model_type == "qwen3"
    assert set(said["missing_keys"]) == {"embed_tokens.weight"}
    assert set(said["unexpected_keys"]) == {"fc.weight", "hidden_norm.weight"}
    assert torch.equal(model.layers[1].mlp.up_proj.weight, weights["layers.1.mlp.up_proj.weight"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda step: flip(step / "drafter.safetensors"), "drafter.safetensors has sha256"),
        (lambda step: flip_digit(step / "config.json"), "config.json has sha256"),
        (lambda step: (step / "drafter.safetensors").write_bytes(b"short"), "has 5 bytes, the manifest says"),
        (lambda step: (step / "probe.safetensors").write_bytes(b"short"), "has 5 bytes, the manifest says"),
        (lambda step: (step / "drafter.safetensors").unlink(), "is missing, the manifest lists it"),
        (lambda step: (step / "manifest.json").unlink(), "still being written"),
        (lambda step: (step / "manifest.json").write_text("{"), "not readable JSON"),
        (lambda step: edit(step / "manifest.json", step="x"), "manifest.json: step"),
        (lambda step: edit(step / "manifest.json", schema=2), "has schema 2, this version reads up to 1"),
        (lambda step: edit(step / "manifest.json", files={}), "lists no drafter.safetensors"),
        (lambda step: edit(step / "manifest.json", config_sha256="0"), "sealed with another config"),
    ],
)
def test_a_step_that_is_not_what_its_manifest_says_is_named(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    path = save_step(tmp_path / "step_7", random_weights())
    damage(path)
    with pytest.raises(DamagedError) as caught:
        read_checkpoint(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_manifest_with_a_name_that_no_file_has_is_an_error(tmp_path: Path) -> None:
    path = save_step(tmp_path / "step_7", random_weights())
    files = json.loads((path / "manifest.json").read_text())["files"]
    edit(path / "manifest.json", files=files | {"x" * 300: {"size": 1, "sha256": "0" * 64}})
    with pytest.raises(CheckpointError, match=r"cannot be read \(File name too long\)"):
        read_checkpoint(path)


def flip_digit(config: Path) -> None:
    """Another block size in as many bytes."""
    config.write_text(config.read_text().replace('"block_size": 8', '"block_size": 7'))


def test_inspection_of_a_step_with_other_weights_than_its_manifest_names(tmp_path: Path) -> None:
    path = save_step(tmp_path / "step_7", random_weights())
    flip(path / "drafter.safetensors")
    assert ["has sha256" in problem for problem in inspect_checkpoint(path).problems] == [True]


def save_as(format: str, directory: Path, config: dict[str, Any], weights: Weights, **extra: Tensor) -> Path:
    raw, _ = write_config(format, read(config), dtype="float32", verifier=None)  # type: ignore[arg-type]
    return save_zlab(directory, {their_name(format, name): t for name, t in weights.items()} | extra, raw)  # type: ignore[arg-type]


BIDIRECTIONAL = changed(is_causal=False)


@pytest.mark.parametrize("format", ["speculators", "transformers"])
def test_other_layouts_come_out_under_z_labs_names(tmp_path: Path, format: str) -> None:
    weights = random_weights()
    checkpoint = read_checkpoint(save_as(format, tmp_path / "drafter", BIDIRECTIONAL, weights))
    assert checkpoint.format == format
    assert checkpoint.config == read(BIDIRECTIONAL)
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in weights.items())


def test_the_targets_own_tensors_in_a_speculators_directory_are_left_out(tmp_path: Path) -> None:
    own = {"embed_tokens.weight": torch.ones(50, 32), "lm_head.weight": torch.ones(50, 32), "d2t": torch.arange(50)}
    weights = random_weights()
    path = save_as("speculators", tmp_path / "drafter", BIDIRECTIONAL, weights, **own)
    assert read_checkpoint(path).weights.keys() == weights.keys()
    assert inspect_checkpoint(path).notes


def test_a_field_the_layout_lacks_comes_from_the_option_or_the_reference(tmp_path: Path) -> None:
    path = save_as("transformers", tmp_path / "drafter", BIDIRECTIONAL, random_weights())
    edit(path / "config.json", vocab_size=None)
    with pytest.raises(ConfigError, match="missing vocab_size"):
        read_checkpoint(path)
    reference = save_zlab(tmp_path / "reference", random_weights())
    assert read_checkpoint(path, reference=reference).config.vocab_size == 50
    option = tmp_path / "drafter.json"
    option.write_text(json.dumps({"vocab_size": 60}))
    found = read_checkpoint(path, drafter_config=option, reference=reference)
    assert (found.config.vocab_size, found.config_source) == (60, "config.json beside")
    edit(path / "config.json", num_target_layers=None)
    both = read_checkpoint(path, drafter_config=option, reference=reference).config
    assert (both.vocab_size, both.num_target_layers) == (60, RAW["num_target_layers"])
    option.write_text(json.dumps(BIDIRECTIONAL | {"block_size": 4}))
    with pytest.raises(ConfigError, match=r"says block_size 8, .*drafter.json says 4"):
        read_checkpoint(path, drafter_config=option)


@pytest.mark.parametrize("format", ["speculators", "transformers"])
def test_a_config_can_be_borrowed_from_a_reference_in_any_layout(tmp_path: Path, format: str) -> None:
    reference = save_as(format, tmp_path / "reference", BIDIRECTIONAL, random_weights())
    path = save_pt(tmp_path / "a.pt", random_weights(), config=None)
    found = read_checkpoint(path, reference=reference)
    assert (found.config, found.config_source) == (read(BIDIRECTIONAL), "reference")


def test_torchspecs_names_and_taps(tmp_path: Path) -> None:
    theirs = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight"}
    theirs["norm.weight"] = "final_norm.weight"
    weights = random_weights()
    saved = {theirs.get(name, name): tensor for name, tensor in weights.items()}
    raw = changed(_torchspec_version="1", nested={"target_layer_ids": None})
    path = save_zlab(tmp_path / "drafter", saved | {"embed_tokens.weight": torch.ones(50, 32)}, raw)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.format, checkpoint.config) == ("torchspec", read(RAW))
    assert "TorchSpec's rule" in checkpoint.notes[0]
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in weights.items())


def test_a_sharded_directory_is_read_by_its_index(tmp_path: Path) -> None:
    weights = random_weights()
    path = save_zlab(tmp_path / "drafter", {"probe": torch.ones(2)})
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, path / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_checkpoint(path).weights.keys() == weights.keys()
    (path / "model-2.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"lists model-2.safetensors, which is not there"):
        read_checkpoint(path)


def test_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    path = save_zlab(tmp_path / "drafter", random_weights())
    (path / "mask_embedding.pt").touch()
    with pytest.raises(TensorsError, match=r"mask_embedding.pt, a mask of its own"):
        read_checkpoint(path)
