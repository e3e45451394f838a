"""Launching a described run on real hosts: once, whoever asks, and it goes on whatever becomes of who asked."""

import errno
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import changes, jobs, launching
from tasks.approvals import Approved
from tasks.channel import RequestFailed
from tasks.errors import Refused
from tasks.inventory import Host
from tasks.jobs import JobStatus
from tasks.launching import DiskFullError, Launched, LaunchError, LaunchUnknownError, Prepared
from tasks.run_file import read_run
from tasks.ssh import ConnectionFailed
from tests.gate_talk import ended, wait_for
from tests.sshds import Operator, Site

NEVER = float("inf")
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
    def entry(self) -> dict[str, Any]:
        """What the entries of both hosts say beside where they are."""
        return {name: str(self.folder / name) for name in ("jobs", "environments")}

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
    folders = {name: str(tmp_path / name) for name in ("jobs", "environments")}
    (tmp_path / "jobs").mkdir()
    (tmp_path / "config.txt").write_text("7")
    (tmp_path / "train.py").write_text(SCRIPT)
    yield Launching(site.operator(tmp_path / "operator", train=folders, infer=folders), tmp_path)
    for record in (tmp_path / "jobs").glob("*/job.json"):
        with suppress(ProcessLookupError):
            os.killpg(json.loads(record.read_text())["pid"], signal.SIGKILL)


def test_a_protected_host_starts_nothing_that_is_not_approved(here: Launching) -> None:
    prepared = here.prepared("train")
    assert launching.find(here.operator.connector, prepared) is None
    with pytest.raises(Refused, match="guard approve"):
        here.operator.store.require(prepared.plan)
    assert list(Path(prepared.launch.jobs).iterdir()) == []


def test_of_two_operators_who_start_the_same_run_one_starts_it_and_it_outlives_its_keeper(
    here: Launching, site: Site
) -> None:
    prepared = here.prepared()
    others = [site.operator(here.folder / name, infer=here.entry) for name in ("ada", "bob")]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda one: launching.launch(one.connector, prepared, None), others))
    assert sorted(one.found for one in both) == [False, True]
    pid = here.record(prepared, "job.json")["pid"]
    assert [one.status.pid for one in both if not one.found] == [pid]
    assert [path.name for path in Path(prepared.launch.jobs).iterdir() if path.is_dir()] == [prepared.job]
    kill_keeper(pid)
    assert here.status(prepared, None).pid == pid
    here.go.touch()
    assert here.record(prepared, "exit")["exit"] == 7
    written = jobs.logs(here.operator.connector, prepared.host, None, prepared.job, offset=7)
    assert b"".join(written) == b"7\ndone\n"


def test_a_job_of_a_protected_host_is_looked_at_under_its_approval_and_stopped_by_one_of_its_own(
    here: Launching,
) -> None:
    prepared = here.prepared("train")
    launched, approved = here.launch(prepared)
    assert (launched.found, launched.status.state) == (False, "running")
    sent = [hashlib.sha256((here.folder / name).read_bytes()).hexdigest() for name in ("config.txt", "train.py")]
    record = here.record(prepared)
    assert [record["config"], record["script"]] == sent
    running = here.status(prepared, approved)
    assert (running.state, running.pid) == ("running", launched.status.pid)
    assert running.command[:3] == ("python3", "-u", prepared.puts[2][0].path)
    action, plan = jobs.plan_stop(prepared.host, prepared.job)
    assert plan is not None
    assert plan.changes == (action,)
    with pytest.raises(Refused):
        here.operator.store.require(plan)
    (request,) = [one for one in here.operator.store.requests() if one.status == "pending"]
    stopping = here.operator.store.approve(request.id, reason="test", ca_key=here.operator.site.ca_key)
    jobs.stop(here.operator.connector, prepared.host, stopping.of(action), action)
    here.record(prepared, "exit")
    over = here.status(prepared, approved)
    assert (over.state, over.exit, over.message) == ("exited", -signal.SIGTERM, "ended by SIGTERM")
    assert (over.ended or 0) >= (over.started or NEVER)


