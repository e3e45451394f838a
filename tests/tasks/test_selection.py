"""Of a torch file only what is wanted is read, and what is made of it is what torch and safetensors read."""

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dflash.checkpoint_layout import ChangedError, CheckpointError, NotACheckpointError, read_safetensors_file
from dflash.checkpoints import read_checkpoint
from tasks.packing import LARGEST_GATHERED, NotContiguousError
from tasks.repack import Repack
from tasks.selection import select
from tasks.sources import LocalSource, require_settled
from tests.tasks.selections import DRAFTER, CountedSource, adam, assert_equal, weights, write_out


def save(path: Path, state: dict[str, torch.Tensor], **more: Any) -> Path:
    torch.save({"model_state_dict": state, **more}, path)
    return path


def drafter_of(path: Path, folder: Path, **how: Any) -> dict[str, torch.Tensor]:
    """The tensors that safetensors reads out of what is made of ``path``."""
    source = LocalSource(path)
    return load_file(write_out(select(source, **how), source, folder) / "model.safetensors")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = weights()
    config = json.loads((DRAFTER / "config.json").read_text())
    path = tmp_path_factory.mktemp("run") / "step_400.pt"
    return save(path, state, optimizer_state_dict=adam(state), config=config, step=400, loss=2.5, kernel="torch")


def test_no_torch_is_imported() -> None:
    code = "import sys, tasks.selection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_drafter_arrives_as_a_directory_that_an_evaluation_reads(checkpoint: Path, tmp_path: Path) -> None:
    source = LocalSource(checkpoint)
    write_out(select(source), source, tmp_path / "out")
    whole, relayed = read_checkpoint(checkpoint), read_checkpoint(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert_equal(relayed.weights, whole.weights)
    assert relayed.config == whole.config
    assert relayed.step == 400
    assert relayed.training == whole.training == {"step": 400, "loss": 2.5, "kernel": "torch"}


def test_moved_bytes_are_the_drafters(tmp_path: Path) -> None:
    state = {f"module.layers.{n}.weight": torch.randn(1024, 1024) for n in range(8)}
    path = save(tmp_path / "step_1.pt", state, optimizer_state_dict=adam(state))
    source = CountedSource(path)
    selection = select(source)
    planned = source.moved
    write_out(selection, source, tmp_path / "out")
    drafter = sum(tensor.nbytes for tensor in state.values())
    assert path.stat().st_size > 2.9 * drafter
    assert source.moved == selection.moved_bytes <= 1.01 * drafter
    assert selection.planned == planned
    assert len(source.questions) < 50
    assert len(selection.outputs[0].ranges()) == 1


def test_planning_asks_few_questions_however_many_records_there_are(checkpoint: Path) -> None:
    source = CountedSource(checkpoint)
    select(source)
    assert len(source.questions) == 6


@pytest.mark.parametrize("most", [1, 7, 64, 1000, 4096, 10_000, 1 << 20])
def test_ranges_can_be_cut_anywhere(checkpoint: Path, tmp_path: Path, most: int) -> None:
    small = tmp_path / "small.pt"
    save(small, {"a": torch.randn(300), "b": torch.randn(5), "c": torch.arange(7), "t": torch.randn(3, 4).T})
    for how in ({}, {"dtype": "bfloat16"}, {"output": "pt"}):
        source = LocalSource(small)
        selection = select(source, **how)  # type: ignore[arg-type]
        whole = write_out(selection, source, tmp_path / "whole")
        cut = write_out(selection, source, tmp_path / "cut", most=most)
        for output in selection.outputs:
            assert (cut / output.name).read_bytes() == (whole / output.name).read_bytes()
            planned = output.ranges(most)
            assert all(one.length <= max(most, 64) for one in planned)
            assert sum(one.size for one in planned) + sum(len(data) for _, data in output.literals) <= output.size


@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16"}, {"output": "pt"}])
def test_bytes_may_come_in_pieces_of_any_size(checkpoint: Path, how: dict[str, Any]) -> None:
    data = checkpoint.read_bytes()
    chance = random.Random(0)
    for output in select(LocalSource(checkpoint), **how).outputs:
        if output.name == "config.json":
            continue
        for planned in output.ranges():
            whole, pieces = Repack(planned), Repack(planned)
            wanted = data[planned.offset : planned.offset + planned.length]
            made, at = bytearray(), 0
            while at < len(wanted):
                length = chance.randrange(1, 5000)
                made += b"".join(pieces.feed(wanted[at : at + length]))
                at += length
            assert made == b"".join(whole.feed(wanted))
            assert pieces.finish() == whole.finish()
            assert len(made) == planned.size


def test_dtypes_of_all_widths_are_aligned_and_equal(tmp_path: Path) -> None:
    state = {
        "flag": torch.tensor([True, False, True]),
        "byte": torch.arange(4, dtype=torch.uint8),
        "double": torch.randn(3, dtype=torch.float64),
        "half": torch.randn(7).half(),
        "brain": torch.randn(9).bfloat16(),
        "long": torch.arange(4),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "eight": torch.randn(6).to(torch.float8_e4m3fn),
        "short": torch.arange(3, dtype=torch.int16),
    }
    found = drafter_of(save(tmp_path / "a.pt", state), tmp_path / "out")
    assert_equal(found, state)
    tensors = read_safetensors_file(tmp_path / "out" / "model.safetensors").content
    assert all(tensors[name].record.start % tensor.element_size() == 0 for name, tensor in state.items())


def test_floats_are_narrowed_as_torch_does(tmp_path: Path) -> None:
    patterns = torch.randint(-(2**31), 2**31 - 1, (50_000,), dtype=torch.int32, generator=torch.manual_seed(0))
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x7F800001], dtype=torch.int32)
    state = {
        "any": torch.cat([patterns, ties]).view(torch.float32),
        "double": torch.randn(1000, dtype=torch.float64) * 1e30,
        "huge": torch.tensor([1e300, -1e300], dtype=torch.float64),
        "half": torch.randn(1000).half(),
        "brain": torch.randn(5).bfloat16(),
        "counter": torch.arange(6),
        "turned": torch.randn(30, 20).T,
    }
    found = drafter_of(save(tmp_path / "a.pt", state), tmp_path / "out", dtype="bfloat16")
    for name, tensor in state.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name].isnan(), expected.isnan())
        assert torch.equal(found[name].nan_to_num(0.5), expected.nan_to_num(0.5)), name


