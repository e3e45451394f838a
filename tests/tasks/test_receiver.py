"""The receiver as the destination runs it: one process, its stdin, its replies, and the directory it leaves."""

import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks import process
from tasks.process import PIPE, Popen
from tasks.transfer import receiver_argv

CONTENT = bytes(range(256)) * 5000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
FIRST, SECOND = "0" * 16, "1" * 16
WHOLE = ["file", "file.relay.json"]


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

    def open(self, name: str | Path = "file", size: int = len(CONTENT), transfer: str = FIRST) -> dict[str, Any]:
        path = str(self.directory / name) if name != "relative" else "relative"
        self.send({"verb": "open", "path": path, "size": size, "transfer": transfer})
        return self.reply()

    def begin(self, name: str = "file", size: int = len(CONTENT), transfer: str = FIRST) -> None:
        assert self.open(name, size, transfer) == {"ok": True, "committed": None, "fresh": True}

    def write(self, content: bytes, offset: int = 0) -> dict[str, Any]:
        self.send({"verb": "write", "offset": offset, "length": len(content)})
        self.send(content)
        return self.reply()

    def commit(self, ranges: list[list[Any]] | None = None, *, reread: bool = False) -> dict[str, Any]:
        self.send({"verb": "commit", "ranges": ranges or [], "reread": reread, "sidecar": {"source": "a test"}})
        return self.reply()

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
    assert there.write(CONTENT) == {"ok": True, "sha256": DIGEST}
    assert there.names() == [f".file.part-{FIRST}"]
    assert there.commit() == {"ok": True, "sha256": DIGEST}
    assert there.end() == (0, "")
    assert there.names() == WHOLE
    assert (there.directory / "file").read_bytes() == CONTENT
    sidecar = json.loads((there.directory / "file.relay.json").read_text())
    about = {"transfer": FIRST, "about": "", "bytes": len(CONTENT), "sha256": DIGEST}
    assert sidecar == {"source": "a test", **about}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_ranges_may_come_in_any_order_and_through_several_sessions(destination: Open, order: tuple[int, ...]) -> None:
    first, second = destination(), destination()
    first.begin()
    second.send({"verb": "join", "path": str(second.directory / "file"), "size": len(CONTENT), "transfer": FIRST})
    assert second.reply() == {"ok": True}
    third = len(CONTENT) // 3 + 1
    ranges = []
    for number, there in zip(order, (first, second, first), strict=True):
        offset, content = number * third, CONTENT[number * third : (number + 1) * third]
        digest = there.write(content, offset)["sha256"]
        assert digest == hashlib.sha256(content).hexdigest()
        ranges.append([offset, len(content), digest])
    assert first.commit(ranges, reread=True) == {"ok": True, "sha256": DIGEST}
    assert (first.directory / "file").read_bytes() == CONTENT


