"""Approving what changes a host, by one person or two, and taking it back; no host is reached here."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.cli import app
from flows.terminal import COMMAND_LINE
from tasks.approvals import Approved
from tasks.errors import Refused
from tasks.requests import Origin
from tests.guard_state import GuardState


def state(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> GuardState:
    guard = GuardState(folder, **settings)
    monkeypatch.setenv("DFLASH_STATE", str(folder))
    monkeypatch.setenv("DFLASH_HOSTS", str(guard.hosts_file))
    return guard


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GuardState:
    return state(tmp_path, monkeypatch)


@pytest.fixture
def two_persons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GuardState:
    return state(tmp_path, monkeypatch, two_person=True)


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, argv)


def done(*argv: str) -> str:
    result = run(*argv)
    assert result.exit_code == 0, result.exception
    assert "--json" in argv or max(map(len, result.stdout.splitlines()), default=0) <= 80
    return result.stdout


def approved(guard: GuardState, plan: Any) -> Approved:
    found = guard.store.find(plan)
    assert found is not None
    return found


def test_each_action_of_a_plan_is_listed_and_shown(guard: GuardState) -> None:
    plan = guard.changing(guard.put("/jobs/\u202econfig"), guard.launch("night-1"), grant=guard.grant())
    request = guard.store.request(plan)
    listed = "".join(done("guard", "requests").split())
    for text in ("/jobs/\\u202econfig", "kpro6:/bin/true", "launch", "night-1", "read", "put"):
        assert text in listed
    assert listed.count(request.id) == 1
    shown = done("guard", "approve", request.id, "--reason", "a test")
    assert shown.count("serial ") == 3
    assert "now run the command again" in shown


def test_what_changes_the_host_is_approved_for_ten_minutes(guard: GuardState) -> None:
    plan = guard.changing(guard.launch())
    done("guard", "approve", guard.store.request(plan).id, "--reason", "a test")
    assert 590 <= approved(guard, plan).not_after - time.time() <= 601


def test_a_change_is_not_approved_for_a_day(guard: GuardState) -> None:
    request = guard.store.request(guard.changing(guard.launch()))
    result = run("guard", "approve", request.id, "--reason", "a test", "--valid", "24h")
    assert isinstance(result.exception, Refused)
    assert guard.store.get(request.id).status == "pending"


def test_the_outcome_of_what_was_used_is_listed(guard: GuardState) -> None:
    plan = guard.changing(guard.launch())
    guard.store.consume(guard.approve(plan).approvals[0])
    assert "unknown" in done("guard", "requests", "--all")
    (entry,) = json.loads(done("guard", "requests", "--all", "--json"))
    assert (entry["status"], entry["outcome"]) == ("spent", "unknown")


def test_where_two_persons_are_needed_the_first_one_is_told_who_is_missing(two_persons: GuardState) -> None:
    plan = two_persons.changing(two_persons.launch())
    request = two_persons.store.request(plan)
    told = done("guard", "approve", request.id, "--reason", "a test")
    assert f"guard countersign {request.id} --name NAME --key KEY" in told
    assert two_persons.store.find(plan) is None
    key = str(two_persons.folder / "ada")
    signed = done("guard", "countersign", request.id, "--name", "ada", "--key", key)
    assert plan.digest() in signed
    assert f"countersigned: {request.id}, by ada" in signed
    assert "now run the command again" in signed
    assert approved(two_persons, plan).id == request.id


def test_a_second_person_who_signs_first_is_told_that_the_operator_is_missing(two_persons: GuardState) -> None:
    request = two_persons.store.request(two_persons.changing(two_persons.launch()))
    key = str(two_persons.folder / "ada")
    signed = done("guard", "countersign", request.id, "--name", "ada", "--key", key)
    assert f"dflash-ops guard approve {request.id}" in signed
    assert "guard countersign" not in signed


@pytest.mark.parametrize(("name", "key"), [("eve", "ada"), ("ada", "bob"), ("ada", "nowhere")])
def test_nobody_signs_as_somebody_else(two_persons: GuardState, name: str, key: str) -> None:
    request = two_persons.store.request(two_persons.changing(two_persons.launch()))
    done("guard", "approve", request.id, "--reason", "a test")
    result = run("guard", "countersign", request.id, "--name", name, "--key", str(two_persons.folder / key))
    assert isinstance(result.exception, Refused)
    assert two_persons.store.get(request.id).second is None


def test_where_only_this_program_enforces_revoking_ends_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = state(tmp_path, monkeypatch, enforcement="client")
    plan = guard.plan()
    (approval,) = guard.approve(plan).approvals
    said = done("guard", "revoke", approval.id, "--reason", "a test")
    assert "nobody to tell" in said
    assert not approval.key_path.exists()
    assert guard.store.find(plan) is None
    assert guard.events()[-1] == "revoke"


def test_what_was_never_approved_cannot_be_revoked(guard: GuardState) -> None:
    request = guard.store.request(guard.plan())
    for argv in (["guard", "revoke", request.id, "--reason", "x"], ["guard", "revoke", "0000", "--reason", "x"]):
        assert isinstance(run(*argv).exception, Refused)
    assert guard.store.get(request.id).status == "pending"


def test_the_plan_of_a_revocation_names_the_serial_and_revokes_nothing(guard: GuardState) -> None:
    (approval,) = guard.approve(guard.plan()).approvals
    planned = json.loads(done("guard", "plan", "--", "guard", "revoke", approval.id, "--json"))
    assert [action["serial"] for action in planned["actions"]] == [approval.serial]
    assert guard.store.get(approval.id).status == "approved"


@pytest.mark.parametrize(
    ("options", "events"),
    [
        (["--event", "decision"], ["decision"]),
        (["--host", "kpro6"], ["request", "decision"]),
        (["--host", "ct129"], []),
        (["--request", "0000"], []),
        (["--since", "1h"], ["request", "decision"]),
        (["--since", "2999-01-01"], []),
        (["--event", "decision", "--since", "2020-01-01T06:00"], ["decision"]),
    ],
)
def test_the_audit_log_is_filtered(guard: GuardState, options: list[str], events: list[str]) -> None:
    guard.approve(guard.plan())
    assert [entry["event"] for entry in json.loads(done("audit", "show", "--json", *options))] == events
    assert ("no such entry" in done("audit", "show", *options)) == (not events)


def test_a_time_that_is_none_is_said(guard: GuardState) -> None:
    assert "as 2h" in str(run("audit", "show", "--since", "yesterday\x1b").exception)


def test_setup_is_printed_and_nothing_is_done(guard: GuardState) -> None:
    said = CliRunner().invoke(app, ["guard", "setup", "ct200"]).stdout
    for text in ("TrustedUserCAKeys", "ForceCommand", guard.keys["ca"].split()[1], "kpro6"):
        assert text in said
    assert list(guard.audit.entries()) == []


def test_approving_names_the_command_to_run_again(guard: GuardState) -> None:
    argv = ("relay", "kpro6:/a b.pt", "ct129:/there")
    token = COMMAND_LINE.set(argv)
    try:
        assert isinstance(run(*argv).exception, Refused)
    finally:
        COMMAND_LINE.reset(token)
    (request,) = guard.store.requests()
    said = done("guard", "approve", request.id, "--reason", "a test")
    assert "now run again: dflash-ops relay 'kpro6:/a b.pt' ct129:/there\n" in said


def test_a_deployment_that_asks_after_a_command_is_what_is_started(guard: GuardState) -> None:
    asked = guard.store.request(guard.plan(), origin=Origin(command=("relay",)))
    flow = Origin(deployment="0d9e", parameters={"source": "kpro6:/a b"}, flow_run="f\x1b1")
    assert guard.store.request(guard.plan(), origin=flow).id == asked.id
    assert guard.store.request(guard.plan(), origin=Origin(command=("evaluate",))).origin == flow
    said = CliRunner().invoke(app, ["guard", "approve", asked.id, "--reason", "a test"]).stdout
    assert "asked for by the flow run f\\x1b1" in said
    assert """prefect deployment run --id 0d9e --params '{"source": "kpro6:/a b"}'""" in said
