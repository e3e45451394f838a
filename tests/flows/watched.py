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


def perform(steps: list[Any], lab: dict[str, str] | None, tell: Callable[[dict[str, Any]], None]) -> None:
    """Do each step; what is refused is approved and done again.

    A step is a command's arguments, with ``{"command": …, "stdin": …}`` where it reads; ``{"flow": …, "parameters":
    …}``, a flow that is called as a function; or ``{"due": …}``, the runs that wait for checkpoints below that folder.
    """
    from flows import cli_doctor
    from tasks.errors import Refused
    from tasks.ssh import Connector

    for name in ("start_gate", "offer"):
        setattr(Connector, name, recording(getattr(Connector, name), name, tell))
    cli_doctor.diagnose = functools.partial(cli_doctor.diagnose, pause=0.0)
    if lab is not None:
        stand_in_for_the_lab(lab)
        stand_in_for_what_needs_more_than_this_machine(lab)
    requests: dict[str, str] = {}
    for step in steps:
        if isinstance(step, dict) and "due" in step:
            run_what_is_due(step["due"], tell)
            continue
        if isinstance(step, dict) and "flow" in step:
            act = functools.partial(call, step["flow"], step["parameters"], tell)
            first = step["flow"]
        else:
            argv, typed = (step["command"], step["stdin"]) if isinstance(step, dict) else (step, None)
            act = functools.partial(command, [requests.get(word, word) for word in argv], typed, tell)
            first = argv[0]
        asked: set[str] = set()
        error = act()
        # what has to be looked at before it is known what it needs is refused twice, the same never
        while isinstance(error, Refused) and error.request_id is not None and error.request_id not in asked:
            asked.add(error.request_id)
            requests[f"request of {first}"] = error.request_id
            command(["guard", "approve", error.request_id, "--reason", "watched"], None, tell)
            error = act()


def command(argv: list[str], typed: str | None, tell: Callable[[dict[str, Any]], None]) -> BaseException | None:
    from typer.testing import CliRunner

    from flows.cli import app

    result = CliRunner().invoke(app, argv, input=typed)
    error = result.exception
    tell({"ran": argv, "code": getattr(error, "exit_code", result.exit_code), "said": repr(error or "")})
    return error


def call(name: str, parameters: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> BaseException | None:
    from flows.deployments import flow

    error: BaseException | None = None
    try:
        flow(name)(**parameters)
    except Exception as raised:
        error = raised
    tell({"ran": ["flow", name], "code": int(error is not None), "said": repr(error or "")})
    return error


def run_what_is_due(folder: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """What the runner of ``dflash-ops serve`` starts a process for each, in this one."""
    from tests import prefect_api

    api = os.environ["PREFECT_API_URL"]
    scheduled = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}}
    for run in prefect_api.ask(api, "flow_runs/filter", scheduled):
        source = run["parameters"].get("source", "")
        if folder in source:
            prefect_api.run_here(run["id"])
            kind, name = prefect_api.state(api, run["id"])
            said = f"{name}: {prefect_api.message(api, run['id'])}"
            tell({"ran": ["due", source], "code": int(kind != "COMPLETED"), "said": said})


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


def stand_in_for_what_needs_more_than_this_machine(place: dict[str, str]) -> None:
    """A package index, somebody at a terminal, and time without end."""
    import asyncio
    from types import SimpleNamespace

    from flows import cli_promote, serve
    from flows.serving import Serving
    from flows.watching import Looks
    from tasks import environments, provisioning
    from tests.terminals import Terminal
    from tests.wheelhouses import SMALL_PROFILE, SmallHouse

    class OneLook(Serving):
        """Has its deployments, and each watch looks once; what is due then is left to whoever looks for it."""

        async def run(self) -> None:
            from prefect.runner import Runner

            await self._apply(Runner("dflash"))
            await asyncio.to_thread(self._settle)
            for watching in self._watches:
                found = await asyncio.to_thread(Looks(watching).look_or_raise)
                if found.state != "watching":
                    raise RuntimeError(f"{found.state}: {found.message}")

    serve.Serving = OneLook
    house = SmallHouse(Path(place["house"]))
    provisioning.Wheelhouse = lambda: house
    provisioning.index_for = lambda host: None
    environments.PROFILES["slim"] = SMALL_PROFILE
    cli_promote.sys = SimpleNamespace(stdin=Terminal())


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
