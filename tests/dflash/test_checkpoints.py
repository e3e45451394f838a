import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import dflash.checkpoints
from dflash.checkpoint_layout import ChangedError, CheckpointError, NotACheckpointError
from dflash.checkpoints import TensorsError, build_drafter, read_checkpoint
from dflash.config import ConfigError
from dflash.inspect import inspect_checkpoint
from tests.dflash.test_config import RAW, changed
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