def test_tied_tensors_are_stored_once_and_read_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    path = save(tmp_path / "a.pt", {"head.weight": weight, "embed.weight": weight})
    found = drafter_of(path, tmp_path / "out")
    assert list(found) == ["head.weight"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["dflash.aliases"]) == {"embed.weight": "head.weight"}
    tensors = read_safetensors_file(tmp_path / "out" / "model.safetensors").content
    assert tensors["embed.weight"] == tensors["head.weight"]


def test_views_of_one_storage_come_out_contiguous(tmp_path: Path) -> None:
    whole = torch.randn(30, 40)
    state = {"q": whole[:10], "k": whole[10:20], "v": whole[20:], "unused": torch.ones(1)}
    for more in (
        {},
        {"turned": whole.T},
        {"column": whole[:, 3]},
        {"overlap": whole[5:15]},
        {"steps": whole[::2, ::3]},
    ):
        path = save(tmp_path / "a.pt", state | more)
        assert_equal(
            drafter_of(path, tmp_path / "out"), {name: one.contiguous() for name, one in (state | more).items()}
        )
    for parts in ({"middle": whole[10:20], "last": whole[25:]}, {"first": whole[:5]}):
        assert_equal(drafter_of(save(tmp_path / "b.pt", parts), tmp_path / "out"), parts)


