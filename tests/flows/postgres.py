"""A real PostgreSQL in a folder of its own, run by the user postgres, for that server refuses root."""

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks import process
from tests.prefect_api import free_port


@dataclass(frozen=True)
class Postgres:
    """One that listens on a port of the loopback interface, and trusts whoever connects from there."""

    folder: Path
    programs: Path
    port: int

    @property
    def url(self) -> str:
        """For Prefect."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/prefect"

    def ask(self, query: str) -> str:
        argv = [str(self.programs / "psql"), "--host=127.0.0.1", f"--port={self.port}", "--username=postgres"]
        return process.run([*argv, "--tuples-only", "--no-align", "--command", query, "prefect"]).stdout.strip()

    def control(self, *words: str) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder}"
        argv = [str(self.programs / "pg_ctl"), f"--pgdata={self.folder}/data", "--wait", f"--log={self.folder}/log"]
        process.run([*_as_postgres(), *argv, f"--options={options}", *words], cwd=self.folder, timeout=120)


@contextmanager
def postgresql() -> Iterator[Postgres]:
    """One with an empty database ``prefect``; the test is skipped where none is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin")) or [Path(shutil.which("initdb") or "/").parent]
    if not (found[-1] / "initdb").exists():
        pytest.skip("no PostgreSQL is installed: `make test-system` as root")
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    try:
        if os.geteuid() == 0:
            os.chown(folder, pwd.getpwnam("postgres").pw_uid, -1)
        server = Postgres(folder, found[-1], free_port())
        initdb = [str(server.programs / "initdb"), f"--pgdata={folder}/data", "--auth=trust", "--username=postgres"]
        process.run([*_as_postgres(), *initdb, "--no-sync"], cwd=folder, timeout=120)
        server.control("start")
        try:
            createdb = [str(server.programs / "createdb"), "--host=127.0.0.1", f"--port={server.port}"]
            process.run([*createdb, "--username=postgres", "prefect"])
            yield server
        finally:
            server.control("--mode=immediate", "stop")
    finally:
        shutil.rmtree(folder)


def _as_postgres() -> list[str]:
    return ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
