"""Launching from the command line and by the flow, over real sshds and a real Prefect server."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.cli import app
from flows.fenced import fenced
from tasks import launching, process
from tasks.errors import Refused
from tasks.launching import Launched
from tasks.process import DEVNULL
from tasks.run_file import read_run
from tests.flows.conftest import Operator
from tests.gate_talk import wait_for

TORCHRUN = Path(sys.executable).with_name("torchrun")
SCRIPT = """\
import os, pathlib, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
for step in range(1, 4):
    print(f"rank {rank} step {step}", flush=True)
    while not (folder / f"go-{step}").exists():
        time.sleep(0.02)
(folder / f"done-{rank}").touch()
"""


@pytest.fixture
def remote(operator: Operator) -> Iterator[Path]:
    """The folder of both hosts; whatever was launched there ends with the test."""
    folder = operator.checkpoint.parents[1]
    (folder / "jobs").mkdir()
    yield folder
    for record in (folder / "jobs").glob("*/job.json"):
        with suppress(ProcessLookupError):
            os.killpg(json.loads(record.read_text())["pid"], signal.SIGKILL)


def run_file(folder: Path, **run: Any) -> Path:
    file = folder / "run.yaml"
    file.write_text(json.dumps({"name": "night", **run}))
    return file


def dflash_ops(*argv: str) -> Result:
    return CliRunner().invoke(app, argv)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_goes_on_when_the_operators_side_is_killed(
    operator: Operator, remote: Path, prefect_api: str, tmp_path: Path, ranks: int
) -> None:
    """Started by Python; of several ranks, which takes longer, by torchrun."""
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [str(TORCHRUN), "--standalone", "--nproc-per-node", str(ranks)]
    command = ["python3", "-u"] if ranks == 1 else torchrun
    env = {"RANK": 0} if ranks == 1 else {}
    file = run_file(tmp_path, host="ct129", command=[*command, "{script}", str(remote)], script="train.py", env=env)
    env = {**os.environ, "PREFECT_API_URL": prefect_api}
    shown = tmp_path / "shown"
    with shown.open("wb") as output:
        argv = [sys.executable, "-m", "flows", "launch", "--config", str(file), "--follow"]
        following = process.start(
            argv, env=env, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
    try:
        begun = {f"rank {rank} step 1" for rank in range(ranks)}
        wait_for(lambda: begun <= set(shown.read_text().splitlines()), seconds=240)
    finally:
        os.killpg(following.pid, signal.SIGKILL)
        following.wait()
    for step in (1, 2, 3):
        (remote / f"go-{step}").touch()
    (job,) = [path.name for path in (remote / "jobs").iterdir() if path.is_dir()]
    ended = wait_for(lambda: (remote / "jobs" / job / "exit").exists() and (remote / "jobs" / job / "exit").read_text())
    assert json.loads(ended)["exit"] == 0, (remote / "jobs" / job / "output.log").read_text()
    assert sorted(path.name for path in remote.glob("done-*")) == [f"done-{rank}" for rank in range(ranks)]

    (listed,) = json.loads(dflash_ops("jobs", "list", "--json").stdout)
    assert (listed["host"], listed["job"], listed["state"], listed["exit"]) == ("ct129", job, "exited", 0)
    asked = dflash_ops("jobs", "status", "ct129", job)
    assert asked.exit_code == 0
    assert f"{job} on ct129: exited 0" in asked.stdout
    assert f"command: {' '.join(command)}" in asked.stdout
    whole = dflash_ops("jobs", "logs", "ct129", job).stdout_bytes
    assert whole == (remote / "jobs" / job / "output.log").read_bytes()
    assert dflash_ops("jobs", "logs", "ct129", job, "--offset", "9").stdout_bytes == whole[9:]
    again = dflash_ops("launch", "--config", str(file), "--json")
    assert (json.loads(again.stdout)["found"], json.loads(again.stdout)["job"]) == (True, job)
    assert again.stderr == "nothing was started; to run it again: --attempt 2\n"
    missing = dflash_ops("jobs", "status", "ct129", "other")
    assert (missing.exit_code, "has no job other" in missing.stdout) == (1, True)


def test_a_launch_on_a_protected_host_waits_for_its_approval_and_is_found_afterwards(
    operator: Operator, remote: Path, prefect_api: str, tmp_path: Path
) -> None:
    from flows.launch_training import launch_training

    file = run_file(tmp_path, host="kpro6", command=["/bin/sleep", "300"])
    before = operator.connections()
    state = launch_training(str(file), return_state=True)
    assert (state.type.value, state.name) == ("FAILED", "AwaitingApproval")
    assert operator.connections() == before
    assert list((remote / "jobs").iterdir()) == []
    (request,) = operator.connector.store.requests()
    operator.connector.store.approve(request.id, reason="test", ca_key=operator.site.ca_key)
    launched: Launched = launch_training(str(file))
    assert (launched.found, launched.status.state) == (False, "running")
    # the approval of the start lets the job be looked at, so asking again needs no other
    again: Launched = launch_training(str(file))
    assert (again.found, again.status.pid) == (True, launched.status.pid)
    shown = dflash_ops("jobs", "status", "kpro6", launched.job)
    assert f"running, process {launched.status.pid}" in shown.stdout
    refused = dflash_ops("jobs", "stop", "kpro6", launched.job)
    assert isinstance(refused.exception, Refused)
    operator.connector.store.approve(refused.exception.request_id or "", reason="test", ca_key=operator.site.ca_key)
    assert dflash_ops("jobs", "stop", "kpro6", launched.job).exit_code == 0
    ended = remote / "jobs" / launched.job / "exit"
    assert json.loads(wait_for(lambda: ended.exists() and ended.read_text()))["exit"] == -signal.SIGTERM


def test_no_argument_of_a_job_ends_the_code_block_that_shows_it() -> None:
    shown = fenced("train\n```\n# approved\n````")
    first, *inside, last, end = shown.split("\n")
    assert (first, last, end) == ("`````text", "`````", "")
    assert inside == ["train", "```", "# approved", "````"]
    assert fenced("train --now\n").startswith("```text\n")


def test_what_would_be_asked_for_is_shown_and_leaves_nothing(operator: Operator, remote: Path, tmp_path: Path) -> None:
    file = run_file(tmp_path, host="kpro6", command=["/bin/sleep", "300"])
    job = launching.prepare(read_run(file), operator.connector.inventory.host("kpro6")).job
    for argv in (
        ("launch", "--config", str(file)),
        ("jobs", "list", "kpro6"),
        ("jobs", "status", "kpro6", job),
        ("jobs", "logs", "kpro6", job),
        ("jobs", "stop", "kpro6", job),
        ("hosts", "check", "kpro6"),
    ):
        shown = dflash_ops(*argv, "--plan")
        assert shown.exit_code == 0, shown.exception
        assert "not approved: it would be refused and leave a request" in shown.stdout
    assert operator.connector.store.requests() == []


def test_hosts_are_checked_and_a_protected_one_only_when_approved(operator: Operator, remote: Path) -> None:
    checked = dflash_ops("hosts", "check", "--json")
    assert isinstance(checked.exception, Refused)
    (name, checks), *others = json.loads(checked.stdout).items()
    assert (name, others) == ("ct129", [])
    found = {check["name"]: check for check in checks}
    assert found["reachable"]["status"] == "pass"
    assert found["gpus"]["status"] == "fail"
    assert f"disk {remote / 'jobs'}" in found
    (request,) = operator.connector.store.requests()
    operator.connector.store.approve(request.id, reason="test", ca_key=operator.site.ca_key)
    protected = dflash_ops("hosts", "check", "kpro6")
    assert protected.exit_code == 0, protected.exception
    assert "reachable" in protected.stdout
    assert max(map(len, protected.stdout.splitlines())) <= 80


def test_a_host_whose_jobs_cannot_be_listed_hides_no_other(operator: Operator, remote: Path) -> None:
    (remote / "jobs").rmdir()
    (remote / "jobs").write_text("no folder")
    listed = dflash_ops("jobs", "list")
    assert listed.exit_code == 0, listed.exception
    assert [line.partition(":")[0] for line in listed.stderr.splitlines()] == ["kpro6", "ct129"]
