"""The gate program behind a real sshd."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tasks import process
from tasks.approvals import Approval
from tasks.process import PIPE
from tests.gate_talk import Conversation, line
from tests.sshds import Operator, Site, write_gate_configuration

MIB = 1 << 20


def _session(operator: Operator, approval: Approval, *lines: bytes) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one ssh session with the gate."""
    running = operator.connector.start_gate(approval, operator.train, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    output, errors = running.communicate(b"".join(line + b"\n" for line in lines), timeout=60)
    return running.returncode, output.decode(), errors.decode()


@pytest.fixture
def step(tmp_path: Path) -> Path:
    file = tmp_path / "step.pt"
    file.write_bytes(os.urandom(MIB))
    return file


def test_sshd_runs_the_gate_for_an_approval(operator: Operator, step: Path) -> None:
    approval = operator.approve(path=str(step))
    status, output, _ = _session(
        operator, approval, approval.grant.canonical(), line({"verb": "stat", "path": str(step)})
    )
    assert status == 0
    assert json.loads(output.splitlines()[1])["size"] == MIB


def test_sshd_takes_no_login_without_a_certificate(operator: Operator, site: Site, step: Path) -> None:
    approval = operator.approve(path=str(step))
    for key in (approval.key_path, site.login_key, site.ca_key):
        bare = dataclasses.replace(approval, key_path=key, certificate_path=Path("/dev/null"))
        status, _, errors = _session(operator, bare)
        assert status == 255
        assert "Permission denied (publickey)" in errors


def test_sshd_takes_no_certificate_out_of_its_terms(operator: Operator, step: Path) -> None:
    approval = operator.approve(path=str(step))
    command = f"force-command=dflash-gate {approval.digest}"
    valid = ("-V", "-1m:+10m", "-O", "clear", "-O", command)
    for options, principal in (
        (("-V", "-10m:-1m", "-O", "clear", "-O", command, "-O", "source-address=127.0.0.0/8"), "dflash-gate"),
        ((*valid, "-O", "source-address=10.9.9.9"), "dflash-gate"),
        ((*valid, "-O", "source-address=127.0.0.0/8"), "root"),
    ):
        status, _, errors = _session(operator, operator.forge(approval, *options, principal=principal))
        assert status == 255
        assert "Permission denied (publickey)" in errors


def test_gate_takes_no_certificate_that_says_something_else(operator: Operator, step: Path) -> None:
    """These log in: sshd lets them through to its ForceCommand, and the gate sends them away."""
    approval = operator.approve(path=str(step))
    source = "source-address=127.0.0.0/8"
    for options, message in (
        (("-O", "clear", "-O", source), "no force-command"),
        ((), "no force-command"),
        (("-O", "clear", "-O", "force-command=/bin/sh", "-O", source), "no force-command"),
        (("-O", "clear", "-O", f"force-command=dflash-gate {'0' * 64}", "-O", source), "not the approved one"),
        (("-O", "clear", "-O", f"force-command=dflash-gate {approval.digest}"), "options"),
    ):
        forged = operator.forge(approval, "-V", "-1m:+10m", *options)
        status, output, _ = _session(operator, forged, approval.grant.canonical())
        assert status == 77
        assert message in json.loads(output)["message"]


def test_no_third_session_at_a_time_and_a_killed_client_takes_nothing_with_it(operator: Operator, step: Path) -> None:
    approval = operator.approve(path=str(step))
    action = approval.grant.canonical()
    first, second = (
        Conversation(
            operator.connector.start_gate(approval, operator.train, stdin=PIPE, stdout=PIPE, stderr=PIPE), approval
        )
        for _ in range(2)
    )
    status, output, _ = _session(operator, approval, action)
    assert status == 77
    assert "2 sessions are open" in json.loads(output)["message"]
    os.killpg(first.running.pid, signal.SIGKILL)
    first.running.communicate()
    assert second.ask(verb="stat", path=str(step))["size"] == MIB
    deadline = time.monotonic() + 20
    while (status := _session(operator, approval, action)[0]) == 77 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert status == 0
    second.running.communicate()
    assert second.running.returncode == 0


def test_the_deadline_ends_a_session_that_waits(operator: Operator, step: Path) -> None:
    approval = operator.approve(path=str(step), seconds=5)
    running = operator.connector.start_gate(approval, operator.train, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    talk = Conversation(running, approval)
    assert running.wait(60) == 77
    assert "expired in the middle" in json.loads(talk.stdout.read())["message"]
    running.communicate()
    assert time.time() >= approval.not_after


@pytest.mark.parametrize("size", [200 * 10**6, pytest.param(2 * 10**9, marks=pytest.mark.slow)])
def test_little_of_what_it_read_stays_in_the_page_cache(operator: Operator, tmp_path: Path, size: int) -> None:
    """Under 5 % of the file are resident when the last of its bytes has come, counted with mincore."""
    large, piece = tmp_path / "large.pt", os.urandom(MIB)
    with large.open("wb") as file:
        while file.tell() < size:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    size = large.stat().st_size
    if _resident(large) < size / 2:
        pytest.skip("this file system does not keep what was written in the page cache")
    approval = operator.approve(path=str(large), bytes=2 * size)
    running = operator.connector.start_gate(approval, operator.train, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    talk = Conversation(running, approval)
    assert talk.ask(verb="read", path=str(large), offset=0, length=size)["length"] == size
    left = size
    while left:
        left -= len(talk.stdout.read(min(left, MIB)))
    assert talk.reply() == {"ok": True}
    assert _resident(large) < 0.05 * size
    running.communicate()
    large.unlink()


def _resident(path: Path) -> int:
    """Bytes of ``path`` that are in the page cache, as mincore tells fincore."""
    return int(process.run(["fincore", "-b", "-n", "-o", "RES", str(path)]).stdout)


@pytest.mark.slow
def test_the_read_limit_holds_within_ten_per_cent(operator: Operator, site: Site, tmp_path: Path) -> None:
    """Two sessions read at once for ten seconds; only a machine that is busy with other things is slower."""
    limit, size = 20 * MIB, 100 * MIB
    write_gate_configuration(site.folder, host_keys=list(operator.train.fingerprints), read_limit=limit)
    try:
        talks = []
        for name in ("one", "two"):
            (tmp_path / name).write_bytes(bytes(size))
            approval = operator.approve(path=str(tmp_path / name))
            running = operator.connector.start_gate(approval, operator.train, stdin=PIPE, stdout=PIPE, stderr=PIPE)
            talks.append(Conversation(running, approval))
        begun = time.monotonic()
        for talk, name in zip(talks, ("one", "two"), strict=True):
            talk.send(line({"verb": "hash", "path": str(tmp_path / name)}))
        for talk in talks:
            assert b"sha256" in talk.running.communicate()[0]
        rate = 2 * size / (time.monotonic() - begun)
    finally:
        write_gate_configuration(site.folder, host_keys=list(operator.train.fingerprints))
    assert 0.9 * limit < rate < 1.1 * limit
