"""The standing approval that a watch reads under: asked for once, named when it ends, warned of before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.actions import ReadGrant
from tasks.errors import Refused
from tasks.inventory import Location
from tasks.watch import plan_look, plan_watch
from tasks.watch_grants import GrantEndedError, Used, admit, ends_at, used, warning
from tests.guard_state import GuardState

DAY = 86_400.0


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GuardState:
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "state"))
    return GuardState(tmp_path / "state")


def tree(guard: GuardState, path: str = "/workspace/checkpoints") -> Location:
    return guard.inventory.location(f"kpro6:{path}")


def approve(guard: GuardState, seconds: int = 30 * 86_400, root: Callable[[GuardState], Location] = tree) -> str:
    plan = plan_watch(root(guard))
    assert plan is not None
    request = guard.store.request(plan, standing=True)
    guard.store.approve(request.id, reason="test", ca_key=guard.ca_key, seconds=seconds)
    return request.id


def test_an_ordinary_host_and_this_machine_need_no_approval(guard: GuardState) -> None:
    for place in (Location(None, "/c"), guard.inventory.location("ct129:/c")):
        assert plan_look(place) is plan_watch(place) is None
        assert admit(guard.store, place) is None


def test_a_watch_that_nobody_approved_asks_for_a_standing_approval_once(guard: GuardState) -> None:
    messages = set()
    for _ in range(3):
        with pytest.raises(Refused) as caught:
            admit(guard.store, tree(guard))
        messages.add(str(caught.value))
    (request,) = guard.store.requests()
    assert (request.standing, request.plan.grant) == (True, plan_watch(tree(guard)).grant)  # type: ignore[union-attr]
    assert caught.value.state_name == "AwaitingApproval"
    assert messages == {str(caught.value)}
    assert f"guard approve {request.id} --valid 30d" in messages.pop()


def test_an_approved_watch_is_admitted_also_below_a_wider_tree(guard: GuardState) -> None:
    wide = approve(guard, root=lambda guard: tree(guard, "/workspace"))
    assert admit(guard.store, tree(guard)).id == wide  # type: ignore[union-attr]


def test_what_is_approved_covers_the_evaluations_it_leads_to(guard: GuardState) -> None:
    from tasks.relay import plan_relay

    approve(guard)
    for name in ("step_400", "step_400.pt", "run/step_1.safetensors"):
        plan = plan_relay([tree(guard, f"/workspace/checkpoints/{name}")], "it is evaluated")
        assert plan is not None
        assert guard.store.find(plan) is not None


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (lambda store, one: store.drop(one), "dropped"),
        (lambda store, one: store.retire(one, "all 9 sessions are used"), "all 9 sessions are used"),
        (lambda store, one: store.revoke(one, reason="enough"), "revoked: enough"),
    ],
)
def test_an_approval_that_ended_is_named_with_why_and_the_request_for_the_next(
    guard: GuardState, end: Callable[[Any, str], object], says: str
) -> None:
    before = approve(guard)
    end(guard.store, before)
    with pytest.raises(GrantEndedError, match=says) as caught:
        admit(guard.store, tree(guard), before)
    assert (caught.value.state_name, before in str(caught.value)) == ("GrantEnded", True)
    again = approve(guard)
    assert again == caught.value.request_id
    assert admit(guard.store, tree(guard), before).id == again  # type: ignore[union-attr]


def grant(sessions: int = 1000, size: int = 10**12) -> ReadGrant:
    return ReadGrant(
        host="kpro6", host_keys=(f"SHA256:{'a' * 43}",), root="/c", verbs=("list",), sessions=sessions, bytes=size
    )


@pytest.mark.parametrize(
    ("spent", "days", "says"),
    [
        (Used(), 30.0, "its time is over"),
        (Used(100, 0, -10 * DAY), 30.0, "its time is over"),
        (Used(900, 0, -9 * DAY), 1.0, "its sessions are used up (100 of 1000 are left)"),
        (Used(10, 9 * 10**11, -9 * DAY), 1.0, "its bytes are used up"),
        (Used(1000, 0, -9 * DAY), 0.0, "(0 of 1000 are left)"),
        # a burst in the first minutes is no pace
        (Used(50, 0, -60.0), 19.0, "its sessions are used up"),
    ],
)
def test_a_grant_ends_with_its_time_or_at_its_pace(spent: Used, days: float, says: str) -> None:
    end, why = ends_at(grant(), 30 * DAY, spent, 0.0)
    assert end / DAY == pytest.approx(days)
    assert says in why


def test_the_warning_comes_two_days_before(guard: GuardState) -> None:
    approval = admit(guard.store, tree(guard), approve(guard))
    assert approval is not None
    last = approval.not_after
    assert warning(tree(guard), approval, Used(), last - 2.01 * DAY) is None
    said = warning(tree(guard), approval, Used(), last - 1.99 * DAY)
    assert said is not None
    assert approval.id in said


def test_what_was_used_is_counted_from_the_audit_log(guard: GuardState) -> None:
    approval = admit(guard.store, tree(guard), approve(guard))
    assert approval is not None
    assert used(guard.audit, approval) == Used()
    for size in (10, 5):
        guard.store.consume(approval)
        guard.audit.append("end", request=approval.id, host="kpro6", serial=approval.serial, bytes=size)
    spent = used(guard.audit, approval)
    assert (spent.sessions, spent.bytes) == (2, 15)
    assert spent.since > 0
