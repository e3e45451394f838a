"""The gate sends parts of a file to an object store, to nowhere else and from no other file."""

import hashlib
import http.server
import json
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.actions import Part, Upload
from tests.changing import approve_change
from tests.gate_talk import Program, line
from tests.sshds import Operator

MIB = 1 << 20


@pytest.fixture
def program(operator: Operator, tmp_path: Path) -> Program:
    return Program(tmp_path, operator)


class _Store(http.server.BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        answers = self.server.answers  # type: ignore[attr-defined]
        self.server.requests.append((self.path, self.headers, content))  # type: ignore[attr-defined]
        status, body = answers.pop(0) if answers else (200, b"")
        self.send_response(status)
        self.send_header("ETag", '"tag"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def store() -> Iterator[Any]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Store)
    server.requests, server.answers = [], []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _upload(program: Program, store: Any, file: Path, *spans: tuple[int, int], **more: Any) -> Upload:
    found = file.stat()
    fields: dict[str, Any] = {
        "host": "train",
        "host_keys": program.operator.train.fingerprints,
        "seconds": 30,
        "path": str(file),
        "identity": (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns),
        "endpoint": f"http://127.0.0.1:{store.server_port}",
        "bucket": "dflash",
        "parts": tuple(Part(offset=at, length=n, key=f"relay/a b/{at}") for at, n in spans),
    }
    return Upload(**fields | more)


def _urls(action: Upload) -> list[str]:
    return [f"{action.endpoint}/dflash/relay/a%20b/{part.offset}?X-Amz-Signature=secret" for part in action.parts]


def _asked(program: Program, action: Upload, urls: list[str]) -> tuple[int, list[Any]]:
    return program.change(approve_change(program.operator, action), line({"urls": urls}))


def test_parts_are_sent_to_the_store_and_told_about(program: Program, store: Any, tmp_path: Path) -> None:
    content, file = os.urandom(3 * MIB), tmp_path / "file"
    file.write_bytes(content)
    action = _upload(program, store, file, (0, 2 * MIB), (2 * MIB + 5, 100), (7, 0))
    status, replies = _asked(program, action, _urls(action))
    sent = [content[: 2 * MIB], content[2 * MIB + 5 :][:100], b""]
    expected = [
        {
            "ok": True,
            "part": number,
            "sha256": hashlib.sha256(part).hexdigest(),
            "crc32": zlib.crc32(part),
            "etag": '"tag"',
        }
        for number, part in enumerate(sent)
    ]
    assert (status, replies) == (0, [{"ok": True}, *expected, {"ok": True}])
    assert [content for _, _, content in store.requests] == sent
    path, headers, _ = store.requests[0]
    assert path == "/dflash/relay/a%20b/0?X-Amz-Signature=secret"
    assert headers["Content-Type"] == "application/octet-stream"
    assert "secret" not in (program.state / "gate.log").read_text()


@pytest.mark.parametrize(
    "change",
    [
        lambda url: url.replace("127.0.0.1", "localhost"),
        lambda url: url.replace("http:", "https:"),
        lambda url: url.replace("/dflash/", "/other/"),
        lambda url: url.replace("a%20b/0", "a%20b/1"),
        lambda url: url.replace("relay/", "relay/../relay/"),
        lambda url: url.replace("http://", "http://user@"),
        lambda url: url + "\r\nX: y",
        lambda url: "",
    ],
)
def test_a_url_for_anything_else_is_refused_and_not_repeated(
    program: Program, store: Any, tmp_path: Path, change: Any
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    action = _upload(program, store, tmp_path / "file", (0, 7))
    status, replies = _asked(program, action, [change(url) for url in _urls(action)])
    assert status == 77
    assert replies[-1]["spent"]
    assert "secret" not in json.dumps(replies) + (program.state / "gate.log").read_text()
    assert store.requests == []


def test_as_many_urls_as_parts(program: Program, store: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    action = _upload(program, store, tmp_path / "file", (0, 3), (3, 4))
    for urls in (_urls(action)[:1], [*_urls(action), *_urls(action)], []):
        assert _asked(program, action, urls)[0] == 77
    assert store.requests == []


def test_what_the_store_refuses_is_a_failure_with_its_code_alone(program: Program, store: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    action = _upload(program, store, tmp_path / "file", (0, 3), (3, 4))
    store.answers += [(403, b"<Error><Code>SignatureDoesNotMatch</Code><Provided>secret</Provided></Error>")]
    status, replies = _asked(program, action, _urls(action))
    assert status == 1
    assert "403 SignatureDoesNotMatch" in replies[-1]["message"]
    assert "secret" not in json.dumps(replies) + (program.state / "gate.log").read_text()
    assert len(store.requests) == 1
    store.shutdown()
    store.server_close()
    status, replies = _asked(program, action, _urls(action))
    assert status == 1
    assert "Connection refused" in replies[-1]["message"]
    assert "secret" not in json.dumps(replies)


def test_another_file_than_the_approved_one_is_not_sent(program: Program, store: Any, tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(b"content")
    other.write_bytes(b"content")
    action = _upload(program, store, file, (0, 7))
    os.utime(other, ns=(action.identity[3],) * 2)
    other.replace(file)
    status, replies = _asked(program, action, _urls(action))
    assert (status, replies[-1]["kind"]) == (77, "changed")
    assert "changed while read" in replies[-1]["message"]
    file.rename(other)
    file.symlink_to(other)
    assert _asked(program, action, _urls(action))[0] == 1
    assert store.requests == []


@pytest.mark.parametrize("answer", ["GARBAGE {}", "HTTP/9.9{} 200 OK", "HTTP/1.1 abc{}"])
def test_a_store_that_repeats_the_url_gets_it_into_no_message(
    program: Program, store: Any, tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat(handler: Any) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.wfile.write(answer.format(handler.path).encode() + b"\r\n\r\n")
        handler.close_connection = True

    monkeypatch.setattr(_Store, "do_PUT", repeat)
    (tmp_path / "file").write_bytes(b"content")
    action = _upload(program, store, tmp_path / "file", (0, 7))
    status, replies = _asked(program, action, _urls(action))
    assert status == 1
    assert "no HTTP answer" in replies[-1]["message"]
    assert "secret" not in json.dumps(replies) + (program.state / "gate.log").read_text()
