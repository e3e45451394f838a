"""Run commands in this process and write down every process that is started and every address that is called.

Run as ``python -m tests.flows.watched LOG < commands.json``: an audit hook cannot be taken off again, so it has a
process of its own. LOG gets a JSON line for each event, with whether it happened inside the gate: the recording one is
``Connector.start_gate`` and, for the doctor's offers of keys that cannot sign, ``Connector.offer``.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

EVENTS = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"),
    *("socket.connect", "socket.sendto", "socket.sendmsg"),
}
READ_BYTES = 1 << 16
inside_gate: ContextVar[bool] = ContextVar("inside_gate", default=False)


def main() -> None:
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    # a child between fork and exec writes here too
    tell = functools.partial(write, log)
    sys.addaudithook(functools.partial(watch, tell))
    steps = json.load(sys.stdin)
    if "sneak" in steps:
        sneak(*steps["sneak"])
    else:
        perform(steps["commands"], steps["lab"], tell)


def write(log: int, entry: dict[str, Any]) -> None:
    os.write(log, json.dumps(entry).encode() + b"\n")


def watch(tell: Callable[[dict[str, Any]], None], event: str, arguments: tuple[Any, ...]) -> None:
    if event in EVENTS:
        words = list(flat(arguments[1:] if event.startswith("socket") else arguments))
        named = list(flat([one for one in arguments if not isinstance(one, Mapping)]))
        tell({"event": event, "words": words, "files": files(named), "gate": inside_gate.get()})


def flat(value: Any) -> Iterator[str]:
    """Every text in the arguments of an event; the environment of a process with them."""
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, list | tuple):
        for one in value:
            yield from flat(one)
    elif isinstance(value, bytes):
        yield value.decode("utf-8", "replace")
    elif isinstance(value, str | os.PathLike | int):
        yield str(value)


def files(words: list[str]) -> str:
    """What the files that a command line names say: a configuration can name the host."""
    found = []
    for word in words:
        if word.startswith("/") and os.path.isfile(word) and os.path.getsize(word) < READ_BYTES:
            found.append(Path(word).read_text("utf-8", "replace"))
    return "\n".join(found)


def perform(commands: list[list[str]], lab: dict[str, str] | None, tell: Callable[[dict[str, Any]], None]) -> None:
    """Run each command; one that is refused is approved and run again."""
    from typer.testing import CliRunner

    from flows import cli_doctor
    from flows.cli import app
    from tasks.errors import Refused
    from tasks.ssh import Connector

    for name in ("start_gate", "offer"):
        setattr(Connector, name, recording(getattr(Connector, name), name, tell))
    cli_doctor.diagnose = functools.partial(cli_doctor.diagnose, pause=0.0)
    if lab is not None:
        stand_in_for_the_lab(lab)
    requests: dict[str, str] = {}
    for command in commands:
        argv = [requests.get(word, word) for word in command]

        def run(argv: list[str]) -> BaseException | None:
            result = CliRunner().invoke(app, argv)
            error = result.exception
            tell({"ran": argv, "code": getattr(error, "exit_code", result.exit_code), "said": str(error or "")})
            return error

        error = run(argv)
        if isinstance(error, Refused) and error.request_id is not None:
            requests[f"request of {command[0]}"] = error.request_id
            run(["guard", "approve", error.request_id, "--reason", "watched"])
            run(argv)


def recording(original: Callable[..., Any], name: str, tell: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def recorded(*arguments: Any, **named: Any) -> Any:
        tell({"passed": name})
        token = inside_gate.set(True)
        try:
            return original(*arguments, **named)
        finally:
            inside_gate.reset(token)

    return recorded


def stand_in_for_the_lab(place: dict[str, str]) -> None:
    """The lab's commands build and enter hosts of their own on this machine; these are up already."""
    from flows import cli_lab, demo

    class StandIn:
        weaker, privileged, environment = "", False, dict[str, str]()
        hosts_file = Path(place["hosts_file"])

        @classmethod
        def up(cls, *_: Any) -> "StandIn":
            return cls()

        running = up

        @classmethod
        def remove(cls, *_: Any) -> bool:
            return False

        def down(self) -> None: ...

        def status(self) -> list[Any]:
            return []

        def seen(self, host: str, path: str) -> str:
            return place["checkpoint"]

        def argv(self, host: str, argv: list[str]) -> list[str]:
            return argv

        @contextmanager
        def entered(self) -> Iterator[None]:
            with nullcontext():
                yield

    cli_lab.Lab = demo.Lab = StandIn
    demo._furnish = lambda lab: None
    demo.STEPS = (100,)


def sneak(way: str, address: str, port: str) -> None:
    """Reach for the address past the gate in one of the ways that there are; whether it works is all the same."""
    import contextlib
    import socket
    import subprocess

    with contextlib.suppress(OSError):
        match way:
            case "connect":
                socket.create_connection((address, int(port)), timeout=1)
            case "datagram":
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", (address, int(port)))
            case "mapped":
                socket.create_connection((f"::ffff:{address}", int(port)), timeout=1)
            case "popen":
                subprocess.run(["/bin/true", f"someone@{address}"])
            case "name":
                subprocess.run(["/bin/true", "kpro6"])
            case "environment":
                subprocess.run(["/bin/true"], env={"TARGET": address})
            case "configuration":
                file = Path(sys.argv[1]).with_name("config")
                file.write_text(f"Host elsewhere\n  HostName {address}\n")
                subprocess.run(["/bin/true", "-F", file, "elsewhere"])
            case "system":
                os.system(f"true {address}")
            case "posix_spawn":
                os.waitpid(os.posix_spawn("/bin/true", ["true", address], {}), 0)
            case "spawn":
                os.spawnv(os.P_WAIT, "/bin/true", ["true", address])
            case "exec":
                os.execv("/bin/true", ["true", address])


if __name__ == "__main__":
    main()
