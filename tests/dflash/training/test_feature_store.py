"""States on disk: what training reads there is what the target says, and what is not so is refused by name."""

import errno
import json
import stat
import subprocess  # another process holds the lock
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.hidden_states import HiddenStateError
from dflash.target import Target
from dflash.training import feature_store, features
from dflash.training.batch import Features
from dflash.training.feature_store import FeatureStoreError, FeatureWriter, checksum, even, plan_shards, read_index
from dflash.training.features import OnlineFeatures, StoredFeatures, Written, write_features
from tests.dflash.pairs import WORDS, write_target
from tests.dflash.training.documents import Documents, documents, rows_of

TAPS = (1, 3, 5)
LENGTHS = [70, 33, 50, 64, 9, 48]
TOKEN_BYTES = 4 * 32 * 4  # three taps and the last hidden state, 32 wide, float32
SHARD_BYTES = 110 * TOKEN_BYTES  # [70, 33] [50] [64, 9] [48] would be cut at 103, 50, 73, 48


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def texts() -> Documents:
    return documents(LENGTHS, vocabulary=len(WORDS))


@pytest.fixture(scope="module")
def store(target: Target, texts: Documents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("features") / "store"
    written(directory, target, texts)
    return directory


def written(directory: Path, target: Target, texts: Documents, *, soft: bool = True, **settings: Any) -> Written:
    return write_features(directory, target, texts, TAPS, soft=soft, **{"shard_bytes": SHARD_BYTES, **settings})


def opened(
    directory: Path,
    texts: Documents,
    layers: Sequence[int] = TAPS,
    *,
    soft: bool = True,
    dtype: torch.dtype = torch.float32,
    target: Path | None = None,
    kernel: str | None = None,
) -> StoredFeatures:
    return StoredFeatures.open(
        directory, texts, layers, soft=soft, device="cpu", dtype=dtype, target=target, kernel=kernel
    )


def assert_alike(found: Features, wanted: Features) -> None:
    """Everything but the states is equal, they are to 1e-5 of their size."""
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.loss_mask, wanted.loss_mask)
    assert torch.equal(found.starts, wanted.starts)
    assert found.samples == wanted.samples
    assert (found.taps - wanted.taps).abs().max() < 1e-5 * wanted.taps.abs().max()
    assert (found.hidden is None) == (wanted.hidden is None)
    if found.hidden is not None and wanted.hidden is not None:
        assert (found.hidden - wanted.hidden).abs().max() < 1e-5 * wanted.hidden.abs().max()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_stored_states_are_those_of_the_target(
    store: Path, target: Target, texts: Documents, packing: bool, soft: bool
) -> None:
    rows = rows_of(texts, [4, 0, 5, 3, 1, 2], length=128, packing=packing)
    found = opened(store, texts, soft=soft, target=Path(target.path), kernel="none").features(rows)
    assert_alike(found, OnlineFeatures(target, TAPS, soft=soft).features(rows))


def test_documents_of_a_hybrid_target_can_be_packed_after_they_went_through_it_alone(tmp_path: Path) -> None:
    hybrid, short = Target.load(write_target(tmp_path / "target", hybrid=True)), documents([7, 20, 3], vocabulary=60)
    written(tmp_path / "store", hybrid, short)
    found = opened(tmp_path / "store", short).features([[short[0], short[1], short[2]]])
    alone = [OnlineFeatures(hybrid, TAPS, soft=True).features([[text]]).taps[0] for text in short.samples]
    assert (found.taps[0] - torch.cat(alone)).abs().max() < 1e-5 * found.taps.abs().max()


def test_taps_can_be_fewer_than_stored_and_in_another_order(store: Path, target: Target, texts: Documents) -> None:
    rows = rows_of(texts, range(6), length=128, packing=False)
    found = opened(store, texts, (5, 1), soft=False).features(rows)
    assert_alike(found, OnlineFeatures(target, (5, 1), soft=False).features(rows))


