"""What the evaluation's flow does with what the ledger knows, on a real Prefect server and real sshds."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash.prompts import default_prompts
from dflash.report import read_report
from tasks.evaluation import Suite
from tasks.ledger import Ledger, Seen
from tests.evaluators import StandIn
from tests.flows.conftest import Operator
from tests.prefect_api import ask

pytestmark = pytest.mark.timeout(600)
SUITE = Suite(default_prompts(), max_new_tokens=24)


@pytest.fixture
def there(operator: Operator, tmp_path: Path) -> StandIn:
    """The inference host with an evaluator that ends at once, and a ledger."""
    stand = StandIn.make(tmp_path / "there")
    stand.let_go()
    known = json.loads(operator.hosts_file.read_text())
    known["hosts"]["ct129"] |= stand.entry
    operator.hosts_file.write_text(json.dumps(known))
    operator.folder.mkdir(exist_ok=True)
    return stand


def evaluated(operator: Operator, checkpoint: Path, **asked: Any) -> Any:
    """The final state of the flow for a checkpoint that lies on the inference host itself, which needs no approval."""
    from flows.evaluate_checkpoint import evaluate_checkpoint

    return evaluate_checkpoint(
        f"ct129:{checkpoint}",
        None,
        SUITE,
        operator.folder / "reports",
        operator.hosts_file,
        return_state=True,
        **asked,
    )


def see(operator: Operator, identity: str, path: Path) -> Ledger:
    ledger = Ledger.open(operator.folder)
    ledger.see(Seen("ct129", str(path), identity, 100, time.time()))
    return ledger


def test_a_number_is_recorded_told_and_not_measured_again_for_the_same_attempt(
    operator: Operator, there: StandIn, prefect_api: str
) -> None:
    first = evaluated(operator, operator.checkpoint)
    assert first.is_completed(), first
    done = first.result()
    assert set(done.steps) == {"relay", "evaluate", "fetch"}
    assert read_report(done.folder / "report.json") == done.report
    assert done.report.relay.source == f"ct129:{operator.checkpoint}"
    assert f"ct129:{operator.checkpoint}" in (done.folder / "report.html").read_text()
    ledger = Ledger.open(operator.folder)
    (attempt,) = ledger.attempts()
    assert (attempt.state, attempt.report, attempt.tau) == ("evaluated", str(done.folder), 4.0)
    about = {"artifacts": {"key": {"like_": "acceptance-"}}, "sort": "CREATED_DESC", "limit": 1}
    (artifact,) = ask(prefect_api, "artifacts/filter", about)
    assert json.loads(artifact["data"])[0]["τ"] == "4.000"

    before = there.starts()
    again = evaluated(operator, operator.checkpoint, identity=attempt.identity, attempt=1)
    assert again.result().report == done.report
    assert again.result().steps == {}
    assert there.starts() == before
    assert len(ledger.attempts()) == 1


def test_a_checkpoint_that_was_deleted_after_it_was_seen_has_a_state_of_that_name(
    operator: Operator, there: StandIn, prefect_api: str
) -> None:
    gone = operator.checkpoint.with_name("step_200.safetensors")
    ledger = see(operator, "it was there", gone)
    final = evaluated(operator, gone, identity="it was there", attempt=1)
    assert (final.type.value, final.name) == ("FAILED", "CheckpointGone")
    assert "keep checkpoints for longer" in final.message
    checkpoint = ledger.checkpoint("it was there")
    assert checkpoint is not None
    assert checkpoint.gone is not None
    never = evaluated(operator, gone)
    assert (never.type.value, never.name) == ("FAILED", "NotACheckpoint")
    assert "is the path right?" in never.message
    assert there.starts() == {}


@pytest.mark.slow
def test_another_checkpoint_in_its_place_ends_the_attempt_and_is_not_given_its_number(
    operator: Operator, there: StandIn, prefect_api: str
) -> None:
    ledger = see(operator, "what was seen", operator.checkpoint)
    save_file({"fc.weight": np.zeros((16, 16), np.float32)}, operator.checkpoint)
    final = evaluated(operator, operator.checkpoint, identity="what was seen", attempt=1)
    assert (final.type.value, final.name) == ("FAILED", "CheckpointReplaced")
    assert [one.state for one in ledger.attempts()] == ["superseded"]
    assert there.starts() == {}


@pytest.mark.slow
def test_an_attempt_that_another_process_has_is_left_to_it(
    operator: Operator, there: StandIn, prefect_api: str
) -> None:
    ledger = see(operator, "at work", operator.checkpoint)
    with ledger.held(ledger.begin("at work", SUITE.digest())):
        final = evaluated(operator, operator.checkpoint, identity="at work", attempt=1)
    assert (final.type.value, final.name) == ("FAILED", "AlreadyRunning")
    assert [one.state for one in ledger.attempts()] == ["seen"]


@pytest.mark.slow
def test_a_run_without_a_suite_says_what_it_lacks(operator: Operator, prefect_api: str) -> None:
    from flows.evaluate_checkpoint import evaluate_checkpoint

    final = evaluate_checkpoint("ct129:/x", hosts=operator.hosts_file, return_state=True)
    assert "no suite is named" in final.message
