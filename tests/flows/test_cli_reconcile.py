import json
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows import cli_audit
from flows.cli import app
from flows.cli_audit import LogsDifferError
from tasks.errors import Refused
from tasks.gate import open_session
from tasks.plans import Plan
from tasks.reconcile import Difference, plan_reconcile
from tests.flows.conftest import Operator


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, argv)


@pytest.fixture
def alone(operator: Operator) -> Operator:
    """An operator of whom alone the host's log tells."""
    (operator.site.gate_state / "gate.log").unlink(missing_ok=True)
    return operator


def read_the_checkpoint(operator: Operator) -> None:
    connector = operator.connector
    grant = {"host": "kpro6", "host_keys": connector.inventory.host("kpro6").fingerprints, "bytes": 10**6}
    plan = Plan.model_validate(
        {
            "grant": {**grant, "paths": (str(operator.checkpoint),), "verbs": ("stat",), "sessions": 1},
            "effect": "looked at",
        }
    )
    key = operator.site.ca_key
    approval = connector.store.approve(connector.store.request(plan).id, reason="test", ca_key=key).read
    with open_session(connector, connector.inventory.host("kpro6"), approval) as session:
        session.stat(str(operator.checkpoint))


def approve_reading_the_log(operator: Operator) -> None:
    store = operator.connector.store
    plan = plan_reconcile(operator.connector.inventory.host("kpro6"))
    store.approve(store.request(plan).id, reason="test", ca_key=operator.site.ca_key)


def test_two_honest_logs_tell_the_same(alone: Operator) -> None:
    read_the_checkpoint(alone)
    approve_reading_the_log(alone)
    result = run("audit", "reconcile", "kpro6")
    assert result.exit_code == 0, result.exception
    assert result.stdout == "both logs tell the same of kpro6\n"


def test_what_this_side_does_not_know_is_listed_and_a_failure(alone: Operator) -> None:
    approve_reading_the_log(alone)
    log = alone.site.gate_state / "gate.log"
    read_the_checkpoint(alone)
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines, *(line.replace('"serial":', '"serial": 7') for line in lines)]) + "\n")
    result = run("audit", "reconcile", "kpro6", "--json")
    assert isinstance(result.exception, LogsDifferError)
    assert result.exception.exit_code == 1
    assert {row["side"] for row in json.loads(result.stdout)} == {"host"}


def test_reading_the_log_needs_an_approval(operator: Operator) -> None:
    before = operator.connections()
    assert "gate.log" in "".join(run("audit", "reconcile", "kpro6", "--plan").stdout.split())
    assert isinstance(run("audit", "reconcile", "kpro6").exception, Refused)
    assert operator.connections() == before


def test_what_a_host_says_is_shown_escaped(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    approve_reading_the_log(operator)

    def found(*_: Any) -> list[Difference]:
        return [Difference("host", 1.0, 5, "a use\x1b[2J")]

    monkeypatch.setattr(cli_audit, "reconcile_host", found)
    result = run("audit", "reconcile", "kpro6")
    assert "a use\\x1b[2J" in result.stdout
    assert "\x1b" not in result.stdout