def test_a_large_tensor_that_is_not_contiguous_is_named_and_moves_as_a_torch_file(tmp_path: Path) -> None:
    rows = LARGEST_GATHERED // 4000 + 1
    path = save(tmp_path / "a.pt", {"w": torch.zeros(rows, 1000).T})
    with pytest.raises(NotContiguousError, match=r"a/data/0 .* save them with \.contiguous\(\)"):
        select(LocalSource(path))
    select(LocalSource(path), output="pt")


def test_an_expanded_tensor_does_not_fill_a_disk(tmp_path: Path) -> None:
    with pytest.raises(NotContiguousError):
        select(LocalSource(save(tmp_path / "a.pt", {"w": torch.zeros(1).expand(10**12)})))


def test_a_torch_file_with_holes_loads_in_both_ways_and_takes_no_room(tmp_path: Path) -> None:
    state = {f"layers.{n}.weight": torch.randn(512, 512) for n in range(4)}
    path = save(tmp_path / "step_1.pt", state, optimizer_state_dict=adam(state), step=1)
    source = CountedSource(path)
    selection = select(source, output="pt")
    made = write_out(selection, source, tmp_path / "out") / "step_1.pt"
    assert made.stat().st_size == path.stat().st_size
    assert made.stat().st_blocks * 512 < 0.4 * path.stat().st_size
    assert source.moved <= 1.05 * sum(tensor.nbytes for tensor in state.values())
    for mmap in (False, True):
        loaded = torch.load(made, mmap=mmap, weights_only=True)
        assert_equal(loaded["model_state_dict"], state)
        assert loaded["step"] == 1
        assert not loaded["optimizer_state_dict"]["state"][0]["exp_avg"].any()


def test_holes_may_be_small_and_lie_between_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    state = {"w": torch.randn(10), "v": torch.randn(3)}
    torch.save({"before": torch.ones(10), "model_state_dict": state, "after": torch.ones(5)}, path)
    source = LocalSource(path)
    made = write_out(select(source, output="pt"), source, tmp_path / "out") / "a.pt"
    loaded = torch.load(made, weights_only=True)
    assert_equal(loaded["model_state_dict"], state)
    assert not loaded["before"].any()
    assert not loaded["after"].any()


def test_a_torch_file_with_holes_is_a_checkpoint_to_an_evaluation(checkpoint: Path, tmp_path: Path) -> None:
    source = LocalSource(checkpoint)
    made = write_out(select(source, output="pt"), source, tmp_path / "out") / checkpoint.name
    assert_equal(read_checkpoint(made).weights, read_checkpoint(checkpoint).weights)


def test_all_of_a_file_is_the_file(checkpoint: Path, tmp_path: Path) -> None:
    source = LocalSource(checkpoint)
    made = write_out(select(source, what="all"), source, tmp_path / "out")
    assert (made / checkpoint.name).read_bytes() == checkpoint.read_bytes()
    with pytest.raises(CheckpointError, match="all of a checkpoint moves as it is"):
        select(source, what="all", dtype="bfloat16")


def test_the_drafter_is_found_inside_of_a_trainers_module(tmp_path: Path) -> None:
    inner = weights("module.draft_model.")
    path = save(tmp_path / "a.pt", inner | {"module.target_model.embed_tokens.weight": torch.randn(10, 10)})
    assert_equal(drafter_of(path, tmp_path / "out"), weights(""))
    model = drafter_of(path, tmp_path / "model", what="model")
    assert sorted(model) == sorted([*inner, "module.target_model.embed_tokens.weight"])


def test_names_that_become_one_without_prefixes_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"module.w": torch.ones(2), "_orig_mod.w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="w is there twice once prefixes are stripped"):
        select(LocalSource(path))