def test_existing_file_stays_until_the_new_one_is_whole(destination: Open) -> None:
    there = destination()
    (there.directory / "file").write_bytes(b"old")
    there.begin()
    there.write(CONTENT)
    assert (there.directory / "file").read_bytes() == b"old"
    assert there.commit()["ok"]
    assert (there.directory / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("end", ["kill", "eof", "terminate"])
def test_same_transfer_goes_on_with_what_arrived(destination: Open, end: str) -> None:
    first = destination()
    first.begin()
    half = len(CONTENT) // 2
    first.write(CONTENT[:half])
    first.send({"verb": "write", "offset": half, "length": half})
    first.send(CONTENT[half : half + 1000])
    if end == "eof":
        assert first.end() == (1, "")
        assert f"stopped after 1000 of {half} bytes at {half}" in first.reply()["message"]
    else:
        getattr(first.process, end)()
        first.process.wait()
    second = destination()
    assert second.open()["fresh"] is False
    second.send({"verb": "hash", "offset": 0, "length": half})
    assert second.reply()["sha256"] == hashlib.sha256(CONTENT[:half]).hexdigest()
    second.write(CONTENT[half:], half)
    assert second.commit()["sha256"] == DIGEST
    assert (second.directory / "file").read_bytes() == CONTENT


def test_session_lost_behind_a_dead_link_is_taken_over(destination: Open) -> None:
    lost, second = destination(), destination()
    lost.begin()
    lost.write(CONTENT[:1000])
    assert second.open() == {"ok": True, "committed": None, "fresh": False}
    assert lost.process.wait(20) == 1
    second.write(CONTENT[1000:], 1000)
    assert second.commit()["sha256"] == DIGEST


def test_finished_transfer_whose_answer_was_lost_is_known(destination: Open) -> None:
    first = destination()
    first.begin()
    first.write(CONTENT)
    assert first.commit()["ok"]
    assert destination().open() == {"ok": True, "committed": DIGEST, "fresh": False}
    assert destination().open(transfer=SECOND)["fresh"] is True


@pytest.mark.parametrize("change", ["another byte", "longer", "gone"])
def test_finished_transfer_whose_file_was_changed_afterwards_is_not_believed(destination: Open, change: str) -> None:
    first = destination()
    first.begin()
    first.write(CONTENT)
    assert first.commit()["ok"]
    if change == "gone":
        (first.directory / "file").unlink()
    else:
        with (first.directory / "file").open("r+b") as file:
            file.seek(0 if change == "another byte" else len(CONTENT))
            file.write(b"!")
    assert destination().open() == {"ok": True, "committed": None, "fresh": True}


def test_receivers_give_names_one_after_the_other(destination: Open) -> None:
    """A sidecar beside another receiver's file would be believed."""
    first, second = destination(), destination()
    first.begin()
    first.write(CONTENT)
    with open_folder(first.directory) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        first.send({"verb": "commit", "ranges": [], "reread": False, "sidecar": {}})
        second.send({"verb": "open", "path": str(first.directory / "file"), "size": 5, "transfer": SECOND})
        assert first.process.stdout is not None
        assert not select.select([first.process.stdout], [], [], 0.5)[0]
        assert first.names() == [f".file.part-{FIRST}"]
    assert first.reply() == {"ok": True, "sha256": DIGEST}
    assert second.reply()["fresh"] is True


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_range_that_changed_on_the_disk_is_found_by_reading_again(destination: Open) -> None:
    there = destination()
    there.begin()
    there.write(CONTENT)
    with (there.directory / f".file.part-{FIRST}").open("r+b") as file:
        file.seek(7)
        file.write(b"\xff")
    assert "are not on the disk as they came" in there.commit([[0, len(CONTENT), DIGEST]], reread=True)["message"]
    assert there.end() == (1, "")
    assert there.names() == [f".file.part-{FIRST}"]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b'{"verb": "write", "offset": 0, "length": 1280001}\n', "1280001 bytes at 0 are not inside the 1280000"),
        (b'{"verb": "write", "offset": -1, "length": 1}\n', "1 bytes at -1 are not inside"),
        (b'{"verb": "commit"', "the sender stopped in the middle of a request"),
        (b'{"verb": "erase"}\n', "'erase' is no request"),
        (b"[]\n", "cannot be interpreted"),
    ],
)
def test_request_that_cannot_be_is_refused(destination: Open, sent: bytes, message: str) -> None:
    there = destination()
    there.begin()
    there.send(sent)
    assert there.end() == (1, "")
    assert message in there.reply()["message"]
    assert there.names() == [f".file.part-{FIRST}"]


def test_discarded_transfer_leaves_no_trace(destination: Open) -> None:
    there = destination()
    there.begin()
    there.write(CONTENT[:1000])
    there.send({"verb": "discard"})
    assert there.reply() == {"ok": True}
    assert there.names() == []


def test_full_disk_is_found_before_the_first_byte(destination: Open) -> None:
    there = destination()
    size = 4 * shutil.disk_usage(there.directory).total
    message = there.open(size=size)["message"]
    assert f"{size} bytes needed" in message
    assert "free" in message
    assert there.end() == (1, "")
    assert there.names() == []


def test_directory_as_destination_is_refused(destination: Open) -> None:
    there = destination()
    (there.directory / "file").mkdir()
    assert "is a directory: give the file's full name" in there.open()["message"]
    assert there.end() == (1, "")


