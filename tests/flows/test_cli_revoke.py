"""Taking back what a real gate would honour."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.cli import app
from tasks.actions import ReadGrant
from tasks.approvals import Approval
from tasks.errors import Refused
from tasks.gate import GateSession, open_session
from tasks.plans import Plan
from tests.flows.conftest import Operator


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, argv)


def approve_reading(operator: Operator) -> Approval:
    store, host = operator.connector.store, operator.connector.inventory.host("kpro6")
    grant = ReadGrant(
        host="kpro6",
        host_keys=host.fingerprints,
        paths=(str(operator.checkpoint),),
        verbs=("stat",),
        sessions=5,
        bytes=10**6,
    )
    request = store.request(Plan(grant=grant, effect="looked at"))
    return store.approve(request.id, reason="test", ca_key=operator.site.ca_key).read


def stolen(approval: Approval, folder: Path) -> Approval:
    """The same approval with copies of its files, as a thief has them."""
    folder.mkdir()
    files = [Path(shutil.copy(file, folder)) for file in (approval.key_path, approval.certificate_path)]
    return replace(approval, key_path=files[0], certificate_path=files[1])


def open_past_the_store(operator: Operator, approval: Approval, monkeypatch: pytest.MonkeyPatch) -> GateSession:
    """A session with whatever key there is, as a program that asks no store would open it."""
    connector = operator.connector
    monkeypatch.setattr(connector.store, "consume", lambda _: None)
    return open_session(connector, connector.inventory.host("kpro6"), approval)


def test_the_host_refuses_a_copied_key_too_and_ends_an_open_session(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    approval = approve_reading(operator)
    copy = stolen(approval, tmp_path / "stolen")
    session = open_past_the_store(operator, copy, monkeypatch)
    session.stat(str(operator.checkpoint))

    result = run("guard", "revoke", approval.id, "--reason", "the laptop is gone")
    assert result.exit_code == 0, result.exception
    assert f"kpro6 refuses serial {approval.serial} from now on" in result.stdout
    assert not approval.key_path.exists()
    with pytest.raises(Refused):
        session.stat(str(operator.checkpoint))
    with pytest.raises(Refused):
        open_past_the_store(operator, copy, monkeypatch)


def test_as_json_it_says_what_the_host_refuses(operator: Operator) -> None:
    approval = approve_reading(operator)
    result = run("guard", "revoke", approval.id, "--reason", "a test", "--json")
    assert json.loads(result.stdout) == {"id": approval.id, "status": "ended", "refused_there": [approval.serial]}
    assert "its key is deleted" in result.stderr


def test_what_the_host_did_not_hear_is_revoked_here_and_told_later(operator: Operator) -> None:
    approval = approve_reading(operator)
    held_back = operator.hosts_file.read_text()
    operator.hosts_file.write_text(held_back.replace(str(operator.site.ca_key), "/nowhere"))
    result = run("guard", "revoke", approval.id, "--reason", "test")
    assert isinstance(result.exception, Refused)
    assert operator.connector.store.get(approval.id).status == "ended"
    assert not approval.key_path.exists()
    operator.hosts_file.write_text(held_back)
    again = run("guard", "revoke", approval.id, "--reason", "test")
    assert again.exit_code == 0, again.exception
    assert f"kpro6 refuses serial {approval.serial}" in again.stdout
    assert [entry["event"] for entry in operator.connector.audit.entries()].count("revoke") == 1


def test_without_a_reason_nothing_is_revoked(operator: Operator) -> None:
    approval = approve_reading(operator)
    assert isinstance(run("guard", "revoke", approval.id).exception, Refused)
    assert operator.connector.store.get(approval.id).status == "approved"
