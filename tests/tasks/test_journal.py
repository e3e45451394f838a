"""The journal of a transfer: what it keeps over a crash, and what it does not believe."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import journal
from tasks.journal import Journal, JournalError

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