def test_the_states_keep_the_targets_dtype_bit_for_bit(tmp_path: Path, texts: Documents) -> None:
    target = Target.load(write_target(tmp_path / "target"), dtype=torch.bfloat16)
    written(tmp_path / "store", target, texts)
    rows = [[texts[3]]]
    found = opened(tmp_path / "store", texts, dtype=torch.bfloat16).features(rows)
    assert found.taps.dtype == torch.bfloat16
    # the document had a pass of its own when it was written, so nothing is rounded otherwise
    assert torch.equal(found.taps, OnlineFeatures(target, TAPS, soft=True).features(rows).taps)


def test_samples_lie_whole_in_shards_of_the_size_asked_for() -> None:
    shards = plan_shards(LENGTHS, TOKEN_BYTES, shard_bytes=SHARD_BYTES)
    assert [(one.first, one.count, one.tokens) for one in shards] == [(0, 2, 103), (2, 1, 50), (3, 2, 73), (5, 1, 48)]
    assert [one.count for one in plan_shards([200, 5, 200], 1, shard_bytes=100)] == [1, 1, 1]
    assert len({one.file for one in shards}) == 4


def test_a_job_is_cut_finely_enough_to_be_shared() -> None:
    mebi = 1 << 20
    assert [even(size * mebi) for size in (1, 1000, 6400, 10**9)] == [16 * mebi, 16 * mebi, 100 * mebi, 1024 * mebi]


def test_whoever_may_read_the_index_may_read_the_states(store: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (store / "features.json", *store.glob("shard-*"))}
    assert len(modes) == 1
    assert modes.pop() & stat.S_IRUSR


def test_reading_ahead_gives_the_same(store: Path, texts: Documents) -> None:
    rows = rows_of(texts, range(6), length=128, packing=True)
    plain = opened(store, texts).features(rows)
    ahead = opened(store, texts)
    ahead.prefetch(rows)
    assert torch.equal(ahead.features(rows).taps, plain.taps)
    assert torch.equal(ahead.features(rows).taps, plain.taps)


def test_a_row_without_labels_is_not_mistaken_for_the_same_row_with_them(store: Path, texts: Documents) -> None:
    source = opened(store, texts)
    source.prefetch([[texts[0]]])
    blank = type(texts[0])(0, texts[0].ids, torch.zeros_like(texts[0].loss_mask))
    assert not source.features([[blank]]).loss_mask.any()


class InterruptedError(Exception):
    """Stands for a kill in the middle of the work."""


