"""How a job is, from what its folder and its host show; the decisions without a host, the looking on a real one."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import UsageError
from tasks import jobs, process
from tasks.channel import GateError
from tasks.errors import HostBusy
from tasks.gate import Entry, JobRecord, open_session
from tasks.inventory import Host
from tasks.job_status import JobStatus, judge
from tasks.jobs import JobError
from tasks.process import birth
from tasks.ssh import ConnectionFailed
from tests.gate_talk import wait_for
from tests.sshds import Operator, Site, another_sshd
from tests.tasks.test_client_enforcement import client_operator

NOW = 1_800_000_000.0
KNOWN = JobStatus("night", "running", pid=41, started=NOW - 1000)


def record(**told: Any) -> JobRecord:
    return JobRecord(kind="file", size=9, mtime_ns=0, inode=1, device=1, **told)


def beat(age: float) -> Entry:
    return Entry(name="heartbeat", kind="file", size=2, mtime_ns=int((NOW - age) * 1e9), inode=2, device=1)


@pytest.mark.parametrize(
    ("told", "heartbeat", "state", "says"),
    [
        pytest.param({"lives": True, "boot": "b"}, beat(3), "running", "", id="lives and beats"),
        pytest.param({"lives": True, "boot": "b"}, beat(999), "running", "how it ends will not", id="its keeper died"),
        pytest.param({"lives": True, "boot": "b"}, None, "running", "how it ends will not", id="no heart at all"),
        pytest.param({"lives": False, "boot": "b"}, beat(3), "running", "", id="processes of others are hidden"),
        pytest.param({"lives": False, "boot": "b"}, beat(999), "vanished", "processes are gone", id="killed together"),
        pytest.param({"lives": False, "boot": "c"}, beat(3), "vanished", "started anew", id="the host was rebooted"),
        pytest.param({}, beat(3), "running", "", id="an old gate tells nothing"),
        pytest.param({}, beat(999), "vanished", "processes are gone", id="an old gate, and no beat"),
    ],
)
def test_a_job_without_an_exit_runs_or_has_vanished(
    told: dict[str, Any], heartbeat: Entry | None, state: str, says: str
) -> None:
    now = {"now": NOW} if told else {}
    found = judge(KNOWN, "b:77", record(**now, **told), heartbeat, NOW)
    assert (found.state, found.pid) == (state, 41)
    assert says in found.message if says else not found.message


def test_a_clock_that_is_wrong_there_misleads_nobody() -> None:
    there = NOW + 86400
    late = Entry(name="heartbeat", kind="file", size=2, mtime_ns=int((there - 5) * 1e9), inode=2, device=1)
    told = record(now=there, lives=False, boot="b")
    assert judge(KNOWN, "b:77", told, late, here=NOW).state == "running"
    assert judge(KNOWN, "b:77", told, beat(5), here=NOW).state == "vanished"


@pytest.fixture
def here(site: Site, tmp_path: Path) -> Operator:
    (tmp_path / "jobs").mkdir()
    return site.operator(tmp_path / "operator", infer={"jobs": str(tmp_path / "jobs")})


def job(here: Operator, name: str = "night", **files: Any) -> Path:
    """The folder of a job as the gate leaves it."""
    folder = Path(jobs.job_folder(here.infer, name))
    folder.mkdir()
    for file, content in files.items():
        (folder / file.replace("_", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def about(pid: int, **changes: Any) -> dict[str, Any]:
    fields = {"job": "night", "digest": "0" * 64, "argv": ["/bin/x"], "cwd": "/", "env": [], "started": NOW}
    return fields | {"pid": pid, "birth": birth(pid)} | changes


def test_each_state_is_told_from_what_lies_there(here: Operator) -> None:
    living = process.start(["sleep", "60"], start_new_session=True)
    try:
        job(here, "runs", job_json=about(living.pid), heartbeat={}, output_log="hello")
        job(here, "gone", job_json=about(living.pid, birth="b:1"), output_log="")
        job(here, "killed", job_json=about(living.pid), exit={"exit": -9, "ended": NOW + 5})
        job(here, "begins", output_log="")
        stalled = job(here, "stalled", output_log="")
        os.utime(stalled, (NOW - 10**8, NOW - 10**8))
        job(here, "evaluate-x", prompts_jsonl="{}")
        job(here, "damaged", job_json="{")
        found = {one.job: one for one in jobs.all_statuses(here.connector, here.infer, None)}
    finally:
        living.kill()
        living.wait()
    assert {name: one.state for name, one in found.items()} == {
        "runs": "running",
        "gone": "vanished",
        "killed": "exited",
        "begins": "running",
        "stalled": "vanished",
        "damaged": "unknown job",
    }
    assert "is not what the gate writes" in found["damaged"].message
    assert (found["runs"].pid, found["runs"].log_bytes, found["runs"].argv) == (living.pid, 5, ("/bin/x",))
    assert (found["killed"].exit, found["killed"].ended, found["killed"].message) == (-9, NOW + 5, "ended by SIGKILL")
    assert "started anew" in found["gone"].message
    assert "never ran" in found["stalled"].message


def test_a_job_that_begins_is_young_by_the_clock_of_its_host(here: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    job(here, "begins", output_log="")
    hour_ahead = time.time() + 3600
    with open_session(here.connector, here.infer, None) as session, monkeypatch.context() as patch:
        patch.setattr(jobs.time, "time", lambda: hour_ahead)
        assert jobs.look(session, "begins").state == "running"


def test_a_record_that_is_none_is_an_error_and_no_state(here: Operator) -> None:
    lies: list[dict[str, Any]] = [
        {"job_json": "[" * 5000},
        {"job_json": {"job": "night"}},
        {"job_json": about(1) | {"pid": "1"}},
        {"job_json": about(1), "exit": "\x1b[31m"},
        {"job_json": "x" * (2 << 20)},
    ]
    with open_session(here.connector, here.infer, None) as session:
        for number, files in enumerate(lies):
            job(here, f"night-{number}", **files)
            with pytest.raises(JobError, match=r"is not what the gate writes|is no job's record") as raised:
                jobs.look(session, f"night-{number}")
            assert str(raised.value).isprintable()


def test_no_job_and_no_id_of_one(here: Operator) -> None:
    missing = jobs.status(here.connector, here.infer, None, "night")
    assert (missing.state, missing.over) == ("unknown job", True)
    with pytest.raises(JobError, match="has no job night"):
        list(jobs.logs(here.connector, here.infer, None, "night"))
    action, plan = jobs.plan_stop(here.infer, "night")
    assert plan is None
    with pytest.raises(JobError, match="has no job night"):
        jobs.stop(here.connector, here.infer, None, action)
    with pytest.raises(UsageError, match="no job's id"):
        jobs.status(here.connector, here.infer, None, "../night")


def test_a_host_that_does_not_answer_says_nothing_about_its_jobs(here: Operator) -> None:
    job(here, job_json=about(1), exit={"exit": 0, "ended": NOW})
    away = here.infer.model_copy(update={"port": 1})
    found = jobs.status(here.connector, away, None, "night")
    assert (found.state, found.exit, found.over) == ("unreachable", None, False)
    assert "it may well run" in found.message


class Session:
    """Stands in for a host: what each session shows, one look a number; a text is why it cannot be reached."""

    def __init__(self, host: Host, looks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.looks, self.now, self.opened = host, looks, 0.0, 0
        monkeypatch.setattr(jobs, "open_session", self.open)
        monkeypatch.setattr(jobs, "look", lambda *_: self.look())
        monkeypatch.setattr(jobs, "_written", lambda _, __, offset: [self.log[offset:]] if self.log[offset:] else [])
        self.log = b""

    def open(self, *_: Any) -> "Session":
        self.opened += 1
        if isinstance(self.looks[0], Exception):
            raise self.looks.pop(0)
        return self

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def look(self) -> JobStatus:
        if isinstance(self.looks[0], Exception):
            raise self.looks.pop(0)
        state, self.log = self.looks.pop(0)
        return JobStatus("night", state, exit=0 if state == "exited" else None, log_bytes=len(self.log))

    def follow(self, **options: Any) -> tuple[JobStatus, bytes]:
        taken = bytearray()

        def sleep(seconds: float) -> None:
            self.now += seconds

        options = {"clock": lambda: self.now, "sleep": sleep} | options
        return jobs.follow(None, self.host, None, "night", taken.extend, **options), bytes(taken)  # type: ignore[arg-type]


def host(role: str = "inference") -> Host:
    entry = {"name": "h", "role": role, "address": "10.0.0.1", "user": "u", "jobs": "/jobs"}
    return Host.model_validate(entry, strict=False)


def test_a_log_is_handed_on_once_over_broken_links(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = [
        ("running", b"one "),
        GateError("the session broke"),
        ConnectionFailed("no route"),
        HostBusy("two sessions are open"),
        ("running", b"one two "),
        ("exited", b"one two three"),
    ]
    stand_in = Session(host(), looks, monkeypatch)
    found, taken = stand_in.follow(offset=0)
    assert (found.state, found.exit, taken) == ("exited", 0, b"one two three")


def test_only_a_long_silence_is_unreachable_and_keeps_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = [("running", b"x"), *([ConnectionFailed("no route")] * 99)]
    stand_in = Session(host(), looks, monkeypatch)
    found, taken = stand_in.follow(patience=300)
    assert (found.state, found.log_bytes, taken) == ("unreachable", 1, b"x")
    assert "no route" in found.message
    assert 300 < stand_in.now < 400


def test_a_job_on_a_protected_host_is_followed_in_short_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Session(host("training"), [("running", b"")] * 3 + [("exited", b"")], monkeypatch)
    stand_in.follow(poll=1.0)
    assert (stand_in.opened, stand_in.now) == (4, 30.0)


@pytest.mark.parametrize("enforcement", ["host", pytest.param("client", marks=pytest.mark.slow)])
def test_a_growing_log_is_read_under_an_approval(site: Site, tmp_path: Path, enforcement: str) -> None:
    """What a job writes while it is read neither breaks the session nor ends the approval."""
    folder = tmp_path / "jobs" / "night"
    folder.mkdir(parents=True)
    jobs_of, place = {"jobs": str(tmp_path / "jobs")}, tmp_path / "operator"
    operator = site.operator(place, train=jobs_of) if enforcement == "host" else client_operator(site, place, **jobs_of)
    log = folder / "output.log"
    log.write_bytes(b"0123456789" * 400_000)
    (folder / "job.json").write_text(json.dumps(about(1)))
    plan = jobs.plan_observation(operator.train, "night")
    assert plan is not None
    operator.store.approve(operator.store.request(plan).id, reason="test", ca_key=site.ca_key)
    approval = jobs.approval_in_force(operator.store, operator.train, "night")
    taken = 0
    for piece in jobs.logs(operator.connector, operator.train, approval, "night", offset=10):
        taken += len(piece)
        with log.open("ab") as file:
            file.write(b"more")
    assert taken == 4_000_000 - 10
    again = jobs.approval_in_force(operator.store, operator.train, "night")
    assert again == approval
    (rest,) = jobs.logs(operator.connector, operator.train, again, "night", offset=4_000_000)
    assert set(rest.split(b"more")) == {b""}


@pytest.mark.slow
def test_a_log_is_followed_over_an_sshd_that_dies_and_comes_back(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "night"
    folder.mkdir(parents=True)
    living = process.start(["sleep", "300"], start_new_session=True)
    (folder / "job.json").write_text(json.dumps(about(living.pid)))
    log, taken, kills = folder / "output.log", bytearray(), 0
    log.touch()
    with another_sshd(site, "follow", "127.1.230.77") as sshd, ThreadPoolExecutor(1) as pool:
        operator = site.operator(
            tmp_path / "operator",
            other=site.ordinary_entry(sshd, host_keys=list(sshd.host_keys), jobs=str(tmp_path / "jobs")),
        )
        host = operator.inventory.host("other")
        following = pool.submit(
            jobs.follow, operator.connector, host, None, "night", taken.extend, poll=0.05, patience=120
        )
        try:
            for number in range(400):
                with log.open("ab") as file:
                    file.write(b"%d\n" % number)
                if number in (100, 200, 300):
                    wait_for(lambda seen=bytes(b"%d\n" % (number - 20)): seen in taken, seconds=120)
                    sshd.crash()
                    time.sleep(0.5)
                    sshd.restart()
                    kills += 1
        finally:
            living.kill()
            living.wait()
            (folder / "exit").write_text(json.dumps({"exit": 0, "ended": NOW}))
        found = following.result(timeout=200)
    assert (kills, found.state, found.exit) == (3, "exited", 0)
    assert bytes(taken) == log.read_bytes()
