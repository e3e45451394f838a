import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tasks import approvals, certificates
from tasks.approvals import ApprovalStore
from tasks.deciding import decide
from tasks.errors import Refused
from tasks.plans import Plan
from tasks.requests import Decision, Request
from tests.guard_state import CHECKPOINT, GuardState, make_key

TREE = "/workspace/dflash/checkpoints"


@pytest.fixture
def guard(tmp_path: Path) -> GuardState:
    return GuardState(tmp_path)


@pytest.fixture
def store(guard: GuardState) -> ApprovalStore:
    return guard.store


def events(guard: GuardState) -> list[str]:
    return [entry["event"] for entry in guard.audit.entries()]


def approve(guard: GuardState, plan: Plan, seconds: int = 600) -> Request:
    request = guard.store.request(plan)
    guard.store.approve(request.id, reason="a test", ca_key=guard.ca_key, seconds=seconds)
    return request


def watch(guard: GuardState, plan: Plan) -> Request:
    request = guard.store.request(plan, standing=True)
    guard.store.approve(request.id, reason="watch", ca_key=guard.ca_key, seconds=30 * 86400)
    return request


def test_without_an_approval_the_refusal_names_request_and_command(guard: GuardState, store: ApprovalStore) -> None:
    with pytest.raises(Refused) as caught:
        store.require(guard.plan())
    request = store.requests()[0]
    assert caught.value.request_id == request.id
    assert caught.value.exit_code == 77
    assert f"dflash-ops guard approve {request.id}" in str(caught.value)
    assert "nothing was done there" in str(caught.value)
    assert (request.status, request.plan) == ("pending", guard.plan())
    assert events(guard) == ["request", "refusal"]


def test_what_was_approved_is_what_is_found(guard: GuardState, store: ApprovalStore) -> None:
    request = approve(guard, guard.plan())
    approval = store.require(guard.plan()).read
    assert (approval.id, approval.digest, approval.host) == (request.id, guard.plan().digest(), "kpro6")
    assert approval.grant == guard.plan().grant
    decision = store.get(request.id).decision
    assert decision is not None
    assert approval.not_after == int(decision.time) + 600
    certificate = certificates.read(approval.certificate_path, guard.keys["ca"])
    assert certificate.terms.digest == approval.digest
    assert certificate.terms.serial == approval.serial
    assert certificate.terms.source_addresses == ("10.1.2.1",)
    assert events(guard) == ["request", "decision"]


def test_serials_are_63_bit_and_differ(guard: GuardState, store: ApprovalStore) -> None:
    serials = {
        store.require(guard.plan(f"/p{n}")).read.serial for n in range(4) if approve(guard, guard.plan(f"/p{n}"))
    }
    assert len(serials) == 4
    assert all(0 < serial < 2**63 for serial in serials)
    assert max(serials) > 2**48


@pytest.mark.parametrize("change", [{"path": CHECKPOINT + "x"}, {"size": 1001}, {"path": None, "root": TREE}])
def test_another_plan_is_not_approved(guard: GuardState, store: ApprovalStore, change: dict[str, object]) -> None:
    approve(guard, guard.plan())
    other = guard.plan(**change)  # type: ignore[arg-type]
    assert store.find(other) is None
    with pytest.raises(Refused):
        store.require(other)


def test_an_approval_covers_what_lies_within_it_and_nothing_wider(guard: GuardState, store: ApprovalStore) -> None:
    approve(guard, guard.plan(None, root=TREE))
    assert store.find(guard.plan(None, root=TREE)) is not None
    assert store.find(guard.plan()) is not None
    assert store.find(guard.plan(size=1001)) is None
    assert store.find(guard.plan(None, root="/")) is None


def test_a_changed_host_key_voids_plan_and_approval(guard: GuardState, store: ApprovalStore) -> None:
    plan = guard.plan()
    approve(guard, plan)
    guard.keys["training"] = make_key(guard.folder / "reinstalled")
    guard.hosts_file.write_text(guard.hosts_text())
    with pytest.raises(Refused, match="pins other keys"):
        guard.store.require(plan)
    assert guard.store.find(guard.plan()) is None


def test_an_expired_approval_is_no_approval(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    approve(guard, guard.plan(), seconds=600)
    assert store.find(guard.plan()) is not None
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + 600)
    assert store.find(guard.plan()) is None
    with pytest.raises(Refused) as caught:
        store.require(guard.plan())
    assert caught.value.request_id not in [request.id for request in store.requests() if request.decision]


