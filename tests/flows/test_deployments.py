"""Each of the six flows from its deployment, on a real Prefect server."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash.errors import UsageError
from flows.cli import app
from flows.deployments import FLOWS, NAME, Nightly, deployment, deployments
from tasks import process
from tasks.errors import Refused
from tasks.evaluation import plan_evaluation
from tasks.ledger import Ledger
from tasks.nights import nightly_suite
from tests.flows.conftest import Operator
from tests.flows.stage import wait_until
from tests.prefect_api import REPOSITORY, ask, engine, message, run_here, start_run, state

pytestmark = pytest.mark.timeout(600)  # a Prefect server takes minutes to start on a machine that has much to do


@pytest.fixture
def folder(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for files of this machine; what a run starts finds the package."""
    monkeypatch.chdir(REPOSITORY)
    return operator.folder.parent


def applied(operator: Operator, name: str) -> str:
    """The id of the deployment of the flow ``name`` with the operator's inventory."""
    return str(deployment(name, operator.hosts_file).apply())


def test_there_are_six_and_each_loads_its_module_and_knows_the_inventory(folder: Path) -> None:
    made = deployments(folder / "hosts.yaml", nightly=None)
    assert [one.entrypoint for one in made] == [f"flows.{name}.{name}" for name in FLOWS]
    assert {one.name for one in made} == {NAME}
    assert {one.parameters["hosts"] for one in made} == {str(folder / "hosts.yaml")}
    assert not any(one.schedules for one in made)


def test_the_night_is_scheduled_in_its_timezone_and_the_flow_is_told_the_same() -> None:
    *others, nightly = deployments(None, nightly=Nightly("15 3 * * *", "Europe/Berlin"))
    (schedule,) = nightly.schedules or []
    assert schedule.schedule.model_dump() == {"cron": "15 3 * * *", "timezone": "Europe/Berlin", "day_or": True}
    assert (nightly.parameters["cron"], nightly.parameters["timezone"]) == ("15 3 * * *", "Europe/Berlin")
    assert not any(one.schedules for one in others)


@pytest.mark.parametrize("nightly", [Nightly("every night"), Nightly("* 2 * * *"), Nightly(timezone="Mars/Olympus")])
def test_a_schedule_without_nights_is_refused(nightly: Nightly) -> None:
    with pytest.raises(UsageError):
        deployments(None, nightly=nightly)


def test_relay_checkpoint(operator: Operator, prefect_api: str, folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"content")
    ends = [f"ct129:{folder}/b.bin", str(folder / "c.bin")]
    run = start_run(
        prefect_api,
        applied(operator, "relay_checkpoint"),
        {"source": str(folder / "a.bin"), "destinations": ends, "settings": {"what": "all", "streams": 1}},
    )
    # in a process of its own, as the runner does it
    assert engine(prefect_api, run).wait(120) == 0
    assert state(prefect_api, run) == ("COMPLETED", "Completed")
    assert [(folder / name).read_bytes() for name in ("b.bin", "c.bin")] == [b"content"] * 2


def test_relay_checkpoint_waits_for_an_approval(operator: Operator, prefect_api: str, folder: Path) -> None:
    before = operator.connections()
    run = start_run(
        prefect_api,
        applied(operator, "relay_checkpoint"),
        {"source": operator.source, "destinations": [str(folder / "there.safetensors")]},
    )
    run_here(run)
    assert state(prefect_api, run) == ("FAILED", "AwaitingApproval")
    assert operator.connections() == before
    assert not (folder / "there.safetensors").exists()


def test_evaluate_checkpoint(operator: Operator, prefect_api: str, folder: Path) -> None:
    connector = operator.connector
    plan = plan_evaluation([connector.inventory.location(operator.source)], connector.inventory.host("ct129"))
    assert plan is not None
    connector.store.approve(connector.store.request(plan).id, reason="test", ca_key=operator.site.ca_key)
    (folder / "prompts.jsonl").write_text('{"id": "a", "prompt": "def f():"}\n')
    run = start_run(
        prefect_api,
        applied(operator, "evaluate_checkpoint"),
        {"source": operator.source, "suite": {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 4}},
    )
    run_here(run)
    assert state(prefect_api, run) == ("COMPLETED", "Completed")
    (attempt,) = Ledger.open().attempts()
    assert (attempt.state, attempt.flow_run) == ("evaluated", run)


