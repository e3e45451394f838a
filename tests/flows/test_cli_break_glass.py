import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dflash.errors import DFlashError, UsageError
from flows.cli import app
from tasks import process
from tasks.errors import Refused
from tests.flows.conftest import Operator

REPOSITORY = Path(__file__).parents[2]


def break_glass(*argv: str, reason: str | None = "the disk is full") -> Result:
    because = [] if reason is None else ["--reason", reason]
    return CliRunner().invoke(app, ["guard", "break-glass", "kpro6", *because, "--", *argv])


def test_a_command_runs_at_once_and_both_logs_are_loud(operator: Operator) -> None:
    marker = operator.checkpoint.with_name("here")
    result = break_glass("/usr/bin/touch", str(marker))
    assert result.exit_code == 0, result.exception
    assert marker.exists()
    assert "BREAK-GLASS" in result.stderr
    entries = list(operator.connector.audit.entries())
    events = [entry["event"] for entry in entries]
    assert any("break" in event.lower() for event in events), events
    assert any("the disk is full" in str(entry.get("reason")) for entry in entries)
    assert "BREAK-GLASS" in (operator.site.gate_state / "gate.log").read_text()


def test_its_output_comes_as_it_is_and_its_failure_is_one(operator: Operator) -> None:
    result = break_glass("/bin/sh", "-c", "echo out; echo err >&2; exit 3")
    assert isinstance(result.exception, DFlashError)
    assert result.exception.exit_code == 1
    assert "ended with exit status 3" in str(result.exception)
    assert result.stdout == "out\n"
    assert "err\n" in result.stderr


@pytest.mark.parametrize("reason", [None, "  "])
def test_without_a_reason_nothing_happens(operator: Operator, reason: str | None) -> None:
    before = operator.connections()
    result = break_glass("/usr/bin/true", reason=reason)
    assert isinstance(result.exception, Refused)
    assert "reason" in str(result.exception)
    assert operator.connections() == before
    assert operator.connector.store.requests() == []


def test_it_is_for_a_protected_host_only(operator: Operator) -> None:
    result = CliRunner().invoke(app, ["guard", "break-glass", "ct129", "--reason", "x", "--", "/usr/bin/true"])
    assert isinstance(result.exception, UsageError)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--", "ls"], "path 'ls' is not absolute"),
        (["--cwd", "here", "--", "/bin/ls"], "path 'here' is not absolute"),
        (["--time", "8d", "--", "/bin/ls"], "seconds: "),
        (["--json", "--", "/bin/ls"], "--json is for --plan"),
        (["--", "/bin/ls", "\udcff"], "is not UTF-8 text"),
    ],
)
def test_what_is_typed_wrongly_is_named_and_asks_for_nothing(operator: Operator, argv: list[str], what: str) -> None:
    result = CliRunner().invoke(app, ["guard", "break-glass", "kpro6", "--reason", "x", *argv])
    assert isinstance(result.exception, UsageError)
    assert what in str(result.exception)
    assert operator.connector.store.requests() == []


def test_it_works_where_prefect_does_not(operator: Operator) -> None:
    marker = operator.checkpoint.with_name("here")
    program = "import sys; sys.modules['prefect'] = None; from flows.__main__ import main; main()"
    argv = ["guard", "break-glass", "kpro6", "--reason", "test", "--", "/usr/bin/touch", str(marker)]
    done = process.run([sys.executable, "-c", program, *argv], check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert marker.exists()


def test_each_time_is_decided_anew(operator: Operator) -> None:
    for _ in range(2):
        assert break_glass("/usr/bin/true").exit_code == 0
    assert [one.outcome for one in operator.connector.store.requests()] == ["exit 0", "exit 0"]
