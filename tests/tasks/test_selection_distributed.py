"""Directories that torch.distributed.checkpoint writes, against what torch reads of them."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from dflash.checkpoint_layout import ChangedError, CheckpointError, DamagedError, UnsafePickleError
from dflash.checkpoints import read_checkpoint
from tasks.packing import NotContiguousError
from tasks.selection import select
from tasks.sources import LocalSource
from tests.tasks.selections import CountedSource, adam, assert_equal, weights, write_out
from tests.tasks.test_selection_directories import CONFIG, made, names

# what it says of a single process that saves alone
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(place: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, checkpoint_id=str(place), no_dist=True)
    return place


@pytest.fixture
def place(tmp_path: Path) -> Path:
    state = weights()
    return save(
        tmp_path / "step_7", {"model": state, "optimizer": adam(state), "config": CONFIG, "step": 7, "loss": 1.5}
    )


def test_the_model_arrives_as_a_directory_that_an_evaluation_reads(place: Path, tmp_path: Path) -> None:
    source = CountedSource(place)
    selection = select(source)
    out = write_out(selection, source, tmp_path / "out")
    assert (selection.format, selection.sealed) == ("dcp", True)
    assert names(out) == ["config.json", "model.safetensors"]
    relayed = read_checkpoint(out)
    assert_equal(relayed.weights, weights(""))
    assert relayed.training == {"step": 7, "loss": 1.5}
    assert relayed.raw_config == CONFIG
    assert source.moved == selection.moved_bytes


def test_moved_bytes_are_the_models(tmp_path: Path) -> None:
    state = {f"layers.{n}.weight": torch.randn(1024, 1024) for n in range(6)}
    source = CountedSource(save(tmp_path / "d", {"model": state, "optimizer": adam(state)}))
    found = load_file(write_out(select(source), source, tmp_path / "out") / "model.safetensors")
    assert_equal(found, state)
    assert source.moved <= 1.01 * sum(tensor.nbytes for tensor in state.values())


def test_it_is_what_torch_reads(tmp_path: Path) -> None:
    state = {
        "turned": torch.randn(20, 30).T,
        "row": torch.randn(40, 5)[3],
        "scalar": torch.tensor(2.5),
        "half": torch.randn(3, 3).bfloat16(),
        "long": torch.arange(6).reshape(2, 3),
        "empty": torch.zeros(0, 3),
    }
    source = LocalSource(save(tmp_path / "d", {"model": state}))
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in state.items()}}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    found = load_file(write_out(select(source, what="model"), source, tmp_path / "out") / "model.safetensors")
    assert_equal(found, {name: tensor.contiguous() for name, tensor in loaded["model"].items()})


@pytest.mark.parametrize(
    "content",
    [
        {"model_state_dict": {"w.a": torch.ones(2)}, "optimizer": {"x": torch.ones(3)}},
        {"app": {"model": {"w.a": torch.ones(2)}, "optim": {"x": torch.ones(3)}}},
        {"w.a": torch.ones(2), "optimizer": {"x": torch.ones(3)}, "train_state": {"y": torch.ones(1)}},
        {"model": {"_orig_mod.draft_model.w.a": torch.ones(2), "_orig_mod.target.w": torch.ones(3)}},
    ],
    ids=["model_state_dict", "app", "bare", "inside of a module"],
)
def test_the_model_is_found_under_its_usual_keys(tmp_path: Path, content: dict[str, Any]) -> None:
    found = load_file(made(save(tmp_path / "d", content), tmp_path / "out") / "model.safetensors")
    assert_equal(found, {"w.a": torch.ones(2)})


def test_all_of_it_is_the_directory(place: Path, tmp_path: Path) -> None:
    out = made(place, tmp_path / "out", what="all")
    for path in place.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


TWO_RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
whole = {"even": torch.randn(8, 5), "odd": torch.randn(7, 3), "one": torch.randn(1, 4), "bias": torch.randn(6)}
for name, axis in (("rows", 0), ("columns", 1)):
    state = {key: distribute_tensor(value, mesh, [Shard(axis if value.dim() > axis else 0)]) for key, value in whole.items()}
    state["both"] = distribute_tensor(torch.arange(12.0), mesh, [Replicate()])
    dcp.save({"model": state}, checkpoint_id=f"{folder}/{name}")
if rank == 0:
    torch.save(whole | {"both": torch.arange(12.0)}, f"{folder}/whole.pt")
dist.destroy_process_group()
"""  # noqa: E501


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [subprocess.Popen([sys.executable, "-c", TWO_RANKS, str(rank), str(folder)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    return folder


@pytest.mark.slow
def test_what_two_ranks_sharded_is_put_together_on_the_way(two_ranks: Path, tmp_path: Path) -> None:
    source = LocalSource(two_ranks / "rows")
    assert len(list((two_ranks / "rows").glob("*.distcp"))) == 2
    whole = torch.load(two_ranks / "whole.pt")
    found = load_file(write_out(select(source), source, tmp_path / "out", most=64) / "model.safetensors")
    assert_equal(found, whole)
    narrow = load_file(write_out(select(source, dtype="bfloat16"), source, tmp_path / "narrow") / "model.safetensors")
    assert_equal(narrow, {name: tensor.bfloat16() for name, tensor in whole.items()})


@pytest.mark.slow
def test_shards_along_another_axis_are_refused(two_ranks: Path) -> None:
    with pytest.raises(NotContiguousError, match="even is sharded along another axis than its first"):
        select(LocalSource(two_ranks / "columns"))


def rewrite(place: Path, change: Any) -> None:
    path = place / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


FC, NORM = "model.module.fc.weight", "model.module.norm.weight"


def item(metadata: Metadata, name: str = FC) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def swap(metadata: Metadata) -> None:
    places = {FC: item(metadata, NORM), NORM: item(metadata)}
    metadata.storage_data = {index: places.get(index.fqn, info) for index, info in metadata.storage_data.items()}


def move(metadata: Metadata, by: int) -> None:
    item(metadata).offset += by
    item(metadata).length -= by


def lengthen(metadata: Metadata) -> None:
    max(metadata.storage_data.values(), key=lambda info: info.offset).length += 1


def grow(metadata: Metadata) -> None:
    told = metadata.state_dict_metadata[FC]
    told.size = torch.Size([told.size[0] + 1, told.size[1]])


def repeat(metadata: Metadata) -> None:
    metadata.state_dict_metadata[FC].chunks *= 2


DAMAGES = {
    "an item past the end": (lengthen, "has .* bytes, .metadata describes"),
    "items that overlap": (lambda metadata: move(metadata, -9), "share the bytes"),
    "an item outside": (lambda metadata: setattr(item(metadata), "relative_path", "../x"), "lies outside"),
    "the item of another tensor": (swap, "is not the float32"),
    "an item that begins in the middle": (lambda metadata: move(metadata, 1), "item at"),
    "compressed items": (lambda metadata: setattr(item(metadata), "transform_descriptors", ["zstd"]), "compressed"),
    "a tensor larger than its items": (grow, "are not all of it"),
    "a negative offset": (lambda metadata: setattr(item(metadata), "offset", -5), "no tuple of numbers"),
    "one item twice": (repeat, "belongs to two"),
    "no file": (lambda metadata: setattr(item(metadata), "relative_path", "__9_0.distcp"), "has no __9_0.distcp"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_metadata_that_lies_is_named(place: Path, damage: str) -> None:
    change, says = DAMAGES[damage]
    rewrite(place, change)
    with pytest.raises(CheckpointError, match=says):
        select(LocalSource(place))


@pytest.mark.parametrize("planned", [None, {"step": (), "model.module.fc.weight": ()}], ids=["none", "empty"])
def test_names_are_split_where_no_keys_are_told(place: Path, tmp_path: Path, planned: Any) -> None:
    rewrite(place, lambda metadata: setattr(metadata, "planner_data", planned))
    found = load_file(made(place, tmp_path / "out") / "model.safetensors")
    assert_equal(found, weights(""))


def as_shards(metadata: Metadata, *offsets: tuple[int, int]) -> None:
    """Make the tensors ``0``, ``1``, … shards of one tensor ``w`` at ``offsets``, as ranks would have saved them."""
    chunks = []
    for number, offset in enumerate(offsets):
        told = metadata.state_dict_metadata.pop(f"model.{number}")
        index = next(index for index in metadata.storage_data if index.fqn == f"model.{number}")
        info = metadata.storage_data.pop(index)
        metadata.storage_data[MetadataIndex("model.w", offset, number)] = info
        chunks.append(ChunkStorageMetadata(torch.Size(offset), told.size))
    shape = [max(chunk.offsets[axis] + chunk.sizes[axis] for chunk in chunks) for axis in range(2)]
    metadata.state_dict_metadata["model.w"] = TensorStorageMetadata(told.properties, torch.Size(shape), chunks)
    metadata.planner_data = {"model.w": ("model", "w")}


def test_shards_of_rows_become_one_tensor_whatever_their_order(tmp_path: Path) -> None:
    whole = torch.randn(10, 6)
    place = save(tmp_path / "d", {"model": {"0": whole[7:], "1": whole[:3], "2": whole[3:7]}})
    rewrite(place, lambda metadata: as_shards(metadata, (7, 0), (0, 0), (3, 0)))
    loaded = {"model": {"w": torch.zeros(10, 6)}}
    dcp.load(loaded, checkpoint_id=str(place), no_dist=True)
    assert torch.equal(loaded["model"]["w"], whole)
    assert_equal(load_file(made(place, tmp_path / "out") / "model.safetensors"), {"w": whole})


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        (((0, 0), (4, 0)), "leave out or repeat row 3"),
        (((0, 0), (2, 0)), "leave out or repeat row 3"),
        (((0, 0), (0, 6)), "sharded along another axis"),
        (((1, 0), (4, 0)), "leave out or repeat row 0"),
    ],
)
def test_shards_that_do_not_make_the_tensor_are_named(
    tmp_path: Path, offsets: tuple[tuple[int, int], ...], says: str
) -> None:
    place = save(tmp_path / "d", {"model": {"0": torch.ones(3, 6), "1": torch.ones(3, 6)}})
    rewrite(place, lambda metadata: as_shards(metadata, *offsets))
    with pytest.raises(CheckpointError, match=says):
        select(LocalSource(place))


def test_metadata_that_would_run_code_is_named_and_not_run(place: Path, tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    rewrite(place, lambda metadata: setattr(metadata, "planner_data", Runs()))
    with pytest.raises(UnsafePickleError, match=r"its pickle names builtins\.exec"):
        select(LocalSource(place))
    assert not (tmp_path / "ran").exists()


def test_a_directory_without_its_metadata_is_still_being_written(place: Path) -> None:
    (place / ".metadata").unlink()
    with pytest.raises(DamagedError, match=r"has __0_0\.distcp and no \.metadata"):
        select(LocalSource(place))


def test_new_metadata_is_a_change(place: Path) -> None:
    selection = select(LocalSource(place))
    selection.require_unchanged(LocalSource(place).look())
    (place / ".metadata").write_bytes((place / ".metadata").read_bytes())
    with pytest.raises(ChangedError, match=r"\.metadata changed"):
        selection.require_unchanged(LocalSource(place).look())


def test_a_cut_file_is_named(place: Path) -> None:
    data = (place / "__0_0.distcp").read_bytes()
    (place / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(DamagedError, match="cut short or still being written"):
        select(LocalSource(place))


def test_a_flipped_byte_is_found_on_the_way(place: Path, tmp_path: Path) -> None:
    tensor = weights()["module.fc.weight"].numpy().tobytes()
    data = bytearray((place / "__0_0.distcp").read_bytes())
    data[data.index(tensor) + 100] ^= 1
    (place / "__0_0.distcp").write_bytes(data)
    source = LocalSource(place)
    selection = select(source)
    with pytest.raises(DamagedError, match="does not match its checksum"):
        write_out(selection, source, tmp_path / "out")