def test_a_decision_needs_a_reason_and_happens_once(guard: GuardState, store: ApprovalStore) -> None:
    request = store.request(guard.plan())
    for reason in ("", " \t"):
        with pytest.raises(Refused, match="needs a reason"):
            store.approve(request.id, reason=reason, ca_key=guard.ca_key)
        with pytest.raises(Refused, match="needs a reason"):
            store.deny(request.id, reason=reason)
    with pytest.raises(Refused, match=r"'\\udcff' is not UTF-8"):
        store.approve(request.id, reason="\udcff", ca_key=guard.ca_key)
    store.approve(request.id, reason="a test", ca_key=guard.ca_key, operator="ada")
    with pytest.raises(Refused, match="is approved already"):
        store.approve(request.id, reason="again", ca_key=guard.ca_key)
    with pytest.raises(Refused, match="is approved already"):
        store.deny(request.id, reason="too late")
    decision = store.get(request.id).decision
    assert decision is not None
    assert (decision.operator, decision.reason) == ("ada", "a test")
    entry = list(guard.audit.entries())[-1]
    assert (entry["event"], entry["operator"], entry["reason"], entry["approved"]) == (
        "decision",
        "ada",
        "a test",
        True,
    )


def test_a_user_without_a_name_decides_under_a_number(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    store.deny(store.request(guard.plan()).id, reason="no")
    (decision,) = [entry for entry in guard.audit.entries() if entry["event"] == "decision"]
    assert decision["operator"] == "4000000000"


def test_a_denial_that_comes_too_late_is_not_recorded(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = store.request(guard.plan())

    def decide_late(*args: Any, **named: Any) -> Decision:
        monkeypatch.undo()
        guard.store.approve(request.id, reason="a test", ca_key=guard.ca_key)
        return decide(*args, **named)

    monkeypatch.setattr(approvals, "decide", decide_late)
    with pytest.raises(Refused, match="is approved already"):
        store.deny(request.id, reason="no")
    assert [entry["approved"] for entry in guard.audit.entries() if entry["event"] == "decision"] == [True]
    assert store.find(guard.plan()) is not None


def test_the_same_for_another_purpose_is_a_request_of_its_own(guard: GuardState, store: ApprovalStore) -> None:
    plan = guard.plan()
    first = store.request(plan)
    other = store.request(plan.model_copy(update={"effect": "it is sent to somebody else"}))
    assert other.id != first.id
    assert other.plan.effect == "it is sent to somebody else"
    assert store.request(plan).id == first.id


def test_denied_is_denied_and_the_next_try_asks_anew(guard: GuardState, store: ApprovalStore) -> None:
    request = store.request(guard.plan())
    store.deny(request.id, reason="not now")
    assert store.get(request.id).status == "denied"
    assert not list((store.folder / "keys").iterdir())
    with pytest.raises(Refused, match="is denied already"):
        store.approve(request.id, reason="yes", ca_key=guard.ca_key)
    with pytest.raises(Refused) as caught:
        store.require(guard.plan())
    assert caught.value.request_id != request.id


def test_a_request_that_changes_while_it_is_shown_is_not_approved(guard: GuardState, store: ApprovalStore) -> None:
    shown = store.request(guard.plan())
    other = guard.plan("/etc/shadow")
    file = store.folder / "requests" / f"{shown.id}.json"
    file.write_text(shown.model_copy(update={"plan": other, "digest": other.digest()}).model_dump_json())
    with pytest.raises(Refused, match="was changed while it was shown"):
        store.approve(shown.id, reason="a test", ca_key=guard.ca_key, shown=shown)
    assert store.get(shown.id).status == "pending"


@pytest.mark.parametrize("created", ["NaN", "Infinity", "1e300", "-1"])
def test_a_time_that_cannot_be_is_a_corrupt_request(guard: GuardState, store: ApprovalStore, created: str) -> None:
    request = store.request(guard.plan())
    file = store.folder / "requests" / f"{request.id}.json"
    file.write_text(file.read_text().replace(f'"created":{request.created}', f'"created":{created}'))
    with pytest.raises(Refused, match="is corrupt"):
        store.find(guard.plan())


def test_a_request_of_a_name_that_deceives_is_corrupt(guard: GuardState, store: ApprovalStore) -> None:
    request = store.request(guard.plan())
    renamed = request.model_copy(update={"id": "[red]\x1b[2J"})
    (store.folder / "requests" / f"{renamed.id}.json").write_text(renamed.model_dump_json())
    with pytest.raises(Refused, match="is corrupt"):
        store.requests()


def test_an_unknown_request_lists_the_way(store: ApprovalStore, guard: GuardState) -> None:
    for name in ("deadbeef", "../../etc/passwd", ""):
        with pytest.raises(Refused, match="guard requests"):
            store.approve(name, reason="a test", ca_key=guard.ca_key)


def test_the_wrong_ca_key_signs_nothing(guard: GuardState, store: ApprovalStore) -> None:
    request = store.request(guard.plan())
    with pytest.raises(Refused, match="is not the one in hosts"):
        store.approve(request.id, reason="a test", ca_key=guard.folder / "training")
    assert store.get(request.id).status == "pending"
    assert not list((store.folder / "keys").glob("*-cert.pub"))


def test_a_long_validity_is_for_standing_approvals(guard: GuardState, store: ApprovalStore) -> None:
    request = store.request(guard.plan())
    with pytest.raises(Refused, match="guard standing request"):
        store.approve(request.id, reason="a test", ca_key=guard.ca_key, seconds=86401)
    assert store.get(request.id).status == "pending"


def test_a_standing_approval_covers_its_tree_until_it_is_dropped(guard: GuardState, store: ApprovalStore) -> None:
    request = watch(guard, guard.plan(None, root=TREE, size=10_000))
    approval = store.require(guard.plan()).read
    assert (approval.id, approval.standing, approval.grant.root) == (request.id, True, TREE)
    assert approval.digest != guard.plan().digest()
    assert [live.id for live in store.standing()] == [request.id]
    assert store.find(guard.plan("/workspace/other")) is None
    assert store.find(guard.plan(size=10_001)) is None
    store.drop(request.id)
    assert store.standing() == []
    assert not approval.key_path.exists()
    assert store.find(guard.plan()) is None
    assert events(guard)[-1] == "drop"
    with pytest.raises(Refused, match="no standing approval"):
        store.drop(request.id)


def test_an_approval_of_exactly_this_goes_before_a_standing_one(guard: GuardState, store: ApprovalStore) -> None:
    watch(guard, guard.plan(None, root=TREE, size=10_000))
    exact = approve(guard, guard.plan())
    assert store.require(guard.plan()).id == exact.id


def test_a_retired_approval_is_asked_for_again(guard: GuardState, store: ApprovalStore) -> None:
    request = approve(guard, guard.plan())
    approval = store.require(guard.plan()).read
    store.retire(request.id, "its budget of sessions is empty")
    assert not approval.key_path.exists()
    with pytest.raises(Refused) as caught:
        store.require(guard.plan())
    assert caught.value.request_id != request.id
    assert store.heads() == [certificates.read(approval.certificate_path, guard.keys["ca"]).terms.head]


def test_only_the_user_can_read_the_store(guard: GuardState, store: ApprovalStore) -> None:
    approve(guard, guard.plan())
    assert store.folder.stat().st_mode & 0o777 == 0o700
    for path in store.folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\0", b"{}"])
def test_a_corrupt_request_file_approves_nothing(guard: GuardState, store: ApprovalStore, content: bytes) -> None:
    request = approve(guard, guard.plan())
    (store.folder / "requests" / f"{request.id}.json").write_bytes(content)
    with pytest.raises(Refused, match="corrupt, so nothing is approved; move it away"):
        store.require(guard.plan())


@pytest.mark.parametrize(
    ("old", "new"),
    [(CHECKPOINT, "/etc/shadow"), ('"bytes":1000', '"bytes":9000'), ('"standing":false', '"standing":"no"')],
)
def test_an_altered_request_file_approves_nothing(guard: GuardState, store: ApprovalStore, old: str, new: str) -> None:
    request = approve(guard, guard.plan())
    file = store.folder / "requests" / f"{request.id}.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(Refused, match="corrupt"):
        store.require(guard.plan())


def test_a_forged_record_without_a_certificate_approves_nothing(guard: GuardState, store: ApprovalStore) -> None:
    mine = approve(guard, guard.plan("/workspace/mine"))
    wanted = store.request(guard.plan())
    forged = wanted.model_copy(update={"decision": store.get(mine.id).decision})
    (store.folder / "requests" / f"{wanted.id}.json").write_text(forged.model_dump_json())
    assert store.find(guard.plan()) is None
    keys = store.folder / "keys"
    (keys / f"{wanted.id}-0-cert.pub").write_bytes((keys / f"{mine.id}-0-cert.pub").read_bytes())
    assert store.find(guard.plan()) is None
    with pytest.raises(Refused) as caught:
        store.require(guard.plan())
    assert caught.value.request_id not in (mine.id, wanted.id)


@pytest.mark.parametrize("lost", ["{}-0", "{}-0-cert.pub"])
def test_a_lost_key_or_certificate_approves_nothing(guard: GuardState, store: ApprovalStore, lost: str) -> None:
    request = approve(guard, guard.plan())
    (store.folder / "keys" / lost.format(request.id)).unlink()
    assert store.find(guard.plan()) is None


def test_a_lost_store_approves_nothing_and_asks(guard: GuardState, store: ApprovalStore) -> None:
    approve(guard, guard.plan())
    (store.folder / "requests").rename(guard.folder / "away")
    with pytest.raises(Refused, match="guard approve"):
        store.require(guard.plan())


def test_a_lost_audit_log_approves_nothing(guard: GuardState, store: ApprovalStore) -> None:
    approve(guard, guard.plan())
    guard.audit.file.unlink()
    with pytest.raises(Refused, match=r"audit log .* is gone"):
        store.require(guard.plan())


def test_an_unusable_store_approves_nothing(guard: GuardState, store: ApprovalStore) -> None:
    store.folder.mkdir()
    (store.folder / "requests").write_text("in the way")
    with pytest.raises(Refused, match="nothing is approved without it"):
        store.require(guard.plan())


@pytest.mark.parametrize("back", [60, 86400])
def test_a_clock_set_back_approves_nothing(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch, back: int
) -> None:
    approve(guard, guard.plan())
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now - back)
    with pytest.raises(Refused, match="set the clock right"):
        store.require(guard.plan())
    with pytest.raises(Refused, match="set the clock right"):
        store.approve("any", reason="a test", ca_key=guard.ca_key)


def test_a_decision_in_the_future_is_not_believed(guard: GuardState, store: ApprovalStore) -> None:
    request = approve(guard, guard.plan())
    file = store.folder / "requests" / f"{request.id}.json"
    decided = store.get(request.id)
    assert decided.decision is not None
    later = decided.decision.model_copy(update={"time": time.time() + 3600})
    file.write_text(decided.model_copy(update={"decision": later}).model_dump_json())
    with pytest.raises(Refused, match="set the clock right"):
        store.require(guard.plan())


def test_the_audit_head_is_signed_over_the_decision(guard: GuardState, store: ApprovalStore) -> None:
    approve(guard, guard.plan())
    store.require(guard.plan())
    assert guard.audit.verify(store.heads()) == []
    lines = guard.audit.file.read_text().splitlines()
    guard.audit.file.write_text("\n".join(lines[:-1]) + "\n")
    assert guard.audit.verify() == []
    assert len(guard.audit.verify(store.heads())) == 1


def ask(folder: Path) -> str:
    guard = object.__new__(GuardState)
    guard.folder = folder
    return guard.store.request(guard.plan()).id


def test_two_processes_that_want_the_same_make_one_request(guard: GuardState, store: ApprovalStore) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        ids = set(pool.map(ask, [guard.folder] * 8))
    assert [request.id for request in store.requests()] == list(ids)
    assert len(list((store.folder / "keys").glob("*.pub"))) == 1
    assert events(guard) == ["request"]


def test_two_operators_at_once_make_one_approval(guard: GuardState, store: ApprovalStore) -> None:
    request = store.request(guard.plan())
    outcomes: list[object] = []

    def decide() -> None:
        try:
            outcomes.append(guard.store.approve(request.id, reason="a test", ca_key=guard.ca_key).read.serial)
        except Refused as error:
            outcomes.append(error)

    threads = [threading.Thread(target=decide) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    serials = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(serials) == 1
    assert store.require(guard.plan()).read.serial == serials[0]
