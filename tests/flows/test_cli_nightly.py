"""dflash-ops compare-nightly and dflash-ops notify at the terminal; no host and no server is reached here."""

import json
import time
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dflash.errors import UsageError
from flows.cli import app
from tasks import nights
from tasks.errors import Refused
from tasks.ledger import Ledger, Seen
from tasks.night_record import Night
from tasks.night_run import Around, run_night
from tasks.night_time import NightTime
from tests import nightly_reports
from tests.guard_state import GuardState


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GuardState:
    guard = GuardState(tmp_path)
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path))
    monkeypatch.setenv("DFLASH_HOSTS", str(guard.hosts_file))
    return guard


def run(*argv: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, argv, input=stdin)


def see(host: str, step: int) -> None:
    now = time.time()
    Ledger.open().see(Seen(host, f"/c/step_{step}", f"id{step}", step, now, now))


def compared(guard: GuardState, *, invalid: str | None = None) -> Night:
    """The night that is due now, as a run recorded it."""
    ledger, suite = Ledger.open(), nights.nightly_suite()

    def evaluate(checkpoint: Seen) -> tuple[object, Path]:
        made = nightly_reports.report(1, invalid=invalid)
        folder = nightly_reports.write(made, guard.folder / "report")
        ledger.finish(ledger.begin(checkpoint.identity, suite.digest()), "evaluated", report=str(folder))
        return made, folder

    around = Around(guard.inventory, guard.audit, ledger, lambda plan: None, evaluate, lambda night: None)  # type: ignore[arg-type]
    date, now = NightTime.of_cron().date(time.time()), time.time()
    return run_night(around, suite, guard.inventory.host("ct129"), date, now=now)


def test_a_night_that_is_recorded_is_shown_without_asking_anybody(guard: GuardState) -> None:
    see("kpro6", 1)
    night = compared(guard)
    shown = run("compare-nightly")
    assert shown.exit_code == 0, shown.exception
    assert shown.stdout.startswith(f"{night.date}: no fall shown: step 1 τ ")
    assert max(map(len, shown.stdout.splitlines()[1:5])) <= 80
    assert Night.model_validate_json(run("compare-nightly", "--json").stdout) == night
    assert "nothing needs an approval" in run("compare-nightly", "--plan").stdout


def test_a_night_that_is_not_valid_has_its_exit_code(guard: GuardState) -> None:
    see("kpro6", 1)
    compared(guard, invalid="kernel")
    shown = run("compare-nightly")
    assert shown.exit_code == 3
    assert ": not valid: kernel" in shown.stdout


def test_what_has_to_be_read_is_asked_for_before_anything_is_done(guard: GuardState) -> None:
    see("kpro6", 1)
    planned = json.loads(run("compare-nightly", "--plan", "--json").stdout)
    assert [action["kind"] for action in planned["actions"]] == ["read-grant"]
    assert planned["approval"] is None
    assert guard.events() == []
    refused = run("compare-nightly")
    assert isinstance(refused.exception, Refused)
    assert "dflash-ops guard approve" in str(refused.exception)


def test_chats_need_to_know_about_thinking(guard: GuardState) -> None:
    prompts = nights.shipped("promotion.jsonl")
    assert "--thinking" in str(run("compare-nightly", "--prompts", str(prompts)).exception)
    assert "neither on nor off" in str(run("compare-nightly", "--thinking", "maybe").exception)


def test_nobody_to_tell_and_no_url_are_said(guard: GuardState) -> None:
    untold = run("notify", "test").exception
    assert isinstance(untold, UsageError)
    assert "dflash-ops notify add" in str(untold)
    assert "no URL" in str(run("notify", "add", "apprise/mail").exception)
