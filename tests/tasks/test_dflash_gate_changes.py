"""The verbs of the gate that change the host: run, put, revoke; what is spent, and when."""

import hashlib
import json
import os
import resource
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks import process
from tasks.actions import FileDigest, Put, Revoke, Run, Signal
from tests.changing import approve_change, launch_of, leave_mark, put_of, shell
from tests.gate_talk import Changes, Program, ended, said, wait_for, with_less_patience
from tests.sshds import GATE, Operator

MIB = 1 << 20


@pytest.fixture
def program(operator: Operator, tmp_path: Path) -> Program:
    return Program(tmp_path, operator)


@pytest.fixture
def changes(program: Program) -> Changes:
    return Changes(program)


# --- run


def test_an_argv_is_run_as_it_is_without_a_shell(changes: Changes) -> None:
    strange = ("$(touch /tmp/never)", "a\nb", "; id", "*", "…", "-x" * 10_000)
    show = "import sys, os; sys.stdout.write(repr((sys.argv[1:], os.getcwd(), dict(os.environ), sys.stdin.read())))"
    argv = (sys.executable, "-I", "-c", show, *strange)
    env = (("A", "$B"), ("LC_ALL", "C.UTF-8"))
    status, replies = changes.of(changes.named(Run, argv=argv, cwd="/usr", env=env))
    assert (status, replies[-1]) == (0, {"ok": True, "exit": 0})
    assert said(replies, "stdout").decode() == repr(([*strange], "/usr", dict(env), ""))


def test_both_streams_and_the_status_come_back(changes: Changes) -> None:
    assert changes.shell("echo out; echo err >&2; exit 3") == (3, b"out\n", b"err\n")
    assert changes.shell("kill -9 $$") == (-9, b"", b"")


def test_output_of_any_bytes_comes_whole(changes: Changes) -> None:
    status, out, _ = changes.shell("head -c 900000 /dev/zero; printf '\\377\\n'")
    assert (status, out) == (0, bytes(900_000) + b"\xff\n")


def test_too_much_output_ends_the_command(changes: Changes, tmp_path: Path) -> None:
    script = 'sleep 300 & echo $! > "$1"; yes; touch "$2"'
    action = shell(changes.host, script, str(tmp_path / "pid"), str(tmp_path / "after"), bytes=100_000)
    assert "wrote more than the approved 100000 bytes" in changes.failure(action)
    wait_for(lambda: ended(int((tmp_path / "pid").read_text())))
    assert not (tmp_path / "after").exists()


def test_the_time_limit_ends_the_whole_process_group(changes: Changes, tmp_path: Path) -> None:
    script = 'sleep 300 & echo $! > "$1"; wait'
    assert "longer than the approved 1 s" in changes.failure(
        shell(changes.host, script, str(tmp_path / "pid"), seconds=1)
    )
    wait_for(lambda: ended(int((tmp_path / "pid").read_text())))


def test_a_client_that_goes_away_takes_the_command_with_it(changes: Changes, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    approval = approve_change(
        changes.program.operator, shell(changes.host, 'sleep 300 & echo $! > "$1"; wait', str(pid))
    )
    talk = changes.program.talk(approval)
    wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))
    talk.stdin.close()
    assert "client has gone" in talk.reply()["message"]
    assert talk.running.wait(30) == 1
    wait_for(lambda: ended(int(pid.read_text())))