def test_writing_goes_on_where_it_was_stopped(
    tmp_path: Path, target: Target, texts: Documents, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, steps, ran = tmp_path / "store", [], []

    def stop(done: int, total: int) -> None:
        steps.append((done, total))
        if done == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        written(directory, target, texts, progress=stop)
    assert [done for done, _ in steps] == [0, 2, 2, 3, 3, 5]  # in the middle of the third shard
    with pytest.raises(
        FeatureStoreError, match=r"is not whole: 2 of 4 shards are missing, shard-00002.* goes on where"
    ):
        opened(directory, texts)
    (directory / ".shard-00002.safetensors.1").write_bytes(b"left by a process that died")
    monkeypatch.setattr(features, "target_states", counting(ran))
    steps.clear()
    done = written(directory, target, texts, progress=lambda done, total: steps.append((done, total)))
    assert (done.already, done.missing()) == (2, [])
    assert list(dict.fromkeys(steps)) == [(3, 6), (5, 6), (6, 6)]
    assert sorted(ran) == [3, 4, 5]
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {
        path.name: path.read_bytes() for path in store.iterdir()
    }


def counting(ran: list[int]) -> Any:
    """``target_states`` that notes which samples it was asked for."""
    plain = features.target_states

    def states(target: Target, layout: Any, *args: Any, **settings: Any) -> Any:
        ran.extend(sample for row in layout.samples for sample in row)
        return plain(target, layout, *args, **settings)

    return states


def test_a_shard_in_another_processs_hands_is_left_to_it(tmp_path: Path, target: Target, texts: Documents) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    hold = "import fcntl,sys\nf=open(sys.argv[1],'w')\nfcntl.lockf(f,fcntl.LOCK_EX,1,2)\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(directory / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert written(directory, target, texts).missing() == [2]
        other.communicate(b"\n")
    assert written(directory, target, texts).missing() == []  # the lock has ended with its process


def test_a_shard_that_another_process_has_just_finished_is_not_written_again(store: Path) -> None:
    writer = FeatureWriter(store, read_index(store))
    with writer.claimed(1) as mine:
        assert not mine


def test_a_full_disk_leaves_nothing_half_written_and_the_same_command_goes_on(
    tmp_path: Path, target: Target, texts: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "store"
    calls: list[Path] = []

    def full(tensors: Any, path: Path, **settings: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, **settings)

    monkeypatch.setattr(feature_store, "save_file", full)
    with pytest.raises(FeatureStoreError, match=r"shard-00001.* could not be written .*No space left.* free space and"):
        written(directory, target, texts)
    assert sorted(path.name for path in directory.iterdir()) == [".lock", "features.json", "shard-00000.safetensors"]
    assert written(directory, target, texts).already == 1
    opened(directory, texts)


def test_a_disk_with_too_little_room_is_refused_before_the_target_runs(
    tmp_path: Path, target: Target, texts: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr(features, "target_states", None)
    with pytest.raises(FeatureStoreError, match=r"the states of 274 tokens take 137 KiB, and 1000 B are free there"):
        written(tmp_path / "store", target, texts)


def test_a_directory_begun_for_other_states_is_left_alone(store: Path, target: Target, texts: Documents) -> None:
    with pytest.raises(FeatureStoreError, match=r"was begun for other states \(soft True, now False; shards"):
        written(store, target, texts, soft=False)
    with pytest.raises(FeatureStoreError, match=r"samples_sha256 of these documents, now of others\)"):
        written(store, target, Documents(texts.samples, "of others"))


def test_somebody_elses_directory_is_left_alone(tmp_path: Path, target: Target, texts: Documents) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FeatureStoreError, match=r"holds files and no features\.json"):
        written(tmp_path, target, texts)
    with pytest.raises(FeatureStoreError, match=r"has no features\.json; write it with dflash data features"):
        opened(tmp_path, texts)


def test_states_of_something_else_than_the_runs_are_refused(
    store: Path, texts: Documents, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for problem, settings in (
        ("of 6 other samples than the run's 6", {"texts": Documents(texts.samples, "of others")}),
        ("of 6 other samples than the run's 5", {"texts": Documents(texts.samples[:5])}),
        ("of the layers 1, 3, 5, and the drafter taps 2, 6 besides", {"layers": (1, 2, 6)}),
        ("in float32, and target.dtype is bfloat16", {"dtype": torch.bfloat16}),
        ("that the kernel none computed, and the run's is fla", {"kernel": "fla"}),
        ("of another target than", {"target": write_target(tmp_path / "other", hybrid=True)}),
    ):
        with pytest.raises(FeatureStoreError, match=problem):
            opened(store, **{"texts": texts, **settings})  # type: ignore[arg-type]


def test_soft_labels_need_the_last_hidden_states(tmp_path: Path, target: Target, texts: Documents) -> None:
    written(tmp_path / "store", target, texts, soft=False)
    assert "hidden" not in load_file(tmp_path / "store" / "shard-00000.safetensors")
    with pytest.raises(FeatureStoreError, match="without the last hidden states, which this loss needs"):
        opened(tmp_path / "store", texts)
    assert opened(tmp_path / "store", texts, soft=False).features([[texts[0]]]).hidden is None


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "shard-00002.* it is cut short or damaged"),
        (lambda path: save_file({"ids": torch.zeros(73).int()}, path), "borders is missing, expected int64"),
        (lambda path: edit(path, "borders", 1, 80), "its borders do not divide 73 tokens"),
        (lambda path: path.with_name("features.json").write_text('{"dflash_features": 2}'), "is no index of features"),
    ],
)  # fmt: skip
def test_a_damaged_directory_is_named_before_training_begins(
    tmp_path: Path, target: Target, texts: Documents, damage: Any, says: str
) -> None:
    written(tmp_path / "store", target, texts)
    damage(tmp_path / "store" / "shard-00002.safetensors")
    with pytest.raises(FeatureStoreError, match=says):
        opened(tmp_path / "store", texts)


