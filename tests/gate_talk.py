"""What a client of the gate program says to it, and reads; and the program without an sshd around it."""

import base64
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks import process
from tasks.approvals import Approval
from tasks.process import PIPE, Popen
from tests.changing import approve_change, shell
from tests.sshds import GATE, Operator, write_gate_configuration


class Conversation:
    """Requests to a running gate, one after the other."""

    def __init__(self, running: Popen[bytes], approval: Approval) -> None:
        assert running.stdin is not None
        assert running.stdout is not None
        self.running, self.stdin, self.stdout = running, running.stdin, running.stdout
        self.send(approval.action.canonical())
        assert self.reply() == {"ok": True}

    def send(self, content: bytes) -> None:
        self.stdin.write(content + b"\n")
        self.stdin.flush()

    def ask(self, **request: Any) -> Any:
        self.send(line(request))
        return self.reply()

    def reply(self) -> Any:
        return json.loads(self.stdout.readline())


class Program:
    """The gate with an approval's certificate, started as sshd starts it."""

    def __init__(self, folder: Path, operator: Operator) -> None:
        self.folder, self.operator, self.gate = folder, operator, GATE
        self.state = folder / "gate"
        self.state.mkdir(mode=0o700)
        self.configure()

    def configure(self, **settings: Any) -> None:
        write_gate_configuration(self.folder, **{"host_keys": list(self.operator.train.fingerprints)} | settings)

    def start(self, approval: Approval) -> Popen[bytes]:
        login = self.folder / "login"
        login.write_text("publickey " + " ".join(approval.certificate_path.read_text().split()[:2]) + "\n")
        env = os.environ | {"SSH_USER_AUTH": str(login), "SSH_CONNECTION": "127.0.0.1 5 10.1.2.6 22"}
        argv = [str(self.gate), str(self.folder / "gate.json")]
        return process.start(argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env)

    def talk(self, approval: Approval) -> Conversation:
        return Conversation(self.start(approval), approval)

    def run(self, approval: Approval, *requests: dict[str, Any], action: bytes | None = None) -> tuple[int, list[Any]]:
        """Exit status and replies to ``requests`` (none of them a read)."""
        running = self.start(approval)
        lines = [approval.action.canonical() if action is None else action, *(map(line, requests))]
        output, errors = running.communicate(b"\n".join(lines) + b"\n", timeout=60)
        assert errors == b"", errors.decode()
        return running.returncode, [json.loads(line) for line in output.splitlines()]

    def refusal(self, approval: Approval, *requests: dict[str, Any], action: bytes | None = None) -> str:
        status, replies = self.run(approval, *requests, action=action)
        assert status == 77, replies
        assert replies[-1]["refused"]
        return str(replies[-1]["message"])

    def change(self, approval: Approval, *lines: bytes) -> tuple[int, list[Any]]:
        """Exit status and replies of a change; stdin stays open until it is done."""
        return exchange(self.start(approval), approval.action.canonical(), *lines)

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state / "gate.log").read_text().splitlines()]


class Changes:
    """Changes as they are approved one by one and done by the program."""

    def __init__(self, program: Program) -> None:
        self.program, self.host = program, program.operator.train

    def of(self, action: Any, *lines: bytes) -> tuple[int, list[Any]]:
        return self.program.change(approve_change(self.program.operator, action), *lines)

    def failure(self, action: Any, *lines: bytes) -> str:
        status, replies = self.of(action, *lines)
        assert status == 1, replies
        assert replies[-1]["ok"] is False
        assert "refused" not in replies[-1]
        return str(replies[-1]["message"])

    def shell(self, script: str, *arguments: str, **more: Any) -> tuple[int, bytes, bytes]:
        """Exit status, stdout and stderr of a script that was run."""
        status, replies = self.of(shell(self.host, script, *arguments, **more))
        assert status == 0, replies
        streams = {name: said(replies, name) for name in ("stdout", "stderr")}
        return int(replies[-1]["exit"]), streams["stdout"], streams["stderr"]

    def named(self, kind: Any, **fields: Any) -> Any:
        return kind(**{"host": "train", "host_keys": self.host.fingerprints, "seconds": 30} | fields)


def exchange(running: Popen[bytes], *lines: bytes) -> tuple[int, list[Any]]:
    """Say ``lines``, wait with stdin open until the program has ended, and return its exit status and replies."""
    assert running.stdin is not None
    assert running.stdout is not None
    with suppress(BrokenPipeError):  # it may refuse before it has heard them
        running.stdin.write(b"\n".join(lines) + b"\n")
        running.stdin.flush()
    replies = [json.loads(line) for line in running.stdout]
    status = running.wait(60)
    with suppress(BrokenPipeError):
        running.stdin.close()
    return status, replies


def with_less_patience(folder: Path) -> Path:
    """The program, except that it gives a client that takes nothing in one second to do so."""
    program, patience = folder / "impatient-gate", "signal.alarm(GRACE_SECONDS // 2)"
    source = GATE.read_text()
    assert source.count(patience) == 1
    program.write_text(source.replace(patience, "signal.alarm(1)"))
    program.chmod(0o755)
    return program


def line(request: dict[str, Any]) -> bytes:
    """A request as it goes over the wire, without the line end."""
    return json.dumps(request).encode()


def said(replies: list[Any], stream: str) -> bytes:
    return b"".join(base64.b64decode(reply["data"]) for reply in replies if reply.get("stream") == stream)


def wait_for(what: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
    return found


def ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