def test_provision_host(operator: Operator, prefect_api: str, folder: Path) -> None:
    hosts = json.loads(operator.hosts_file.read_text())
    hosts["hosts"]["kpro6"]["environments"] = str(folder / "environments")
    operator.hosts_file.write_text(json.dumps(hosts))
    before = operator.connections()
    run = start_run(prefect_api, applied(operator, "provision_host"), {"host": "kpro6", "profile": "train"})
    run_here(run)
    assert state(prefect_api, run) == ("FAILED", "AwaitingApproval"), message(prefect_api, run)
    (request,) = operator.connector.store.requests()
    assert request.plan.host == "kpro6"
    assert operator.connections() == before


def test_launch_training(operator: Operator, prefect_api: str, folder: Path) -> None:
    config = {"name": "night", "command": ["sh", "-c", f"echo trained > {folder}/trained"]}
    (folder / "run.yaml").write_text(json.dumps(config))
    run = start_run(
        prefect_api,
        applied(operator, "launch_training"),
        {"config": str(folder / "run.yaml"), "on": "ct129"},
    )
    run_here(run)
    assert state(prefect_api, run) == ("COMPLETED", "Completed"), message(prefect_api, run)
    (record,) = (folder / "remote" / "jobs").glob("*/job.json")
    wait_until((record.parent / "exit").exists, 120)
    assert (folder / "trained").read_text() == "trained\n"


def test_watch_training(operator: Operator, prefect_api: str, folder: Path) -> None:
    run = start_run(prefect_api, applied(operator, "watch_training"), {"source": f"kpro6:{operator.checkpoint.parent}"})
    run_here(run)
    assert state(prefect_api, run) == ("FAILED", "AwaitingApproval"), message(prefect_api, run)
    (request,) = operator.connector.store.requests()
    assert request.standing
    assert f"guard approve {request.id}" in message(prefect_api, run)


def test_nightly_comparison(operator: Operator, prefect_api: str, folder: Path) -> None:
    run = start_run(prefect_api, applied(operator, "nightly_comparison"), {"again_after": []})
    run_here(run)
    # nothing was evaluated yet, so there is nothing to compare, and that is a night like any other
    assert state(prefect_api, run) == ("COMPLETED", "Completed"), message(prefect_api, run)
    assert len(Ledger.open().nights(nightly_suite().digest())) == 1


@pytest.mark.slow
def test_prefect_deploys_what_prefect_yaml_describes(prefect_api: str, folder: Path) -> None:
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    process.run([*prefect, "work-pool", "create", "dflash", "--type", "process"], cwd=REPOSITORY, timeout=120)
    described = ["deploy", "--all", "--prefect-file", "deploy/prefect.yaml"]
    process.run([*prefect, *described], cwd=REPOSITORY, timeout=300)
    found: list[dict[str, Any]] = ask(prefect_api, "deployments/filter", {"work_pools": {"name": {"any_": ["dflash"]}}})
    assert {one["entrypoint"] for one in found} == {f"flows.{name}.{name}" for name in FLOWS}


def test_the_command_runs_the_same_flow_where_there_is_a_server(
    operator: Operator, prefect_api: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    (folder / "a.bin").write_bytes(b"content")
    source = str(folder / "a.bin")
    relayed = CliRunner().invoke(app, ["relay", source, f"ct129:{folder}/b.bin", "--json"])
    assert relayed.exit_code == 0, relayed.exception
    assert (folder / "b.bin").read_bytes() == b"content"
    found = ask(prefect_api, "flow_runs/filter", {"flow_runs": {"name": {"any_": [f"relay {source}"]}}})
    assert [run["state_name"] for run in found] == ["Completed"]
    assert json.loads(relayed.stdout)["moved"] == len(b"content")

    refused = CliRunner().invoke(app, ["relay", operator.source, str(folder / "c.bin")])
    assert isinstance(refused.exception, Refused)
