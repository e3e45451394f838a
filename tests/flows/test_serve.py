"""``dflash-ops serve`` as a process: from a checkpoint to its number, and to a good end."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import process
from tests.flows.stage import STOP_SECONDS, Stage, staged, wait_until
from tests.prefect_api import REPOSITORY, Server, ask
from tests.sshds import Site

pytestmark = pytest.mark.timeout(600)  # a Prefect server takes minutes to start on a machine that has much to do
EVALUATED = 300.0
LONG = 25.0
"""Seconds of an evaluation that something happens to."""


@pytest.fixture
def stage(own_site: Site, shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """An operator whose watch is approved, and a Prefect database that need not be made first."""
    with staged(own_site, tmp_path, evaluation_seconds=1.0) as made:
        monkeypatch.setenv("DFLASH_STATE", str(made.state))
        made.migrated(shared_server)
        made.approve()
        yield made


class Evaluations:
    """Evaluations that take long and leave a line when they begin."""

    def take(self, stage: Stage, seconds: float) -> None:
        program = stage.folder / "remote" / "environments" / "current" / "bin" / "dflash"
        text = program.read_text().replace("sleep 1.0", f"echo begun >> {self._record(stage)}; sleep {seconds}")
        program.write_text(text)

    def begun(self, stage: Stage) -> int:
        record = self._record(stage)
        return record.read_text().count("begun") if record.exists() else 0

    def _record(self, stage: Stage) -> Path:
        return stage.folder / "begun"


@pytest.fixture
def evaluations() -> Evaluations:
    return Evaluations()


def runs(api: str) -> list[tuple[str, str, str]]:
    """Name, type and name of the state of every run."""
    found = ask(api, "flow_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})
    return [(run["name"], run["state_type"], run["state_name"]) for run in found if run["state_type"] != "SCHEDULED"]


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_and_a_signal_to_all_ends_it_well(stage: Stage) -> None:
    serving = stage.serve()
    stage.save(100)
    wait_until(stage.results, EVALUATED)
    (result,) = stage.results()
    assert (result.state, result.number, result.on) == ("evaluated", 1, "ct129")
    assert result.report is not None
    assert json.loads((Path(result.report) / "report.json").read_text())["valid"]
    wait_until(lambda: [run[1:] for run in runs(stage.api)] == [("COMPLETED", "Completed")], EVALUATED)

    status = json.loads(stage.command("status", "--json"))
    assert status["queue"]["api"] == stage.api
    assert [watch["state"] for watch in status["watches"]] == ["watching"]
    assert [(number["step"], number["state"]) for number in status["numbers"]] == [(100, "evaluated")]
    assert [grant["host"] for grant in status["grants"]] == ["kpro6"]
    assert status["queue"]["next"] is not None  # the night's comparison

    os.killpg(serving.pid, signal.SIGTERM)
    assert serving.wait(STOP_SECONDS) == 0, stage.log
    assert stage.log.rstrip().endswith("ended")
    assert not (stage.state / "serve.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_what_ran_when_it_was_ended_is_taken_up_again_and_measured_once(
    stage: Stage, how: signal.Signals, evaluations: Evaluations
) -> None:
    evaluations.take(stage, LONG)
    serving = stage.serve()
    stage.save(100)
    wait_until(lambda: evaluations.begun(stage), EVALUATED)
    if how is signal.SIGKILL:
        serving.kill()
    else:
        os.killpg(serving.pid, how)
    code = serving.wait(STOP_SECONDS)
    assert code == (0 if how is not signal.SIGKILL else -how), stage.log
    stage.serve()
    wait_until(stage.results, EVALUATED)
    (result,) = stage.results()
    assert (result.state, result.number) == ("evaluated", 1)
    assert evaluations.begun(stage) == 1
    wait_until(lambda: runs(stage.api)[0][1] == "COMPLETED", EVALUATED)
    assert len(runs(stage.api)) == 1


@pytest.mark.slow
def test_without_the_servers_database_the_ledger_knows_what_is_due(stage: Stage) -> None:
    first = stage.serve()
    stage.save(100)
    wait_until(stage.results, EVALUATED)
    first.send_signal(signal.SIGTERM)
    assert first.wait(STOP_SECONDS) == 0, stage.log
    for file in (stage.state / "prefect").glob("prefect.db*"):
        file.unlink()
    stage.save(200)
    stage.serve()
    wait_until(lambda: len(stage.results()) == 2, EVALUATED)
    found = {seen.step: stage.ledger.attempts(seen.identity) for seen in stage.ledger.checkpoints()}
    assert {step: [(one.number, one.state) for one in attempts] for step, attempts in found.items()} == {
        100: [(1, "evaluated")],
        200: [(1, "evaluated")],
    }
    wait_until(lambda: [run[1] for run in runs(stage.api)] == ["COMPLETED"], EVALUATED)


@pytest.mark.slow
def test_an_event_starts_the_evaluation_where_it_is_to_and_nothing_else_does(stage: Stage) -> None:
    stage.serve("--by-event")
    stage.save(100)
    wait_until(stage.results, EVALUATED)
    wait_until(lambda: [run[1] for run in runs(stage.api)] == ["COMPLETED"], EVALUATED)
    (run,) = (one for one in ask(stage.api, "flow_runs/filter", {}) if one["state_type"] == "COMPLETED")
    assert run["created_by"]["type"] == "AUTOMATION"
    (attempt,) = stage.ledger.attempts()
    assert (attempt.number, attempt.state, attempt.flow_run) == (1, "evaluated", run["id"])


@pytest.mark.slow
def test_a_second_serve_over_the_same_state_folder_is_refused(stage: Stage) -> None:
    stage.serve()
    argv = [sys.executable, "-m", "flows", "serve", "--prompts", str(stage.prompts)]
    second = process.run(argv, env=stage.environment, cwd=REPOSITORY, check=False, timeout=120)
    assert second.returncode == 1
    assert f"another dflash-ops serve runs over {stage.state} already ({stage.api})" in second.stderr
