"""What ``dflash-ops serve`` sees to before it serves, and what it settles of an earlier one."""

import json
import os
import re
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dflash.errors import UsageError
from flows import prefect_home, pruning
from flows.embedded_server import EmbeddedServer, PortTakenError
from flows.prefect_database import HOLES_BYTES, DatabaseLockedError, make_ready
from flows.pruning import Retention
from flows.serve import AlreadyServingError, _alone


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own; what is put into the environment is gone with the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    monkeypatch.setattr(os, "environ", kept | {"DFLASH_STATE": str(tmp_path / "state")})
    return tmp_path / "state"


def database(file: Path, rows: int = 0) -> Path:
    with closing(sqlite3.connect(file)) as made:
        made.execute("CREATE TABLE filled (content BLOB)")
        made.executemany("INSERT INTO filled VALUES (zeroblob(?))", [(1 << 20,)] * rows)
        made.commit()
    return file


def test_a_database_that_cannot_be_read_is_put_aside_and_said(tmp_path: Path) -> None:
    file = database(tmp_path / "prefect.db", rows=1)
    content = bytearray(file.read_bytes())
    content[:100] = os.urandom(100)
    file.write_bytes(content)
    said: list[str] = []
    make_ready(file, said.append)
    assert not file.exists()
    (aside,) = tmp_path.glob("prefect.db.unreadable-*")
    assert aside.read_bytes() == content
    (line,) = said
    assert str(aside) in line
    assert "ledger knows what is due" in line


def test_a_database_whose_pages_do_not_fit_together_is_put_aside(tmp_path: Path) -> None:
    file = database(tmp_path / "prefect.db", rows=1)
    content = bytearray(file.read_bytes())
    content[4096:8192] = os.urandom(4096)
    file.write_bytes(content)
    said: list[str] = []
    make_ready(file, said.append)
    assert len(said) == 1
    assert not file.exists()


def test_a_sound_database_stays_and_nothing_is_said(tmp_path: Path) -> None:
    file = database(tmp_path / "prefect.db", rows=1)
    before = file.read_bytes()
    make_ready(file, pytest.fail)
    make_ready(tmp_path / "none.db", pytest.fail)
    assert file.read_bytes() == before
    assert not (tmp_path / "none.db").exists()


def test_a_locked_database_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = database(tmp_path / "prefect.db")
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(
            DatabaseLockedError, match="locked by another process: end the other Prefect server"
        ) as held:
            make_ready(file, pytest.fail, patience=0.05)
    assert held.value.state_name == "DatabaseLocked"
    assert file.exists()


def test_a_file_full_of_holes_is_written_anew(tmp_path: Path) -> None:
    file = database(tmp_path / "prefect.db", rows=(HOLES_BYTES >> 20) + 2)
    with closing(sqlite3.connect(file)) as holes:
        holes.execute("DELETE FROM filled")
        holes.commit()
    assert file.stat().st_size > HOLES_BYTES
    make_ready(file, pytest.fail)
    assert file.stat().st_size < 1 << 20


def test_prefect_understands_what_is_kept_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import Settings

    for name, value in pruning.settings(Retention(runs=2, events=0.5), every=7).items():
        monkeypatch.setenv(name, value)
    server = Settings().server
    vacuum = server.services.db_vacuum
    assert {"events", "flow_runs"} <= vacuum.enabled_vacuum_types
    assert vacuum.loop_seconds == 7
    assert vacuum.retention_period.total_seconds() == 2 * 86_400
    assert server.events.retention_period.total_seconds() == 43_200
    assert {name: kept.total_seconds() for name, kept in vacuum.event_retention_overrides.items()} == {
        "prefect.flow-run.heartbeat": 3600,
        "prefect.task-run.Pending": 3600,
        "prefect.task-run.Running": 3600,
        "prefect.task-run.Completed": 3600,
    }


def test_less_than_an_hour_cannot_be_kept() -> None:
    with pytest.raises(UsageError, match="--keep-events"):
        Retention(events=0.01)


def test_a_port_that_is_taken_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} .* it is no Prefect server.*--port"):
            EmbeddedServer(port)


def test_one_state_folder_is_served_once(folder: Path) -> None:
    with _alone():
        prefect_home.record_serving("http://127.0.0.1:4200/api")
        with pytest.raises(AlreadyServingError, match=re.escape("http://127.0.0.1:4200/api")), _alone():
            pytest.fail("it was let in")
    with _alone():
        pass


def test_a_record_of_a_process_that_is_gone_names_no_server(folder: Path) -> None:
    assert prefect_home.serving() is None
    prefect_home.record_serving("http://127.0.0.1:4200/api")
    assert prefect_home.serving() == "http://127.0.0.1:4200/api"
    record = folder / "serve.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"birth": "another boot:1"}))
    assert prefect_home.serving() is None
    record.write_text("{")
    assert prefect_home.serving() is None


def test_a_command_uses_the_server_that_serves_its_state_folder(folder: Path) -> None:
    prefect_home.record_serving("http://127.0.0.1:4200/api")
    prefect_home.configure_prefect()
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    os.environ["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    prefect_home.configure_prefect()
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
