"""The pump between local processes, and the sender against the real receiver."""

import hashlib
import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import process, transfer
from tasks.process import PIPE, Popen
from tasks.transfer import (
    PIPE_BYTES,
    Receiver,
    ReceiverError,
    SinkClosedError,
    SourceEndedError,
    pump,
    receiver_argv,
)

TRANSFER = "0123456789abcdef"


def source_of(script: str) -> Popen[bytes]:
    return process.start([sys.executable, "-c", script], stdout=PIPE)


def descriptor(stream: object) -> int:
    return stream.fileno()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def running() -> Iterator[list[Popen[bytes]]]:
    processes: list[Popen[bytes]] = []
    yield processes
    for child in processes:
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
        child.wait()


@pytest.mark.parametrize("length", [0, 1, 65_537, PIPE_BYTES, 3 * PIPE_BYTES + 17])
def test_pump_moves_every_byte_and_hashes_it(length: int, tmp_path: Path, running: list[Popen[bytes]]) -> None:
    content = os.urandom(length)
    (tmp_path / "in").write_bytes(content)
    with (tmp_path / "in").open("rb") as opened, (tmp_path / "out").open("wb") as written:
        reader = process.start(["cat"], stdin=opened, stdout=PIPE)
        writer = process.start(["cat"], stdin=PIPE, stdout=written)
        running += [reader, writer]
        digest = hashlib.sha256()
        pump(descriptor(reader.stdout), descriptor(writer.stdin), length, digests=[digest])
        writer.stdin.close()  # type: ignore[union-attr]
        assert (reader.wait(), writer.wait()) == (0, 0)
    assert (tmp_path / "out").read_bytes() == content
    assert digest.hexdigest() == hashlib.sha256(content).hexdigest()


def test_pump_takes_no_byte_beyond_the_length(running: list[Popen[bytes]]) -> None:
    reader = source_of("import sys; sys.stdout.write('x' * 100 + 'rest')")
    writer = process.start(["cat"], stdin=PIPE, stdout=PIPE)
    running += [reader, writer]
    pump(descriptor(reader.stdout), descriptor(writer.stdin), 100)
    assert reader.stdout is not None
    assert reader.stdout.read() == b"rest"


def test_pump_names_how_far_a_source_came(running: list[Popen[bytes]]) -> None:
    reader = source_of("import sys; sys.stdout.write('x' * 100)")
    writer = process.start(["cat"], stdin=PIPE, stdout=process.DEVNULL)
    running += [reader, writer]
    with pytest.raises(SourceEndedError, match="after 100 of 101 bytes"):
        pump(descriptor(reader.stdout), descriptor(writer.stdin), 101)


def test_pump_notices_a_sink_that_is_gone(running: list[Popen[bytes]]) -> None:
    reader = process.start(["cat", "/dev/zero"], stdout=PIPE)
    writer = process.start(["true"], stdin=PIPE)
    running += [reader, writer]
    with pytest.raises(SinkClosedError):
        pump(descriptor(reader.stdout), descriptor(writer.stdin), 1 << 30)


def test_pump_says_how_much_has_moved(running: list[Popen[bytes]]) -> None:
    reader = process.start(["head", "-c", "5000000", "/dev/zero"], stdout=PIPE)
    writer = process.start(["cat"], stdin=PIPE, stdout=process.DEVNULL)
    running += [reader, writer]
    moved: list[int] = []
    pump(descriptor(reader.stdout), descriptor(writer.stdin), 5_000_000, moved=moved.append)
    assert sum(moved) == 5_000_000