@pytest.mark.slow
def test_a_job_that_was_killed_with_its_keeper_has_vanished(here: Launching) -> None:
    prepared = here.prepared()
    launched, _ = here.launch(prepared)
    pid = launched.status.pid or 0
    kill_keeper(pid)
    os.killpg(pid, signal.SIGKILL)
    wait_for(lambda: ended(pid))
    heartbeat = Path(jobs.job_folder(prepared.host, prepared.job)) / "heartbeat"
    os.utime(heartbeat, (1, 1))
    assert here.status(prepared, None).state == "vanished"
    found = launching.find(here.operator.connector, prepared)
    assert found is not None
    assert found.status.state == "vanished"


@pytest.mark.slow
def test_a_link_that_breaks_in_the_middle_of_the_start_is_told_and_the_job_found(
    here: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer gets lost, not the job: whether it runs is unknown, and asking again starts no second one."""
    prepared = here.prepared("train")
    real = changes.launch

    def cut(*arguments: Any) -> int:
        real(*arguments)
        raise ConnectionFailed("train: the connection was reset")

    monkeypatch.setattr(changes, "launch", cut)
    with pytest.raises(LaunchUnknownError, match="never started twice"):
        here.launch(prepared)
    # under the approval that the start left, without a new one
    found = launching.find(here.operator.connector, prepared)
    assert found is not None
    assert (found.found, found.status.state) == (True, "running")


def kill_keeper(pid: int) -> None:
    """Kill the gate's process that keeps the job whose first process is ``pid``."""
    keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert "dflash-gate" in Path(f"/proc/{keeper}/cmdline").read_text()
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: ended(keeper))


class Away:
    """Stands in for changing a host: at the ``step``-th change ``error`` comes of it, and before that all goes well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int, error: Exception) -> None:
        self.done: list[str] = []
        for name in ("put", "launch"):
            monkeypatch.setattr(changes, name, self.change(name, step, error))

    def change(self, name: str, step: int, error: Exception) -> Any:
        def call(*_: Any) -> int:
            if len(self.done) == step:
                raise error
            self.done.append(name)
            return 41

        return call


@pytest.mark.parametrize("step", range(4))
def test_a_host_that_goes_away_at_any_step_is_named(
    here: Launching, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    away = Away(monkeypatch, step, ConnectionFailed("infer: no route to host"))
    with pytest.raises((ConnectionFailed, LaunchUnknownError)) as raised:
        here.launch(here.prepared())
    assert away.done == ["put"] * step
    assert raised.value.state_name == ("LaunchUnknown" if step == 3 else "HostUnreachable")


@pytest.mark.parametrize("step", range(4))
def test_a_full_disk_of_the_host_is_named(here: Launching, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    Away(monkeypatch, step, RequestFailed("infer: no", "[Errno 28] No space left on device"))
    with pytest.raises(DiskFullError, match=r"infer: .*disk is full; make room there") as raised:
        here.launch(here.prepared())
    assert raised.value.state_name == "DiskFull"


def test_a_full_disk_of_this_machine_is_named_before_anything_happens(
    here: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(monkeypatch, 9, AssertionError())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="nothing was started"):
        here.launch(here.prepared())
    assert away.done == []
    assert launching.known_launches() == ()


@pytest.mark.parametrize("same", [True, False])
def test_a_file_that_is_there_already_is_as_good_and_another_in_its_place_starts_nothing(
    here: Launching, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    prepared = here.prepared()
    away = Away(monkeypatch, 9, AssertionError())
    well = changes.put
    first, calls = prepared.puts[0][0], []

    def put(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            sha256 = first.sha256 if same else "0" * 64
            raise RequestFailed("infer: no", f"what is there may not be replaced; its sha256 is {sha256}")
        well(*arguments)

    monkeypatch.setattr(changes, "put", put)
    if same:
        assert here.launch(prepared)[0].found is False
        assert away.done == ["put", "put", "launch"]
    else:
        with pytest.raises(LaunchError, match=r"was not written .*may not be replaced"):
            here.launch(prepared)
        assert away.done == []


def test_what_was_asked_for_here_is_known_without_any_host(here: Launching, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = here.prepared(), here.prepared(attempt=2)
    for prepared in (first, second):
        Away(monkeypatch, 9, AssertionError())
        here.launch(prepared)
    (here.folder / "state" / "launches" / "damaged.json").write_text("{")
    known = launching.known_launches()
    assert [(one.host, one.job) for one in known] == [("infer", second.job), ("infer", first.job)]
    assert known[0].config_sha256 == hashlib.sha256(b"7").hexdigest()
