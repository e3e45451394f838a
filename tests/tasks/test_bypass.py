"""Every way around the guard that we could think of, against real sshds: refused with exit code 77, and recorded."""

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from dflash.errors import run_cli
from tasks import process
from tests.bypass import ATTEMPTS
from tests.bypass.stage import SLOW, More, Stage
from tests.sshds import Operator, Site, both_sshds


@contextmanager
def _on_ipv6(site: Site, folder: Path) -> Iterator[int]:
    """The port of an sshd on ``::1`` that is the protected host's in everything else."""
    with closing(socket.create_server(("::1", 0), family=socket.AF_INET6)) as free:
        port = int(free.getsockname()[1])
    config = (site.protected.log.parent / "sshd_config").read_text()
    config = re.sub(r"^Port .*\n", "", config, flags=re.MULTILINE)
    config = re.sub(r"^ListenAddress .*$", f"Port {port}\nListenAddress ::1", config, flags=re.MULTILINE)
    (folder / "ipv6").write_text(config)
    sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
    assert sshd is not None
    running = process.start([sshd, "-D", "-f", str(folder / "ipv6"), "-E", str(folder / "ipv6.log")])
    for _ in range(200):
        with suppress(OSError), socket.create_connection(("::1", port), timeout=1):
            break
        time.sleep(0.05)
    yield port
    running.terminate()
    running.wait()


@contextmanager
def _forwarded(address: str, port: int) -> Iterator[int]:
    """A port of 127.0.0.1 from which everything goes on to ``address``, as ``ssh -L`` would have it."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                here, _ = server.accept()
                there = socket.create_connection((address, port))
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, daemon=True).start()
    yield int(server.getsockname()[1])
    server.close()


@pytest.fixture(scope="module")
def more(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[More]:
    """A second sshd of other keys, one on IPv6, and a port that leads to the protected host."""
    folder = tmp_path_factory.mktemp("more")
    with ExitStack() as open_files, both_sshds(folder) as others:
        ipv6_port = open_files.enter_context(_on_ipv6(site, folder))
        forwarded_port = open_files.enter_context(_forwarded(site.protected.address, site.protected.port))
        yield More(others.protected, ipv6_port, forwarded_port)


@pytest.fixture
def stage(
    site: Site, more: More, operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    with ExitStack() as open_files:
        yield Stage(site, more, operator, tmp_path, monkeypatch, open_files)


TABLE = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ATTEMPTS]


def test_the_table_is_long_enough() -> None:
    assert len(ATTEMPTS) - len(SLOW) >= 40
    assert set(ATTEMPTS) > SLOW


@pytest.mark.parametrize("name", TABLE)
def test_every_way_around_is_refused_and_recorded(stage: Stage, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tried, says = ATTEMPTS[name]
    before = sum(1 for _ in stage.operator.audit.entries())
    with pytest.raises(SystemExit) as ended:
        run_cli(lambda: tried(stage))
    said = capsys.readouterr().err
    assert ended.value.code == 77, said
    assert re.search(says, said), said
    new = list(stage.operator.audit.entries())[before:]
    assert "refusal" in [entry["event"] for entry in new]
    assert not stage.effect.exists()
