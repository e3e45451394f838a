"""Uses of one approval at the same time, and uses that are killed: at most once, whatever happens."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks import changes, public_keys
from tasks.actions import Run
from tasks.approvals import Approval
from tasks.channel import Channel
from tasks.errors import HostBusy, Refused
from tasks.gate import open_session
from tasks.plans import Plan
from tests.changing import approve_change, approve_changes, leave_mark
from tests.sshds import Operator, Site, write_gate_configuration
from tests.tasks.test_client_enforcement import client_operator

MIB = 1 << 20


def _uses_at_once(operators: list[Operator], approval: Approval, action: Run) -> list[int | Refused]:
    """What came of one use by each operator, all at the same time: an exit status or a refusal."""
    start = threading.Barrier(len(operators))

    def use(operator: Operator) -> int | Refused:
        start.wait(60)
        try:
            return changes.run(operator.connector, operator.train, approval, action, lambda *_: None)
        except Refused as refusal:
            return refusal

    with ThreadPoolExecutor(len(operators)) as pool:
        return list(pool.map(use, operators))


def _rounds_in_which_one_of_two_ran(site: Site, folder: Path, rounds: int) -> int:
    """How many rounds left one mark and one refusal.

    In turns the store decides, which both have in common, and the gate: the other one has a copy of the store."""
    operator, marks = site.operator(folder / "operator"), folder / "marks"
    actions = [leave_mark(operator.train, marks, str(number)) for number in range(rounds)]
    approvals = approve_changes(operator, *actions)
    shutil.copytree(folder / "operator", folder / "copy")
    other = site.operator(folder / "copy")
    single = 0
    for number, (approval, action) in enumerate(zip(approvals, actions, strict=True)):
        came = _uses_at_once([operator, other if number % 2 else operator], approval, action)
        single += [type(each) for each in came if each != 0] == [Refused]
    assert sorted(marks.read_text().split(), key=int) == [str(number) for number in range(rounds)]
    # in every second round both got past their stores
    assert (len(operator.events("consumption")), len(other.events("consumption"))) == (rounds, rounds // 2)
    return single


def test_of_two_uses_at_once_exactly_one_runs(site: Site, tmp_path: Path) -> None:
    assert _rounds_in_which_one_of_two_ran(site, tmp_path, 8) == 8


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_of_two_uses_at_once_exactly_one_runs_200_times_of_200(site: Site, tmp_path: Path) -> None:
    assert _rounds_in_which_one_of_two_ran(site, tmp_path, 200) == 200


@pytest.mark.parametrize("enforcement", ["host", "client"])
def test_of_eight_sessions_at_once_on_a_grant_of_five_five_open(site: Site, tmp_path: Path, enforcement: str) -> None:
    folder = tmp_path / "operator"
    operator = client_operator(site, folder) if enforcement == "client" else site.operator(folder)
    approval = operator.approve(path="/etc/hostname", sessions=5)
    start = threading.Barrier(8)

    def open_one() -> bool:
        start.wait(60)
        while True:
            try:
                with open_session(operator.connector, operator.train, approval) as session:
                    return session.stat("/etc/hostname").kind == "file"
            except HostBusy:
                # two sessions at most are open at once: who finds no room comes again
                continue
            except Refused:
                return False

    with ThreadPoolExecutor(8) as pool:
        opened = [future.result() for future in [pool.submit(open_one) for _ in range(8)]]
    assert sorted(opened) == [False] * 3 + [True] * 5


def test_parallel_reads_where_the_client_enforces_never_get_more_than_the_budget(site: Site, tmp_path: Path) -> None:
    operator = client_operator(site, tmp_path / "operator")
    file = tmp_path / "file"
    file.write_bytes(bytes(4 * MIB))
    approval = operator.approve(path=str(file), bytes=10 * MIB)
    taken: list[int] = []

    def read() -> None:
        try:
            with open_session(operator.connector, operator.train, approval) as session:
                while True:
                    with session.read(str(file), 0, MIB) as stream:
                        taken.append(_drain(stream.fileno(), MIB))
        except Refused as refusal:
            assert "bytes of the approval are left" in str(refusal)  # noqa: PT017 - raised in a thread

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(read) for _ in range(2)]:
            done.result()
    assert sum(taken) == 10 * MIB


def _drain(descriptor: int, length: int) -> int:
    left = length
    while left and (more := os.read(descriptor, left)):
        left -= len(more)
    return length - left


def _kill_myself(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before_the_connection(operator: Operator) -> None:
    operator.connector.start_gate = _kill_myself  # type: ignore[method-assign,assignment]


def _before_the_action_is_sent(operator: Operator) -> None:
    Channel.send = _kill_myself  # type: ignore[method-assign,assignment]


def _before_its_answer(operator: Operator) -> None:
    Channel.reply = _kill_myself  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("fault", [_before_the_connection, _before_the_action_is_sent, _before_its_answer])
def test_a_use_that_is_killed_is_never_repeated_and_its_outcome_unknown(
    operator: Operator, tmp_path: Path, fault: Callable[[Operator], None]
) -> None:
    marks = tmp_path / "marks"
    action = leave_mark(operator.train, marks)
    plan = Plan(changes=(action,), effect="a test changes something")
    approval = approve_change(operator, action)

    def use() -> None:
        fault(operator)
        changes.run(operator.connector, operator.train, approval, action, lambda *_: None)

    child = multiprocessing.get_context("fork").Process(target=use)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert [entry["serial"] for entry in operator.events("consumption")] == [approval.serial]
    request = operator.store.get(approval.id)
    assert (request.status, request.outcome) == ("spent", "unknown")
    with pytest.raises(Refused, match="was used already"):
        changes.run(operator.connector, operator.train, approval, action, lambda *_: None)
    assert operator.store.find(plan) is None
    with pytest.raises(Refused, match="dflash-ops guard approve"):
        operator.store.require(plan)
    assert operator.store.get(approval.id).outcome == "unknown"
    if fault is not _before_its_answer:
        assert not marks.exists()


@pytest.fixture
def gate_that_is_killed(site: Site) -> Iterator[None]:
    """The gate's child, in which every change happens, kills the gate before it does anything."""
    keys = [public_keys.fingerprint(key) for key in site.protected.host_keys]
    write_gate_configuration(site.folder, host_keys=keys, job=["/bin/sh", "-c", "kill -9 $PPID"])
    yield
    write_gate_configuration(site.folder, host_keys=keys)


def test_a_gate_that_is_killed_before_the_effect_has_spent_the_approval(
    site: Site, tmp_path: Path, gate_that_is_killed: None
) -> None:
    operator = site.operator(tmp_path / "operator")
    marks = tmp_path / "marks"
    action = leave_mark(operator.train, marks)
    approval = approve_change(operator, action)
    shutil.copytree(tmp_path / "operator", tmp_path / "copy")
    with pytest.raises(Exception, match="train"):
        changes.run(operator.connector, operator.train, approval, action, lambda *_: None)
    keys = [public_keys.fingerprint(key) for key in site.protected.host_keys]
    write_gate_configuration(site.folder, host_keys=keys)
    copy = site.operator(tmp_path / "copy")
    with pytest.raises(Refused, match="train refused: "):
        changes.run(copy.connector, copy.train, approval, action, lambda *_: None)
    time.sleep(0.1)
    assert not marks.exists()
