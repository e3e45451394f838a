"""What ``dflash export`` writes is what was read, in every layout, or nothing is there."""

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import dflash.export
import dflash.output
from dflash.checkpoints import DrafterCheckpoint, read_checkpoint
from dflash.cli_export import export as command
from dflash.config import ConfigError, DrafterConfig
from dflash.errors import DFlashError
from dflash.export import export
from dflash.formats import ExportFormat
from dflash.output import OutputError
from tests.dflash.test_checkpoints import random_weights, save_pt, save_step, save_zlab
from tests.dflash.test_config import changed
from tests.tiny import Pair

LAYOUTS: dict[str, dict[str, Any]] = {
    "causal sliding and a full": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "all full": {"layer_types": ["full_attention"] * 3, "sliding_window": None},
    "all sliding, causal": {"layer_types": ["sliding_attention"] * 3},
    "all sliding, bidirectional": {"layer_types": ["sliding_attention"] * 3, "is_causal": False},
    "mixed, bidirectional": {"is_causal": False},
    "all full, causal": {"layer_types": ["full_attention"] * 3, "sliding_window": None, "is_causal": True},
}
CANNOT = {
    "speculators": {"all full, causal"},
    "transformers": {"causal sliding and a full", "all sliding, causal", "all full, causal"},
}


def a_checkpoint(directory: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> DrafterCheckpoint:
    weights = {name: tensor.to(dtype) for name, tensor in random_weights().items()}
    return read_checkpoint(save_zlab(directory, weights, changed(**changes)))


def equal(one: DrafterCheckpoint, other: DrafterCheckpoint) -> bool:
    """Config and every bit of every tensor."""
    return (
        one.config == other.config
        and one.weights.keys() == other.weights.keys()
        and all(
            tensor.dtype == other.weights[name].dtype and torch.equal(tensor, other.weights[name])
            for name, tensor in one.weights.items()
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["zlab", "speculators", "transformers"])
def test_there_and_back_is_the_same_drafter(tmp_path: Path, format: ExportFormat, layout: str) -> None:
    checkpoint = a_checkpoint(tmp_path / "own", **LAYOUTS[layout])
    if layout in CANNOT.get(format, ()):
        with pytest.raises(ConfigError, match=rf"own as {format}: "):
            export(checkpoint, format, tmp_path / "there")
        assert not (tmp_path / "there").exists()
        return
    export(checkpoint, format, tmp_path / "there")
    there = read_checkpoint(tmp_path / "there")
    assert there.format == format
    export(there, "zlab", tmp_path / "back")
    back = read_checkpoint(tmp_path / "back")
    assert equal(there, checkpoint)
    assert equal(back, checkpoint)


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_the_reference_drafters_survive_the_way_over_speculators(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    pair: Pair = request.getfixturevalue(f"tiny_{kind}")
    released = read_checkpoint(pair.drafter)
    written = export(released, "speculators", tmp_path / "there", verifier=str(pair.target))
    assert written.config["speculators_config"]["verifier"]["architectures"]
    assert ("vLLM" in " ".join(written.notes)) is (kind == "hybrid")
    export(read_checkpoint(tmp_path / "there"), "zlab", tmp_path / "back")
    assert equal(read_checkpoint(tmp_path / "back"), released)
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    assert ("is_causal" in raw) is (kind == "dense")


def test_any_layout_that_is_read_is_exported(tmp_path: Path) -> None:
    weights = random_weights()
    weights["layers.1.mlp.gate_proj.weight"] = weights["layers.0.mlp.gate_proj.weight"]  # tied, as some trainers do
    for source in (save_pt(tmp_path / "a.pt", weights), save_step(tmp_path / "step_1", random_weights())):
        checkpoint = read_checkpoint(source)
        written = export(checkpoint, "zlab", tmp_path / f"{source.name}-export")
        assert (written.source_format, written.step) == (checkpoint.format, checkpoint.step)
        assert equal(read_checkpoint(tmp_path / f"{source.name}-export"), checkpoint)


@pytest.mark.parametrize(
    ("has", "asked", "written", "rounded"),
    [
        (torch.bfloat16, "auto", "bfloat16", False),
        (torch.float32, "auto", "float32", False),
        (torch.float32, "bfloat16", "bfloat16", True),
        (torch.float16, "bfloat16", "bfloat16", True),
        (torch.bfloat16, "float32", "float32", False),
    ],
)
def test_the_dtype_stays_unless_another_is_asked_for(
    tmp_path: Path, has: torch.dtype, asked: Any, written: str, rounded: bool
) -> None:
    checkpoint = a_checkpoint(tmp_path / "own", has)
    result = export(checkpoint, "zlab", tmp_path / "there", dtype=asked)
    assert (result.dtype, result.config["dtype"]) == (written, written)
    assert any("rounded from" in note for note in result.notes) is rounded
    there = read_checkpoint(tmp_path / "there").weights
    assert all(torch.equal(there[name], t.to(getattr(torch, written))) for name, t in checkpoint.weights.items())


def test_a_place_that_is_taken_is_left_as_it_is(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path / "own")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="is not an empty directory"):
        export(checkpoint, "zlab", tmp_path / "full")
    with pytest.raises(OutputError, match="is not an empty directory"):
        export(checkpoint, "zlab", tmp_path / "file")
    (tmp_path / "empty").mkdir()
    export(checkpoint, "zlab", tmp_path / "empty")
    assert sorted(file.name for file in (tmp_path / "empty").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "file", "full", "own"]


def disk_full(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("fault", "raises"), [(disk_full, OutputError), (interrupted, KeyboardInterrupt)])
@pytest.mark.parametrize("at", ["save_file", "file_sha256", "to_disk"])
def test_nothing_is_left_of_an_export_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], raises: type[BaseException], at: str
) -> None:
    checkpoint = a_checkpoint(tmp_path / "own")
    monkeypatch.setattr(dflash.output if at == "to_disk" else dflash.export, at, fault)
    with pytest.raises(raises) as caught:
        export(checkpoint, "zlab", tmp_path / "there")
    assert [entry.name for entry in tmp_path.iterdir()] == ["own"]
    if raises is OutputError:
        assert "No space left on device" in str(caught.value)


def test_the_command_prints_what_it_wrote(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    source = save_zlab(tmp_path / "own", random_weights(), changed(is_causal=False))
    asked = [str(source), "--format", "transformers", "--output"]
    printed = CliRunner().invoke(app, [*asked, str(tmp_path / "one"), "--json", "--dtype", "bfloat16"])
    said = json.loads(printed.stdout)
    assert (said["format"], said["dtype"]) == ("transformers", "bfloat16")
    assert {file["name"] for file in said["files"]} == {"config.json", "model.safetensors"}
    shown = CliRunner().invoke(app, [*asked, str(tmp_path / "two")])
    assert (shown.exit_code, "transformers, from zlab" in shown.stdout) == (0, True)
    refused = CliRunner().invoke(app, [*asked, str(tmp_path / "two")])
    assert isinstance(refused.exception, DFlashError)


def test_an_export_is_not_written_of_a_config_nobody_can_state(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path / "own")
    odd = DrafterConfig.model_validate(checkpoint.config.model_dump() | {"causal": (True, False, False)})
    with pytest.raises(ConfigError, match=r"cannot be expressed in a config\.json"):
        export(replace(checkpoint, config=odd), "zlab", tmp_path / "there")
