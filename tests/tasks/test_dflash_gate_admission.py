"""Whom the gate serves: second persons, authorized_keys; its settings, its own log, its clock, its pace."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tasks import process
from tasks.process import PIPE
from tests.changing import approve_change, launch_of, leave_mark, put_of, shell
from tests.gate_talk import Program, exchange, line, with_less_patience
from tests.guard_state import make_key
from tests.sshds import GATE, Operator

MIB = 1 << 20


@pytest.fixture
def program(operator: Operator, tmp_path: Path) -> Program:
    return Program(tmp_path, operator)


# --- second persons


@pytest.fixture
def second(program: Program, tmp_path: Path) -> Path:
    """The key of a second person, whom the gate asks for."""
    program.configure(second_persons={"second": make_key(tmp_path / "second")})
    return tmp_path / "second"


def _signed(key: Path, text: str, namespace: str = "dflash-approval") -> bytes:
    argv = ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", str(key)]
    return line({"second": "second", "signature": process.run(argv, input=text).stdout})


def test_two_persons_have_to_sign(program: Program, second: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    approval = approve_change(program.operator, leave_mark(program.operator.train, mark))
    text = f"{approval.digest} {approval.id}"
    other = tmp_path / "other"
    make_key(other)
    good = _signed(second, text)
    for bad in (
        b"",
        b"{}",
        line({"second": "nobody", "signature": json.loads(good)["signature"]}),
        line({"second": "second", "signature": ""}),
        _signed(other, text),
        _signed(second, text, namespace="file"),
        _signed(second, f"{approval.digest} 0000"),
        _signed(second, f"{'0' * 64} {approval.id}"),
    ):
        status, replies = program.change(approval, bad)
        assert status == 77
        assert not replies[0]["spent"]
    assert program.change(approval, good)[0] == 0
    assert mark.read_text() == "ran\n"
    assert program.logged()[-1]["second"] == "second"
    assert program.change(approval, good)[0] == 77


def test_two_persons_have_to_sign_a_read_as_well_and_no_emergency(
    program: Program, second: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    approval = program.operator.approve(path=str(tmp_path / "file"))
    request = line({"verb": "stat", "path": str(tmp_path / "file")})
    assert program.change(approval, request)[0] == 77
    running = program.start(approval)
    lines = [approval.action.canonical(), _signed(second, f"{approval.digest} {approval.id}"), request]
    output, _ = running.communicate(b"\n".join(lines) + b"\n")
    assert json.loads(output.splitlines()[1])["size"] == 1
    action = shell(program.operator.train, "true", break_glass=True)
    options = ["-O", "clear", "-O", f"force-command=dflash-gate {action.digest()}", "-O", "source-address=127.0.0.0/8"]
    short = program.operator.forge(approve_change(program.operator, action), "-V", "-1m:+5m", *options)
    assert program.change(short)[0] == 0


# --- where only authorized_keys can be edited


def test_a_forced_command_says_digest_serial_and_end(program: Program, tmp_path: Path) -> None:
    home = tmp_path / "home" / ".dflash"
    home.mkdir(parents=True)
    shutil.copy(GATE, home)
    shutil.copy(tmp_path / "gate.json", home)
    mark = tmp_path / "mark"
    approval = approve_change(program.operator, leave_mark(program.operator.train, mark))

    def start(*arguments: object) -> tuple[int, Any]:
        argv = ["env", "-C", str(home.parent), ".dflash/dflash-gate", *map(str, arguments)]
        status, replies = exchange(process.start(argv, stdin=PIPE, stdout=PIPE), approval.action.canonical())
        return status, replies[-1]

    now = int(time.time())
    for wrong in (
        (approval.digest, 5, now - 1),
        ("0" * 64, 5, now + 60),
        (approval.digest, "5;id", now + 60),
        (approval.digest, -5, "soon"),
        (approval.digest, 5),
        (approval.digest, 5, now + 60, 7),
    ):
        assert start(*wrong)[0] == 77
    assert not mark.exists()
    assert start(approval.digest, 5, now + 60) == (0, {"ok": True, "exit": 0})
    status, reply = start(approval.digest, 5, now + 60)
    assert (status, reply["spent"]) == (77, True)
    assert mark.read_text() == "ran\n"


# --- the gate's own log, the clock and the settings


def test_the_gates_log_can_be_read_while_it_grows(program: Program) -> None:
    log = program.state / "gate.log"
    approval = program.operator.approve(path=str(log))
    for _ in range(2):
        talk = program.talk(approval)
        size = talk.ask(verb="stat", path=str(log))["size"]
        assert talk.ask(verb="read", path=str(log), offset=0, length=size)["length"] == size
        content = talk.stdout.read(size)
        assert talk.reply() == {"ok": True}
        assert json.loads(content.splitlines()[-1])["event"] == "stat"
        assert "sha256" in talk.ask(verb="hash", path=str(log))
        talk.running.communicate()
    other = program.state.parent / "other"
    other.write_bytes(log.read_bytes())
    os.replace(other, log)
    assert "changed while read" in program.refusal(approval, {"verb": "stat", "path": str(log)})


def test_a_clock_that_was_set_back_serves_nothing(program: Program, tmp_path: Path) -> None:
    approval = program.operator.approve(path=str(tmp_path / "file"))
    assert program.run(approval)[0] == 0
    late = time.time() + 3600
    os.utime(program.state / "gate.log", (late, late))
    assert "clock went back" in program.refusal(approval)


@pytest.mark.parametrize(
    "settings",
    [{"second_person": {}}, {"second_persons": {}}, {"read_limit": 0}, {"host_keys": []}, {"host_keys": None}],
)
def test_settings_that_are_not_whole_serve_nothing(program: Program, tmp_path: Path, settings: dict[str, Any]) -> None:
    approval = program.operator.approve(path=str(tmp_path / "file"))
    program.configure(**settings)
    assert "cannot be used" in program.refusal(approval)


# --- politeness


def test_two_sessions_together_keep_to_the_limit_of_the_host(program: Program, tmp_path: Path) -> None:
    limit, size = 2 * MIB, 3 * MIB
    program.configure(read_limit=limit)
    files = [tmp_path / str(number) for number in range(2)]
    for file in files:
        file.write_bytes(bytes(size))
    talks = [program.talk(program.operator.approve(path=str(file))) for file in files]
    begun = time.monotonic()
    for talk, file in zip(talks, files, strict=True):
        talk.send(line({"verb": "hash", "path": str(file)}))
    for talk in talks:
        assert "sha256" in talk.running.communicate()[0].decode()
    # the first chunk, a quarter of a second's worth, and 50 ms of bytes more go at once
    assert time.monotonic() - begun > (2 * size - limit // 4) / limit - 0.05


@pytest.mark.parametrize("kind", ["read-grant", "put", "launch"])
def test_only_a_command_that_is_run_can_be_an_emergency(
    program: Program, second: Path, tmp_path: Path, kind: str
) -> None:
    """One person may run something in an emergency; that is no way to read or to write without the second."""
    operator = program.operator
    run = shell(operator.train, "true", break_glass=True)
    sides: dict[str, Any] = {
        "read-grant": operator.grant(root=str(tmp_path)),
        "put": put_of(operator.train, tmp_path / "file", b""),
        "launch": launch_of(operator.train, tmp_path, "true"),
    }
    fields = json.loads(sides[kind].canonical()) | {"break_glass": True, "argv": list(run.argv)}
    action = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    force = f"force-command=dflash-gate {hashlib.sha256(action).hexdigest()}"
    options = ["-O", "clear", "-O", force, "-O", "source-address=127.0.0.0/8"]
    approval = operator.forge(approve_change(operator, run), "-V", "-1m:+4m", *options)
    assert "only a run can be an emergency" in program.refusal(approval, action=action)


def test_a_slot_that_cannot_be_taken_is_a_refusal(program: Program, tmp_path: Path) -> None:
    (program.state / "slot-0").mkdir()
    assert "slot-0" in program.refusal(program.operator.approve(path=str(tmp_path / "file")))


def test_a_session_that_nobody_listens_to_ends_with_its_approval(program: Program, tmp_path: Path) -> None:
    """Else it would hold one of the two slots for as long as the connection lasts."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(1000):
        (folder / f"{number:0>200}").touch()
    program.gate = with_less_patience(tmp_path)
    talk = program.talk(program.operator.approve(root=str(folder), seconds=2))
    for _ in range(8):
        talk.send(line({"verb": "list", "path": str(folder)}))
    assert talk.running.wait(60) != 0
    talk.running.communicate()
