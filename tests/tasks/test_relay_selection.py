"""What is wanted of a checkpoint, relayed: from a protected host behind its gate, and between files of this machine."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.checkpoint_layout import ChangedError, DamagedError
from dflash.errors import DFlashError, UsageError
from dflash.manifest import seal
from tasks.contents import SelectedFile, SourceError, unit_of
from tasks.ends import open_reader
from tasks.inventory import Location
from tasks.relay import RelayResult, Settings, estimate, plan_relay, relay
from tasks.relayable import look
from tasks.selection import What
from tasks.several import Several
from tasks.transfer import Receiver, SourceChangedError, StoredOtherwiseError, TransferError
from tests.sshds import Operator
from tests.tasks.selections import adam, assert_equal, weights

CONFIG = {"architectures": ["DFlashDraftModel"]}


@pytest.fixture(autouse=True)
def settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.relayable.SETTLING_SECONDS", 0.0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A training checkpoint of the old kind: weights and twice as much of the optimizer's, a config beside it."""
    folder = tmp_path / "source"
    folder.mkdir()
    state = weights()
    torch.save({"model_state_dict": state, "optimizer_state_dict": adam(state), "step": 7}, folder / "step_7.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder / "step_7.pt"


def here(path: Path) -> Location:
    return Location(None, str(path))


def relay_here(source: Path, destination: Path, what: What = "drafter", **settings: Any) -> RelayResult:
    """Without any host; nothing opens a connection."""
    connector: Any = None
    progress = settings.pop("progress", None)
    return relay(connector, None, here(source), here(destination), Settings(what=what, **settings), progress=progress)


def test_only_the_drafter_leaves_a_protected_host(operator: Operator, checkpoint: Path, tmp_path: Path) -> None:
    source = Location(operator.train, str(checkpoint))
    there = Location(operator.infer, str(tmp_path / "there"))
    plan = plan_relay([source], "the drafter is read")
    assert plan is not None
    request = operator.store.request(plan)
    approval = operator.store.approve(request.id, reason="test", ca_key=operator.site.ca_key).read
    result = relay(operator.connector, approval, source, there, Settings(what="drafter"))
    made = load_file(tmp_path / "there" / "model.safetensors")
    assert_equal(made, weights(prefix=""))
    assert json.loads((tmp_path / "there" / "config.json").read_text()) == CONFIG
    tensors = sum(tensor.nbytes for tensor in made.values())
    (end,) = operator.events("end")
    assert tensors <= end["bytes"] < tensors + 300_000 < 0.5 * checkpoint.stat().st_size
    assert (result.what, result.moved) == ("drafter", result.bytes)


def test_directory_with_the_name_of_a_file_is_no_refusal_of_the_gate(operator: Operator, tmp_path: Path) -> None:
    made = step(tmp_path)
    made.rename(tmp_path / "step_9.pt")
    plan = plan_relay([Location(operator.train, str(tmp_path / "step_9.pt"))], "it is read")
    assert plan is not None
    approval = operator.store.approve(operator.store.request(plan).id, reason="test", ca_key=operator.site.ca_key).read
    with pytest.raises(SourceError, match="is a directory, and only a file was asked for"):
        relay(operator.connector, approval, Location(operator.train, str(tmp_path / "step_9.pt")), here(tmp_path / "x"))


def test_more_than_was_asked_for_is_said_before_a_byte(operator: Operator, checkpoint: Path, tmp_path: Path) -> None:
    source = Location(operator.train, str(checkpoint))
    plan = plan_relay([source], "it is read", max_bytes=500_000)
    assert plan is not None
    approval = operator.store.approve(operator.store.request(plan).id, reason="test", ca_key=operator.site.ca_key).read
    with pytest.raises(SourceError, match=r"500 kB were asked for: ask for more with --max-bytes 1\.9"):
        relay(operator.connector, approval, source, here(tmp_path / "there"), Settings(what="drafter"))
    assert not (tmp_path / "there").exists()


def test_streams_tell_the_first_what_they_stored(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the destination takes the whole digest behind them."""
    told: dict[str, list[Any]] = {}
    begin = Receiver.begin

    def noting(receiver: Receiver, offset: int, length: int, others: Any = ()) -> None:
        told.setdefault(threading.current_thread().name, []).extend(others)
        begin(receiver, offset, length, others)

    monkeypatch.setattr(Receiver, "begin", noting)
    monkeypatch.setattr("tasks.streams.UNCONFIRMED_BYTES", 1)
    relay_here(checkpoint, tmp_path / "there.pt", "all", streams=2, range_bytes=100_000, bandwidth=1_500_000)
    first, second = (told.pop(name) for name in (threading.current_thread().name, "stream 2"))
    assert first
    assert not second
    assert (tmp_path / "there.pt").read_bytes() == checkpoint.read_bytes()


def test_wanted_twice_moves_once(checkpoint: Path, tmp_path: Path) -> None:
    first = relay_here(checkpoint, tmp_path / "there")
    assert first.moved == first.bytes > 0
    second = relay_here(checkpoint, tmp_path / "there")
    assert (second.moved, second.sha256) == (0, first.sha256)


def test_other_selection_of_the_same_source_is_not_taken_for_it(checkpoint: Path, tmp_path: Path) -> None:
    wide = relay_here(checkpoint, tmp_path / "there")
    narrow = relay_here(checkpoint, tmp_path / "there", dtype="bfloat16")
    assert narrow.moved > 0
    assert narrow.bytes < 0.7 * wide.bytes
    expected = {name: tensor.bfloat16() for name, tensor in weights(prefix="").items()}
    assert_equal(load_file(tmp_path / "there" / "model.safetensors"), expected)


def test_each_state_of_a_source_has_a_folder_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    first = relay_here(checkpoint, tmp_path / "there", by_identity=True)
    state = weights()
    state["module.norm.weight"] += 1
    torch.save({"model_state_dict": state}, checkpoint)
    second = relay_here(checkpoint, tmp_path / "there", by_identity=True)
    assert first.destination.path != second.destination.path
    made = load_file(Path(second.destination.path) / "model.safetensors")
    assert torch.equal(made["norm.weight"], state["module.norm.weight"])


@pytest.mark.parametrize("range_bytes", [1, 3000, 100_000])
def test_interrupted_relay_goes_on_with_the_records_that_are_missing(
    checkpoint: Path, tmp_path: Path, range_bytes: int
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total * 0.9:
            raise KeyboardInterrupt

    whole = relay_here(checkpoint, tmp_path / "once")
    with pytest.raises(KeyboardInterrupt):
        relay_here(checkpoint, tmp_path / "there", range_bytes=range_bytes, progress=interrupt)
    assert not (tmp_path / "there" / "model.safetensors").exists()
    rest = relay_here(checkpoint, tmp_path / "there", range_bytes=range_bytes)
    assert 0 < rest.moved < 0.5 * rest.bytes
    assert rest.sha256 == whole.sha256
    assert_equal(load_file(tmp_path / "there" / "model.safetensors"), weights(prefix=""))


def test_what_arrived_and_was_changed_since_is_found_and_moves_again(checkpoint: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total * 0.5:
            raise KeyboardInterrupt

    there = tmp_path / "there" / "step_7.pt"
    with pytest.raises(KeyboardInterrupt):
        relay_here(checkpoint, there, "all", range_bytes=100_000, progress=interrupt)
    (part,) = there.parent.iterdir()
    with part.open("r+b") as file:
        file.write(b"spoilt")
    with pytest.raises(StoredOtherwiseError, match=r"100000 bytes .* at 0 are not on the disk as they came"):
        relay_here(checkpoint, there, "all", range_bytes=100_000)
    assert list(there.parent.iterdir()) == [part]
    assert relay_here(checkpoint, there, "all", range_bytes=100_000).moved == checkpoint.stat().st_size
    assert there.read_bytes() == checkpoint.read_bytes()


@pytest.mark.parametrize("change", [lambda file: os.utime(file, (0, 0)), os.unlink], ids=["rewritten", "deleted"])
def test_source_that_changes_behind_its_last_byte_leaves_nothing_of_that_file(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    last = os.path.basename(relay_here(checkpoint, tmp_path / "once").files[-1].path)
    changed = []

    def progress(done: int, total: int) -> None:
        if done == total and not changed:
            changed.append(change(checkpoint))

    with pytest.raises((ChangedError, SourceChangedError)):
        relay_here(checkpoint, tmp_path / "there", progress=progress)
    assert not any(last in name for name in os.listdir(tmp_path / "there"))


def test_record_that_does_not_match_its_checksum_gets_no_name(checkpoint: Path, tmp_path: Path) -> None:
    content = bytearray(checkpoint.read_bytes())
    place = content.index(weights()["module.norm.weight"].numpy().tobytes())
    content[place] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(DamagedError, match="does not match its checksum"):
        relay_here(checkpoint, tmp_path / "there")
    assert not (tmp_path / "there" / "model.safetensors").exists()


def test_torch_file_with_holes_is_as_large_and_takes_no_space(checkpoint: Path, tmp_path: Path) -> None:
    result = relay_here(checkpoint, tmp_path / "there", output="pt")
    made = tmp_path / "there" / "step_7.pt"
    assert made.stat().st_size == checkpoint.stat().st_size
    assert made.stat().st_blocks * 512 < 0.6 * checkpoint.stat().st_size
    assert result.moved < 0.6 * checkpoint.stat().st_size
    assert_equal(torch.load(made, mmap=True, weights_only=True)["model_state_dict"], weights())


def step(folder: Path) -> Path:
    """A ``step_N/`` as the trainer writes it."""
    made = folder / "step_9"
    made.mkdir()
    save_file(weights(prefix=""), made / "drafter.safetensors")
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "training_state.pt").write_bytes(os.urandom(100_000))
    seal(made, step=9, metrics={}, recipe={})
    return made


def test_step_arrives_with_its_manifest_last_and_without_its_training_state(tmp_path: Path) -> None:
    made = step(tmp_path)
    result = relay_here(made, tmp_path / "there")
    names = [os.path.basename(file.path) for file in result.files]
    assert names[-1] == "manifest.json"
    assert "training_state.pt" not in names
    assert all((tmp_path / "there" / name).read_bytes() == (made / name).read_bytes() for name in names)


def test_all_of_a_directory_arrives(tmp_path: Path) -> None:
    made = step(tmp_path)
    relay_here(made, tmp_path / "there", what="all")
    for path in made.iterdir():
        assert (tmp_path / "there" / path.name).read_bytes() == path.read_bytes()


def test_file_of_a_step_that_is_not_what_its_manifest_says_gets_no_name(tmp_path: Path) -> None:
    made = step(tmp_path)
    content = bytearray((made / "drafter.safetensors").read_bytes())
    content[-1] ^= 1
    (made / "drafter.safetensors").write_bytes(content)
    with pytest.raises(DFlashError, match=r"its checkpoint says [0-9a-f]{64}: it is damaged at its source"):
        relay_here(made, tmp_path / "there")
    assert not any(".part-" in name or name == "drafter.safetensors" for name in os.listdir(tmp_path / "there"))


def test_checkpoint_that_is_still_written_is_not_relayed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.relayable.time.sleep", lambda seconds: os.utime(checkpoint, (0, 0)))
    with pytest.raises(ChangedError, match="between two looks: it is still being written"):
        relay_here(checkpoint, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_plan_tells_what_would_move(checkpoint: Path) -> None:
    connector: Any = None
    found = estimate(connector, None, here(checkpoint), Settings(what="drafter"))
    tensors = sum(tensor.nbytes for tensor in weights().values())
    assert found.source_bytes > checkpoint.stat().st_size
    assert tensors < found.moving_bytes < tensors + 300_000
    assert found.streams == 1


def test_ranges_that_an_earlier_relay_cut_otherwise_are_taken_up(checkpoint: Path, tmp_path: Path) -> None:
    """As when the store, whose chunks are small, was the way at first."""
    whole = relay_here(checkpoint, tmp_path / "once")

    def break_off(done: int, total: int) -> None:
        if done > total * 0.7:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.streams.PROGRESS_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            relay_here(checkpoint, tmp_path / "there", range_bytes=3000, progress=break_off)
    rest = relay_here(checkpoint, tmp_path / "there", range_bytes=100_000)
    # a pipe holds a MiB that was sent and is not confirmed
    assert 0 < rest.moved < 0.9 * rest.bytes
    assert rest.sha256 == whole.sha256


def test_range_that_cuts_a_record_is_none_of_this_selection(checkpoint: Path) -> None:
    connector: Any = None
    with open_reader(connector, here(checkpoint), None) as reader:
        place, selection = look(reader, here(checkpoint), what="drafter", dtype=None, output="safetensors")
        content = SelectedFile(here(checkpoint), place, selection.outputs[0], selection, 3000)
    spans = content.spans
    assert content.fits(spans)
    assert content.fits([(0, spans[0][1] + spans[1][1]), *spans[2:]])
    assert not content.fits([(0, spans[0][1] + 7), *spans[1:]])
    for offset, length in spans:
        unit = unit_of(content.output, offset, length)
        assert (unit.ranges(), unit.literal) == (content.units[offset].ranges(), content.units[offset].literal)


@pytest.mark.parametrize("what", ["all", "drafter"])
def test_source_is_not_replaced_by_what_is_made_of_it(checkpoint: Path, tmp_path: Path, what: What) -> None:
    """Also under another name of its folder; with holes in it, the checkpoint would be lost."""
    before = checkpoint.read_bytes()
    (tmp_path / "link").symlink_to(checkpoint.parent)
    place = tmp_path / "link" / checkpoint.name if what == "all" else tmp_path / "link"
    with pytest.raises(UsageError, match="is a file of the source itself, which would be replaced"):
        relay_here(checkpoint, place, what, output="safetensors" if what == "all" else "pt")
    assert checkpoint.read_bytes() == before
    assert sorted(os.listdir(checkpoint.parent)) == ["config.json", checkpoint.name]


def test_what_says_two_things_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for settings, message in (
        ({"dtype": "bfloat16"}, "all of it moves as it is, so --dtype has no say"),
        ({"output": "pt"}, "all of it moves as it is, so --output has no say"),
        ({"what": "model", "dtype": "bfloat16", "output": "pt"}, "cannot be changed on the way"),
    ):
        with pytest.raises(UsageError, match=message):
            Settings(**settings)  # type: ignore[arg-type]
    connector: Any = None
    with pytest.raises(UsageError, match="is named twice"):
        relay(connector, None, here(checkpoint), here(tmp_path / "a"), also=[here(tmp_path / "a")])


@pytest.mark.parametrize("name", ["step_7.pt", "model.safetensors"])
def test_checkpoint_that_is_cut_short_is_not_relayed_whole_either(checkpoint: Path, tmp_path: Path, name: str) -> None:
    cut = tmp_path / name
    save_file(weights(), tmp_path / "whole.safetensors")
    whole = checkpoint if name.endswith(".pt") else tmp_path / "whole.safetensors"
    cut.write_bytes(whole.read_bytes()[:-1000])
    with pytest.raises(DamagedError, match="cut"):
        relay_here(cut, tmp_path / "there", "all")
    assert not (tmp_path / "there").exists()


def test_checkpoint_in_one_file_that_is_still_written_is_not_relayed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.relayable.time.sleep", lambda seconds: os.utime(checkpoint, (0, 0)))
    with pytest.raises(ChangedError, match="between two looks: it is still being written"):
        relay_here(checkpoint, tmp_path / "there", "all")
    assert not (tmp_path / "there").exists()


def test_what_relays_left_beside_a_checkpoint_is_not_of_it(tmp_path: Path) -> None:
    made = step(tmp_path)
    relay_here(made, tmp_path / "one", "all")
    (tmp_path / "one" / f".training_state.pt.part-{'0' * 16}").write_bytes(b"of a broken relay")
    relay_here(tmp_path / "one", tmp_path / "two", "all")
    own = {path.name for path in made.iterdir()}
    assert {path.name for path in (tmp_path / "two").iterdir()} == own | {f"{name}.relay.json" for name in own}
    assert relay_here(tmp_path / "one", tmp_path / "two", "all").moved == 0


def test_links_to_files_are_followed_and_others_are_named(tmp_path: Path) -> None:
    """As a cache of downloads holds its files."""
    made, blobs = step(tmp_path), tmp_path / "blobs"
    blobs.mkdir()
    os.rename(made / "drafter.safetensors", blobs / "1234")
    (made / "drafter.safetensors").symlink_to("../blobs/1234")
    relay_here(made, tmp_path / "there", "all")
    assert (tmp_path / "there" / "drafter.safetensors").read_bytes() == (blobs / "1234").read_bytes()
    (made / "elsewhere").symlink_to(blobs)
    with pytest.raises(SourceError, match="holds elsewhere, which is no file"):
        relay_here(made, tmp_path / "there", "all")
    relay_here(made, tmp_path / "drafter", "drafter")


def relay_to_both(checkpoint: Path, tmp_path: Path, **options: Any) -> RelayResult:
    connector: Any = None
    first, second = here(tmp_path / "first"), here(tmp_path / "second")
    settings = Settings(what="drafter", range_bytes=3000)
    return relay(connector, None, here(checkpoint), first, settings, also=[second], **options)


def test_several_destinations_get_it_from_one_reading(checkpoint: Path, tmp_path: Path) -> None:
    read = []
    result = relay_to_both(checkpoint, tmp_path, progress=lambda done, total: read.append(done))
    for folder in ("first", "second"):
        assert_equal(load_file(tmp_path / folder / "model.safetensors"), weights(prefix=""))
        assert json.loads((tmp_path / folder / "config.json").read_text()) == CONFIG
    assert read[-1] == result.bytes


def test_destination_that_has_it_already_is_left_out(checkpoint: Path, tmp_path: Path) -> None:
    relay_here(checkpoint, tmp_path / "first")
    before = (tmp_path / "first" / "model.safetensors").stat().st_ino
    relay_to_both(checkpoint, tmp_path)
    assert (tmp_path / "first" / "model.safetensors").stat().st_ino == before
    assert_equal(load_file(tmp_path / "second" / "model.safetensors"), weights(prefix=""))
    assert relay_to_both(checkpoint, tmp_path).moved == 0


def test_stream_that_joins_leaves_out_who_has_it_already(checkpoint: Path, tmp_path: Path) -> None:
    connector: Any = None
    relay_here(checkpoint, tmp_path / "first.pt", "all")
    settings = Settings(streams=3, range_bytes=200_000, bandwidth=3_000_000)
    ends = here(tmp_path / "first.pt"), here(tmp_path / "second.pt")
    relay(connector, None, here(checkpoint), ends[0], settings, also=[ends[1]])
    assert (tmp_path / "second.pt").read_bytes() == checkpoint.read_bytes()


def test_destination_with_a_slash_at_its_end_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    connector: Any = None
    first, second = Location(None, f"{tmp_path}/first/"), here(tmp_path / "second")
    relay(connector, None, here(checkpoint), first, Settings(what="drafter"), also=[second])
    assert sorted(os.listdir(tmp_path / "second")) == sorted(os.listdir(tmp_path / "first"))


def test_destination_that_cannot_take_it_stops_all_and_the_rest_goes_on_later(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "second" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(DFlashError, match="is a directory"):
        relay_to_both(checkpoint, tmp_path)
    assert not (tmp_path / "first" / "model.safetensors").exists()
    (tmp_path / "second" / "model.safetensors").rmdir()
    relay_to_both(checkpoint, tmp_path)
    for folder in ("first", "second"):
        assert_equal(load_file(tmp_path / folder / "model.safetensors"), weights(prefix=""))


def test_interrupted_relay_to_several_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total * 0.7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        relay_to_both(checkpoint, tmp_path, progress=interrupt)
    rest = relay_to_both(checkpoint, tmp_path)
    assert 0 < rest.moved < 0.5 * rest.bytes
    assert_equal(load_file(tmp_path / "second" / "model.safetensors"), weights(prefix=""))


def test_destinations_that_end_with_different_files_are_no_success() -> None:
    ends: list[Any] = [
        SimpleNamespace(commit=lambda *_, digest=digest, **__: digest) for digest in ("a" * 64, "b" * 64)
    ]
    with pytest.raises(TransferError, match="took different digests"):
        Several(ends, ["/a", "/b"]).commit([], {}, reread=False)
    assert Several(ends[:1] * 2, ["/a", "/b"]).commit([], {}, reread=False) == "a" * 64