def test_device_or_pipe_as_destination_is_refused(destination: Open, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        there = destination()
        assert "is a device, a pipe or a socket" in there.open(path)["message"]
        assert there.end()[0] == 1
    assert there.names() == ["pipe"]


def test_symbolic_link_as_destination_is_refused_and_stays(destination: Open, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    for name, target in (("file", "other"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(target)
        there = destination()
        assert f"is a symbolic link to '{target}'" in there.open(name)["message"]
        assert there.end()[0] == 1
        assert os.readlink(tmp_path / name) == target
    assert there.names() == ["dangling", "file", "other"]


def test_symbolic_link_in_the_place_of_the_temporary_file_is_not_followed(destination: Open, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / f".file.part-{FIRST}").symlink_to("other")
    assert "symbolic links" in destination().open()["message"]
    assert (tmp_path / "other").read_bytes() == b"other"


def test_relative_destination_is_refused(destination: Open) -> None:
    there = destination()
    assert "not the absolute path" in there.open("relative")["message"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signalled_receiver_says_so(destination: Open, signum: signal.Signals) -> None:
    there = destination()
    there.begin()
    there.process.send_signal(signum)
    assert f"ended by signal {signum.value}" in there.reply()["message"]
    assert there.process.wait() == 1
    assert there.names() == [f".file.part-{FIRST}"]


def test_part_of_a_dead_transfer_is_removed_by_the_next(destination: Open) -> None:
    first = destination()
    first.begin()
    first.process.kill()
    first.process.wait()
    assert first.names() == [f".file.part-{FIRST}"]
    second = destination()
    second.begin(transfer=SECOND)
    assert second.names() == [f".file.part-{SECOND}"]


def test_part_of_a_transfer_at_work_is_left_alone(destination: Open) -> None:
    first, second = destination(), destination()
    first.begin()
    second.begin(transfer=SECOND)
    assert len(first.names()) == 2
    for there in (first, second):
        there.write(CONTENT)
        assert there.commit()["ok"]
        assert there.end() == (0, "")
    assert first.names() == WHOLE
    assert (first.directory / "file").read_bytes() == CONTENT


def test_only_parts_of_the_same_name_are_removed(destination: Open) -> None:
    there = destination()
    others = [".file.part-", ".file.part-keep", ".files.part-0123456789abcdef", "file.part-0123456789abcdef"]
    for name in others:
        (there.directory / name).touch()
    for stale in (".file.part-0123456789abcdef", ".file.part-0123456789abcdef.json"):
        (there.directory / stale).touch()
    there.begin(size=0)
    assert there.commit()["ok"]
    assert there.names() == sorted([*others, *WHOLE])


class _Objects(BaseHTTPRequestHandler):
    """An object store of one object."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/bucket/key?signature=s3cret" else 403)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def store() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Objects)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/bucket/key"
    server.shutdown()
    server.server_close()


def test_range_that_is_written_again_counts_once_in_the_whole(destination: Open) -> None:
    there = destination()
    there.begin()
    for content in (bytes(len(CONTENT)), CONTENT):
        assert there.write(content)["ok"]
    assert there.commit()["sha256"] == DIGEST


def test_range_can_come_from_a_presigned_url(destination: Open, store: str) -> None:
    there = destination()
    there.begin()
    url = f"{store}?signature=s3cret"
    there.send({"verb": "fetch", "offset": 0, "length": len(CONTENT), "url": url})
    assert there.reply() == {"ok": True, "sha256": DIGEST}
    assert there.commit()["sha256"] == DIGEST


def test_presigned_url_that_is_refused_is_not_told(destination: Open, store: str) -> None:
    there = destination()
    there.begin()
    there.send({"verb": "fetch", "offset": 0, "length": len(CONTENT), "url": f"{store}?signature=expired"})
    message = there.reply()["message"]
    assert "answered 403 Forbidden" in message
    assert "expired" not in message


def test_object_of_another_length_is_refused(destination: Open, store: str) -> None:
    there = destination()
    there.begin(size=10)
    there.send({"verb": "fetch", "offset": 0, "length": 10, "url": f"{store}?signature=s3cret"})
    assert "10 bytes were expected: 1280000" in there.reply()["message"]
