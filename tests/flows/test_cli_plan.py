import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import Result
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from dflash.errors import UsageError
from flows.cli import app
from flows.cli_plan import with_plan
from tests.guard_state import CHECKPOINT, GuardState

ROOT = get_command(app)
TOUCH_NO_HOST = {
    # the lab's hosts are ours, and stand on this machine
    *("demo", "lab up", "lab down", "lab status", "lab exec"),
    # files of this machine
    *("hosts list", "audit show", "audit verify"),
    *("guard requests", "guard approve", "guard countersign", "guard deny", "guard plan", "guard setup"),
    *("guard standing drop", "status", "notify add", "notify test"),
}


@pytest.fixture
def guard(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> GuardState:
    guard = GuardState(tmp_path)
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path))
    monkeypatch.setenv("DFLASH_HOSTS", str(guard.hosts_file))
    return guard


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, argv)


def commands(group: Any = ROOT, *names: str) -> Iterator[tuple[str, Any]]:
    """Every command by its whole name."""
    for name, found in group.commands.items():
        if isinstance(found, TyperGroup):
            yield from commands(found, *names, name)
        else:
            yield " ".join((*names, name)), found


def test_every_command_that_touches_a_host_takes_plan() -> None:
    without = {name for name, found in commands() if not any("--plan" in one.opts for one in found.params)}
    assert without == TOUCH_NO_HOST


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("relay a:/b c:/d", "relay --plan a:/b c:/d"),
        ("relay a:/b c:/d --json", "relay --plan a:/b c:/d --json"),
        ("guard revoke 1234 --reason x", "guard revoke --plan 1234 --reason x"),
        ("guard standing request a:/b --sessions 1", "guard standing request --plan a:/b --sessions 1"),
        ("guard break-glass kpro6 -- /bin/sh -c --plan", "guard break-glass --plan kpro6 -- /bin/sh -c --plan"),
    ],
)
def test_plan_stands_where_no_argument_can_hide_it(given: str, expected: str) -> None:
    assert with_plan(ROOT, given.split()) == expected.split()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lab down", "touches no host"),
        ("guard approve 1234", "touches no host"),
        ("guard", "touches no host"),
        ("nonsense", "'nonsense' is not a command of dflash-ops"),
        ("guard --hosts f revoke 1", "'--hosts' is not a command of dflash-ops guard"),
    ],
)
def test_what_has_no_plan_is_said_and_not_run(given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_plan(ROOT, given.split())


def test_guard_plan_shows_what_the_command_would_ask_for_and_asks_for_nothing(guard: GuardState) -> None:
    hostile = f"{CHECKPOINT}\u202e\x1b[2J"
    shown = run("guard", "plan", "--", "relay", f"ct200:{hostile}", "ct129:/root/there")
    assert shown.exit_code == 0, shown.exception
    assert "not approved: it would be refused and leave a request" in shown.stdout
    assert f"{CHECKPOINT}\\u202e\\x1b[2J" in "".join(shown.stdout.split())
    assert "\x1b" not in shown.stdout
    assert guard.inventory.host("kpro6").fingerprints[0] in shown.stdout
    assert guard.store.requests() == []
    assert list(guard.audit.entries()) == []


def test_guard_plan_says_which_approval_there_is(guard: GuardState) -> None:
    argv = ["relay", f"kpro6:{CHECKPOINT}", "ct129:/root/there", "--json"]
    planned = json.loads(run("guard", "plan", "--", *argv).stdout)
    assert planned["approval"] is None
    assert isinstance(run(*argv).exception, Exception)
    (request,) = guard.store.requests()
    assert request.digest == planned["digest"]
    assert run("guard", "approve", request.id, "--reason", "test").exit_code == 0
    assert json.loads(run("guard", "plan", "--", *argv).stdout)["approval"] == request.id


def test_guard_plan_fails_as_the_command_does(guard: GuardState) -> None:
    assert isinstance(run("guard", "plan", "--", "relay", "kpro6:/a", "kpro6:/b").exception, Exception)
    assert run("guard", "plan", "--", "relay").exit_code == 2
