"""The journal of a transfer: what it keeps over a crash, and what it does not believe."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import journal
from tasks.journal import Journal, JournalError, OnItsWayError

SPANS = [(0, 10), (10, 10), (20, 5)]
DIGEST = "a" * 64


def opened(folder: Path, *, identity: str = "state 1", spans: list[tuple[int, int]] = SPANS) -> Journal:
    with journal.opened(
        "train:/a", "infer:/b", identity, sum(length for _, length in spans), spans, folder=folder
    ) as notes:
        return notes


def test_what_arrived_is_known_after_a_crash(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.sent(first.spans[0], DIGEST)
    first.stored(first.spans[0])
    first.sent(first.spans[1], DIGEST)
    second = opened(tmp_path)
    assert second.transfer == first.transfer
    assert [(span.sha256, span.stored) for span in second.spans] == [(DIGEST, True), (DIGEST, False), (None, False)]


def test_ranges_stay_those_the_transfer_was_begun_with(tmp_path: Path) -> None:
    opened(tmp_path)
    assert [(span.offset, span.length) for span in opened(tmp_path, spans=[(0, 25)]).spans] == SPANS


def test_another_state_of_the_source_is_another_transfer(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.sent(first.spans[0], DIGEST)
    for changed in (opened(tmp_path, identity="state 2"), opened(tmp_path, identity="state 2", spans=[(0, 7)])):
        assert changed.transfer != first.transfer
        assert all(span.sha256 is None for span in changed.spans)


def test_removed_journal_begins_anew(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.remove()
    assert opened(tmp_path).transfer != first.transfer


def test_lost_range_moves_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.sent(first.spans[0], DIGEST)
    first.stored(first.spans[0])
    first.lost(first.spans[0])
    assert not opened(tmp_path).spans[0].stored


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content | {"version": 2},
        lambda content: content | {"size": 24},
        lambda content: content | {"transfer": "../../etc"},
        lambda content: content | {"extra": 1},
        lambda content: content | {"spans": content["spans"][::-1]},
        lambda content: content | {"spans": [{**content["spans"][0], "stored": True}, *content["spans"][1:]]},
    ],
)
def test_journal_that_cannot_be_believed_is_none(tmp_path: Path, damage: Callable[[dict[str, object]], object]) -> None:
    first = opened(tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    assert opened(tmp_path).transfer != first.transfer


def test_cut_off_journal_is_none(tmp_path: Path) -> None:
    first = opened(tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_bytes(file.read_bytes()[:-5])
    assert opened(tmp_path).transfer != first.transfer


def test_journal_of_another_file_is_none(tmp_path: Path) -> None:
    """Copied, restored from a backup under the wrong name, or put there."""
    first = opened(tmp_path)
    with journal.opened("train:/other", "infer:/b", "state 1", 25, SPANS, folder=tmp_path) as other:
        other.sent(other.spans[0], DIGEST)
        other.stored(other.spans[0])
        files = {transfer: file for file in tmp_path.glob("*.json") if (transfer := journal.transfer_of(file))}
    files[first.transfer].write_bytes(files[other.transfer].read_bytes())
    again = opened(tmp_path)
    assert again.transfer not in files
    assert not any(span.stored for span in again.spans)


@pytest.mark.parametrize("torn", [b"1 aaaa", b"7 " + b"a" * 64 + b" stored\n", b"\0" * 50, b"1 " + b"a" * 64 + b" sto"])
def test_line_that_was_being_written_counts_for_nothing(tmp_path: Path, torn: bytes) -> None:
    first = opened(tmp_path)
    first.sent(first.spans[0], DIGEST)
    first.stored(first.spans[0])
    (file,) = tmp_path.glob("*.json")
    with file.open("ab") as journal_file:
        journal_file.write(torn)
    second = opened(tmp_path)
    assert second.transfer == first.transfer
    assert [span.stored for span in second.spans] == [True, False, False]
    second.sent(second.spans[1], DIGEST)
    second.stored(second.spans[1])
    assert [span.stored for span in opened(tmp_path).spans] == [True, True, False]


def test_what_is_taken_back_stays_so(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for span in first.spans:
        first.sent(span, DIGEST)
        first.stored(span)
    first.begin_anew()
    first.sent(first.spans[2], DIGEST)
    assert [(span.sha256, span.stored) for span in opened(tmp_path).spans] == [(None, False)] * 2 + [(DIGEST, False)]


def test_a_note_costs_a_line_however_many_ranges_there_are(tmp_path: Path) -> None:
    many = opened(tmp_path, spans=[(offset, 1) for offset in range(20_000)])
    (file,) = tmp_path.glob("*.json")
    before, inode = file.stat().st_size, file.stat().st_ino
    for span in many.spans[:100]:
        many.sent(span, DIGEST)
        many.stored(span)
    assert file.stat().st_ino == inode
    assert file.stat().st_size - before < 100 * 2 * 100
    again = journal.read(file)
    assert again is not None
    assert sum(span.stored for span in again.spans) == 100


def test_names_need_not_be_text(tmp_path: Path) -> None:
    with journal.opened("/\udcff\n", "infer:/\udcfe", "state \udcff", 25, SPANS, folder=tmp_path) as notes:
        notes.sent(notes.spans[0], DIGEST)
    with journal.opened("/\udcff\n", "infer:/\udcfe", "state \udcff", 25, SPANS, folder=tmp_path) as again:
        assert (again.transfer, again.spans[0].sha256) == (notes.transfer, DIGEST)


def test_one_process_at_a_time_holds_a_transfer(tmp_path: Path) -> None:
    with (
        journal.opened("train:/a", "infer:/b", "state", 25, SPANS, folder=tmp_path),
        pytest.raises(JournalError, match="train:/a is on its way to infer:/b already"),
        journal.opened("train:/a", "infer:/b", "state", 25, SPANS, folder=tmp_path),
    ):
        pass
    with journal.opened("train:/a", "infer:/c", "state", 25, SPANS, folder=tmp_path):
        opened(tmp_path)


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"journal .*/file/relays: Not a directory; make room"):
        opened(tmp_path / "file" / "relays")


def test_lock_stays_as_long_as_its_journal(tmp_path: Path) -> None:
    opened(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".lock"]
    with journal.opened("train:/a", "infer:/b", "state 1", 25, SPANS, folder=tmp_path) as notes:
        notes.remove()
        with pytest.raises(OnItsWayError):
            opened(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_lock_that_its_holder_removed_just_before_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locking = fcntl.flock

    def late(lock: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", locking)
        next(tmp_path.glob("*.lock")).unlink()
        locking(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        journal.opened("train:/a", "infer:/b", "state 1", 25, SPANS, folder=tmp_path),
        pytest.raises(OnItsWayError),
    ):
        opened(tmp_path)