def test_other_names_for_the_weights_are_known(tmp_path: Path) -> None:
    tensor = torch.randn(3)
    for number, content in enumerate(({"state_dict": {"w": tensor}}, {"model": {"w": tensor}}, {"w": tensor})):
        torch.save(content, tmp_path / f"{number}.pt")
        assert_equal(drafter_of(tmp_path / f"{number}.pt", tmp_path / f"out{number}"), {"w": tensor})
    torch.save({"optimizer": {}, "step": 3}, tmp_path / "none.pt")
    with pytest.raises(
        NotACheckpointError, match="holds keys optimizer, step, expected tensors under model_state_dict"
    ):
        select(LocalSource(tmp_path / "none.pt"))


def test_the_config_beside_travels_along_when_the_file_has_none(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", weights(), config={"lr": 1e-3})
    shutil.copy(DRAFTER / "config.json", tmp_path)
    source = LocalSource(path)
    write_out(select(source), source, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (DRAFTER / "config.json").read_bytes()


def test_zip64_directories_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.pt", {"a": torch.randn(40), "b": torch.randn(2, 3)})
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 8)
    with zipfile.ZipFile(tmp_path / "large.pt", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert b"\xff\xff\xff\xff" in (tmp_path / "large.pt").read_bytes()[-2000:]
    assert_equal(drafter_of(tmp_path / "large.pt", tmp_path / "out"), torch.load(path)["model_state_dict"])


class Holes:
    """A file that torch.save writes to and that keeps no room for zeros."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._zeros = bytes(1 << 20)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), 1 << 20):
            block = view[begin : begin + (1 << 20)]
            if block == self._zeros[: len(block)]:
                self._file.seek(len(block), os.SEEK_CUR)
            else:
                self._file.write(block)
        self._file.truncate(max(self._file.tell(), 0))
        return len(view)

    def flush(self) -> None:
        self._file.flush()


@pytest.mark.slow
def test_a_drafter_behind_more_than_four_gigabytes_is_found(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000, 1000), "v": torch.randn(10)}
    path = tmp_path / "a.pt"
    target = Holes(path)
    torch.save({"optimizer_state_dict": {"large": torch.zeros(1_250_000_000)}, "model_state_dict": state}, target)
    target.flush()
    assert path.stat().st_size > 5 * 10**9
    source = CountedSource(path)
    found = write_out(select(source), source, tmp_path / "out") / "model.safetensors"
    assert_equal(load_file(found), state)
    assert source.moved < 1.03 * 4_000_040
    made = write_out(select(source, output="pt"), source, tmp_path / "out") / "a.pt"
    assert_equal(torch.load(made, mmap=True, weights_only=True)["model_state_dict"], state)


def test_the_identity_is_of_the_content(tmp_path: Path) -> None:
    weight = torch.randn(4)
    identities = []
    for name, tensor in (("a", weight), ("b", weight), ("c", weight + 1)):
        (tmp_path / name).mkdir()
        path = save(tmp_path / name / "step_1.pt", {"w": tensor})
        identities.append(select(LocalSource(path)).identity)
    assert identities[0].startswith("zip:")
    assert identities[0] == identities[1] != identities[2]


def test_a_file_without_checksums_is_known_by_its_time(tmp_path: Path) -> None:
    state = {"w": torch.randn(4), "v": torch.randn(5)}
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path / "a.pt", state)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_equal(drafter_of(path, tmp_path / "out"), state)
    first = select(LocalSource(path)).identity
    os.utime(path, ns=(0, 10**18))
    assert select(LocalSource(path)).identity != first


def test_what_changes_between_two_looks_is_still_being_written(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"w": torch.randn(4)})
    source = LocalSource(path)
    selection = select(source)
    first = source.look()
    require_settled(str(path), first, source.look())
    selection.require_unchanged(source.look())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ChangedError, match=r"config\.json appeared between two looks"):
        require_settled(str(path), first, source.look())
    selection.require_unchanged(source.look())
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ChangedError, match=r"a\.pt changed \(from \d+ to \d+ bytes\)"):
        selection.require_unchanged(source.look())
    path.unlink()
    with pytest.raises(ChangedError, match=r"a\.pt vanished"):
        selection.require_unchanged(source.look())
