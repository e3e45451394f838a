"""What was used, and what is left where only this program keeps count."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tasks.approvals import Approval
from tasks.errors import Refused
from tests.guard_state import GuardState


@pytest.fixture
def guard(tmp_path: Path) -> GuardState:
    return GuardState(tmp_path, enforcement="client")


@pytest.fixture
def approval(guard: GuardState) -> Approval:
    """Of reading 1000 bytes in 2 sessions."""
    return guard.approve(guard.plan()).read


def budget(guard: GuardState, approval: Approval) -> Path:
    return guard.store.folder / "budgets" / f"{approval.serial}.json"


def test_a_session_more_than_were_approved_is_refused(guard: GuardState, approval: Approval) -> None:
    guard.store.consume(approval)
    guard.store.consume(approval)
    with pytest.raises(Refused, match="all 2 sessions"):
        guard.store.consume(approval)
    assert guard.events().count("consumption") == 2


def test_bytes_are_debited_before_they_are_asked_for(guard: GuardState, approval: Approval) -> None:
    guard.store.consume(approval)
    guard.store.debit(approval, 600)
    with pytest.raises(Refused, match="400 of 1000 bytes of the approval are left, 401 are needed"):
        guard.store.debit(approval, 401)
    guard.store.debit(approval, 400)
    guard.store.consume(approval)
    with pytest.raises(Refused, match="0 of 1000 bytes"):
        guard.store.debit(approval, 1)


def test_a_grant_that_was_not_opened_has_no_bytes(guard: GuardState, approval: Approval) -> None:
    with pytest.raises(Refused, match="is gone"):
        guard.store.debit(approval, 1)


def test_a_negative_debit_gives_nothing_back(guard: GuardState, approval: Approval) -> None:
    guard.store.consume(approval)
    with pytest.raises(Refused, match="cannot be debited"):
        guard.store.debit(approval, -1)


def test_two_at_once_do_not_debit_the_same_bytes(guard: GuardState, approval: Approval) -> None:
    guard.store.consume(approval)

    def debit(_: int) -> bool:
        try:
            guard.store.debit(approval, 150)
        except Refused:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(debit, range(12))) == 6


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is gone"),
        (b"", "is corrupt"),
        (b"{", "is corrupt"),
        (b'{"sessions":-1,"bytes":1}', "is corrupt"),
        (b'{"sessions":1,"bytes":"1"}', "is corrupt"),
        (b'{"sessions":1}', "is corrupt"),
        (b'{"sessions":2,"bytes":1001}', "more than was approved"),
        (b'{"sessions":3,"bytes":1000}', "more than was approved"),
    ],
)
def test_a_budget_that_cannot_be_believed_leaves_nothing(
    guard: GuardState, approval: Approval, content: bytes | None, reason: str
) -> None:
    guard.store.consume(approval)
    if content is None:
        budget(guard, approval).unlink()
    else:
        budget(guard, approval).write_bytes(content)
    with pytest.raises(Refused, match=rf"{reason}.*ask for a new approval"):
        guard.store.debit(approval, 1)
    with pytest.raises(Refused, match=reason):
        guard.store.consume(approval)
    assert guard.events().count("consumption") == 1


def test_a_budget_folder_that_is_gone_or_in_the_way_leaves_nothing(guard: GuardState, approval: Approval) -> None:
    guard.store.consume(approval)
    folder = guard.store.folder / "budgets"
    folder.rename(guard.folder / "away")
    with pytest.raises(Refused, match="is gone"):
        guard.store.consume(approval)
    folder.write_text("in the way")
    with pytest.raises(Refused, match="Not a directory; nothing is approved without it"):
        guard.store.consume(approval)


def test_where_spent_changes_cannot_be_recorded_nothing_is_used(guard: GuardState) -> None:
    put = guard.put()
    approval = guard.approve(guard.changing(put)).of(put)
    (guard.store.folder / "spent").write_text("in the way")
    with pytest.raises(Refused, match="nothing is approved without it"):
        guard.store.consume(approval)
    assert "consumption" not in guard.events()


def test_a_host_that_keeps_count_itself_is_not_counted_for_here(tmp_path: Path) -> None:
    guard = GuardState(tmp_path)
    approval = guard.approve(guard.plan()).read
    for _ in range(3):
        guard.store.consume(approval)
    guard.store.debit(approval, 10**9)
    assert not budget(guard, approval).exists()


def test_a_dropped_approval_has_no_bytes_left(guard: GuardState) -> None:
    request = guard.store.request(guard.plan(), standing=True)
    approval = guard.store.approve(request.id, reason="watch", ca_key=guard.ca_key).read
    guard.store.consume(approval)
    guard.store.drop(approval.id)
    with pytest.raises(Refused, match="dropped by the operator"):
        guard.store.debit(approval, 1)


def test_records_are_the_users_own(guard: GuardState, approval: Approval) -> None:
    put = guard.put()
    guard.store.consume(guard.approve(guard.changing(put)).of(put))
    guard.store.consume(approval)
    for path in guard.store.folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def consume_and_wait(folder: Path, approval: Approval, done: Connection) -> None:
    guard = object.__new__(GuardState)
    guard.folder = folder
    guard.store.consume(approval)
    done.send(True)
    time.sleep(600)


def test_a_process_that_is_killed_after_the_use_leaves_it_used_and_its_outcome_unknown(guard: GuardState) -> None:
    put = guard.put()
    approval = guard.approve(guard.changing(put)).of(put)
    context = get_context("spawn")
    here, there = context.Pipe()
    user = context.Process(target=consume_and_wait, args=(guard.folder, approval, there))
    user.start()
    assert here.poll(60)
    assert user.pid is not None
    os.kill(user.pid, signal.SIGKILL)
    user.join()
    request = guard.store.get(approval.id)
    assert (request.status, request.outcome) == ("spent", "unknown")
    with pytest.raises(Refused, match="used already"):
        guard.store.consume(approval)
    assert guard.audit.verify(guard.store.heads()) == []
