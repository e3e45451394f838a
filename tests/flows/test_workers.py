"""Two inference hosts share one queue: a real Prefect server, real workers, real sshds, an evaluator that stands in."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from dflash.prompts import default_prompts
from flows import workers
from flows.cli import app
from flows.cli_evaluate import NotServingError
from flows.workers import Workers
from tasks import evaluating, inventory
from tasks.evaluation import ON_VARIABLE
from tasks.ledger import Ledger
from tests.evaluators import StandIn
from tests.flows.conftest import Operator
from tests.prefect_api import ask
from tests.sshds import Sshd, another_sshd

pytestmark = pytest.mark.timeout(900)
NAMES = ("ct129", "ct130")


@dataclass(frozen=True)
class Shared:
    """Two inference hosts, the second of which a test may take away, and a deployment of their queue."""

    operator: Operator
    stands: dict[str, StandIn]
    second: Sshd
    api: str

    @property
    def hosts_file(self) -> Path:
        return self.operator.hosts_file

    @property
    def ledger(self) -> Ledger:
        return Ledger.open(self.operator.folder)

    def checkpoint(self, number: int) -> Path:
        file = self.operator.checkpoint.parent / f"step_{number}.safetensors"
        save_file({"fc.weight": np.full((16, 16), number, np.float32)}, file)
        return file

    def start(self, deployment: str, checkpoint: Path) -> str:
        parameters = {
            "source": str(checkpoint),
            "suite": {"prompts": str(default_prompts()), "max_new_tokens": 24},
            "reports": str(self.operator.folder / "reports"),
            "hosts": str(self.hosts_file),
        }
        asked = {"parameters": parameters, "idempotency_key": str(checkpoint)}
        deadline = time.monotonic() + 300
        while True:
            try:
                return str(ask(self.api, f"deployments/{deployment}/create_flow_run", asked)["id"])
            except HTTPError as error:  # its database has more to do than it can; the key makes it one run
                if error.code != 503 or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        asked = {"deployments": {"id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return list(ask(self.api, "flow_runs/filter", asked))


@pytest.fixture
def shared(operator: Operator, prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    operator.folder.mkdir(exist_ok=True)
    with another_sshd(operator.site, f"second-{tmp_path.name}", "127.1.230.173") as second:
        stands = {name: StandIn.make(tmp_path / name) for name in NAMES}
        known = json.loads(operator.hosts_file.read_text())
        known["hosts"]["ct129"] |= stands["ct129"].entry
        known["hosts"]["ct130"] = operator.site.ordinary_entry(second, **stands["ct130"].entry)
        operator.hosts_file.write_text(json.dumps(known))
        monkeypatch.setenv("PREFECT_API_URL", prefect_api)
        yield Shared(operator, stands, second, prefect_api)


def wait_until(what: Callable[[], bool], seconds: float = 1500) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def execute(flow_run: str, host: str) -> None:
    """What the worker of ``host`` does about a run, in this process, which is quicker."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    from flows.evaluate_checkpoint import evaluate_checkpoint

    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ON_VARIABLE, host)
        run_flow(evaluate_checkpoint, flow_run=run, return_type="state")


def test_one_inference_host_needs_no_workers_and_several_share_a_pool(operator: Operator, shared: Shared) -> None:
    several = inventory.load(shared.hosts_file)
    assert [host.name for host in workers.sharing_hosts(several)] == list(NAMES)
    assert workers.deployment_options(several) == {"work_pool_name": workers.POOL}
    known = json.loads(shared.hosts_file.read_text())
    del known["hosts"]["ct130"]
    one = inventory.parse(json.dumps(known))
    assert workers.sharing_hosts(one) == ()
    assert workers.deployment_options(one) == {}


