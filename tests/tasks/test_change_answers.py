"""What a gate may answer to a change, and what of it is believed."""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks import changes, process
from tasks.actions import AnyChange, Part, Signal, Upload
from tasks.channel import GateError, RequestFailed
from tasks.inventory import Host
from tests.changing import launch_of, on, put_of, shell
from tests.sshds import Operator


def _changes(host: Host) -> dict[str, tuple[AnyChange, Callable[..., object]]]:
    """Each change, with the call that makes it on an ordinary host."""
    signal = Signal(**on(host), jobs="/jobs", job="train-1", signal="TERM")
    part = Part(offset=0, length=1, key="k")
    identity = (1, 1, 1, 1)
    upload = Upload(**on(host), path="/x", identity=identity, endpoint="http://h", bucket="b", parts=(part,), seconds=9)
    return {
        "run": (shell(host, "true"), lambda *given: changes.run(*given, lambda *_: None)),
        "put": (put_of(host, Path("/x"), b"x"), lambda *given: changes.put(*given, io.BytesIO(b"x"))),
        "launch": (launch_of(host, Path("/jobs"), "true"), changes.launch),
        "signal": (signal, changes.signal),
        "upload": (upload, lambda *given: changes.upload(*given, ["http://h/b/k"])),
    }


def _speak(operator: Operator, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have ``program`` of this machine speak in place of the one that is sent over ssh."""

    def start(_: Host, __: Sequence[str], **streams: Any) -> process.Popen[bytes]:
        return process.start([sys.executable, "-I", "-c", program], start_new_session=True, **streams)

    monkeypatch.setattr(operator.connector, "start", start)


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("run", ['"exit": "3"']),
        ("run", ['"exit": true']),
        ("run", ['"stream": "stdlog", "data": ""']),
        ("run", ['"stream": "stdout", "data": "%%%"']),
        ("run", ['"stream": "stdout", "data": 7']),
        ("run", ['"stream": "stdout", "data": "YQ=="']),
        ("run", ['"x": 1']),
        ("run", ['"stream": "stdout", "data": "", "exit": 0']),
        ("put", ['"ready": false']),
        ("put", ['"ready": true', f'"sha256": "{"0" * 64}"']),
        ("put", ['"ready": true', '"sha256": 7']),
        ("launch", ['"job": "other", "pid": 7']),
        ("launch", ['"job": "train-1", "pid": 0']),
        ("launch", ['"job": "train-1"']),
        ("signal", ['"signalled": -1']),
        ("upload", ['"x": 1']),
        ("upload", ['"part": 0']),
        ("upload", [f'"part": 1, "sha256": "{"0" * 64}", "crc32": 1, "etag": ""']),
        ("upload", [f'"part": 0, "sha256": "{"0" * 64}", "crc32": -1, "etag": ""']),
        ("upload", ['"part": 0, "sha256": "0", "crc32": 1, "etag": ""']),
    ],
)
def test_an_answer_that_cannot_be_is_not_believed(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, kind: str, answers: list[str]
) -> None:
    lines = ['{"ok": true}', *(f'{{"ok": true, {answer}}}' for answer in answers)]
    program = f"import sys\nfor line in {lines!r}: print(line, flush=True)\nsys.stdin.read()"
    if answers == ['"stream": "stdout", "data": "YQ=="']:
        program = program.replace("sys.stdin.read()", "")  # the output ends without an exit status
    _speak(operator, monkeypatch, program)
    action, perform = _changes(operator.infer)[kind]
    with pytest.raises(GateError, match="the session with infer broke") as error:
        perform(operator.connector, operator.infer, None, action)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["run", "put", "launch", "signal", "upload"])
def test_a_failure_is_said_in_one_escaped_line(operator: Operator, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    program = """print('{"ok": true}'); print('{"ok": false, "message": "no \\\\u001b[2J\\\\n"}', flush=True)"""
    _speak(operator, monkeypatch, program)
    action, perform = _changes(operator.infer)[kind]
    with pytest.raises(RequestFailed, match=r"^infer: no \\x1b\[2J\\x0a$"):
        perform(operator.connector, operator.infer, None, action)


def test_a_gate_that_takes_in_nothing_is_not_waited_for(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = """print('{"ok": true}'); print('{"ok": true, "ready": true}', flush=True)"""
    _speak(operator, monkeypatch, f"import time; {answers}; time.sleep(300)")
    monkeypatch.setattr(changes, "GRACE_SECONDS", 0.0)
    content = bytes(8 << 20)
    action = put_of(operator.infer, Path("/x"), content, seconds=1)
    with pytest.raises(GateError, match="took in nothing more for 1 s"):
        changes.put(operator.connector, operator.infer, None, action, io.BytesIO(content))
