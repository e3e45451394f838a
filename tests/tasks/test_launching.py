"""Launching a described run on real hosts: once, whoever asks, and it goes on whatever becomes of who asked."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import jobs, launching
from tasks.approvals import Approved
from tasks.errors import Refused
from tasks.inventory import Host
from tasks.jobs import JobStatus
from tasks.launching import Launched, Prepared
from tasks.run_file import read_run
from tests.gate_talk import wait_for
from tests.sshds import Operator, Site

SCRIPT = """\
import pathlib, sys, time
config = pathlib.Path(sys.argv[1]).read_text()
print("config", config, flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.02)
print("done", flush=True)
sys.exit(int(config))
"""


@dataclass
class Launching:
    """Runs on the hosts of one operator; everything that is started ends with the test."""

    operator: Operator
    folder: Path

    @property
    def go(self) -> Path:
        """The file that the runs wait for."""
        return self.folder / "go"

    def prepared(self, host: str = "infer", **changes: Any) -> Prepared:
        run = {"name": "night", "config": "config.txt", "script": "train.py"}
        run["command"] = ["python3", "-u", "{script}", "{config}", str(self.go)]
        file = self.folder / "run.yaml"
        file.write_text(json.dumps(run | changes))
        return launching.prepare(read_run(file), self.host(host))

    def host(self, name: str) -> Host:
        return self.operator.inventory.host(name)

    def approved(self, prepared: Prepared) -> Approved | None:
        if prepared.plan is None:
            return None
        request = self.operator.store.request(prepared.plan)
        return self.operator.store.approve(request.id, reason="test", ca_key=self.operator.site.ca_key)

    def launch(self, prepared: Prepared) -> tuple[Launched, Approved | None]:
        approved = self.approved(prepared)
        return launching.launch(self.operator.connector, prepared, approved), approved

    def status(self, prepared: Prepared, approved: Approved | None) -> JobStatus:
        reading = None if approved is None else approved.read
        return jobs.status(self.operator.connector, prepared.host, reading, prepared.job)

    def record(self, prepared: Prepared, name: str = "launch.json") -> Any:
        file = Path(jobs.job_folder(prepared.host, prepared.job)) / name
        return json.loads(wait_for(lambda: file.exists() and file.read_text()))


@pytest.fixture
def here(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launching]:
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "state"))
    folders = {"jobs": str(tmp_path / "jobs"), "environments": str(tmp_path / "environments")}
    (tmp_path / "jobs").mkdir()
    (tmp_path / "config.txt").write_text("7")
    (tmp_path / "train.py").write_text(SCRIPT)
    yield Launching(site.operator(tmp_path / "operator", train=folders, infer=folders), tmp_path)
    for record in (tmp_path / "jobs").glob("*/job.json"):
        with suppress(ProcessLookupError):
            os.killpg(json.loads(record.read_text())["pid"], signal.SIGKILL)


@pytest.mark.parametrize("host", ["infer", "train"])
def test_a_run_is_launched_once_and_goes_on_by_itself(here: Launching, host: str) -> None:
    prepared = here.prepared(host)
    launched, approved = here.launch(prepared)
    assert (launched.found, launched.status.state) == (False, "running")
    running = here.status(prepared, approved)
    assert (running.state, running.pid) == ("running", launched.status.pid)
    assert running.command[:3] == ("python3", "-u", prepared.puts[2][0].path)
    again, _ = here.launch(here.prepared(host))
    assert (again.found, again.status.pid) == (True, launched.status.pid)
    here.go.touch()
    folder = Path(jobs.job_folder(prepared.host, prepared.job))
    wait_for((folder / "exit").exists)
    over = here.status(prepared, approved)
    assert (over.state, over.exit) == ("exited", 7)
    assert over.ended is not None and over.started is not None and over.ended >= over.started
    written = jobs.logs(here.operator.connector, prepared.host, approved and approved.read, prepared.job, offset=7)
    assert b"".join(written) == b"7\ndone\n"


def test_what_was_launched_is_recorded_with_its_digests(here: Launching) -> None:
    code = here.folder / "code"
    (code / "__pycache__").mkdir(parents=True)
    (code / "model.py").write_text("x = 1\n")
    prepared = here.prepared(code=[str(code), str(here.folder / "missing")])
    here.launch(prepared)
    first = here.record(prepared)
    described = prepared.described
    assert described.config is not None and described.script is not None
    assert (first["config"], first["script"]) == (described.config.sha256, described.script.sha256)
    assert len(first["code"][str(code)]) == 64
    assert "No such file" in first["code"][str(here.folder / "missing")]
    (code / "__pycache__" / "model.pyc").write_text("not code")
    second = here.prepared(code=[str(code)], attempt=2)
    here.launch(second)
    assert here.record(second)["code"][str(code)] == first["code"][str(code)]
    (code / "model.py").write_text("x = 2\n")
    third = here.prepared(code=[str(code)], attempt=3)
    here.launch(third)
    assert here.record(third)["code"][str(code)] != first["code"][str(code)]
    known = launching.known_launches()
    assert [one.job for one in known] == [third.job, second.job, prepared.job]
    assert known[0].config_sha256 == described.config.sha256


def test_a_protected_host_starts_nothing_that_is_not_approved(here: Launching) -> None:
    prepared = here.prepared("train")
    assert launching.find(here.operator.connector, prepared) is None
    with pytest.raises(Refused, match="guard approve"):
        here.operator.store.require(prepared.plan)
    assert list(Path(prepared.launch.jobs).iterdir()) == []