def test_pace_is_one_for_all_who_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(transfer.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(transfer.time, "sleep", waits.append)
    pace = transfer.Pace(1_000_000)
    for _ in range(4):
        pace(100_000)
    assert waits == pytest.approx([0.05, 0.15, 0.25, 0.35])


def test_pump_memory_does_not_grow_with_the_length(running: list[Popen[bytes]]) -> None:
    peaks = []
    for length in (8 * PIPE_BYTES, 128 * PIPE_BYTES):
        reader = process.start(["head", "-c", str(length), "/dev/zero"], stdout=PIPE)
        writer = process.start(["cat"], stdin=PIPE, stdout=process.DEVNULL)
        running += [reader, writer]
        tracemalloc.start()
        pump(descriptor(reader.stdout), descriptor(writer.stdin), length)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 2 * PIPE_BYTES


def open_receiver(running: list[Popen[bytes]]) -> Receiver:
    child = process.start(receiver_argv(), stdin=PIPE, stdout=PIPE)
    running.append(child)
    return Receiver(child, "here", lambda code: ReceiverError(f"exit code {code}"))


def test_sender_and_receiver_agree(tmp_path: Path, running: list[Popen[bytes]]) -> None:
    content = os.urandom(3 * PIPE_BYTES + 5)
    (tmp_path / "in").write_bytes(content)
    receiver = open_receiver(running)
    assert receiver.open(str(tmp_path / "new" / "out"), len(content), TRANSFER).fresh
    digest = hashlib.sha256()
    receiver.begin(0, len(content))
    with (tmp_path / "in").open("rb") as source:
        pump(source.fileno(), receiver.sink, len(content), digests=[digest])
    assert not (tmp_path / "new" / "out").exists()
    assert receiver.stored() == digest.hexdigest()
    assert receiver.hash(0, 5) == hashlib.sha256(content[:5]).hexdigest()
    assert receiver.commit([], {}, reread=False) == digest.hexdigest()
    assert (tmp_path / "new" / "out").read_bytes() == content


def test_receiver_refusal_reaches_the_sender(tmp_path: Path, running: list[Popen[bytes]]) -> None:
    with pytest.raises(ReceiverError, match=r"here: .* is a directory: give the file's full name"):
        open_receiver(running).open(str(tmp_path), 1, TRANSFER)


def test_receiver_that_never_spoke_is_explained_by_its_exit_code(running: list[Popen[bytes]]) -> None:
    child = process.start(["sh", "-c", "exit 255"], stdin=PIPE, stdout=PIPE)
    running.append(child)
    receiver = Receiver(child, "there", lambda code: ReceiverError(f"ssh said {code}"))
    with pytest.raises(ReceiverError, match="ssh said 255"):
        receiver.open("/x", 1, TRANSFER)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"ok": false, "message": "\\u001b[31m\\nno"}', r"there: \\x1b\[31m\\x0ano$"),
        ("hello", "the receiver answered b'hello"),
        ("[1]", "the receiver answered"),
        ("null", "the receiver answered"),
        ("{}", "the receiver answered"),
        ("[" * 50_000, "the receiver answered"),
        ("a" * 10**5, "the receiver answered"),
    ],
)
def test_hostile_answer_of_a_receiver_is_an_error_of_one_line(
    running: list[Popen[bytes]], tmp_path: Path, answer: str, message: str
) -> None:
    (tmp_path / "answer").write_text(answer + "\n")
    child = process.start(["sh", "-c", 'read line; exec cat "$0"', tmp_path / "answer"], stdin=PIPE, stdout=PIPE)
    running.append(child)
    with pytest.raises(ReceiverError, match=message) as caught:
        Receiver(child, "there", lambda code: ReceiverError(f"exit code {code}")).open("/x", 1, TRANSFER)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_receiver_that_does_not_end_is_given_up(running: list[Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CLOSING_SECONDS", 0.1)
    child = process.start(["sh", "-c", "exec >&-; exec sleep 60"], stdin=PIPE, stdout=PIPE)
    running.append(child)
    with pytest.raises(ReceiverError, match="there: the receiver said nothing more and did not end"):
        Receiver(child, "there", lambda code: ReceiverError(f"exit code {code}")).open("/x", 1, TRANSFER)
    child.kill()