def test_a_run_that_loses_its_host_hands_on_and_keeps_its_place_until_the_host_is_back(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.evaluate_checkpoint import evaluate_checkpoint

    deployment = str(evaluate_checkpoint.to_deployment(name=shared.operator.folder.parent.name).apply())
    waited: list[str] = []

    def back_again(connector: Any, host: Any, away: Callable[[Any, Any], bool]) -> None:
        # by now another may have it already
        assert len(shared.runs(deployment)) == 2
        assert away(connector, host)
        waited.append(host.name)
        shared.second.restart()

    monkeypatch.setattr(evaluating, "wait_for", back_again)
    first = shared.start(deployment, shared.checkpoint(1))
    shared.second.crash()
    execute(first, "ct130")
    assert waited == ["ct130"]
    by_id = {run["id"]: run for run in shared.runs(deployment)}
    lost = by_id.pop(first)
    assert (lost["state_type"], lost["state_name"]) == ("FAILED", "HostUnreachable")
    ((successor, run),) = by_id.items()
    assert run["parameters"]["not_on"] == ["ct130"]
    assert {name: value for name, value in run["parameters"].items() if name != "not_on"} == lost["parameters"]

    shared.stands["ct129"].let_go()
    execute(successor, "ct129")
    (done,) = [run for run in shared.runs(deployment) if run["id"] == successor]
    assert done["state_type"] == "COMPLETED"
    (attempt,) = shared.ledger.attempts()
    assert (attempt.state, attempt.on, attempt.number) == ("evaluated", "ct129", 1)
    assert attempt.flow_run == successor


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_evaluations_of_which_a_host_dies_midway_are_all_done_once_and_by_both(shared: Shared) -> None:
    from flows.deployments import deployment

    count = 20

    workers.make_pool()
    made = str(deployment("evaluate_checkpoint", shared.hosts_file, work_pool_name=workers.POOL).apply())
    checkpoints = [shared.checkpoint(number) for number in range(count)]
    for checkpoint in checkpoints:
        shared.start(made, checkpoint)
    running = Workers(NAMES, shared.operator.folder / "logs")
    assert sorted(running.tend()) == sorted(NAMES)
    assert running.tend() == []
    try:
        # both have one under way; the first goes on to its end, and the second dies in the middle of its third
        shared.stands["ct129"].let_go()
        shared.stands["ct130"].let_go()
        wait_until(lambda: len(shared.stands["ct130"].starts()) >= 2)
        shared.stands["ct130"].hold()
        wait_until(lambda: _on(shared, "ct130") and _waits(shared, "ct130"))
        shared.second.crash()
        shared.stands["ct130"].kill_jobs()
        wait_until(lambda: _done(shared) >= count)
        shared.second.restart()
        wait_until(lambda: all(run["state_type"] in ("COMPLETED", "FAILED") for run in shared.runs(made)))
    finally:
        running.stop()
        if shared.second.running.poll() is not None:
            shared.second.restart()
    attempts = shared.ledger.attempts()
    assert Counter(one.identity for one in attempts if one.state == "evaluated") == Counter(
        dict.fromkeys({one.identity for one in attempts}, 1)
    )
    assert len({one.identity for one in attempts}) == count
    assert [one for one in attempts if one.is_open] == []
    assert {one.on for one in attempts} == set(NAMES)
    started = Counter(job for stand in shared.stands.values() for job in stand.starts())
    assert all(times == 1 for stand in shared.stands.values() for times in stand.starts().values())
    assert sorted(started.values()) == [1] * (count - 1) + [2]  # the one that died with its host
    reports = [json.loads((Path(str(one.report)) / "report.json").read_text()) for one in attempts]
    assert len({report["relay"]["source"] for report in reports}) == count
    lost = [run for run in shared.runs(made) if run["state_name"] == "HostUnreachable"]
    assert len(lost) == 1


def _done(shared: Shared) -> int:
    return len({one.identity for one in shared.ledger.attempts() if one.state == "evaluated"})


def _on(shared: Shared, host: str) -> bool:
    return any(one.on == host for one in shared.ledger.open_attempts())


def _waits(shared: Shared, host: str) -> bool:
    """Whether a job there has begun and has no report yet."""
    jobs = shared.stands[host].home / "jobs"
    open_ones = {one.job for one in shared.ledger.open_attempts() if one.on == host}
    return any(
        (jobs / str(job) / "output.log").exists() and not (jobs / str(job) / "report").exists() for job in open_ones
    )


def test_a_worker_serves_its_host_and_ends_when_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, operator: Operator
) -> None:
    """The program is stood in for: what is shown is which are started, with what, and which again."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "${ON_VARIABLE} $*" >> {tmp_path}/started\nexec sleep 600\n')
    program.chmod(0o755)
    monkeypatch.setattr(workers.sys, "executable", str(program))
    running = Workers(NAMES, tmp_path / "logs")
    running.tend()
    wait_until(lambda: (tmp_path / "started").exists() and len((tmp_path / "started").read_text().splitlines()) == 2)
    asked = "-m prefect worker start --pool dflash-inference --type process --name"
    assert sorted((tmp_path / "started").read_text().splitlines()) == [
        f"{name} {asked} {name} --limit 1" for name in NAMES
    ]
    os.kill(running.pids["ct130"], 9)
    wait_until(lambda: running.tend() == ["ct130"])
    pids = list(running.pids.values())
    running.stop()
    assert running.pids == {}
    assert not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids)


def test_the_command_leaves_it_to_the_queue_which_host_does_it(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.deployments import deployment

    workers.make_pool()
    workers.make_pool()  # a second start of the server's side changes nothing
    made = str(deployment("evaluate_checkpoint", shared.hosts_file, work_pool_name=workers.POOL).apply())
    known = {run["id"] for run in shared.runs(made)}
    asked = ["evaluate", *(str(shared.checkpoint(number)) for number in (1, 2)), "--thinking", "off", "--queue"]
    queued = CliRunner().invoke(app, [*asked, "--json"])
    assert queued.exit_code == 0, queued.exception
    new = [run for run in shared.runs(made) if run["id"] not in known]
    assert {run["id"] for run in new} == set(json.loads(queued.stdout).values())
    assert {run["work_pool_name"] for run in new} == {workers.POOL}
    assert {run["parameters"]["on"] for run in new} == {None}
    assert {Path(run["parameters"]["hosts"]) for run in new} == {shared.hosts_file}

    refused = CliRunner().invoke(app, asked[:-1])
    assert "2 inference hosts (ct129, ct130): name one with --on" in str(refused.exception)
    monkeypatch.delenv("PREFECT_API_URL")
    alone = CliRunner().invoke(app, asked)
    assert isinstance(alone.exception, NotServingError)
    assert alone.exception.state_name == "PrefectUnreachable"
