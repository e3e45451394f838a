import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from dflash.errors import UsageError
from flows import cli_audit, cli_guard, cli_hosts
from tasks import process
from tasks.errors import Refused
from tests.guard_state import CHECKPOINT, PASSPHRASE, GuardState, make_key
from tests.terminals import at_a_terminal

COMMANDS = typer.Typer()
COMMANDS.add_typer(cli_guard.app, name="guard")
COMMANDS.add_typer(cli_audit.app, name="audit")
COMMANDS.add_typer(cli_hosts.hosts_app, name="hosts")
TREE = "/workspace/dflash/checkpoints"


def main() -> None:
    COMMANDS()


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GuardState:
    return state(tmp_path, monkeypatch)


def state(folder: Path, monkeypatch: pytest.MonkeyPatch, *, lab: bool = True, passphrase: str = "") -> GuardState:
    guard = GuardState(folder, lab=lab, passphrase=passphrase)
    monkeypatch.setenv("DFLASH_STATE", str(folder))
    monkeypatch.setenv("DFLASH_HOSTS", str(guard.hosts_file))
    return guard


def run(*argv: str) -> Result:
    return CliRunner().invoke(COMMANDS, argv)


def done(*argv: str) -> str:
    result = run(*argv)
    assert result.exit_code == 0, result.exception
    assert "--json" in argv or max(map(len, result.stdout.splitlines()), default=0) <= 80
    return result.stdout


def test_a_request_is_listed_approved_and_gone_from_the_list(guard: GuardState) -> None:
    assert done("guard", "requests") == "no request waits for a decision\n"
    request = guard.store.request(guard.plan())
    shown = done("guard", "requests")
    assert request.id in shown
    approved = done("guard", "approve", request.id, "--reason", "a test", "--valid", "10m")
    for text in (CHECKPOINT, "signed with the lab's CA, unattended", guard.plan().digest(), "valid for 10m"):
        assert text in approved
    assert 590 <= guard.store.require(guard.plan()).not_after - time.time() <= 601
    assert request.id not in done("guard", "requests")
    decided = done("guard", "requests", "--all")
    assert "approved" in decided
    assert "decide with" not in decided


def test_the_default_validity_is_an_hour(guard: GuardState) -> None:
    request = guard.store.request(guard.plan())
    done("guard", "approve", request.id, "--reason", "a test")
    assert 3590 <= guard.store.require(guard.plan()).not_after - time.time() <= 3601


def test_requests_as_json(guard: GuardState) -> None:
    request = guard.store.request(guard.plan())
    (entry,) = json.loads(done("guard", "requests", "--json"))
    assert (entry["id"], entry["status"], entry["digest"]) == (request.id, "pending", guard.plan().digest())
    assert entry["plan"]["grant"]["paths"] == [CHECKPOINT]


def test_a_hostile_path_is_shown_escaped(guard: GuardState) -> None:
    request = guard.store.request(guard.plan("/w/[bold]\x1b[2Jtp.\u202etxt"))
    for shown in (done("guard", "requests"), done("guard", "approve", request.id, "--reason", "\x1b[2J")):
        assert "/w/[bold]\\x1b[2Jtp.\\u202etxt" in "".join(shown.split())
        assert "\x1b" not in shown
    assert "\\x1b[2J" in done("audit", "show")


def test_without_a_terminal_a_reason_must_be_given(guard: GuardState) -> None:
    request = guard.store.request(guard.plan())
    result = run("guard", "approve", request.id)
    assert isinstance(result.exception, Refused)
    assert "--reason" in str(result.exception)
    assert guard.store.find(guard.plan()) is None


