"""Nights as real Prefect runs: checkpoints of a guarded host, evaluated over sshd, the verdict in two mailboxes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from dflash.errors import UsageError
from flows.notify import NotNotifiedError, save_block
from tasks.errors import Refused
from tasks.evaluation import Suite
from tasks.ledger import Seen
from tasks.look_memory import Memory
from tasks.looking import look
from tasks.night_record import Night
from tasks.night_run import Around, run_night
from tasks.night_time import NightTime
from tasks.watch import take
from tasks.watch_grants import admit
from tests import nightly_reports
from tests.flows.stage import Stage
from tests.prefect_api import ask
from tests.receivers import MailServer, Webhook, plain_text, running
from tests.sshds import Site
from tests.tasks import checkpoints

DAY = 86_400.0
NOW = 1_800_000_000.0
EVALUATOR = """#!/bin/sh
while [ "$1" != --checkpoint ]; do shift; done
step=$(echo "$2" | sed 's,.*/\\(step_[0-9]*\\)/.*,\\1,')
while [ "$1" != --output ]; do shift; done
mkdir -p "$2" && cp {reports}/$step/* "$2"
"""
CRON, ZONE = "30 2 * * *", "Europe/Berlin"


class Nights:
    """A training host that saves one checkpoint a day, and the nights after it."""

    def __init__(self, site: Site, folder: Path, webhook: Webhook, mail: MailServer, patch: pytest.MonkeyPatch) -> None:
        self.stage, self.webhook, self.mail, self._patch = Stage.build(site, folder), webhook, mail, patch
        hosts = json.loads(self.stage.hosts_file.read_text()) | {"notify": ["custom-webhook/nights", "apprise/nights"]}
        self.stage.hosts_file.write_text(json.dumps(hosts))
        evaluator = folder / "remote" / "environments" / "current" / "bin" / "dflash"
        evaluator.write_text(EVALUATOR.format(reports=folder / "reports-to-come"))
        self.reports = folder / "reports-to-come"
        patch.setenv("DFLASH_STATE", str(self.stage.state))
        patch.setenv("DFLASH_HOSTS", str(self.stage.hosts_file))

    @property
    def suite(self) -> Suite:
        return Suite(prompts=self.stage.prompts)

    def save(self, step: int, level: float, *, at: float) -> None:
        """A checkpoint of known strength, which the watch has seen."""
        checkpoints.written(self.stage.save(step), at)
        nightly_reports.write(nightly_reports.report(step, level), self.reports / f"step_{step}")
        source, connector = self.stage.source, self.stage.connector
        found = look(connector, source, admit(connector.store, source), Memory(), at + 60)
        take(self.stage.ledger, source, found, at + 60)

    def happened(self, step: int, level: float, *, at: float) -> None:
        """A night that was compared before."""
        ledger, digest = self.stage.ledger, self.suite.digest()
        ledger.see(Seen("kpro6", f"/c/step_{step}", f"id{step}", step, at, at))
        attempt = ledger.begin(f"id{step}", digest)
        folder = nightly_reports.write(nightly_reports.report(step, level), self.stage.folder / f"report-{step}")
        ledger.finish(attempt, "evaluated", report=str(folder))

        def measured(checkpoint: Seen) -> NoReturn:
            raise AssertionError(f"{checkpoint} is measured")

        connector = self.stage.connector
        around = Around(connector.inventory, connector.audit, ledger, lambda plan: None, measured, lambda night: None)
        run_night(around, self.suite, connector.inventory.host("ct129"), NightTime.of_cron(CRON, ZONE).date(at), now=at)

    def night(self, moment: float) -> Night:
        """The run that begins at ``moment``."""
        import flows.nightly_comparison as module

        self._patch.setattr(module, "_now", lambda: moment)
        return module.nightly_comparison(
            suite=self.suite,
            reports=self.stage.folder / "reports",
            hosts=self.stage.hosts_file,
            cron=CRON,
            timezone=ZONE,
            again_after=(),
        )


@pytest.fixture
def nights(own_site: Site, tmp_path: Path, prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nights]:
    with running(Webhook()) as webhook, running(MailServer()) as mail:
        save_block("custom-webhook/nights", webhook.url)
        save_block("apprise/nights", mail.url)
        yield Nights(own_site, tmp_path, webhook, mail, monkeypatch)


def test_an_alarm_reaches_both_mailboxes_and_a_night_that_comes_twice_is_one(nights: Nights, prefect_api: str) -> None:
    nights.stage.approve()
    nights.happened(1, 1.0, at=NOW)
    nights.happened(2, 0.8, at=NOW + DAY)
    nights.save(3, 0.8, at=NOW + 2 * DAY)
    night = nights.night(NOW + 2 * DAY + 3600)
    # a run that comes late on the same night finds it done
    assert nights.night(NOW + 2 * DAY + 7200) == night
    assert night.alarm == "raised"
    assert_told(nights, night)

    first, second = ask(prefect_api, "flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 3})[::-2]
    assert [run["name"] for run in (first, second)] == [f"compare the night of {night.date}"] * 2
    assert [run["state_type"] for run in (first, second)] == ["COMPLETED"] * 2
    page, trend = (
        ask(prefect_api, "artifacts/filter", {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC"})[0]["data"]
        for key in ("nightly-comparison", "trend")
    )
    assert page.startswith(f"# {night.date}: ALARM")
    assert night.newest is not None
    assert f"| {night.newest.step} | " in trend


@pytest.mark.slow
def test_three_nights_with_their_evaluations_end_in_an_alarm(nights: Nights) -> None:
    nights.stage.approve()
    verdicts = []
    for number, level in enumerate((1.0, 0.8, 0.8)):
        nights.save(number + 1, level, at=NOW + number * DAY)
        verdicts.append(nights.night(NOW + number * DAY + 3600))
    assert [night.alarm for night in verdicts] == ["none", "none", "raised"]
    assert len(nights.stage.results()) == 3
    assert [one["subject"].partition(": ")[2] for one in nights.webhook.received] == [
        "no fall shown",
        "fell, an alarm if it does on the next night too",
        "ALARM, fell on two nights running",
    ]
    assert_told(nights, verdicts[-1])


def assert_told(nights: Nights, night: Night) -> None:
    """Webhook and mail have the alarm of steps 1, 2 and 3 as their last message."""
    told, mail = nights.webhook.received[-1], nights.mail.received[-1]
    assert told["subject"] == mail["Subject"] == f"DFlash {night.date}: ALARM, fell on two nights running"
    assert told["body"].splitlines()[0] == night.verdict
    assert "best so far (step 1)" in told["body"]
    assert "a day before (step 2)" in told["body"]
    assert plain_text(mail).split() == told["body"].split()


def test_without_an_approval_the_night_waits_for_it_and_people_are_told(nights: Nights, prefect_api: str) -> None:
    where = nights.stage.save(1)
    nights.stage.ledger.see(Seen("kpro6", str(where), "id", 1, NOW, NOW))
    with pytest.raises(Refused, match="dflash-ops guard approve"):
        nights.night(NOW + 3600)
    (run,) = ask(prefect_api, "flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert run["state_name"] == "AwaitingApproval"
    (told,) = nights.webhook.received
    assert "no comparison" in told["subject"]
    assert "dflash-ops guard approve" in told["body"]
    assert nights.stage.ledger.nights(nights.suite.digest()) == []


def test_a_schedule_that_is_none_fails_with_a_sentence(nights: Nights, prefect_api: str) -> None:
    import flows.nightly_comparison as module

    with pytest.raises(UsageError, match="minute and hour as in"):
        module.nightly_comparison(hosts=nights.stage.hosts_file, cron="@daily", again_after=())
    (run,) = ask(prefect_api, "flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert (run["name"], run["state_type"]) == ("compare a night", "FAILED")
    assert "minute and hour as in" in run["state"]["message"]


def test_a_night_that_somebody_could_not_be_told_is_recorded_and_its_run_named(
    nights: Nights, prefect_api: str
) -> None:
    nights.webhook.status = 500
    with pytest.raises(NotNotifiedError, match="HTTP status 500"):
        nights.night(NOW)
    (run,) = ask(prefect_api, "flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert run["state_name"] == "NotNotified"
    assert len(nights.mail.received) == 1
    assert nights.night(NOW).outcome == "no checkpoint"
