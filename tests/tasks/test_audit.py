import json
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tasks.audit import Audit, select
from tasks.errors import Refused


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    audit = Audit(tmp_path / "guard" / "audit.jsonl")
    for number in range(5):
        audit.append("refusal", request=f"r{number}", host="kpro6")
    return audit


def rewrite(audit: Audit, lines: list[str]) -> None:
    audit.file.write_text("".join(f"{line}\n" for line in lines))


def lines(audit: Audit) -> list[str]:
    return audit.file.read_text().splitlines()


def test_entries_come_back_in_order(audit: Audit) -> None:
    assert [entry["request"] for entry in audit.entries()] == ["r0", "r1", "r2", "r3", "r4"]
    assert audit.last() == list(audit.entries())[-1]
    assert audit.verify() == []
    assert audit.file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", range(4))
def test_an_edited_entry_is_found(audit: Audit, number: int) -> None:
    text = lines(audit)
    text[number] = text[number].replace("kpro6", "kpro7")
    rewrite(audit, text)
    assert any(f"line {number + 2} does not follow" in problem for problem in audit.verify())


@pytest.mark.parametrize("number", range(4))
def test_a_deleted_entry_is_found(audit: Audit, number: int) -> None:
    text = lines(audit)
    del text[number]
    rewrite(audit, text)
    assert any(f"line {number + 1} does not follow" in problem for problem in audit.verify())


def test_moved_entries_are_found(audit: Audit) -> None:
    text = lines(audit)
    text[1], text[3] = text[3], text[1]
    rewrite(audit, text)
    assert len(audit.verify()) == 4


def test_a_line_that_is_no_entry_is_found(audit: Audit) -> None:
    text = lines(audit)
    text[2] = "[]"
    rewrite(audit, text)
    assert audit.verify()[0] == "line 3 is not an audit entry"


def test_truncation_is_found_by_a_signed_head_only(audit: Audit) -> None:
    head = audit.append("decision", request="r5")
    assert audit.verify([head]) == []
    rewrite(audit, lines(audit)[:-1])
    assert audit.verify() == []
    assert audit.verify([head]) == [
        f"the entry {head[:16]}… that an approval was signed over is gone: the log was cut or rewritten"
    ]


def test_the_edited_last_entry_is_found_by_a_signed_head(audit: Audit) -> None:
    head = audit.append("decision", reason="good")
    rewrite(audit, [*lines(audit)[:-1], lines(audit)[-1].replace("good", "fine")])
    assert len(audit.verify([head])) == 1


def test_a_rewritten_log_is_found_by_a_signed_head(audit: Audit) -> None:
    head = audit.append("decision", reason="good")
    audit.file.unlink()
    for number in range(6):
        audit.append("refusal", request=f"r{number}", host="kpro6")
    assert audit.verify() == []
    assert len(audit.verify([head])) == 1


@pytest.mark.parametrize("missing", [1, 10])
def test_an_unfinished_line_stops_everything(audit: Audit, missing: int) -> None:
    audit.file.write_text(audit.file.read_text()[:-missing])
    with pytest.raises(Refused, match=r"its last line is unfinished.*audit verify"):
        audit.append("request")
    assert audit.verify()


@pytest.mark.parametrize(
    "content",
    [
        "garbage\n",
        "{}\n",
        '{"time":"x","event":1,"prev":2}\n',
        "\0\n",
        '{"time":"1.0","event":"x","prev":"y"}\n',
        '{"time":NaN,"event":"x","prev":"y"}\n',
        '{"time":1e300,"event":"x","prev":"y"}\n',
        '{"time":-1e300,"event":"x","prev":"y"}\n',
        "[" * 50_000 + "\n",
    ],
)
def test_a_corrupt_log_stops_everything(audit: Audit, content: str) -> None:
    audit.file.write_text(content)
    with pytest.raises(Refused, match="not an audit entry"):
        audit.append("request")
    with pytest.raises(Refused, match="not an audit entry"):
        audit.check_clock()


def test_an_unusable_log_stops_everything(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    with pytest.raises(Refused, match="Is a directory; nothing is approved without it"):
        Audit(tmp_path / "audit.jsonl").append("request")


def append_to_a_full_disk(file: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, resource.RLIM_INFINITY))
    try:
        return Audit(file).append("consumption", request="r9")
    except Refused as refused:
        return f"refused: {refused}"


def test_an_entry_that_does_not_fit_on_the_disk_is_a_refusal_and_leaves_no_trace(audit: Audit) -> None:
    before = audit.file.read_bytes()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(append_to_a_full_disk, audit.file).result().startswith("refused: audit log")
    assert audit.file.read_bytes() == before
    audit.append("request")
    assert audit.verify() == []


def test_a_clock_set_back_stops_everything(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    last = audit.last()
    assert last is not None
    monkeypatch.setattr("tasks.audit.time.time", lambda: last["time"] - 60)
    with pytest.raises(Refused, match="set the clock right"):
        audit.append("request")
    with pytest.raises(Refused, match="set the clock right"):
        audit.check_clock()
    monkeypatch.setattr("tasks.audit.time.time", lambda: last["time"] - 1)
    audit.append("request")


def test_an_entry_is_never_longer_than_what_is_read_back(audit: Audit) -> None:
    with pytest.raises(Refused, match="the longest is"):
        audit.append("decision", reason="x" * 70_000)
    assert audit.verify() == []


ENTRIES = [
    {"time": 10.0, "event": "request", "request": "r1", "host": "kpro6"},
    {"time": 20.0, "event": "decision", "request": "r1", "host": "kpro6"},
    {"time": 30.0, "event": "request", "request": "r2", "host": "other"},
    {"time": 40.0, "event": "countersignature", "request": "r2"},
]


@pytest.mark.parametrize(
    ("wanted", "times"),
    [
        ({}, [10, 20, 30, 40]),
        ({"event": "request"}, [10, 30]),
        ({"host": "kpro6"}, [10, 20]),
        ({"request": "r2"}, [30, 40]),
        ({"since": 20.0}, [20, 30, 40]),
        ({"event": "request", "host": "other", "request": "r2", "since": 30.0}, [30]),
        ({"event": "request", "since": 31.0}, []),
        ({"event": "req"}, []),
    ],
)
def test_entries_are_selected_by_all_that_is_given(wanted: dict[str, Any], times: list[int]) -> None:
    assert [entry["time"] for entry in select(ENTRIES, **wanted)] == times


def test_uses_are_told_apart_by_the_whole_serial(audit: Audit) -> None:
    for serial in (1, 12):
        audit.append("consumption", serial=serial)
        audit.append("end", serial=serial, outcome="closed")
        audit.append("refusal", serial=serial)
    audit.append("decision", reason='"serial":1', serials=[1])
    audit.append("consumption", serial="1")
    audit.append("consumption", request="r9")
    assert [(entry["event"], entry["serial"]) for entry in audit.uses(1)] == [("consumption", 1), ("end", 1)]
    assert [entry["serial"] for entry in audit.uses()] == [1, 1, 12, 12]


def append_many(file: Path, name: str) -> None:
    for number in range(25):
        Audit(file).append("request", request=f"{name}{number}")


def test_processes_write_one_chain(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        list(pool.map(append_many, [file] * 4, "abcd"))
    assert Audit(file).verify() == []
    assert sorted(json.loads(line)["request"] for line in file.read_text().splitlines()) == sorted(
        f"{name}{number}" for name in "abcd" for number in range(25)
    )
