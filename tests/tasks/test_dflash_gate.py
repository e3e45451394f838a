"""The gate program, started as sshd starts it."""

import base64
import dataclasses
import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tasks import process
from tests.gate_talk import Program
from tests.sshds import GATE, Operator, write_gate_configuration

MIB = 1 << 20


@pytest.fixture
def program(operator: Operator, tmp_path: Path) -> Program:
    return Program(tmp_path, operator)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A root with files in it, and a file beside it that must stay out of reach."""
    root = tmp_path / "checkpoints"
    (root / "deep").mkdir(parents=True)
    (root / "step.pt").write_bytes(os.urandom(3 * MIB))
    (root / "deep" / "other.pt").write_bytes(b"other")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "checkpoints-2").mkdir()
    (tmp_path / "checkpoints-2" / "secret").write_bytes(b"secret")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    (root / "latest").symlink_to(root / "step.pt")
    os.mkfifo(root / "fifo")
    return root


def test_serves_what_was_approved(program: Program, tree: Path) -> None:
    step = str(tree / "step.pt")
    status, replies = program.run(
        program.operator.approve(root=str(tree)),
        {"verb": "stat", "path": step},
        {"verb": "list", "path": str(tree)},
        {"verb": "hash", "path": step},
        {"verb": "stat", "path": str(tree / "latest")},
        {"verb": "stat", "path": str(tree / "missing")},
        {"verb": "stat", "path": str(tree)},
        {"verb": "hash", "path": str(tree / "fifo")},
        {"verb": "list", "path": step},
    )
    assert status == 0
    opened, found, listed, hashed, linked, missing, folder, fifo, not_a_folder = replies
    assert opened == {"ok": True}
    real = os.stat(step)
    identity = {"size": 3 * MIB, "mtime_ns": real.st_mtime_ns, "inode": real.st_ino, "device": real.st_dev}
    assert found == {"ok": True, "kind": "file"} | identity
    kinds = {entry["name"]: entry["kind"] for entry in listed["entries"]}
    assert kinds == dict.fromkeys(("fifo", "latest", "out", "up"), "other") | {"deep": "directory", "step.pt": "file"}
    assert hashed["sha256"] == process.run(["sha256sum", step]).stdout.split()[0]
    assert linked == found
    assert missing == {"ok": False, "message": f"{str(tree / 'missing')!r}: No such file or directory"}
    assert folder["kind"] == "directory"
    assert "not a regular file" in fifo["message"]
    assert "Not a directory" in not_a_folder["message"]


OUTSIDE = [
    "../secret",
    "..",
    "../checkpoints-2/secret",
    "out",
    "up/secret",
    "up/checkpoints-2",
    "/",
    "/etc/passwd",
    "/proc/self/environ",
]


@pytest.mark.parametrize("place", OUTSIDE)
def test_places_outside_of_a_root_are_refused(program: Program, tree: Path, place: str) -> None:
    approval = program.operator.approve(root=str(tree))
    path = os.path.normpath(tree / place) if place.startswith("..") else str(tree / place)
    assert "was not approved" in program.refusal(approval, {"verb": "list", "path": path})
    request = {"verb": "read", "path": path, "offset": 0, "length": 0}
    assert "was not approved" in program.refusal(approval, request)


def test_dots_in_a_path_are_refused(program: Program, tree: Path) -> None:
    approval = program.operator.approve(root=str(tree))
    request = {"verb": "stat", "path": f"{tree}/../secret"}
    assert "not a request of this gate" in program.refusal(approval, request)


def test_a_path_grant_is_for_that_path_as_it_really_is(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    assert "was not approved" in program.refusal(approval, {"verb": "stat", "path": str(tree)})
    assert "was not approved" in program.refusal(approval, {"verb": "stat", "path": str(tree / "deep/other.pt")})
    for path in (tree / "latest", tree / "out", tree / "up" / "secret"):
        linked = program.operator.approve(path=str(path))
        assert "was not approved" in program.refusal(linked, {"verb": "stat", "path": str(path)})


def test_other_verbs_are_refused(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"), verbs=("stat",))
    request = {"verb": "read", "path": str(tree / "step.pt"), "offset": 0, "length": 1}
    assert "not among the approved verbs stat" in program.refusal(approval, request)
    assert "its verbs are" in program.refusal(approval, {"verb": "run", "path": "/bin/true"})


def test_another_action_than_the_signed_one_is_refused(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    action = approval.grant.canonical()
    altered = action.replace(b'"sessions":100', b'"sessions":101')
    spaced = action.replace(b",", b", ", 1)
    wider = program.operator.grant(root="/").canonical()
    for other in (altered, spaced, wider, b"", b"{}", action + b" ", action[:-1]):
        assert "is not the approved one" in program.refusal(approval, action=other)
    assert "longer than" in program.refusal(approval, action=b"x" * 100_000)


def test_an_approval_for_another_host_is_refused(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    other = "SHA256:" + base64.b64encode(bytes(32)).decode().rstrip("=")
    write_gate_configuration(program.folder, host_keys=[*program.operator.train.fingerprints, other])
    assert "host keys are not those of this host" in program.refusal(approval)


def test_a_login_without_our_certificate_is_refused(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    plain = dataclasses.replace(approval, certificate_path=approval.key_path.with_suffix(".pub"))
    assert "shows no certificate of the guard" in program.refusal(plain)


@pytest.mark.parametrize("login", [None, "", "password\n", "publickey ssh-ed25519\n", "publickey a b\npublickey c d\n"])
def test_a_login_that_sshd_does_not_explain_is_refused(program: Program, login: str | None) -> None:
    file = program.folder / "login"
    if login is not None:
        file.write_text(login)
    env = os.environ | {"SSH_USER_AUTH": str(file), "SSH_CONNECTION": "127.0.0.1 5 10.1.2.6 22"}
    finished = process.run([str(GATE), str(program.folder / "gate.json")], env=env, check=False)
    assert finished.returncode == 77
    assert "ExposeAuthInfo" in json.loads(finished.stdout)["message"]


def test_sessions_are_counted(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"), sessions=3)
    request = {"verb": "stat", "path": str(tree / "step.pt")}
    for _ in range(3):
        assert program.run(approval, request)[0] == 0
    status, replies = program.run(approval, request)
    assert status == 77
    (reply,) = replies
    assert (reply["ok"], reply["refused"], reply["spent"]) == (False, True, True)
    assert "all 3 sessions are used" in reply["message"]


def test_bytes_are_counted_over_sessions_and_before_they_are_sent(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"), bytes=7 * MIB)
    request = {"verb": "hash", "path": str(tree / "step.pt")}
    assert program.run(approval, request, request)[0] == 0
    assert f"{3 * MIB} bytes asked for, {MIB} approved ones left" in program.refusal(approval, request)


def test_a_killed_session_has_paid_for_what_it_sent(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"), bytes=3 * MIB)
    talk = program.talk(approval)
    step = str(tree / "step.pt")
    assert talk.ask(verb="read", path=step, offset=0, length=3 * MIB)["length"] == 3 * MIB
    talk.stdout.read(MIB)
    talk.running.kill()
    talk.running.communicate()
    assert "approved ones left" in program.refusal(approval, {"verb": "hash", "path": step})


def test_the_file_of_a_path_grant_stays_the_one_first_seen(program: Program, tree: Path) -> None:
    step = tree / "step.pt"
    approval = program.operator.approve(path=str(step))
    request = {"verb": "stat", "path": str(step)}
    assert program.run(approval, request)[0] == 0
    with step.open("ab") as file:
        file.write(b"more")
    assert "changed while read" in program.refusal(approval, request)


def test_below_a_root_files_may_grow_between_stats_but_not_between_stat_and_read(program: Program, tree: Path) -> None:
    step = tree / "step.pt"
    approval = program.operator.approve(root=str(tree))
    talk = program.talk(approval)
    assert talk.ask(verb="stat", path=str(step))["size"] == 3 * MIB
    with step.open("ab") as file:
        file.write(b"more")
    assert talk.ask(verb="stat", path=str(step))["size"] == 3 * MIB + 4
    with step.open("ab") as file:
        file.write(b"more")
    reply = talk.ask(verb="read", path=str(step), offset=0, length=1)
    assert reply["refused"]
    assert "changed while read" in reply["message"]
    talk.running.communicate()
    assert talk.running.returncode == 77


def test_each_path_of_a_grant_is_pinned_for_itself(program: Program, tree: Path) -> None:
    step, other = tree / "step.pt", tree / "deep" / "other.pt"
    approval = program.operator.approve(paths=(str(step), str(other)))
    requests = [{"verb": "stat", "path": str(path)} for path in (step, other)]
    assert program.run(approval, *requests)[0] == 0
    other.write_bytes(b"changed")
    assert program.run(approval, requests[0])[0] == 0
    assert "changed while read" in program.refusal(approval, requests[1])
    assert "was not approved" in program.refusal(approval, {"verb": "stat", "path": str(tree / "deep")})


@pytest.mark.parametrize("place", ["path", "root"])
def test_a_file_swapped_between_stat_and_read_is_refused(program: Program, tree: Path, place: str) -> None:
    step = tree / "step.pt"
    where: dict[str, Any] = {place: str(step if place == "path" else tree)}
    talk = program.talk(program.operator.approve(**where))
    found = talk.ask(verb="stat", path=str(step))
    other = tree / "step.new"
    other.write_bytes(bytes(3 * MIB))
    os.utime(other, ns=(found["mtime_ns"], found["mtime_ns"]))
    other.replace(step)
    reply = talk.ask(verb="read", path=str(step), offset=0, length=1)
    assert "changed while read" in reply["message"]
    talk.running.communicate()


def test_a_link_put_in_place_of_a_file_is_refused(program: Program, tree: Path) -> None:
    step = tree / "step.pt"
    approval = program.operator.approve(root=str(tree))
    talk = program.talk(approval)
    talk.ask(verb="stat", path=str(step))
    step.unlink()
    step.symlink_to(tree.parent / "secret")
    reply = talk.ask(verb="read", path=str(step), offset=0, length=1)
    assert "was not approved" in reply["message"]
    talk.running.communicate()


def test_a_file_that_shrinks_while_it_is_read_ends_the_session(program: Program, tree: Path) -> None:
    step = tree / "step.pt"
    approval = program.operator.approve(path=str(step), rate=4 * MIB)
    talk = program.talk(approval)
    assert talk.ask(verb="read", path=str(step), offset=0, length=3 * MIB)["ok"]
    talk.stdout.read(MIB)
    os.truncate(step, 1)
    output, errors = talk.running.communicate()
    assert len(output) < 2 * MIB
    assert talk.running.returncode == 77
    assert "changed while read" in json.loads(errors)["message"]


def test_what_gives_less_than_its_size_is_no_file_to_read(program: Program) -> None:
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    if not os.path.exists(path):
        pytest.skip("no sysfs")
    talk = program.talk(program.operator.approve(path=path))
    size = talk.ask(verb="stat", path=path)["size"]
    assert talk.ask(verb="read", path=path, offset=0, length=size)["length"] == size
    output, errors = talk.running.communicate()
    assert (output, talk.running.returncode) == (b"", 77)
    assert "less than its size" in json.loads(errors)["message"]


def test_hashing_much_needs_an_approval_of_its_own(program: Program, tree: Path) -> None:
    large = tree / "large"
    with large.open("wb") as file:
        file.truncate((1 << 30) + 1)
    request = {"verb": "hash", "path": str(large)}
    approval = program.operator.approve(path=str(large), bytes=1 << 40)
    assert "an approval of its own" in program.refusal(approval, request)
    short = program.operator.approve(path=str(large), verbs=("stat", "hash"), bytes=5)
    assert "bytes asked for" in program.refusal(short, request)


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "{",
            "[]",
            "{}",
            '{"sessions": 0}',
            '{"next": 0, "files": {}}',
            '{"sessions": -1}',
            '{"sessions": "0"}',
            '{"next": "0"}',
            '{"more": 1}',
            '{"files": 1}',
        ),
        *('{"next": NaN}', '{"next": -1.0}', "[" * 50_000),
    ],
)
def test_a_corrupt_budget_serves_nothing(program: Program, tree: Path, content: str) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    (program.state / f"{approval.serial}.json").write_text(content)
    assert "nothing is done without it" in program.refusal(approval)


def test_a_budget_that_cannot_be_written_serves_nothing(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    (program.state / f"{approval.serial}.json").mkdir()
    assert "nothing is done without it" in program.refusal(approval)


def test_a_log_that_is_not_written_whole_serves_nothing(program: Program, tree: Path) -> None:
    (program.state / "gate.log").write_bytes(b"x" * 8182 + b"\n")
    approval = program.operator.approve(path=str(tree / "step.pt"))
    running = program.start(approval)
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (8192, 8192))
    output, _ = running.communicate(approval.grant.canonical() + b"\n", timeout=60)
    assert running.returncode == 77
    assert "log was not written whole" in json.loads(output)["message"]


def test_a_missing_or_open_state_folder_serves_nothing(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    program.state.chmod(0o777)
    assert "another user can write" in program.refusal(approval)
    shutil.rmtree(program.state)
    assert "cannot be used" in program.refusal(approval)


@pytest.mark.parametrize(
    "changes", [{"host_keys": []}, {"read_limit": 0}, {"read_limit": "1"}, {"read_limit": True}, {"state": 7.5}]
)
def test_a_wrong_configuration_serves_nothing(program: Program, tree: Path, changes: dict[str, Any]) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    write_gate_configuration(program.folder, **{"host_keys": list(program.operator.train.fingerprints)} | changes)
    assert "configuration" in program.refusal(approval)


def test_a_configuration_that_others_can_write_serves_nothing(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    (program.folder / "gate.json").chmod(0o666)
    assert "another user can write" in program.refusal(approval)


def test_no_argument_switches_the_checks_off(program: Program) -> None:
    for arguments in ([], ["--ordinary"], ["serve"], [str(program.folder / "gate.json"), "--ordinary"]):
        finished = process.run([str(GATE), *arguments], input="{}\n", check=False)
        assert finished.returncode == 77
        assert json.loads(finished.stdout)["refused"]


def test_everything_is_in_the_gates_own_log(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"), verbs=("stat",))
    program.run(approval, {"verb": "stat", "path": str(tree / "step.pt")}, {"verb": "hash", "path": "/etc/passwd"})
    program.refusal(approval, action=b"{}")
    log = [json.loads(line) for line in (program.state / "gate.log").read_text().splitlines()]
    assert [entry["event"] for entry in log] == ["session opened", "stat", "session ended", "refused"]
    assert {entry["serial"] for entry in log} == {approval.serial}
    assert log[0]["digest"] == approval.digest
    assert log[1]["path"] == str(tree / "step.pt")
    assert log[2]["outcome"].startswith("refused: 'hash' is not among")


def test_runs_at_the_lowest_priority_and_idle_io(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"))
    talk = program.talk(approval)
    assert os.getpriority(os.PRIO_PROCESS, talk.running.pid) == 19
    assert process.run(["ionice", "-p", str(talk.running.pid)]).stdout.strip() == "idle"
    talk.running.communicate()


def test_keeps_to_the_rate(program: Program, tree: Path) -> None:
    approval = program.operator.approve(path=str(tree / "step.pt"), rate=2 * MIB)
    begun = time.monotonic()
    assert program.run(approval, {"verb": "hash", "path": str(tree / "step.pt")})[0] == 0
    # chunks are a quarter of a second's worth, and the first goes at once
    assert time.monotonic() - begun > (3 - 0.5) / 2 * 0.95
