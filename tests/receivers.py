"""Who is told, in tests: a webhook's receiver and a mail server that keep what arrives."""

import email
import email.policy
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Server = TypeVar("Server", bound=socketserver.BaseServer)


class Webhook(ThreadingHTTPServer):
    """Takes JSON by POST and answers with ``status``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Post)
        self.status = 200
        self.received: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class _Post(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(json.loads(body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Keep the test's output clean."""


class MailServer(socketserver.ThreadingTCPServer):
    """Speaks as much SMTP as a client needs to leave a message, and keeps it."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Smtp)
        self.received: list[EmailMessage] = []

    @property
    def url(self) -> str:
        """Apprise's URL for it."""
        port = self.server_address[1]
        return f"mailto://127.0.0.1:{port}/?from=dflash@example.org&to=operator@example.org&mode=insecure"


class _Smtp(socketserver.StreamRequestHandler):
    server: MailServer

    def handle(self) -> None:
        self._say("220 sink")
        while line := self.rfile.readline():
            command = line.decode().split()[0].upper()
            if command == "DATA":
                self._say("354 go on")
                self._take()
                self._say("250 kept")
            elif command == "QUIT":
                self._say("221 bye")
                return
            else:
                self._say("250 fine")

    def _take(self) -> None:
        lines = []
        while (line := self.rfile.readline()) != b".\r\n":
            lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
        message = email.message_from_bytes(b"".join(lines), policy=email.policy.default)
        assert isinstance(message, EmailMessage)
        self.server.received.append(message)

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """The server answers until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def plain_text(message: EmailMessage) -> str:
    """The text of a mail as it is read."""
    part = message.get_body(preferencelist=("plain", "html"))
    assert part is not None
    return str(part.get_content())
