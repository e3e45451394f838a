import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash.checkpoint_layout import (
    ChangedError,
    CheckpointError,
    DamagedError,
    NotACheckpointError,
    TensorRecord,
    UnsafePickleError,
    files_of,
    read_record,
    read_safetensors_file,
    read_torch_file,
    sniff,
    step_in_name,
    weight_files,
)
from dflash.safetensors_header import training_told


def test_no_torch_is_imported() -> None:
    modules = "checkpoint_layout", "distributed_checkpoint", "formats", "manifest"
    code = f"import sys, {', '.join(f'dflash.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_records_hold_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    torch.save({"weights": {"a": weight, "tied": weight, "turned": weight.T}, "step": 3}, path)
    layout = read_torch_file(path)
    a, tied, turned = (layout.content["weights"][name] for name in ("a", "tied", "turned"))
    assert layout.content["step"] == 3
    assert (a.dtype, a.shape, a.stride, a.offset) == ("float32", (2, 3), (3, 1), 0)
    assert (turned.shape, turned.stride) == ((3, 2), (1, 3))
    assert a.record == tied.record == turned.record
    with path.open("rb") as file:
        assert struct.unpack("<6f", read_record(path, file, a.record)) == (0, 1, 2, 3, 4, 5)


def test_what_trainers_save_beside_weights_is_read_past(tmp_path: Path) -> None:
    import argparse
    from collections import Counter, OrderedDict

    import numpy as np

    extras = {
        "numpy": np.random.RandomState(0).get_state(),
        "loss": np.float64(1.0),
        "rng": torch.get_rng_state(),
        "arguments": argparse.Namespace(lr=1e-3, output=Path("runs")),
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "milestones": Counter([3, 5]),
        "names": OrderedDict(a={1, 2}),
    }
    torch.save(extras, tmp_path / "a.pt")
    content = read_torch_file(tmp_path / "a.pt").content
    assert content["size"] == (1, 2)
    assert content["names"] == {"a": {1, 2}}
    assert isinstance(content["parameter"], TensorRecord)
    assert isinstance(content["rng"], TensorRecord)


class RunsCode:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("function", "argument", "named"),
    [(os.system, "touch {}", "posix.system"), (eval, "open({!r}, 'w')", "eval"), (getattr, "", "getattr")],
)
def test_a_pickle_that_would_run_code_is_named_and_not_run(
    tmp_path: Path, function: Callable[..., Any], argument: str, named: str
) -> None:
    path, marker = tmp_path / "evil.pt", tmp_path / "ran"
    torch.save({"model_state_dict": {}, "extra": RunsCode(function, argument.format(str(marker)))}, path)
    with pytest.raises(UnsafePickleError, match=named) as caught:
        read_torch_file(path)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def with_pickle(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
    return path


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x80\x02}r\xff\xff\xff\x7f.", UnsafePickleError),  # memo index of 2 GiB entries
        (b"\x80\x02]q\x00(h\x00h\x00e", DamagedError),  # no STOP
        (b"not a pickle", DamagedError),
        (pickle.dumps("x", 2)[:-1] + b"Q.", DamagedError),  # a persistent id that is no storage
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02tR.", DamagedError),
    ],
)
def test_broken_pickles_are_errors_of_ours(tmp_path: Path, data: bytes, error: type[CheckpointError]) -> None:
    with pytest.raises(error, match=r"data\.pkl"):
        read_torch_file(with_pickle(tmp_path / "a.pt", data))


def test_a_pickle_cannot_poke_at_the_stand_ins(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    poke = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__(K\x05K\x05ts\x86b."
    with pytest.raises(DamagedError, match="gives a state to"):
        read_torch_file(with_pickle(tmp_path / "evil.pt", poke))
    assert read_torch_file(tmp_path / "good.pt").content["w"].shape == (2,)


def test_every_cut_of_a_file_is_an_error(tmp_path: Path) -> None:
    torch.save({"model_state_dict": {"w": torch.ones(300)}}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in (*range(8, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match="cut short or still being written"):
            read_torch_file(path)


def test_a_flipped_byte_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(300)}, path)
    record = read_torch_file(path).content["w"].record
    data = bytearray(path.read_bytes())
    data[record.start + 5] ^= 1
    path.write_bytes(data)
    with path.open("rb") as file, pytest.raises(DamagedError, match="does not match its checksum"):
        read_record(path, file, record)


def test_a_damaged_directory_of_the_zip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(3)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 181  # a version of the format that nobody reads
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="cut short or still being written"):
        read_torch_file(path)


def test_a_file_that_grows_while_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(3)}, path)
    layout = read_torch_file(path)
    layout.require_unchanged()
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ChangedError, match="still being written"):
        layout.require_unchanged()


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))
    with pytest.raises(NotACheckpointError, match="compressed"):
        read_torch_file(tmp_path / "a.pt")


def test_a_tensor_outside_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(4, 4)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    members["a/data.pkl"] = members["a/data.pkl"].replace(b"K\x04K\x04\x86", b"K\x05K\x04\x86", 1)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(DamagedError, match="reaches outside its storage"):
        read_torch_file(path)


def test_what_is_not_a_checkpoint_is_said(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("hello, this is not a checkpoint")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "directory").mkdir()
    cases = {
        "old.pt": "save it again with today's torch.save",
        "text.pt": "neither a torch.save file nor",
        "empty.pt": "is empty",
        "directory": "has no config.json",
        "missing.pt": "does not exist",
    }
    for name, says in cases.items():
        with pytest.raises(CheckpointError, match=says) as caught:
            sniff(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "x")
    with pytest.raises(NotACheckpointError, match="is a zip but not a torch"):
        read_torch_file(tmp_path / "other.zip")