def test_deny(guard: GuardState) -> None:
    request = guard.store.request(guard.plan())
    assert done("guard", "deny", request.id, "--reason", "no") == f"denied: {request.id}\n"
    assert guard.store.get(request.id).status == "denied"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--valid", "soon"], "10m"),
        (["--valid", "1h", "--until", "2030-01-01"], "give one"),
        (["--until", "tomorrow"], "2027-01-31"),
        (["--until", "2020-01-01"], "is over"),
        (["--until", "0001-01-01"], "not a date"),
        (["--valid", "999999999d"], "too long"),
        (["--until", "2099-01-01"], "guard standing request"),
        (["--ca-key", "nowhere"], "No such file"),
    ],
)
def test_wrong_options_of_approve(guard: GuardState, options: Sequence[str], message: str) -> None:
    request = guard.store.request(guard.plan())
    result = run("guard", "approve", request.id, "--reason", "a test", *options)
    assert message in str(result.exception)
    assert guard.store.get(request.id).status == "pending"


def test_a_standing_approval_of_a_host_that_changed_is_listed_and_can_be_dropped(guard: GuardState) -> None:
    for old, new in (
        ("[10.1.2.1]", "[10.1.2.9]"),
        ("kpro6:", "kpro7:"),
        (guard.keys["training"], make_key(guard.folder / "other")),
    ):
        request = guard.store.request(guard.plan(None, root=TREE), standing=True)
        done("guard", "approve", request.id, "--reason", "watch", "--valid", "30d")
        before = guard.hosts_file.read_text()
        guard.hosts_file.write_text(before.replace(old, new))
        assert request.id in done("guard", "standing")
        assert json.loads(done("guard", "standing", "--json"))[0]["id"] == request.id
        done("guard", "standing", "drop", request.id)
        assert "no standing approval" in done("guard", "standing")
        guard.hosts_file.write_text(before)


def test_a_standing_approval_ends_within_a_life(guard: GuardState) -> None:
    request = guard.store.request(guard.plan(None, root=TREE), standing=True)
    result = run("guard", "approve", request.id, "--reason", "watch", "--until", "9999-12-31")
    assert isinstance(result.exception, UsageError)
    assert "too far away" in str(result.exception)
    assert guard.events() == ["request"]


def test_a_standing_approval_from_request_to_drop(guard: GuardState) -> None:
    budget = ["--sessions", "500", "--bytes", "2TB", "--rate", "50MB/s", "--verbs", "stat,read"]
    request_id = done("guard", "standing", "request", f"ct200:{TREE}", *budget).split()[1]
    assert "needs an end" in str(run("guard", "approve", request_id, "--reason", "watch").exception)
    assert "no standing approval" in done("guard", "standing")
    done("guard", "approve", request_id, "--reason", "watch", "--valid", "30d")
    shown = done("guard", "standing")
    for text in (request_id, "500 sessions", "2 TB in all", "50 MB/s", f"kpro6:{TREE}"):
        assert text in shown
    (entry,) = json.loads(done("guard", "standing", "--json"))
    assert (entry["root"], entry["sessions"], entry["bytes"], entry["rate"]) == (TREE, 500, 2 * 10**12, 50_000_000)
    assert guard.store.require(guard.plan()).id == request_id
    assert done("guard", "standing", "drop", request_id) == f"dropped: {request_id}\n"
    assert json.loads(done("guard", "standing", "--json")) == []
    assert guard.store.find(guard.plan()) is None


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("ct129:/root", [], "needs no approval"),
        ("/local", [], "needs no approval"),
        ("kpro6:/r", ["--verbs", "stat,write"], "'write' is not one of"),
        ("kpro6:/r", ["--rate", "fast"], "not a rate"),
        ("kpro6:/r", ["--effect", "\udcff"], "not UTF-8"),
        ("nowhere:/r", [], "unknown host"),
    ],
)
def test_wrong_standing_requests(guard: GuardState, place: str, options: Sequence[str], message: str) -> None:
    result = run("guard", "standing", "request", place, "--sessions", "1", "--bytes", "1GB", *options)
    assert message in str(result.exception)
    assert guard.store.requests() == []


