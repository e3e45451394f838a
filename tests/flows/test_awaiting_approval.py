"""A refused flow on a real Prefect server, with a real sshd that it must not reach."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash.prompts import default_prompts
from flows.cli import app
from tasks import process
from tasks.errors import Refused
from tests.flows.conftest import Operator
from tests.prefect_api import ask

pytestmark = pytest.mark.timeout(600)  # a Prefect server takes minutes to start on a machine that has much to do
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def deployment(operator: Operator, prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Id of a deployment of evaluate_checkpoint."""
    from flows.evaluate_checkpoint import evaluate_checkpoint

    monkeypatch.chdir(REPOSITORY)
    return str(evaluate_checkpoint.to_deployment(name=operator.folder.parent.name).apply())


def parameters(operator: Operator) -> dict[str, Any]:
    return {
        "source": operator.source,
        "on": "ct129",
        "suite": {"prompts": str(default_prompts()), "max_new_tokens": 24},
        "reports": str(operator.folder / "reports"),
        "hosts": str(operator.hosts_file),
    }


def start(api: str, deployment: str, operator: Operator) -> str:
    run = ask(api, f"deployments/{deployment}/create_flow_run", {"parameters": parameters(operator)})
    return str(run["id"])


def execute(flow_run: str, **environment: str) -> None:
    """What a runner does about a run that is due, in a process of its own."""
    env = {**os.environ, "PREFECT_API_URL": api_url(), "PREFECT__FLOW_RUN_ID": flow_run, **environment}
    process.run([sys.executable, "-m", "prefect.engine"], env=env, cwd=REPOSITORY, check=False, timeout=120)


def api_url() -> str:
    from prefect.settings import get_current_settings

    return str(get_current_settings().api.url)


def execute_here(flow_run: str) -> None:
    """The same in this process, which is quicker."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    from flows.evaluate_checkpoint import evaluate_checkpoint

    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run)
    run_flow(evaluate_checkpoint, flow_run=run, return_type="state")


def state(api: str, flow_run: str) -> tuple[str, str]:
    (run,) = ask(api, "flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    return run["state_type"], run["state_name"]


def tasks_of(api: str, flow_run: str) -> list[str]:
    runs = ask(api, "task_runs/filter", {"task_runs": {"flow_run_id": {"any_": [flow_run]}}})
    return sorted(run["name"] for run in runs)


def runs_of(api: str, deployment: str) -> list[str]:
    return [run["id"] for run in ask(api, "flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}})]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    """An agent's socket that anybody may call."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "agent"))
        listening.listen()
        listening.setblocking(False)
        yield listening