def test_a_shard_of_another_directory_is_not_read_as_this_ones(
    tmp_path: Path, target: Target, texts: Documents
) -> None:
    """Same samples, same shapes, other layers: nothing but the shard's own word tells them apart."""
    written(tmp_path / "store", target, texts)
    write_features(tmp_path / "other", target, texts, (0, 2, 4), soft=True, shard_bytes=SHARD_BYTES)
    name = "shard-00001.safetensors"
    (tmp_path / "other" / name).replace(tmp_path / "store" / name)
    with pytest.raises(FeatureStoreError, match=r"shard-00001.* was written for another directory .* remove it and"):
        opened(tmp_path / "store", texts)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "load"}, "dtype: Input should be"),
        ({"dflash_features": 1}, "dflash_features: Input should be 2"),
        ({"hidden_size": -32}, "hidden_size: "),
        ({"shards": []}, "shards: "),
        ({"samples": 7}, "its shards are not those of 7 samples with 274 tokens"),
        ({"tokens": 275}, "its shards are not those of 6 samples with 275 tokens"),
    ],
)
def test_an_index_that_contradicts_itself_is_no_traceback(
    store: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    index = json.loads((store / "features.json").read_text())
    (tmp_path / "features.json").write_text(json.dumps(index | change))
    with pytest.raises(FeatureStoreError, match=rf"is no index of features of version 2 \(.*{says}"):
        read_index(tmp_path)


def edit(path: Path, name: str, place: int | slice, value: Any) -> None:
    """Change some numbers of a tensor in a file that stays well-formed."""
    tensors = load_file(path)
    tensors[name][place] = value
    save_file(tensors, path, metadata={"store": read_index(path.parent).digest})


def test_states_of_other_tokens_are_found_when_they_are_read(tmp_path: Path, target: Target, texts: Documents) -> None:
    written(tmp_path / "store", target, texts)
    edit(tmp_path / "store" / "shard-00002.safetensors", "ids", 70, 1 if int(texts[4].ids[6]) != 1 else 2)
    source = opened(tmp_path / "store", texts)
    source.features([[texts[3]]])
    source.prefetch([[texts[4]]])
    with pytest.raises(FeatureStoreError, match="the tokens stored for sample 4 are not the sample's"):
        source.features([[texts[4]]])


@pytest.mark.parametrize("name", ["taps", "hidden"])
def test_one_flipped_bit_in_a_state_is_found_when_it_is_read(
    tmp_path: Path, target: Target, texts: Documents, name: str
) -> None:
    written(tmp_path / "store", target, texts)
    path = tmp_path / "store" / "shard-00001.safetensors"
    states = load_file(path)[name].view(torch.int32)
    edit(path, name, slice(7, 8), states[7:8].bitwise_xor(1).view(torch.float32))
    source = opened(tmp_path / "store", texts)
    source.features([[texts[0], texts[1]]])
    with pytest.raises(FeatureStoreError, match=rf"shard-00001.*: the {name} of sample 2 are not what was written; is"):
        source.features([[texts[2]]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_of_all_bytes(dtype: torch.dtype) -> None:
    states = torch.arange(1, 12, dtype=dtype)
    alone = [states.clone() for _ in states]
    for place, one in enumerate(alone):
        one[place] = 0
    assert len({checksum(one) for one in [states, *alone]}) == 12
    largest = torch.tensor([2**63 - 1]).view(torch.bfloat16)
    assert checksum(torch.cat((largest, torch.ones(1, dtype=torch.bfloat16)))) < 0, "it wraps, and fits where it lies"


def test_a_state_that_is_not_finite_is_never_written(tmp_path: Path, texts: Documents) -> None:
    spoiled = write_target(tmp_path / "target")
    weights = load_file(spoiled / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][2] = torch.nan
    save_file(weights, spoiled / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        HiddenStateError, match=r"the hidden states of layer 3 .* weight model\.layers\.2\.mlp\.up_proj"
    ):
        written(tmp_path / "store", Target.load(spoiled), texts)
    assert not list((tmp_path / "store").glob("shard-*"))
