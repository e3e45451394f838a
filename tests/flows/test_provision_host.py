"""``provision-host`` as a real run: refused without an approval, then looked at, then changed, by one approval each."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks import environments, process, provisioning
from tasks.errors import Refused
from tests.flows.conftest import Operator
from tests.flows.stage import wait_until
from tests.prefect_api import QUIET, REPOSITORY, ask
from tests.wheelhouses import SMALL_PROFILE, SmallHouse

RELEASE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def provisioned(operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    """An operator whose slim profile is one small module; both hosts' environments are in new folders."""
    house = SmallHouse(tmp_path / "house")
    monkeypatch.setattr(provisioning, "Wheelhouse", lambda: house)
    monkeypatch.setattr(provisioning, "index_for", lambda host: None)
    monkeypatch.setitem(environments.PROFILES, "slim", SMALL_PROFILE)
    known = json.loads(operator.hosts_file.read_text())
    for name, host in known["hosts"].items():
        host["environments"] = str(tmp_path / f"environments-{name}")
    operator.hosts_file.write_text(json.dumps(known))
    return operator


def approve(operator: Operator) -> str:
    """Approve what waits; what it may do, as a word an action."""
    connector = operator.connector
    (waiting,) = [one for one in connector.store.requests() if one.status == "pending"]
    connector.store.approve(waiting.id, reason="a test", ca_key=operator.site.ca_key, seconds=600)
    return " ".join(getattr(action, "kind", "") for action in waiting.plan.actions)


def test_a_protected_host_is_provisioned_by_two_approvals(
    provisioned: Operator, prefect_api: str, tmp_path: Path
) -> None:
    from flows.provision_host import provision_host

    def again():  # type: ignore[no-untyped-def]
        return provision_host("kpro6", "slim", RELEASE, hosts=provisioned.hosts_file)

    before = provisioned.connections()
    with pytest.raises(Refused, match="guard approve"):
        again()
    assert provisioned.connections() == before
    (last,) = ask(prefect_api, "flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert (last["name"], last["state"]["name"]) == ("provision kpro6", "AwaitingApproval")

    assert approve(provisioned) == "run run"
    with pytest.raises(Refused, match="packages are installed"):
        again()
    assert not (tmp_path / "environments-kpro6").exists()
    connections = provisioned.connections()
    with pytest.raises(Refused):
        again()
    assert provisioned.connections() == connections

    assert approve(provisioned) == "run put run"
    made = again()
    assert made.changed
    assert (tmp_path / "environments-kpro6/current").resolve() == Path(made.path)
    published = ask(prefect_api, "artifacts/filter", {"sort": "CREATED_DESC"})
    assert any(one["key"] == "environment-kpro6" and made.digest in one["data"] for one in published)


def test_a_host_without_what_it_takes_ends_in_a_state_that_says_so(
    provisioned: Operator, prefect_api: str, tmp_path: Path
) -> None:
    from flows.provision_host import provision_host

    state = provision_host("ct129", "slim", "3.1", hosts=provisioned.hosts_file, return_state=True)
    assert state.name == "NoPython"
    assert "install Python 3.1 there" in str(state.message)


def test_the_plan_of_a_protected_host_is_shown_and_leaves_no_request(provisioned: Operator) -> None:
    before = provisioned.connections()
    told = CliRunner().invoke(app, ["provision", "kpro6", "--profile", "slim", "--plan"])
    assert told.exit_code == 0
    assert "not approved" in told.output
    assert "its environments are looked at" in " ".join(told.output.split())
    assert provisioned.connector.store.requests() == []
    assert provisioned.connections() == before


@pytest.mark.slow
def test_the_command_says_what_it_would_do_does_it_and_finds_it_done(
    provisioned: Operator, prefect_api: str, tmp_path: Path
) -> None:
    def command(*options: str) -> str:
        told = CliRunner().invoke(app, ["provision", "ct129", "--profile", "slim", "--python", RELEASE, *options])
        assert told.exit_code == 0, told.output
        return " ".join(told.stdout.split())

    assert "1 packages from wheels that are sent, 2 wheels to send" in command("--plan")
    assert not (tmp_path / "environments-ct129").exists()
    assert "built and current now" in command()
    assert "was there already, nothing changed" in command()
    assert "nothing would change" in command("--plan")
    assert json.loads(command("--json").splitlines()[-1])["changed"] is False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_to_end_leaves_one_line_and_no_server_behind(provisioned: Operator, tmp_path: Path) -> None:
    """Of a command that started a Prefect server for its run."""
    kept = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    argv = [sys.executable, "-m", "flows", "provision", "ct129", "--profile", "slim"]
    # nobody answers pip there; with a password in it, it is no address for the host to see
    mute = socket.create_server(("127.0.0.1", 0))
    index = f"http://me:secret@127.0.0.1:{mute.getsockname()[1]}/simple"
    env = {**kept, **QUIET, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_TIMEOUT": "600"}
    with (tmp_path / "said").open("wb") as said:
        running = process.start(argv, env=env, cwd=REPOSITORY, stdout=said, stderr=said, start_new_session=True)

    def servers() -> list[int]:
        return [
            pid for pid, of in process_environments() if str(provisioned.folder).encode() in of and pid != running.pid
        ]

    try:
        wait_until(
            lambda: b"choosing the wheels" in (tmp_path / "said").read_bytes() or running.poll() is not None, 300
        )
        assert servers()
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 130
        wait_until(lambda: not servers(), 60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        mute.close()
    *_, last = (tmp_path / "said").read_text().splitlines()
    assert last == "interrupted: the environment that was current there stays so; the same command goes on"
    assert "Traceback" not in (tmp_path / "said").read_text()


def process_environments() -> Iterator[tuple[int, bytes]]:
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(one.name), (one / "environ").read_bytes()


def test_an_unknown_profile_is_said_before_anything_else(provisioned: Operator) -> None:
    told = CliRunner().invoke(app, ["provision", "kpro6", "--profile", "huge"])
    assert "slim, eval, train" in str(told.exception)
