"""The server beneath the flows: over PostgreSQL, killed in the middle of a run, and pruned."""

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flows.deployments import deployment
from flows.pruning import Retention
from flows.pruning import settings as pruned
from flows.serve import CLIENT_RETRIES
from tests.flows.conftest import Operator
from tests.flows.postgres import postgresql
from tests.flows.stage import wait_until
from tests.prefect_api import LEAN, REPOSITORY, Server, ask, copy_database, engine, running, start_run, state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BYTES = 12 << 20
LONG_AGO = "2020-01-01 00:00:00.000000"


@pytest.fixture
def server(
    shared_server: Server, tmp_path: Path, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """One of the test's own, with a database that need not be made first."""
    monkeypatch.chdir(REPOSITORY)
    own = Server(tmp_path / "prefect", **LEAN, **pruned(Retention(runs=1, events=1), every=3.0))
    copy_database(shared_server, own.home)
    with running(own):
        yield own


def applied(api: str, name: str, hosts: Path) -> str:
    """The id of a deployment at the server ``api``."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: api}):
        return str(deployment(name, hosts).apply())


def slow_relay(server: Server, operator: Operator, folder: Path) -> tuple[str, Path]:
    """A run that copies for some seconds, and where to."""
    (folder / "a.bin").write_bytes(b"x" * BYTES)
    end = folder / "b.bin"
    asked: dict[str, Any] = {"source": str(folder / "a.bin"), "destinations": [f"ct129:{end}"]}
    asked["settings"] = {"bandwidth": BYTES // 8, "range_bytes": 1 << 20}
    return start_run(server.api, applied(server.api, "relay_checkpoint", operator.hosts_file), asked), end


def test_a_server_that_is_killed_in_the_middle_of_a_run_and_comes_back_finds_it_completed(
    server: Server, operator: Operator, tmp_path: Path
) -> None:
    run, end = slow_relay(server, operator, tmp_path)
    executing = engine(server.api, run, PREFECT_CLIENT_MAX_RETRIES=str(CLIENT_RETRIES))
    wait_until(lambda: state(server.api, run)[0] == "RUNNING", 120)
    wait_until(lambda: list(tmp_path.glob(".b.bin.part-*")), 60)
    server.stop(signal.SIGKILL)
    # what it does needs no server
    wait_until(end.exists, 120)
    server.start()
    assert executing.wait(300) == 0
    assert state(server.api, run) == ("COMPLETED", "Completed")
    assert end.read_bytes() == b"x" * BYTES


def test_old_runs_go_with_their_logs_and_new_ones_stay(server: Server, operator: Operator, tmp_path: Path) -> None:
    relay = applied(server.api, "relay_checkpoint", operator.hosts_file)
    (tmp_path / "a.bin").write_bytes(b"x")
    asked = {"source": str(tmp_path / "a.bin"), "destinations": [str(tmp_path / "b.bin")]}
    old, new = (start_run(server.api, relay, asked) for _ in range(2))
    for run in (old, new):
        assert engine(server.api, run).wait(120) == 0
        assert state(server.api, run)[0] == "COMPLETED"
    with closing(sqlite3.connect(server.home / "prefect.db", timeout=60)) as database:
        changed = database.execute("UPDATE flow_run SET end_time = ? WHERE id = ?", (LONG_AGO, old))
        database.execute("UPDATE events SET occurred = ?", (LONG_AGO,))
        database.commit()
    assert changed.rowcount == 1

    def left() -> list[str]:
        return [run["id"] for run in ask(server.api, "flow_runs/filter", {"deployments": {"id": {"any_": [relay]}}})]

    wait_until(lambda: left() == [new], 60)
    assert ask(server.api, "logs/filter", {"logs": {"flow_run_id": {"any_": [old]}}}) == []
    with closing(sqlite3.connect(server.home / "prefect.db", timeout=60)) as database:

        def old_events() -> int:
            return int(database.execute("SELECT count(*) FROM events WHERE occurred <= ?", (LONG_AGO,)).fetchone()[0])

        wait_until(lambda: old_events() == 0, 60)


def test_it_runs_over_postgresql(tmp_path: Path, operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "a.bin").write_bytes(b"content")
    with (
        postgresql() as postgres,
        running(
            Server(
                tmp_path / "prefect",
                **LEAN,
                **pruned(Retention()),
                PREFECT_SERVER_DATABASE_DRIVER="postgresql+asyncpg",
                PREFECT_SERVER_DATABASE_HOST="127.0.0.1",
                PREFECT_SERVER_DATABASE_PORT=str(postgres.port),
                PREFECT_SERVER_DATABASE_NAME="prefect",
                PREFECT_SERVER_DATABASE_USER="postgres",
                PREFECT_SERVER_DATABASE_PASSWORD="not asked for",
            )
        ) as server,
    ):
        relay = applied(server.api, "relay_checkpoint", operator.hosts_file)
        asked = {"source": str(tmp_path / "a.bin"), "destinations": [str(tmp_path / "b.bin")]}
        run = start_run(server.api, relay, asked)
        assert engine(server.api, run).wait(120) == 0
        assert state(server.api, run) == ("COMPLETED", "Completed")
        assert (tmp_path / "b.bin").read_bytes() == b"content"
        assert postgres.ask(f"SELECT state_name FROM flow_run WHERE id = '{run}'") == "Completed"
        assert not (tmp_path / "prefect" / "prefect.db").exists()