@pytest.mark.parametrize("damage", [lambda data: data[:-10], lambda data: b"\xff" * 8 + data, lambda data: data[:8]])
def test_damaged_safetensors_are_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 4, dtype=torch.bfloat16)}, path)
    assert read_safetensors_file(path).content["a"].shape == (3, 4)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedError):
        read_safetensors_file(path)


@pytest.mark.parametrize("places", [((0, 8), (0, 8)), ((0, 8), (4, 12)), ((0, 8), (12, 20)), ((4, 12), (12, 20))])
def test_tensors_of_a_safetensors_file_lie_one_behind_the_other(tmp_path: Path, places: tuple[tuple[int, int]]) -> None:
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in zip("ab", places, strict=True)
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(max(end for _, end in places)))
    with pytest.raises(DamagedError, match=r"tensor [ab] does not begin where the one before ends"):
        read_safetensors_file(path)


def test_tied_tensors_are_read_under_all_their_names(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path, metadata={"dflash.aliases": '{"b": "a"}', "dflash.training": '{"step": 3}'})
    layout = read_safetensors_file(path)
    assert layout.content["b"] == layout.content["a"]
    assert training_told(layout.metadata) == {"step": 3}
    for aliases in ('{"b": "c"}', '{"a": "a"}', "[1]", "{"):
        save_file({"a": torch.ones(3)}, path, metadata={"dflash.aliases": aliases, "dflash.training": "["})
        with pytest.raises(DamagedError, match=r"dflash\.aliases names no tensors"):
            read_safetensors_file(path)
    assert training_told({"dflash.training": "["}) == training_told({"dflash.training": "3"}) == training_told({}) == {}


def a_directory(path: Path, config: dict[str, Any], *files: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name in files:
        save_file({"w": torch.ones(2)}, path / name)
    return path


def test_layouts_are_told_apart_by_what_only_their_writer_leaves(tmp_path: Path) -> None:
    configs = {
        "zlab": {"dflash_config": {}, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}},
        "speculators": {"speculators_model_type": "dflash"},
        "torchspec": {"_torchspec_version": "1.0", "dflash_config": {}},
        "transformers": {"model_type": "muse_glimmer_assistant"},
    }
    for format, config in configs.items():
        assert sniff(a_directory(tmp_path / format, config, "model.safetensors")) == format
    torch.save({}, tmp_path / "a.pt")
    assert sniff(tmp_path / "a.pt") == "pt"
    step = a_directory(tmp_path / "step_1", {}, "drafter.safetensors")
    (step / "manifest.json").touch()
    assert sniff(step) == "step"


@pytest.mark.parametrize("left", ["drafter.safetensors", "training_state.pt"])
def test_a_step_without_its_manifest_is_still_being_written(tmp_path: Path, left: str) -> None:
    step = a_directory(tmp_path / "step_1", {})
    (step / left).touch()
    with pytest.raises(DamagedError, match=rf"has {left} and no manifest.json: .* still being written"):
        sniff(step)


def test_a_directory_that_is_no_checkpoint_is_said_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "run" / "step_900").mkdir(parents=True)
    with pytest.raises(NotACheckpointError, match=r"it holds checkpoints: give one of them, as .*step_900"):
        sniff(tmp_path / "run")
    pickled = a_directory(tmp_path / "pickled", {})
    (pickled / "pytorch_model.bin").touch()
    with pytest.raises(NotACheckpointError, match=r"no \*.safetensors file.*it holds config.json, pytorch_model.bin"):
        sniff(pickled)


def test_a_shard_with_a_name_that_no_file_has_is_an_error_that_names_the_index(tmp_path: Path) -> None:
    path = a_directory(tmp_path / "a", {}, "model-1.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(CheckpointError, match=rf"{index} cannot be read \(File name too long\)"):
        weight_files(path, "zlab")


def test_shards_are_those_the_index_names(tmp_path: Path) -> None:
    path = a_directory(tmp_path / "a", {}, "model-1.safetensors", "model-2.safetensors", "probe.safetensors")
    assert len(weight_files(path, "zlab")) == 3
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}}))
    assert [file.name for file in weight_files(path, "zlab")] == ["model-1.safetensors", "model-2.safetensors"]
    assert [file.name for file in files_of(path)] == [
        "model-1.safetensors", "model-2.safetensors", "config.json", "model.safetensors.index.json",
    ]  # fmt: skip
    for content, says in (
        ('{"weight_map": {"a": "model-9.safetensors"}}', "lists model-9.safetensors, which is not there"),
        ('{"weight_map": {"a": "../model-1.safetensors"}}', "names no file beside it"),
        ('{"weight_map": {}}', "names no file beside it"),
        ("[]", "is no index"),
    ):
        index.write_text(content)
        with pytest.raises(DamagedError, match=says):
            weight_files(path, "zlab")


def test_optimizer_state_is_not_among_what_an_evaluation_needs(tmp_path: Path) -> None:
    step = a_directory(tmp_path / "step_1", {}, "drafter.safetensors", "probe.safetensors")
    for name in ("manifest.json", "training_state.pt"):
        (step / name).touch()
    assert {file.name for file in files_of(step)} == {
        "config.json", "drafter.safetensors", "manifest.json", "probe.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "step"),
    [("a/step_400.pt", 400), ("kpro6:/runs/step_00500", 500), ("step-7", 7), ("step_3/final.pt", None), ("27b", None)],
)
def test_a_name_tells_its_step(path, step):
    assert step_in_name(path) == step
