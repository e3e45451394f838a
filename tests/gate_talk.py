"""What a client of the gate program says to it, and reads."""

import json
from typing import Any

from tasks.approvals import Approval
from tasks.process import Popen


class Conversation:
    """Requests to a running gate, one after the other."""

    def __init__(self, running: Popen[bytes], approval: Approval) -> None:
        assert running.stdin is not None
        assert running.stdout is not None
        self.running, self.stdin, self.stdout = running, running.stdin, running.stdout
        self.send(approval.grant.canonical())
        assert json.loads(self.stdout.readline()) == {"ok": True}

    def send(self, content: bytes) -> None:
        self.stdin.write(content + b"\n")
        self.stdin.flush()

    def ask(self, **request: Any) -> Any:
        self.send(line(request))
        return json.loads(self.stdout.readline())


def line(request: dict[str, Any]) -> bytes:
    """A request as it goes over the wire, without the line end."""
    return json.dumps(request).encode()
