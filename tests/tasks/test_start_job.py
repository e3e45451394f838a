"""What goes along with a job and stays with it there, started as the gate starts it."""

import getpass
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tasks import process
from tasks.process import DEVNULL, Popen
from tests.disks import fill, small_disk
from tests.gate_talk import ended, wait_for

SYSTEMD_RUN = """\
#!/bin/sh
echo "$XDG_RUNTIME_DIR $@" >> {log}
while [ "$1" != -- ] && [ "$1" != true ]; do shift; done
[ "$1" = true ] && exit {usable}
shift
exec "$@"
"""


class Job:
    """One job's folder, and the program in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.program = folder, folder / "start_job.py"
        text = files("deploy").joinpath("host", "start_job.py").read_text("utf-8")
        # the marks of lingering users lie where only root can put one
        self.program.write_text(text.replace("/var/lib/systemd/linger", str(folder / "linger")))
        (folder / "heartbeat").write_text("{}")
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.running: list[Popen[bytes]] = []

    def start(self, *command: str, between: tuple[str, ...] = (), code: tuple[str, ...] = ()) -> Popen[bytes]:
        settings = {"folder": str(self.folder), "job": "night", "code": code}
        argv = [*between, sys.executable, "-I", str(self.program), json.dumps(settings), *command]
        with (self.folder / "output.log").open("ab") as output:
            env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "MARK": "kept"}
            running = process.start(
                argv, stdin=DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True, cwd=self.folder
            )
        self.running.append(running)
        return running

    def impatient(self, *, beat: float = 10.0, leaving: float = 10.0) -> None:
        text, patience = self.program.read_text(), "BEAT_SECONDS, LEAVING_SECONDS = 10.0, 10.0"
        assert text.count(patience) == 1
        self.program.write_text(text.replace(patience, f"BEAT_SECONDS, LEAVING_SECONDS = {beat}, {leaving}"))

    def systemd(self, *, usable: bool = True, lingers: bool = True) -> Path:
        """Put a stand-in for ``systemd-run`` into PATH; the file that its calls are written to."""
        log = self.folder / "systemd.log"
        log.touch()
        (self.bin / "systemd-run").write_text(SYSTEMD_RUN.format(log=log, usable=0 if usable else 1))
        (self.bin / "systemd-run").chmod(0o755)
        (self.folder / "linger").mkdir()
        if lingers:
            (self.folder / "linger" / getpass.getuser()).touch()
        return log

    def log(self) -> str:
        return (self.folder / "output.log").read_text()

    def read(self, name: str) -> Any:
        file = self.folder / name
        return json.loads(wait_for(lambda: file.exists() and file.read_text()))


@contextmanager
def job_in(folder: Path) -> Iterator[Job]:
    made = Job(folder)
    try:
        yield made
    finally:
        for running in made.running:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with job_in(tmp_path) as made:
        yield made


def test_the_command_gets_its_arguments_and_environment_and_its_end_is_passed_on(job: Job) -> None:
    running = job.start("sh", "-c", 'echo "$1" "$MARK" "${HOME:?}" "${USER:?}" >&2; exit 5', "sh", "a b;$(c)")
    assert running.wait(60) == 5
    assert job.log().startswith("a b;$(c) kept /")
    assert not (job.folder / "exit").exists()
    written = job.read("launch.json")
    assert (written["job"], written["command"][0], written["scope"]) == ("night", "sh", None)


def test_the_code_is_digested_as_it_is_at_the_start(job: Job) -> None:
    code, file, missing = job.folder / "code", job.folder / "alone.py", str(job.folder / "missing")
    (code / "__pycache__").mkdir(parents=True)
    file.write_text("x = 1\n")

    def digests() -> dict[str, str]:
        assert job.start("true", code=(str(code), str(file), missing)).wait(60) == 0
        return dict(job.read("launch.json")["code"])

    (code / "model.py").write_text("x = 1\n")
    first = digests()
    assert first[str(file)] == hashlib.sha256(b"x = 1\n").hexdigest()
    assert "No such file" in first[missing]
    (code / "__pycache__" / "model.pyc").write_text("not code")
    (code / ".git").write_text("not code")
    assert digests() == first
    (code / "model.py").write_text("x = 2\n")
    second = digests()
    (code / "model.py").rename(code / "other.py")
    assert len({first[str(code)], second[str(code)], digests()[str(code)]}) == 3


def test_code_that_is_no_file_keeps_no_job_from_starting(job: Job) -> None:
    code = job.folder / "code"
    code.mkdir()
    (code / "model.py").write_text("x = 1\n")
    (code / "data").symlink_to("nowhere")
    os.mkfifo(code / "pipe")
    assert job.start("true", code=(str(code), str(code / "pipe"))).wait(20) == 0
    folder, pipe = (job.read("launch.json")["code"][str(path)] for path in (code, code / "pipe"))
    assert len(folder) == 64
    assert pipe == f"not digested: {code / 'pipe'} is no file or folder"


def test_a_command_that_is_not_there_ends_the_job_with_the_reason_in_its_log(job: Job) -> None:
    assert job.start("no-such-trainer").wait(60) == 127
    assert "no-such-trainer: No such file or directory; it was not started" in job.log()


@pytest.mark.parametrize(
    ("trap", "status"), [("trap 'echo saved; exit 3' TERM;", 3), ("", -signal.SIGTERM)], ids=["saves first", "dies"]
)
def test_a_signal_is_the_commands_to_answer(job: Job, trap: str, status: int) -> None:
    running = job.start("sh", "-c", f"{trap} echo ready; while :; do sleep 0.05; done")
    wait_for(lambda: "ready" in job.log())
    os.killpg(running.pid, signal.SIGTERM)
    assert running.wait(60) == status
    assert ("saved" in job.log()) == (status == 3)


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "], ids=["dies", "does not listen"])
def test_what_the_command_leaves_running_ends_with_the_job(job: Job, trap: str) -> None:
    job.impatient(leaving=0.2)
    # in a session of its own, as torchrun starts its workers
    left = f"{trap}echo $$ > pid.new; mv pid.new pid; while :; do sleep 0.05; done"
    running = job.start("sh", "-c", 'setsid sh -c "$1" & while [ ! -e pid ]; do sleep 0.02; done; exit 4', "sh", left)
    assert running.wait(60) == 4
    assert ended(int((job.folder / "pid").read_text()))


@pytest.mark.parametrize(
    "at", ["    try:\n        child = ", "        for each in ASKED:\n"], ids=["no child", "a child"]
)
def test_a_signal_of_the_moment_of_the_start_is_for_the_command(job: Job, at: str) -> None:
    text = job.program.read_text()
    assert text.count(at) == 1
    indent = at[: len(at) - len(at.lstrip())]
    job.program.write_text(text.replace(at, f"{indent}os.killpg(0, signal.SIGTERM)\n{at}"))
    told = "import signal, time; signal.signal(15, signal.SIG_DFL); time.sleep(50)"
    assert job.start(sys.executable, "-c", told).wait(30) == -signal.SIGTERM


def test_a_full_disk_at_the_start_is_a_line_in_the_log_and_starts_nothing(job: Job) -> None:
    text, line = job.program.read_text(), "json.dump(content, file)"
    assert text.count(line) == 1
    job.program.write_text(text.replace(line, "raise OSError(28, 'No space left on device')"))
    assert job.start("touch", "begun").wait(30) == 1
    assert job.log().startswith("launch.json: No space left on device; nothing was started: ")
    assert job.log().count("\n") == 1
    assert not (job.folder / "begun").exists()
    assert not list(job.folder.glob("launch.json*"))


def test_what_the_command_leaves_for_a_moment_may_finish(job: Job) -> None:
    running = job.start("sh", "-c", "setsid sh -c 'sleep 0.3; touch finished' & exit 4")
    assert running.wait(60) == 4
    assert (job.folder / "finished").exists()


def start_and_kill_the_keeper(job: Job) -> None:
    """The command goes on without its keeper, until there is ``go``, and then ends with 6."""
    waiting = "echo $$ > pid.new; mv pid.new pid; while [ ! -e go ]; do sleep 0.02; done; exit 6"
    between = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")
    keeper = job.start("sh", "-c", waiting, between=between)
    wait_for((job.folder / "pid").exists)
    keeper.kill()
    keeper.wait()


def test_when_the_keeper_is_gone_its_work_goes_on(job: Job) -> None:
    job.impatient(beat=0.05)
    start_and_kill_the_keeper(job)
    os.utime(job.folder / "heartbeat", (1, 1))
    wait_for(lambda: (job.folder / "heartbeat").stat().st_mtime > 1)
    (job.folder / "go").touch()
    assert job.read("exit")["exit"] == 6


def test_without_a_keeper_the_end_is_written_on_a_full_disk_too(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk, job_in(disk) as job:
        start_and_kill_the_keeper(job)
        fill(disk)
        (job.folder / "go").touch()  # an empty file takes no block
        assert job.read("exit")["exit"] == 6


def test_with_a_user_manager_that_stays_the_job_has_a_scope_of_its_own(job: Job) -> None:
    called = job.systemd()
    running = job.start("sh", "-c", 'echo "pid $PPID ${XDG_RUNTIME_DIR-none} ${DFLASH_JOB_SCOPE-none}"; exit 5')
    assert running.wait(60) == 5
    assert job.log() == f"pid {running.pid} none none\n"
    tried, used = called.read_text().splitlines()
    scope = f"/run/user/{os.getuid()} --user --scope --quiet --collect"
    assert tried == f"{scope} true"
    assert used.startswith(f"{scope} --unit=dflash-job-night -- env ")
    assert job.read("launch.json")["scope"] == "dflash-job-night.scope"


@pytest.mark.parametrize("settings", [{"usable": False}, {"lingers": False}])
def test_a_user_manager_that_does_not_work_or_not_stay_is_left_alone(job: Job, settings: dict[str, bool]) -> None:
    called = job.systemd(**settings)
    assert job.start("sh", "-c", "exit 5").wait(60) == 5
    assert "--unit" not in called.read_text()
    assert job.read("launch.json")["scope"] is None
