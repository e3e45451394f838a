"""The receiver as the destination runs it: one process, its stdin, its replies, and the directory it leaves."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import process
from tasks.process import PIPE, Popen
from tasks.transfer import receiver_argv

CONTENT = bytes(range(256)) * 5000


class Destination:
    """A receiver at work on ``directory``, driven line by line."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process: Popen[bytes] = process.start(receiver_argv(), stdin=PIPE, stdout=PIPE, stderr=PIPE)

    def send(self, data: bytes | dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n")
        self.process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        fields: dict[str, Any] = json.loads(self.process.stdout.readline())
        return fields

    def begin(self, name: str = "file", size: int = len(CONTENT)) -> None:
        self.send({"path": str(self.directory / name), "size": size})
        assert self.reply() == {"ok": True, "ready": True}

    def end(self) -> tuple[int, str]:
        """Close stdin and return exit code and stderr."""
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self.process.stdin.close()
        said = self.process.stderr.read().decode()
        return self.process.wait(), said

    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory))


Open = Callable[[], Destination]


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[Open]:
    made: list[Destination] = []

    def open_destination() -> Destination:
        made.append(Destination(tmp_path))
        return made[-1]

    yield open_destination
    for each in made:
        each.process.kill()
        each.process.wait()
        for stream in (each.process.stdin, each.process.stdout, each.process.stderr):
            assert stream is not None
            stream.close()


def test_whole_file_is_verified_and_renamed(destination: Open) -> None:
    there = destination()
    there.begin()
    there.send(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    there.send({"sha256": digest})
    assert there.reply() == {"ok": True, "bytes": len(CONTENT), "sha256": digest}
    assert there.end() == (0, "")
    assert there.names() == ["file"]
    assert (there.directory / "file").read_bytes() == CONTENT


def test_existing_file_stays_until_the_new_one_is_whole(destination: Open) -> None:
    there = destination()
    (there.directory / "file").write_bytes(b"old")
    there.begin()
    there.send(CONTENT)
    assert (there.directory / "file").read_bytes() == b"old"
    there.send({"sha256": hashlib.sha256(CONTENT).hexdigest()})
    assert there.reply()["ok"]
    assert (there.directory / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (CONTENT[:-1], "the sender stopped after 1279999 of 1280000 bytes"),
        (CONTENT, "the sender stopped before it confirmed the file"),
        (CONTENT + b'{"sha256": "00"}\n', "arrived with another sha256 than it was sent with"),
        (CONTENT + b'{"sha256": "00"', "the sender stopped before it confirmed the file"),
    ],
)
def test_anything_but_a_whole_confirmed_file_leaves_no_trace(destination: Open, sent: bytes, message: str) -> None:
    there = destination()
    there.begin()
    there.send(sent)
    assert there.end() == (1, "")
    assert message in there.reply()["message"]
    assert there.names() == []


def test_full_disk_is_found_before_the_first_byte(destination: Open) -> None:
    there = destination()
    size = 4 * shutil.disk_usage(there.directory).total
    there.send({"path": str(there.directory / "file"), "size": size})
    message = there.reply()["message"]
    assert f"{size} bytes needed" in message
    assert "free" in message
    assert there.end() == (1, "")
    assert there.names() == []


def test_directory_as_destination_is_refused(destination: Open) -> None:
    there = destination()
    (there.directory / "file").mkdir()
    there.send({"path": str(there.directory / "file"), "size": 1})
    assert "is a directory: give the file's full name" in there.reply()["message"]
    assert there.end() == (1, "")


def test_device_or_pipe_as_destination_is_refused(destination: Open, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        there = destination()
        there.send({"path": str(tmp_path / name), "size": 1})
        assert "is a device, a pipe or a socket" in there.reply()["message"]
        assert there.end()[0] == 1
    assert there.names() == ["null", "pipe"]


def test_relative_destination_is_refused(destination: Open) -> None:
    there = destination()
    there.send({"path": "file", "size": 1})
    assert "not the absolute path" in there.reply()["message"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signalled_receiver_leaves_no_trace(destination: Open, signum: signal.Signals) -> None:
    there = destination()
    there.begin()
    there.send(CONTENT[:1000])
    there.process.send_signal(signum)
    assert f"ended by signal {signum.value}" in there.reply()["message"]
    assert there.process.wait() == 1
    assert there.names() == []


def test_part_of_a_killed_receiver_is_removed_by_the_next(destination: Open) -> None:
    first = destination()
    first.begin()
    first.send(CONTENT[:1000])
    first.process.kill()
    first.process.wait()
    (left,) = first.names()
    assert left.startswith(".file.part-")

    second = destination()
    second.begin()
    (new,) = second.names()
    assert new != left


def test_part_of_a_receiver_at_work_is_left_alone(destination: Open) -> None:
    first, second = destination(), destination()
    first.begin()
    second.begin()
    assert len(first.names()) == 2
    digest = hashlib.sha256(CONTENT).hexdigest()
    for there in (first, second):
        there.send(CONTENT)
        there.send({"sha256": digest})
        assert there.reply()["ok"]
        assert there.end() == (0, "")
    assert first.names() == ["file"]
    assert (first.directory / "file").read_bytes() == CONTENT


def test_only_parts_of_the_same_name_are_removed(destination: Open) -> None:
    there = destination()
    others = [".file.part-", ".file.part-keep", ".files.part-0123456789abcdef", "file.part-0123456789abcdef"]
    for name in others:
        (there.directory / name).touch()
    (there.directory / ".file.part-0123456789abcdef").touch()
    there.begin(size=0)
    there.send({"sha256": hashlib.sha256().hexdigest()})
    assert there.reply()["ok"]
    assert there.names() == sorted([*others, "file"])
