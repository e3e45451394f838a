"""The receiver where the destination's folder holds what nobody expects, and where it ended between two steps."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tasks.test_receiver import CONTENT, DIGEST, FIRST, WHOLE, Destination, Open, destination

__all__ = ["destination"]

THIRD = len(CONTENT) // 4


@pytest.fixture
def there(destination: Open) -> Destination:
    return destination()


def huge(sidecar: Path) -> None:
    sidecar.touch()
    os.truncate(sidecar, 5 * 10**9)


def about_another_file(sidecar: Path) -> None:
    fields = {"transfer": FIRST, "about": "", "bytes": len(CONTENT), "sha256": "0" * 64}
    sidecar.write_text(json.dumps(fields))
    sidecar.with_name("file").write_bytes(CONTENT)


@pytest.mark.parametrize(
    "lay",
    [
        lambda sidecar: sidecar.write_bytes(b'{"transfer": "0'),
        lambda sidecar: sidecar.write_bytes(b"[" * 100_000),
        lambda sidecar: sidecar.write_bytes(b"[]"),
        lambda sidecar: sidecar.write_bytes(b"\xff\xfe"),
        lambda sidecar: os.mkfifo(sidecar),
        lambda sidecar: sidecar.symlink_to("/dev/zero"),
        huge,
        about_another_file,
    ],
    ids=["half-written", "nested", "a list", "no text", "a pipe", "a link", "huge", "another file's"],
)
def test_sidecar_that_cannot_be_believed_is_replaced(there: Destination, lay: Callable[[Path], object]) -> None:
    lay(there.directory / "file.relay.json")
    there.begin()
    there.write(CONTENT)
    assert there.commit() == {"ok": True, "sha256": DIGEST}
    assert there.names() == WHOLE
    assert json.loads((there.directory / "file.relay.json").read_text())["sha256"] == DIGEST


def test_directory_in_the_sidecars_place_is_refused_before_a_byte(there: Destination) -> None:
    (there.directory / "file.relay.json").mkdir()
    assert "is a directory, and the file's sidecar goes there" in there.open()["message"]
    assert there.end()[0] == 1
    assert there.names() == ["file.relay.json"]


def test_destination_below_a_file_is_refused_before_a_byte(there: Destination) -> None:
    (there.directory / "file").touch()
    assert "is not a directory, or is below a file: name another" in there.open("file/below")["message"]


@pytest.mark.parametrize(("letter", "count"), [("n", 227), ("ä", 113)])
def test_name_is_as_long_as_what_is_on_its_way_may_be(destination: Open, letter: str, count: int) -> None:
    """The sidecar is written last, under the longest name of all."""
    fitting, longer = destination(), destination()
    assert "has more than 227 bytes" in longer.open(letter * (count + 1))["message"]
    fitting.begin(letter * count, size=0)
    assert fitting.commit()["ok"]


def test_end_between_both_names_is_made_good_by_the_same_transfer(destination: Open) -> None:
    first = destination()
    first.begin()
    first.write(CONTENT)
    assert first.commit()["ok"]
    os.rename(first.directory / "file.relay.json", first.directory / f".file.part-{FIRST}.json")
    assert destination().open() == {"ok": True, "committed": DIGEST, "fresh": False}
    assert first.names() == WHOLE


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1), (1, 2, 3, 0), (2, 1, 0, 3)])
def test_digest_is_taken_behind_what_other_sessions_store(destination: Open, order: tuple[int, ...]) -> None:
    """Told late, in any order, and of what the same session writes between."""
    first, second = destination(), destination()
    first.begin()
    second.send({"verb": "join", "path": str(second.directory / "file"), "size": len(CONTENT), "transfer": FIRST})
    second.reply()
    told: list[list[object]] = []
    for count, number in enumerate(order):
        offset, content = number * THIRD, CONTENT[number * THIRD : (number + 1) * THIRD]
        if count % 2:
            first.send({"verb": "write", "offset": offset, "length": len(content), "others": told})
            first.send(content)
            assert first.reply()["sha256"] == hashlib.sha256(content).hexdigest()
            told = []
        else:
            second.write(content, offset)
            told.append([offset, len(content)])
    assert first.commit() == {"ok": True, "sha256": DIGEST}


def test_range_that_is_written_again_behind_others_counts_once(destination: Open) -> None:
    first, half = destination(), len(CONTENT) // 2
    first.begin()
    for content, others in ((bytes(half), []), (CONTENT[half:], [[0, half]]), (CONTENT[:half], [])):
        offset = half if others else 0
        first.send({"verb": "write", "offset": offset, "length": half, "others": others})
        first.send(content)
        assert first.reply()["ok"]
    assert first.commit()["sha256"] == DIGEST


def test_range_of_another_session_that_is_not_in_the_file_is_refused(there: Destination) -> None:
    there.begin()
    there.send({"verb": "write", "offset": 0, "length": 1, "others": [[len(CONTENT), 1]]})
    assert "are not inside the 1280000" in there.reply()["message"]


@pytest.mark.parametrize("told", [True, False], ids=["before it is needed", "at the end"])
@pytest.mark.parametrize("spoilt", [False, True])
def test_what_an_earlier_session_stored_must_still_be_there(destination: Open, told: bool, spoilt: bool) -> None:
    first, second, half = destination(), destination(), len(CONTENT) // 2
    first.begin()
    ranges = [[0, half, first.write(CONTENT[:half])["sha256"]]]
    first.end()
    with (first.directory / f".file.part-{FIRST}").open("r+b") as part:
        part.write(b"\xff" if spoilt else CONTENT[:1])
    assert second.open() == {"ok": True, "committed": None, "fresh": False}
    second.send({"verb": "write", "offset": half, "length": half, "others": ranges if told else []})
    second.send(CONTENT[half:])
    reply = second.commit([*ranges, [half, half, second.reply()["sha256"]]])
    if not spoilt:
        assert reply == {"ok": True, "sha256": DIGEST}
        return
    assert (reply["kind"], f"{half} bytes of" in reply["message"], " at 0 are not" in reply["message"]) == (
        "damaged",
        True,
        True,
    )
    assert second.names() == [f".file.part-{FIRST}"]