def test_one_certificate_that_cannot_be_read_hides_no_other_entry_that_is_gone(guard: GuardState) -> None:
    (lost,) = guard.approve(guard.plan()).approvals
    guard.approve(guard.plan("/w/other"))
    lost.certificate_path.unlink()
    lines = guard.audit.file.read_bytes().splitlines(keepends=True)
    guard.audit.file.write_bytes(b"".join(lines[:-1]))
    broken = str(run("audit", "verify").exception)
    assert "No such file" in broken
    assert "the log was cut" in broken


def test_audit_show_and_verify(guard: GuardState) -> None:
    request = guard.store.request(guard.plan())
    done("guard", "approve", request.id, "--reason", "a test")
    assert [entry["event"] for entry in json.loads(done("audit", "show", "--json"))] == ["request", "decision"]
    assert [entry["event"] for entry in json.loads(done("audit", "show", "--last", "1", "--json"))] == ["decision"]
    assert "decision" in done("audit", "show")
    assert "2 entries hold together" in done("audit", "verify")
    guard.audit.file.write_text(guard.audit.file.read_text().splitlines()[0] + "\n")
    result = run("audit", "verify")
    assert isinstance(result.exception, cli_audit.AuditBrokenError)
    assert result.exception.exit_code == 1
    assert "cut or rewritten" in str(result.exception)


def test_hosts_list(guard: GuardState) -> None:
    shown = done("hosts", "list")
    assert "alias ct200" in shown
    listed = {host["name"]: host for host in json.loads(done("hosts", "list", "--json"))}
    assert listed["kpro6"]["protected"]
    assert listed["kpro6"]["host_keys"] == list(guard.inventory.host("kpro6").fingerprints)
    assert not listed["ct129"]["protected"]


PROGRAM = "from dflash.errors import run_cli; from tests.flows.test_cli_guard import main; run_cli(main)"


def test_at_a_terminal_the_operator_sees_the_plan_and_types_the_passphrase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = state(tmp_path, monkeypatch, lab=False, passphrase=PASSPHRASE)
    request = guard.store.request(guard.plan())
    questions = ("reason", "nightly"), ("approve exactly this?", "y"), ("passphrase", PASSPHRASE)
    code, said = at_a_terminal(PROGRAM, ["guard", "approve", request.id], *questions)
    assert code == 0, said
    assert guard.plan().digest() in said.split("reason")[0]
    assert "signed with the operator's CA" in said
    assert PASSPHRASE not in said
    decision = guard.store.get(request.id).decision
    assert decision is not None
    assert decision.reason == "nightly"
    assert guard.store.require(guard.plan()).id == request.id


def test_a_wrong_passphrase_or_a_no_approves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = state(tmp_path, monkeypatch, lab=False, passphrase=PASSPHRASE)
    request = guard.store.request(guard.plan())
    argv = ["guard", "approve", request.id, "--reason", "a test"]
    code, said = at_a_terminal(PROGRAM, argv, ("exactly this?", "y"), ("passphrase", "wrong"))
    assert code == 77, said
    assert "nothing was approved" in said
    code, said = at_a_terminal(PROGRAM, argv, ("exactly this?", "n"))
    assert code == 1, said
    assert "nothing was decided" in said
    assert guard.store.get(request.id).status == "pending"
    assert [entry["event"] for entry in guard.audit.entries()] == ["request", "decision", "unsigned"]


def test_a_passphrase_is_never_taken_from_a_helper_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = state(tmp_path, monkeypatch, lab=False, passphrase=PASSPHRASE)
    helper = tmp_path / "askpass"
    helper.write_text(f"#!/bin/sh\necho '{PASSPHRASE}'\n")
    helper.chmod(0o700)
    monkeypatch.setenv("SSH_ASKPASS", str(helper))
    monkeypatch.setenv("SSH_ASKPASS_REQUIRE", "force")
    request = guard.store.request(guard.plan())
    argv = [sys.executable, "-c", PROGRAM, "guard", "approve", request.id, "--reason", "a test"]
    result = process.run(argv, check=False, cwd=Path(__file__).parents[2])
    assert result.returncode == 77
    assert "approve at a terminal" in result.stderr
    assert guard.store.find(guard.plan()) is None