def test_a_refused_run_shows_plan_and_command_and_no_forced_state_lets_it_through(
    operator: Operator, deployment: str, prefect_api: str, agent: socket.socket
) -> None:
    untouched = operator.connections()
    waiting = start(prefect_api, deployment, operator)
    execute(waiting, SSH_AUTH_SOCK=agent.getsockname())
    assert state(prefect_api, waiting) == ("FAILED", "AwaitingApproval")
    (request,) = operator.connector.store.requests()
    assert request.origin is not None
    assert request.origin.deployment == deployment

    (artifact,) = ask(prefect_api, "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [waiting]}}})
    assert artifact["key"] == f"approval-{request.id}"
    for text in (f"dflash-ops guard approve {request.id}", request.digest, "kpro6"):
        assert text in artifact["data"]
    assert str(operator.checkpoint) in "".join(artifact["data"].split())

    for forced in ("RUNNING", "COMPLETED", "PAUSED", "SCHEDULED"):
        ask(prefect_api, f"flow_runs/{waiting}/set_state", {"state": {"type": forced}, "force": True})
        execute_here(waiting)
        assert tasks_of(prefect_api, waiting) == []
        assert operator.connections() == untouched
    # one that is due again asks the guard again
    assert state(prefect_api, waiting) == ("FAILED", "AwaitingApproval")
    assert ask(prefect_api, f"flow_runs/{waiting}/resume", {})["status"] in ("ABORT", "REJECT")
    assert [one.id for one in operator.connector.store.requests()] == [request.id]
    with pytest.raises(BlockingIOError):
        agent.accept()


def test_approving_starts_the_deployment_once_and_the_new_run_passes_the_guard(
    operator: Operator, deployment: str, prefect_api: str
) -> None:
    waiting = start(prefect_api, deployment, operator)
    execute_here(waiting)
    (request,) = operator.connector.store.requests()
    approved = CliRunner().invoke(app, ["guard", "approve", request.id, "--reason", "test"])
    assert approved.exit_code == 0, approved.exception
    assert "started: flow run " in approved.stdout
    (started,) = set(runs_of(prefect_api, deployment)) - {waiting}

    from flows.awaiting import start_deployment

    start_deployment(request)
    assert set(runs_of(prefect_api, deployment)) == {waiting, started}
    before = operator.connections()
    execute_here(started)
    assert operator.connections() > before
    assert state(prefect_api, started) == ("COMPLETED", "Completed")
    assert len(tasks_of(prefect_api, started)) == 3


def test_an_approval_that_cannot_start_its_deployment_counts_and_says_so(
    operator: Operator, deployment: str, prefect_api: str
) -> None:
    execute_here(start(prefect_api, deployment, operator))
    (request,) = operator.connector.store.requests()
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.delete_deployment(deployment)
    result = CliRunner().invoke(app, ["guard", "approve", request.id, "--reason", "test"])
    assert "is approved, but its deployment" in str(result.exception)
    assert operator.connector.store.find(request.plan) is not None


def test_a_flow_that_is_called_as_a_function_is_refused_like_a_command(operator: Operator, prefect_api: str) -> None:
    from flows.evaluate_checkpoint import evaluate_checkpoint
    from tasks.evaluation import Suite

    with pytest.raises(Refused) as refused:
        evaluate_checkpoint(
            operator.source, "ct129", Suite(default_prompts()), operator.folder / "reports", operator.hosts_file
        )
    assert refused.value.request_id is not None
    assert operator.connector.store.get(refused.value.request_id).origin is None


@pytest.mark.parametrize(("spent", "name"), [(True, "AwaitingApproval"), (False, "Refused")])
def test_a_refusal_on_the_way_asks_again_only_when_the_approval_is_over(
    operator: Operator, prefect_api: str, monkeypatch: pytest.MonkeyPatch, spent: bool, name: str
) -> None:
    from flows import evaluate_checkpoint as flow
    from tasks.evaluation import Suite, plan_evaluation

    connector = operator.connector
    source, host = connector.inventory.location(operator.source), connector.inventory.host("ct129")
    plan = plan_evaluation([source], host)
    assert plan is not None
    first = connector.store.request(plan)
    connector.store.approve(first.id, reason="test", ca_key=operator.site.ca_key)

    def refused(*_: Any, **__: Any) -> Any:
        if spent:
            connector.store.retire(first.id, "no bytes are left")
        raise Refused("kpro6 refused", request_id=first.id)

    monkeypatch.setattr(flow, "relay", refused)
    arguments = (operator.source, "ct129", Suite(default_prompts()), operator.folder, operator.hosts_file)
    final = flow.evaluate_checkpoint(*arguments, return_state=True)
    assert final.name == name
    waiting = [one.id for one in connector.store.requests() if one.status == "pending"]
    assert len(waiting) == spent
    assert first.id not in waiting


def test_a_flow_process_has_no_agent(
    operator: Operator, prefect_api: str, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import evaluate_checkpoint as flow
    from tasks.evaluation import Suite

    monkeypatch.setenv("SSH_AUTH_SOCK", agent.getsockname())
    seen = []

    def load(hosts: Path | None) -> Any:
        seen.append({name for name in os.environ if name.startswith("SSH_A")})
        raise Refused("far enough")

    monkeypatch.setattr(flow.Connector, "load", load)
    with pytest.raises(Refused):
        flow.evaluate_checkpoint(
            operator.source, "ct129", Suite(default_prompts()), operator.folder, operator.hosts_file
        )
    assert seen == [set()]
