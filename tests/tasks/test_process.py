"""tasks/process.py: what may be started, and what a failure says."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from tasks import process
from tasks.process import ConnectingProgramError, ProcessError


@pytest.mark.parametrize("name", process.CONNECTING_PROGRAMS)
def test_programs_that_connect_are_refused(name: str, tmp_path: Path) -> None:
    program = tmp_path / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for argv in ([program], [f"./{name}"]):
        with pytest.raises(ConnectingProgramError, match=r"tasks/ssh\.py"):
            process.run(argv, cwd=tmp_path)
    with pytest.raises(ConnectingProgramError):
        process.start([name], env={"PATH": str(tmp_path)})


def test_ssh_under_another_name_is_refused(tmp_path: Path) -> None:
    ssh = shutil.which("ssh")
    assert ssh is not None
    (tmp_path / "cat").symlink_to(ssh)
    with pytest.raises(ConnectingProgramError):
        process.start([tmp_path / "cat", "host", "true"])


def test_a_hard_link_to_ssh_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\n")
    (tmp_path / "ssh").chmod(0o755)
    os.link(tmp_path / "ssh", tmp_path / "cat")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConnectingProgramError):
        process.run(["cat"])


def test_ssh_keygen_is_allowed(tmp_path: Path) -> None:
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"])
    assert (tmp_path / "key.pub").exists()


def test_a_failure_carries_the_last_line_and_the_exit_code() -> None:
    with pytest.raises(ProcessError, match=r"^sh failed with exit code 3: second$") as caught:
        process.run(["sh", "-c", "echo first >&2; echo second >&2; echo; exit 3"])
    assert caught.value.returncode == 3
    assert process.run(["sh", "-c", "exit 3"], check=False).returncode == 3


def test_a_missing_program_is_named() -> None:
    with pytest.raises(ProcessError, match="no program 'no-such-program' was found"):
        process.run(["no-such-program"])


def test_a_program_that_takes_too_long_is_stopped() -> None:
    begun = time.monotonic()
    with pytest.raises(ProcessError, match=r"sleep did not finish within 0\.2 s"):
        process.run(["sleep", "60"], timeout=0.2)
    assert time.monotonic() - begun < 30


def test_input_and_output_are_text() -> None:
    assert process.run(["cat"], input="τ = 4\n").stdout == "τ = 4\n"
    assert process.run(["cat"]).stdout == ""


def test_birth_tells_one_life_of_a_pid_from_another() -> None:
    assert process.birth(os.getpid()) == process.birth(os.getpid())
    child = process.start([sys.executable, "-c", "input()"], stdin=process.PIPE)
    born = process.birth(child.pid)
    assert born is not None
    assert born != process.birth(os.getpid())
    child.kill()
    child.wait()
    assert process.birth(child.pid) is None