def test_what_a_command_leaves_in_its_group_ends_with_it(changes: Changes, tmp_path: Path) -> None:
    """Also when it still holds the output open."""
    status, out, _ = changes.shell('sleep 300 & echo $! > "$1"; echo done', str(tmp_path / "pid"))
    assert (status, out) == (0, b"done\n")
    wait_for(lambda: ended(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(("then", "seconds"), [("", 30), ("sleep 300", 1)])
def test_what_leaves_the_group_of_a_command_ends_with_it_too(
    changes: Changes, tmp_path: Path, then: str, seconds: int
) -> None:
    leave = 'setsid sh -c "sleep 300 & echo \\$! > $1; wait" & while [ ! -s "$1" ]; do sleep 0.05; done; '
    env = (("PATH", os.environ["PATH"]),)
    status, _ = changes.of(shell(changes.host, leave + then, str(tmp_path / "pid"), seconds=seconds, env=env))
    assert status == (1 if then else 0)
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_command_dies_with_the_process_that_holds_it_to_its_limits(changes: Changes, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    action = shell(changes.host, 'echo $$ > "$1"; exec sleep 300', str(pid))
    talk = changes.program.talk(approve_change(changes.program.operator, action))
    wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))
    (performing,) = Path(f"/proc/{talk.running.pid}/task/{talk.running.pid}/children").read_text().split()
    os.kill(int(performing), signal.SIGKILL)
    wait_for(lambda: ended(int(pid.read_text())))
    assert talk.running.wait(60) == 1


def test_a_client_that_does_not_read_is_not_waited_for(changes: Changes, tmp_path: Path) -> None:
    approval = approve_change(changes.program.operator, shell(changes.host, "yes", bytes=10**9, seconds=1))
    changes.program.gate = with_less_patience(tmp_path)
    running = changes.program.start(approval)
    assert running.stdin is not None
    running.stdin.write(approval.action.canonical() + b"\n")
    running.stdin.flush()
    below = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    performing = wait_for(below.read_text).split()
    wait_for(lambda: all(ended(int(pid)) for pid in performing))
    assert running.wait(60) == 1
    running.communicate()


def test_a_command_is_run_with_the_lowest_priority(changes: Changes) -> None:
    assert changes.shell("nice; ionice -p $$", env=(("PATH", os.environ["PATH"]),))[1] == b"19\nidle\n"


def test_a_program_or_folder_that_is_not_there_is_a_failure(changes: Changes) -> None:
    assert "/no/such/program" in changes.failure(changes.named(Run, argv=("/no/such/program",)))
    assert "/no/such/folder" in changes.failure(shell(changes.host, "true", cwd="/no/such/folder"))


def test_what_a_command_requires_is_looked_at_before_it_runs(changes: Changes, tmp_path: Path) -> None:
    needed, mark = tmp_path / "needed", tmp_path / "mark"
    needed.write_bytes(b"as approved")
    requires = (FileDigest(path=str(needed), sha256=hashlib.sha256(b"as approved").hexdigest()),)
    action = leave_mark(changes.host, mark).model_copy(update={"requires": requires})
    assert changes.of(action)[0] == 0
    needed.write_bytes(b"another")
    assert "another sha256 than was approved" in changes.failure(action)
    needed.unlink()
    assert "No such file" in changes.failure(action)
    (tmp_path / "other").write_bytes(b"as approved")
    needed.symlink_to(tmp_path / "other")
    assert "is really" in changes.failure(action)
    assert mark.read_text() == "ran\n"


# --- spent


def test_a_change_is_done_once(changes: Changes, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    approval = approve_change(changes.program.operator, leave_mark(changes.host, mark))
    assert changes.program.change(approval)[0] == 0
    for _ in range(2):
        status, replies = changes.program.change(approval)
        assert (status, len(replies)) == (77, 1)
        assert replies[0]["spent"]
        assert "sessions are used" in replies[0]["message"]
    assert mark.read_text() == "ran\n"


def _race(changes: Changes, mark: Path) -> list[int]:
    approval = approve_change(changes.program.operator, leave_mark(changes.host, mark))
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(changes.program.change, approval) for _ in range(4)]
    return sorted(run.result()[0] for run in runs)


def test_of_several_at_once_one_is_done(changes: Changes, tmp_path: Path) -> None:
    for number in range(2):
        mark = tmp_path / str(number)
        assert _race(changes, mark) == [0, 77, 77, 77]
        assert mark.read_text() == "ran\n"


@pytest.mark.parametrize("moment", ["spent", "logged"])
def test_killed_between_spending_and_effect_it_is_spent_and_not_done(
    changes: Changes, tmp_path: Path, moment: str
) -> None:
    """A debugger's breakpoint, in effect: the program kills itself where the line says."""
    stops = {"spent": '        self.log("session opened"', "logged": "        if emergency:\n            self.log"}
    program, mark = tmp_path / "killed-gate", tmp_path / "mark"
    source = GATE.read_text()
    assert source.count(stops[moment]) == 1
    program.write_text(source.replace(stops[moment], "        os.kill(os.getpid(), 9)\n" + stops[moment]))
    program.chmod(0o755)
    approval = approve_change(changes.program.operator, leave_mark(changes.host, mark))
    changes.program.gate = program
    assert changes.program.change(approval) == (-9, [])
    changes.program.gate = GATE
    assert changes.program.change(approval)[0] == 77
    assert not mark.exists()


def test_a_state_that_cannot_be_written_spends_and_does_nothing(changes: Changes, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    approval = approve_change(changes.program.operator, leave_mark(changes.host, mark))
    running = changes.program.start(approval)
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (10, 10))
    output, _ = running.communicate(approval.action.canonical() + b"\n", timeout=60)
    assert running.returncode == 77
    assert "nothing is done without it" in json.loads(output)["message"]
    assert not mark.exists()


def test_each_change_is_in_the_gates_log_with_what_came_of_it(changes: Changes, tmp_path: Path) -> None:
    action = leave_mark(changes.host, tmp_path / "mark")
    approval = approve_change(changes.program.operator, action)
    changes.program.change(approval)
    changes.program.change(approval)
    opened, ended, refused = changes.program.logged()
    assert (opened["event"], opened["digest"], opened["serial"]) == ("session opened", action.digest(), approval.serial)
    assert opened["action"]["argv"] == list(action.argv)
    assert (ended["event"], ended["outcome"]) == ("session ended", "status 0")
    assert refused["event"] == "refused"


def test_a_second_transfer_slot_is_needed_by_run_and_none_by_an_emergency(changes: Changes, tmp_path: Path) -> None:
    operator, program = changes.program.operator, changes.program
    talks = [program.talk(operator.approve(root=str(tmp_path))) for _ in range(2)]
    mark = leave_mark(changes.host, tmp_path / "mark")
    status, replies = changes.of(mark)
    assert (status, replies[0]["spent"], replies[0]["kind"]) == (77, False, "busy")
    assert "2 sessions are open" in replies[0]["message"]
    assert changes.of(changes.named(Revoke, serial=5))[0] == 0
    (tmp_path / "jobs").mkdir()
    assert changes.of(launch_of(changes.host, tmp_path / "jobs", "true"))[0] == 0
    assert "ended" in changes.failure(changes.named(Signal, jobs=str(tmp_path / "jobs"), job="train-1", signal="TERM"))
    for talk in talks:
        talk.running.communicate()
    assert changes.of(mark)[0] == 0


def test_the_jobs_user_starts_the_part_that_changes_something(changes: Changes, tmp_path: Path) -> None:
    """The ``job`` prefix gets the gate's own file and the word ``perform``, and nothing of the state or the action."""
    seen = tmp_path / "seen"
    prefix = ["/bin/sh", "-c", 'printf "%s\\n" "$@" > "$0"; ls -l /proc/$$/fd >> "$0"; exec "$@"', str(seen)]
    changes.program.configure(job=prefix)
    assert changes.shell("echo hello")[1] == b"hello\n"
    argv, _, open_files = seen.read_text().partition("total")
    assert argv.split() == [str(GATE), "perform"]
    assert str(changes.program.state) not in open_files
    changes.program.configure(job=["/no/such/sudo"])
    status, replies = changes.of(shell(changes.host, "true"))
    assert (status, replies[0]["refused"]) == (77, True)


# --- put


def _put(changes: Changes, path: Path, content: bytes, sent: bytes | None = None, **more: Any) -> tuple[int, list[Any]]:
    action = put_of(changes.host, path, content, **more)
    running = changes.program.start(approve_change(changes.program.operator, action))
    output, _ = running.communicate(action.canonical() + b"\n" + (content if sent is None else sent), timeout=60)
    return running.returncode, [json.loads(line) for line in output.splitlines()]


def test_a_file_is_put_whole_with_its_mode(changes: Changes, tmp_path: Path) -> None:
    content, path = os.urandom(2 * MIB + 1), tmp_path / "new"
    status, replies = _put(changes, path, content, mode=0o755)
    sha256 = hashlib.sha256(content).hexdigest()
    assert (status, replies) == (0, [{"ok": True}, {"ok": True, "ready": True}, {"ok": True, "sha256": sha256}])
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o7777 == 0o755
    assert _put(changes, tmp_path / "empty", b"", mode=0o600)[0] == 0
    assert (tmp_path / "empty").stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize(("sent", "why"), [(b"conten", "client has gone"), (b"CONTENT", "not the approved bytes")])
def test_other_bytes_are_not_put(changes: Changes, tmp_path: Path, sent: bytes, why: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    status, replies = _put(changes, folder / "new", b"content", sent)
    assert status == 1
    assert why in replies[-1]["message"]
    assert list(folder.iterdir()) == []


def test_only_the_file_that_was_approved_is_replaced(changes: Changes, tmp_path: Path) -> None:
    path, old = tmp_path / "file", hashlib.sha256(b"old").hexdigest()
    path.write_bytes(b"old")
    assert "may not be replaced" in _put(changes, path, b"new")[1][-1]["message"]
    assert "may not be replaced" in _put(changes, path, b"new", replaces="0" * 64)[1][-1]["message"]
    assert path.read_bytes() == b"old"
    assert _put(changes, path, b"new", replaces=old)[0] == 0
    assert path.read_bytes() == b"new"
    path.unlink()
    assert "may not be replaced" in _put(changes, path, b"newer", replaces=old)[1][-1]["message"]
    assert not path.exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_comes_or_changes_while_another_is_put_stays(
    changes: Changes, tmp_path: Path, replaced: bool
) -> None:
    path, more = tmp_path / "file", {"replaces": hashlib.sha256(b"old").hexdigest()} if replaced else {}
    if replaced:
        path.write_bytes(b"old")
    action = put_of(changes.host, path, b"new", **more)
    talk = changes.program.talk(approve_change(changes.program.operator, action))
    assert talk.reply()["ready"]
    path.write_bytes(b"somebody's")
    talk.stdin.write(b"new")
    talk.stdin.flush()
    assert "may not be replaced" in talk.reply()["message"]
    talk.running.communicate()
    assert path.read_bytes() == b"somebody's"
    assert [each for each in tmp_path.iterdir() if each.name.startswith(".dflash")] == []


def test_nothing_is_put_through_a_link(changes: Changes, tmp_path: Path) -> None:
    real, outside = tmp_path / "real", tmp_path / "outside"
    for folder in (real, outside):
        folder.mkdir()
    (tmp_path / "linked").symlink_to(outside)
    (real / "linked").symlink_to(outside / "file")
    assert "is really" in _put(changes, tmp_path / "linked" / "file", b"x")[1][-1]["message"]
    assert _put(changes, real / "linked", b"x")[0] == 1
    assert _put(changes, tmp_path / "missing" / "file", b"x")[0] == 1
    assert list(outside.iterdir()) == []


def test_a_folder_that_is_swapped_while_a_file_is_put_gets_nothing(changes: Changes, tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for each in (folder, outside):
        each.mkdir()
    talk = changes.program.talk(approve_change(changes.program.operator, put_of(changes.host, folder / "file", b"new")))
    assert talk.reply()["ready"]
    folder.rename(tmp_path / "moved")
    folder.symlink_to(outside)
    talk.stdin.write(b"new")
    talk.stdin.flush()
    assert talk.reply()["ok"]
    talk.running.communicate()
    assert list(outside.iterdir()) == []
    assert (tmp_path / "moved" / "file").read_bytes() == b"new"


# --- revoke


def test_a_revoked_serial_is_refused_also_in_an_open_session_and_by_sshd(
    changes: Changes, tmp_path: Path, program: Program
) -> None:
    operator, krl = program.operator, tmp_path / "krl"
    process.run(["ssh-keygen", "-q", "-k", "-f", str(krl)])
    krl.chmod(0o644)
    program.configure(ca=str(operator.site.ca_key.with_suffix(".pub")), revoked=str(krl))
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    approval, other = (operator.approve(path=str(file)) for _ in range(2))
    talk = program.talk(approval)
    assert talk.ask(verb="stat", path=str(file))["size"] == 100
    for _ in range(2):  # doing it again is no mistake
        status, replies = changes.of(changes.named(Revoke, serial=approval.serial))
        assert (status, replies[-1]) == (0, {"ok": True, "revoked": approval.serial})
    reply = talk.ask(verb="stat", path=str(file))
    assert (reply["refused"], reply["spent"]) == (True, True)
    assert "was revoked" in reply["message"]
    talk.running.communicate()
    assert "was revoked" in program.refusal(approval)
    assert program.run(other)[0] == 0
    listed = process.run(["ssh-keygen", "-Q", "-f", str(krl), str(approval.certificate_path)], check=False)
    assert "REVOKED" in listed.stdout
    assert "ok" in process.run(["ssh-keygen", "-Q", "-f", str(krl), str(other.certificate_path)]).stdout
    assert krl.stat().st_mode & 0o777 == 0o644


def test_a_change_that_was_revoked_is_not_done(changes: Changes, tmp_path: Path) -> None:
    approval = approve_change(changes.program.operator, leave_mark(changes.host, tmp_path / "mark"))
    assert changes.of(changes.named(Revoke, serial=approval.serial))[0] == 0
    status, replies = changes.program.change(approval)
    assert status == 77
    assert "was revoked" in replies[0]["message"]
    assert not (tmp_path / "mark").exists()


def test_a_long_read_of_a_revoked_serial_stops(changes: Changes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(8 * MIB))
    approval = changes.program.operator.approve(path=str(file), rate=2 * MIB)
    talk = changes.program.talk(approval)
    assert talk.ask(verb="read", path=str(file), offset=0, length=8 * MIB)["length"] == 8 * MIB
    talk.stdout.read(MIB // 2)
    assert changes.of(changes.named(Revoke, serial=approval.serial))[0] == 0
    output, errors = talk.running.communicate()
    assert talk.running.returncode == 77
    assert "was revoked" in json.loads(errors)["message"]
    assert len(output) < 8 * MIB


def test_a_list_of_sshd_that_cannot_be_written_is_a_failure_and_the_gate_refuses_all_the_same(
    changes: Changes, tmp_path: Path
) -> None:
    approval = changes.program.operator.approve(path=str(tmp_path / "file"))
    changes.program.configure(ca=str(changes.program.operator.site.ca_key), revoked=str(tmp_path / "missing"))
    assert "missing" in changes.failure(changes.named(Revoke, serial=approval.serial))
    assert "was revoked" in changes.program.refusal(approval)


# --- break-glass


def test_break_glass_is_short_and_loud(changes: Changes, tmp_path: Path) -> None:
    operator = changes.program.operator
    action = shell(changes.host, "true", break_glass=True)
    approval = approve_change(operator, action)
    options = ["-O", "clear", "-O", f"force-command=dflash-gate {action.digest()}", "-O", "source-address=127.0.0.0/8"]
    status, replies = changes.program.change(operator.forge(approval, "-V", "-1m:+301s", *options))
    assert status == 77
    assert "certificate of minutes" in replies[0]["message"]
    short = operator.forge(approval, "-V", "-1m:+299s", *options)
    assert changes.program.change(short)[0] == 0
    assert [entry["event"] for entry in changes.program.logged()] == [
        "refused",
        "session opened",
        "BREAK-GLASS",
        "session ended",
    ]


# --- files


def test_a_put_takes_no_other_files_place_on_a_device_or_socket(changes: Changes, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert _put(changes, tmp_path / "socket", b"x")[0] == 1
    os.mkfifo(tmp_path / "fifo")
    assert _put(changes, tmp_path / "fifo", b"x")[0] == 1
    assert (tmp_path / "fifo").is_fifo()


def test_what_is_no_file_has_no_sha256(changes: Changes, tmp_path: Path) -> None:
    """Its size is 0, and nothing has a sha256 too: that of an empty file."""
    os.mkfifo(tmp_path / "fifo")
    nothing = hashlib.sha256(b"").hexdigest()
    assert "not a regular file" in _put(changes, tmp_path / "fifo", b"new", replaces=nothing)[1][-1]["message"]
    assert (tmp_path / "fifo").is_fifo()
    for path in (str(tmp_path / "fifo"), "/dev/null"):
        requires = (FileDigest(path=path, sha256=nothing),)
        action = leave_mark(changes.host, tmp_path / "mark").model_copy(update={"requires": requires})
        assert "not a regular file" in changes.failure(action)


def test_what_takes_the_place_of_a_file_that_is_written_is_not_put(changes: Changes, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    talk = changes.program.talk(approve_change(changes.program.operator, put_of(changes.host, folder / "file", b"new")))
    assert talk.reply()["ready"]
    (temporary,) = folder.iterdir()
    temporary.unlink()
    temporary.write_bytes(b"somebody's")
    talk.stdin.write(b"new")
    talk.stdin.flush()
    assert "something else took the place" in talk.reply()["message"]
    talk.running.communicate()
    assert not (folder / "file").exists()


def test_actions_of_other_forms_are_refused(changes: Changes) -> None:
    """The operator's program makes none of these; a gate that takes them would do less than was approved."""
    good = json.loads(changes.named(Put, path="/tmp/x", size=1, sha256="0" * 64).canonical())
    sent = (good | {"most": 5}, good | {"rate": "1"}, good | {"bytes": True}, good | {"sessions": -1})
    for fields in sent:
        content = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        finished = process.run([str(GATE), "perform"], input=content.decode() + "\n", check=False)
        assert finished.returncode == 77
        assert "cannot be used here" in json.loads(finished.stdout)["message"]
