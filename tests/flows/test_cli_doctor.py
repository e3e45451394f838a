import functools
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dflash.errors import UsageError
from flows import cli_doctor
from flows.cli import app
from flows.cli_doctor import HostOpenError
from tasks.errors import Refused
from tasks.finding import Finding
from tests.flows.conftest import Operator


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, ["guard", "doctor", *argv])


@pytest.fixture(autouse=True)
def in_haste_and_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor offers what whoever runs it has, and takes its time."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(cli_doctor, "diagnose", functools.partial(cli_doctor.diagnose, pause=0.0))


def test_a_host_that_refuses_everything_is_found_well_without_an_approval(operator: Operator) -> None:
    result = run("kpro6")
    assert result.exit_code == 0, result.exception
    assert "no certificate" in result.stdout
    assert "needs approval" in result.stdout
    assert "  host keys …\n  no certificate …\n" in result.stderr, "a log, too, tells how far it is"
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert operator.connector.store.requests() == []
    assert [entry["event"] for entry in operator.connector.audit.entries()] == ["doctor"]


def test_what_needs_a_session_asks_first(operator: Operator) -> None:
    before = operator.connections()
    planned = run("kpro6", "--full", "--plan")
    assert "not approved" in planned.stdout
    refused = run("kpro6", "--full")
    assert isinstance(refused.exception, Refused)
    (request,) = operator.connector.store.requests()
    assert [action.kind for action in request.plan.changes] == ["run"]
    assert operator.connections() == before


def test_one_way_in_is_a_failure(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Finding("host keys", "pass", "3 shown", "fine"),
        Finding("ordinary keys", "fail", "taken: \x1b[2J", "it is open"),
        Finding("replay", "skipped", "needs approval", "not looked at"),
    ]
    monkeypatch.setattr(cli_doctor, "diagnose", lambda *_, **__: rows)
    result = run("kpro6")
    assert isinstance(result.exception, HostOpenError)
    assert result.exception.exit_code == 1
    assert "ordinary keys" in str(result.exception)
    assert "\x1b" not in result.stdout
    assert "taken: \\x1b[2J: it is open" in " ".join(result.stdout.split())
    assert [row["status"] for row in json.loads(run("kpro6", "--json").stdout)] == ["pass", "fail", "skipped"]


@pytest.mark.parametrize("options", [[], ["--full"]])
def test_only_a_protected_host_has_a_doctor(operator: Operator, options: list[str]) -> None:
    assert isinstance(run("ct129", *options).exception, UsageError)


def test_the_gate_is_named_by_its_whole_path(operator: Operator) -> None:
    result = run("kpro6", "--full", "--plan", "--gate", "dflash-gate")
    assert isinstance(result.exception, UsageError)
    assert "'dflash-gate' is not absolute" in str(result.exception)


def test_without_full_the_plan_is_to_log_in_nowhere(operator: Operator) -> None:
    before = operator.connections()
    assert "none could log in" in run("kpro6", "--plan").stdout
    assert json.loads(run("kpro6", "--plan", "--json").stdout)["actions"] == []
    assert operator.connections() == before
