"""Jobs of the gate: launched once, kept on by themselves, signalled while they live."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import process
from tasks.actions import FileDigest, Launch, Signal
from tests.changing import approve_change, launch_of
from tests.disks import fill, small_disk
from tests.gate_talk import Changes, Program, ended, wait_for
from tests.sshds import GATE, Operator


@pytest.fixture
def changes(operator: Operator, tmp_path: Path) -> Changes:
    return Changes(Program(tmp_path, operator))


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "jobs"
    folder.mkdir()
    yield folder
    for file in folder.glob("*/job.json"):
        pid = json.loads(file.read_text())["pid"]
        if not (file.parent / "exit").exists() and not ended(pid):
            os.killpg(pid, signal.SIGKILL)


def _exit_of(jobs: Path, job: str = "train-1") -> Any:
    wait_for((jobs / job / "exit").exists)
    return json.loads((jobs / job / "exit").read_text())["exit"]


def test_a_job_runs_on_by_itself_and_leaves_its_record(changes: Changes, jobs: Path) -> None:
    go = jobs.parent / "go"
    script = 'echo out; echo err >&2; while [ ! -e "$1" ]; do sleep 0.05; done; echo late; exit 5'
    action = launch_of(changes.host, jobs, script, str(go), cwd="/usr", env=(("PATH", os.environ["PATH"]),))
    status, replies = changes.of(action)
    pid = replies[-1]["pid"]
    assert (status, replies) == (0, [{"ok": True}, {"ok": True, "job": "train-1", "pid": pid}])
    job = json.loads((jobs / "train-1" / "job.json").read_text())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    assert job == {
        "job": "train-1",
        "digest": action.digest(),
        "argv": list(action.argv),
        "cwd": "/usr",
        "env": [["PATH", os.environ["PATH"]]],
        "pid": pid,
        "birth": f"{boot}:{started}",
        "started": job["started"],
    }
    assert (jobs / "train-1" / "heartbeat").exists()
    assert os.getsid(pid) == pid != os.getsid(0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert not (jobs / "train-1" / "exit").exists()
    go.touch()
    assert _exit_of(jobs) == 5
    assert (jobs / "train-1" / "output.log").read_text() == "out\nerr\nlate\n"


def test_a_job_is_launched_at_most_once(changes: Changes, jobs: Path) -> None:
    mark = jobs.parent / "mark"
    action = launch_of(changes.host, jobs, 'echo ran >> "$1"', str(mark))
    assert changes.of(action)[0] == 0
    assert _exit_of(jobs) == 0
    assert "File exists" in changes.failure(action)
    assert mark.read_text() == "ran\n"


def test_a_job_that_cannot_start_leaves_nothing(changes: Changes, jobs: Path) -> None:
    action = changes.named(Launch, argv=("/no/such/program",), jobs=str(jobs), job="train-1")
    assert "no job was started" in changes.failure(action)
    assert list(jobs.iterdir()) == []
    linked = jobs.parent / "linked"
    linked.symlink_to(jobs)
    assert "is really" in changes.failure(launch_of(changes.host, linked, "true"))


def _requiring_much(changes: Changes, jobs: Path, seconds: int) -> Launch:
    """A launch that reads for minutes before it starts anything."""
    large = jobs.parent / "large"
    with large.open("wb") as file:
        file.truncate(1 << 37)
    requires = (FileDigest(path=str(large), sha256="0" * 64),)
    return launch_of(changes.host, jobs, "true", seconds=seconds, requires=requires)


def test_a_job_that_does_not_start_in_time_does_not_start_later(changes: Changes, jobs: Path) -> None:
    assert "longer than the approved 1 s" in changes.failure(_requiring_much(changes, jobs, 1))
    assert list(jobs.iterdir()) == []


def test_a_job_that_does_not_start_leaves_alone_what_took_its_folders_name(changes: Changes, jobs: Path) -> None:
    other = jobs.parent / "other"
    (other / "train-1").mkdir(parents=True)
    (other / "train-1" / "exit").write_text("another's")
    talk = changes.program.talk(approve_change(changes.program.operator, _requiring_much(changes, jobs, 2)))
    wait_for((jobs / "train-1" / "output.log").exists)
    jobs.rename(jobs.parent / "moved")
    other.rename(jobs)
    assert "no job was started" in talk.reply()["message"]
    talk.running.communicate()
    assert (jobs / "train-1" / "exit").read_text() == "another's"
    assert list((jobs.parent / "moved").iterdir()) == []


def test_the_heart_of_a_job_beats(changes: Changes, jobs: Path, tmp_path: Path) -> None:
    program = tmp_path / "quick-gate"
    program.write_text(
        GATE.read_text().replace("CLOCK_SECONDS = 360, 15, 10, 300", "CLOCK_SECONDS = 360, 15, 0.05, 300")
    )
    program.chmod(0o755)
    changes.program.gate = program
    assert changes.of(launch_of(changes.host, jobs, "sleep 60"))[0] == 0
    heartbeat = jobs / "train-1" / "heartbeat"
    before = heartbeat.stat().st_mtime_ns
    wait_for(lambda: heartbeat.stat().st_mtime_ns > before + 2 * 10**8)
    heartbeat.unlink()
    assert changes.of(changes.named(Signal, jobs=str(jobs), job="train-1", signal="KILL"))[0] == 0
    assert _exit_of(jobs) == -9


def test_how_a_job_ended_is_written_down_on_a_full_disk_too(changes: Changes, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        go, jobs = tmp_path / "go", disk / "jobs"
        jobs.mkdir()
        script = 'while [ ! -e "$1" ]; do sleep 0.05; done; exit 7'
        assert changes.of(launch_of(changes.host, jobs, script, str(go)))[0] == 0
        (jobs / "train-1" / "heartbeat").write_text("x" * 100)  # whoever else wrote there
        fill(disk)
        go.touch()
        assert _exit_of(jobs) == 7


def test_a_signal_reaches_the_processes_of_a_job(changes: Changes, jobs: Path) -> None:
    pid, caught = jobs.parent / "pid", jobs.parent / "caught"
    script = 'trap \'echo usr >> "$2"\' USR1; sleep 300 & echo $! > "$1"; while :; do wait; done'
    _, replies = changes.of(launch_of(changes.host, jobs, script, str(pid), str(caught)))
    wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))

    def send(name: str) -> Any:
        return changes.named(Signal, jobs=str(jobs), job="train-1", signal=name)

    status, answer = changes.of(send("USR1"))
    assert (status, answer[-1]) == (0, {"ok": True, "signalled": replies[-1]["pid"]})
    wait_for(caught.exists)
    assert changes.of(send("KILL"))[0] == 0
    assert _exit_of(jobs) == -signal.SIGKILL
    wait_for(lambda: ended(int(pid.read_text())))
    assert "has ended" in changes.failure(send("TERM"))


def test_a_process_that_has_the_id_of_an_ended_job_is_not_signalled(changes: Changes, jobs: Path) -> None:
    assert changes.of(launch_of(changes.host, jobs, "true"))[0] == 0
    assert _exit_of(jobs) == 0
    victim = process.start(["sleep", "300"], start_new_session=True)
    file = jobs / "train-1" / "job.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": victim.pid}))
    assert "has ended" in changes.failure(changes.named(Signal, jobs=str(jobs), job="train-1", signal="KILL"))
    assert victim.poll() is None
    victim.kill()
    victim.wait()


@pytest.mark.parametrize("birth", ["ended", None])
def test_a_record_that_lies_leads_to_no_other_process_group(
    changes: Changes, jobs: Path, birth: str | None, tmp_path: Path
) -> None:
    """A group that has lost its first process, and a process that leads no group."""
    script = ("sleep 300 & echo $! > pid.new; mv pid.new pid", "sleep 300 & echo $! > pid.new; mv pid.new pid; wait")
    leader = process.start(["sh", "-c", script[birth is None]], start_new_session=True, cwd=tmp_path)
    victim = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    if birth is not None:
        leader.wait()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    true = f"{boot}:{Path(f'/proc/{victim}/stat').read_text().rpartition(')')[2].split()[19]}"
    (jobs / "train-1").mkdir()
    (jobs / "train-1" / "exit").touch()
    record = {"pid": leader.pid if birth else victim, "birth": birth or true}
    (jobs / "train-1" / "job.json").write_text(json.dumps(record))
    said = changes.failure(changes.named(Signal, jobs=str(jobs), job="train-1", signal="KILL"))
    assert "nothing was signalled" in said
    time.sleep(0.1)
    assert not ended(victim)
    os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def test_there_is_no_signal_for_a_job_that_is_not_there(changes: Changes, jobs: Path) -> None:
    assert "No such file" in changes.failure(changes.named(Signal, jobs=str(jobs), job="other", signal="TERM"))


def test_the_record_of_a_job_tells_whether_it_lives_and_nothing_else_does(changes: Changes, jobs: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert changes.of(launch_of(changes.host, jobs, "sleep 300"))[0] == 0
    record = jobs / "train-1" / "job.json"

    def told(path: Path) -> dict[str, Any]:
        approval = changes.program.operator.approve(root=str(jobs))
        status, (_, found) = changes.program.run(approval, {"verb": "stat", "path": str(path)})
        assert (status, found["ok"]) == (0, True)
        return {name: found.get(name) for name in ("boot", "lives")} if "now" in found else {}

    assert told(record) == {"boot": boot, "lives": True}
    assert told(jobs / "train-1" / "heartbeat") == {}
    os.killpg(json.loads(record.read_text())["pid"], signal.SIGKILL)
    assert _exit_of(jobs) == -9
    assert told(record) == {"boot": boot, "lives": False}
    for lie in ("{", "[]", '{"pid": 1, "birth": "b:1"}', '{"pid": "1", "birth": 1}'):
        record.write_text(lie)
        assert told(record).get("lives") in (None, False)
