"""Plans of several actions: one certificate each, changes used once, ended and revoked together."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import certificates, process, signing
from tasks.actions import ReadGrant, Revoke
from tasks.approvals import Approval, ApprovalStore, default_seconds
from tasks.errors import Refused
from tasks.requests import Origin, revocation
from tests.guard_state import CHECKPOINT, GuardState

TREE = "/workspace/dflash/checkpoints"
ORIGIN = Origin(deployment="0d9e", parameters={"source": "kpro6:/a", "steps": [1, 2]}, flow_run="f1")


@pytest.fixture
def guard(tmp_path: Path) -> GuardState:
    return GuardState(tmp_path)


@pytest.fixture
def store(guard: GuardState) -> ApprovalStore:
    return guard.store


def outcome(guard: GuardState, approval: Approval, how: str) -> None:
    """Record how a use ended, as the session does."""
    guard.audit.append("end", request=approval.id, serial=approval.serial, outcome=how)


def test_every_action_has_a_certificate_and_a_key_of_its_own(guard: GuardState, store: ApprovalStore) -> None:
    plan = guard.changing(guard.put(), guard.launch(), grant=guard.grant())
    guard.approve(plan)
    approved = store.require(plan)
    assert [approval.action for approval in approved.approvals] == list(plan.actions)
    assert approved.read.action == plan.grant
    assert [approved.of(action).digest for action in plan.actions] == [action.digest() for action in plan.actions]
    read = [certificates.read(approval.certificate_path, guard.keys["ca"]) for approval in approved.approvals]
    assert [one.terms.digest for one in read] == [action.digest() for action in plan.actions]
    assert [one.terms.serial for one in read] == [approval.serial for approval in approved.approvals]
    assert len({one.terms.serial for one in read}) == len({approval.key_path for approval in approved.approvals}) == 3
    assert {one.terms.head for one in read} == set(store.heads())
    assert {one.terms.request_id for one in read} == {approved.id}
    assert guard.audit.verify(store.heads()) == []


def test_a_certificate_is_for_the_key_beside_it(guard: GuardState, store: ApprovalStore) -> None:
    for approval in guard.approve(guard.changing(guard.put(), guard.launch())).approvals:
        of_key = process.run(["ssh-keygen", "-l", "-f", approval.key_path]).stdout.split()[1]
        assert of_key in process.run(["ssh-keygen", "-L", "-f", approval.certificate_path]).stdout


def test_of_a_plan_all_is_found_or_nothing(guard: GuardState, store: ApprovalStore) -> None:
    put, launch = guard.put(), guard.launch()
    guard.approve(guard.changing(put, launch))
    assert store.find(guard.changing(put, launch)) is not None
    assert store.find(guard.changing(put, launch, grant=guard.grant())) is None
    assert store.find(guard.changing(put, guard.launch("night-2"))) is None
    assert store.find(guard.changing(guard.put(content=b"seed: 2\n"), launch)) is None
    assert store.find(guard.changing(launch, put)) is None
    assert store.find(guard.plan()) is None


def test_a_part_of_what_was_approved_is_found_in_its_order(guard: GuardState, store: ApprovalStore) -> None:
    put, launch = guard.put(), guard.launch()
    whole = guard.approve(guard.changing(put, launch, grant=guard.grant(None, root=TREE)))
    assert store.require(guard.changing(launch)).approvals == (whole.of(launch),)
    part = store.require(guard.changing(launch, grant=guard.grant()))
    assert part.approvals == (whole.read, whole.of(launch))
    assert part.of(guard.grant()) == whole.read


def test_two_requests_do_not_make_one_approval(guard: GuardState, store: ApprovalStore) -> None:
    put, launch = guard.put(), guard.launch()
    guard.approve(guard.changing(put))
    guard.approve(guard.changing(launch))
    assert store.find(guard.changing(put, launch)) is None


def test_a_change_is_approved_for_ten_minutes_and_an_hour_at_most(guard: GuardState, store: ApprovalStore) -> None:
    plan = guard.changing(guard.put(), grant=guard.grant())
    assert (default_seconds(plan), default_seconds(guard.plan())) == (600, 3600)
    request = store.request(plan)
    with pytest.raises(Refused, match="too long for a change"):
        store.approve(request.id, reason="a test", ca_key=guard.ca_key, seconds=3601)
    with pytest.raises(Refused, match="at least a second"):
        store.approve(request.id, reason="a test", ca_key=guard.ca_key, seconds=0)
    assert store.get(request.id).status == "pending"
    store.approve(request.id, reason="a test", ca_key=guard.ca_key)
    decision = store.get(request.id).decision
    assert decision is not None
    assert {approval.not_after for approval in store.require(plan).approvals} == {int(decision.time) + 600}


def test_a_standing_approval_changes_nothing(guard: GuardState, store: ApprovalStore) -> None:
    with pytest.raises(Refused, match="for reading only"):
        store.request(guard.changing(guard.put()), standing=True)


def test_validity_counts_from_the_decision_however_long_signing_takes(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign = certificates_signed_late(monkeypatch, seconds=5)
    request = store.request(guard.changing(guard.put(), guard.launch()))
    approved = store.approve(request.id, reason="a test", ca_key=guard.ca_key, seconds=100)
    decision = store.get(request.id).decision
    assert decision is not None
    assert {approval.not_after for approval in approved.approvals} == {int(decision.time) + 100}
    sign["seconds"] = 101
    late = store.request(guard.plan("/late"))
    with pytest.raises(Refused, match="signing took longer"):
        store.approve(late.id, reason="a test", ca_key=guard.ca_key, seconds=100)
    assert store.get(late.id).status == "pending"


def certificates_signed_late(monkeypatch: pytest.MonkeyPatch, *, seconds: int) -> dict[str, int]:
    """Let the clock go on by ``seconds`` whenever something is signed."""
    wait, passed = {"seconds": seconds}, [0]
    really, now = signing.sign, time.time

    def sign(*arguments: object) -> Path:
        passed[0] += wait["seconds"]
        return really(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("tasks.signing.sign", sign)
    monkeypatch.setattr("time.time", lambda: now() + passed[0])
    return wait


def test_a_signature_over_something_else_than_was_asked_for_approves_nothing(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = signing.sign
    monkeypatch.setattr("tasks.signing.sign", lambda key, terms, ca: really(key, replace(terms, serial=7), ca))
    request = store.request(guard.plan())
    with pytest.raises(Refused, match="signed something else"):
        store.approve(request.id, reason="a test", ca_key=guard.ca_key)
    assert store.get(request.id).status == "pending"


# --- use


def test_a_change_is_used_once(guard: GuardState, store: ApprovalStore) -> None:
    put = guard.put()
    approval = guard.approve(guard.changing(put)).of(put)
    store.consume(approval)
    assert guard.events() == ["request", "decision", "consumption"]
    with pytest.raises(Refused, match=r"used already.*one use; nothing was done"):
        store.consume(approval)
    assert store.find(guard.changing(put)) is None
    with pytest.raises(Refused, match="guard approve"):
        store.require(guard.changing(put))
    assert guard.events().count("consumption") == 1


def test_a_use_that_is_recorded_nowhere_but_in_the_audit_log_stays_a_use(
    guard: GuardState, store: ApprovalStore
) -> None:
    put = guard.put()
    approval = guard.approve(guard.changing(put)).of(put)
    store.consume(approval)
    (store.folder / "spent" / str(approval.serial)).unlink()
    assert store.find(guard.changing(put)) is None
    with pytest.raises(Refused, match="used already"):
        store.consume(approval)


def test_a_plan_of_which_a_change_was_used_is_asked_for_again(guard: GuardState, store: ApprovalStore) -> None:
    put, launch = guard.put(), guard.launch()
    approved = guard.approve(guard.changing(put, launch, grant=guard.grant()))
    store.consume(approved.of(put))
    assert store.find(guard.changing(put, launch, grant=guard.grant())) is None
    assert store.find(guard.changing(launch)) is not None
    store.consume(approved.of(launch))
    assert store.find(guard.plan()) is not None


def test_reading_does_not_spend_a_grant(guard: GuardState, store: ApprovalStore) -> None:
    approval = guard.approve(guard.plan()).read
    for _ in range(5):
        store.consume(approval)
    assert store.find(guard.plan()) is not None
    assert store.get(approval.id).status == "approved"


def test_of_many_at_once_one_uses_a_change(guard: GuardState) -> None:
    put = guard.put()
    approval = guard.approve(guard.changing(put)).of(put)

    def use(_: int) -> bool:
        try:
            guard.store.consume(approval)
        except Refused:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(use, range(8))) == 1
    assert guard.events().count("consumption") == 1


def test_the_outcome_of_a_use_is_what_its_end_says_and_unknown_without(guard: GuardState, store: ApprovalStore) -> None:
    put, launch = guard.put(), guard.launch()
    approved = guard.approve(guard.changing(put, launch))
    assert (store.get(approved.id).status, store.get(approved.id).outcome) == ("approved", None)
    store.consume(approved.of(put))
    assert (store.get(approved.id).status, store.get(approved.id).outcome) == ("spent", "unknown")
    outcome(guard, approved.of(put), "closed")
    assert store.get(approved.id).outcome == "closed"
    store.consume(approved.of(launch))
    assert [request.outcome for request in store.requests()] == ["unknown"]
    outcome(guard, approved.of(launch), "GateError: it broke")
    assert [request.outcome for request in store.requests()] == ["GateError: it broke"]


def test_a_crash_between_the_record_and_the_audit_log_leaves_it_used(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = guard.put()
    approval = guard.approve(guard.changing(put)).of(put)

    def crash(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tasks.audit.Audit.append", crash)
        with pytest.raises(KeyboardInterrupt):
            store.consume(approval)
    assert (store.get(approval.id).status, store.get(approval.id).outcome) == ("spent", "unknown")
    with pytest.raises(Refused, match="used already"):
        store.consume(approval)


def test_what_is_no_longer_in_force_is_not_used(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, launch = guard.put(), guard.launch()
    old = guard.approve(guard.changing(put)).of(put)
    revoked = guard.approve(guard.changing(launch)).of(launch)
    other = replace(revoked, serial=revoked.serial + 1)
    strange = replace(revoked, action=guard.put("/etc/shadow"))
    for approval in (other, strange):
        with pytest.raises(Refused, match="no longer in force"):
            store.consume(approval)
    store.revoke(revoked.id, reason="a mistake")
    with pytest.raises(Refused, match="revoked: a mistake"):
        store.consume(revoked)
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + 600)
    with pytest.raises(Refused, match="no longer in force"):
        store.consume(old)
    assert "consumption" not in guard.events()


# --- the end


def test_revoking_deletes_every_key_at_once_and_names_every_certificate_to_the_host(
    guard: GuardState, store: ApprovalStore
) -> None:
    plan = guard.changing(guard.put(), guard.launch(), grant=guard.grant())
    approved = guard.approve(plan)
    ended = store.revoke(approved.id, reason="a mistake")
    assert (ended.status, ended.ended) == ("ended", "revoked: a mistake")
    assert not [approval for approval in approved.approvals if approval.key_path.exists()]
    assert store.find(plan) is None
    assert guard.events()[-1] == "revoke"
    told = revocation(ended)
    assert told == store.revocation(ended)
    assert {one.serial for one in told.changes if isinstance(one, Revoke)} == {one.serial for one in approved.approvals}
    assert len(told.changes) == 3
    assert guard.audit.verify(store.heads()) == []


def test_only_what_was_approved_can_be_revoked(guard: GuardState, store: ApprovalStore) -> None:
    request = store.request(guard.changing(guard.put()))
    with pytest.raises(Refused, match="is pending, so there is nothing to revoke; deny it"):
        store.revoke(request.id, reason="a test")
    with pytest.raises(Refused, match="needs a reason"):
        store.revoke(request.id, reason=" ")
    with pytest.raises(Refused, match="no certificate"):
        revocation(request)
    store.deny(request.id, reason="no")
    assert not list((store.folder / "keys").iterdir())
    with pytest.raises(Refused, match="is denied"):
        store.revoke(request.id, reason="a test")


@pytest.mark.parametrize(
    ("before", "after"),
    [("[10.1.2.1]", "[10.1.2.9]"), ("enforcement: host", "enforcement: authorized-keys")],
)
def test_what_the_host_would_no_longer_take_is_asked_for_again(
    guard: GuardState, store: ApprovalStore, before: str, after: str
) -> None:
    guard.approve(guard.plan())
    guard.hosts_file.write_text(guard.hosts_file.read_text().replace(before, after))
    assert guard.store.find(guard.plan()) is None
    assert store.find(guard.plan()) is not None


# --- who asked


def test_the_run_that_asked_is_kept_and_is_no_part_of_what_is_approved(guard: GuardState, store: ApprovalStore) -> None:
    with pytest.raises(Refused) as caught:
        store.require(guard.plan(), ORIGIN)
    assert caught.value.request_id is not None
    request = store.get(caught.value.request_id)
    assert (request.origin, request.digest) == (ORIGIN, guard.plan().digest())
    assert store.request(guard.plan()) == request


def test_a_run_joins_a_request_that_nobody_runs_for_yet(guard: GuardState, store: ApprovalStore) -> None:
    mine = store.request(guard.plan())
    assert mine.origin is None
    joined = store.request(guard.plan(), origin=ORIGIN)
    assert (joined.id, joined.origin) == (mine.id, ORIGIN)
    other = ORIGIN.model_copy(update={"flow_run": "f2"})
    assert store.request(guard.plan(), origin=other).origin == ORIGIN


# --- an emergency


def test_breaking_the_glass_is_one_step_five_minutes_and_loud(guard: GuardState, store: ApprovalStore) -> None:
    run = guard.emergency()
    approved = store.break_glass(guard.changing(run), reason="it burns", ca_key=guard.ca_key, operator="ada")
    terms = certificates.read(approved.of(run).certificate_path, guard.keys["ca"]).terms
    decision = store.get(approved.id).decision
    assert decision is not None
    assert terms.not_after == int(decision.time) + 300
    assert terms.not_after - terms.not_before == 360
    assert guard.events() == ["request", "BREAK-GLASS", "decision"]
    (loud,) = [entry for entry in guard.audit.entries() if entry["event"] == "BREAK-GLASS"]
    assert (loud["operator"], loud["reason"], loud["host"]) == ("ada", "it burns", "kpro6")
    store.consume(approved.of(run))


def test_the_glass_is_for_emergencies_with_a_reason(guard: GuardState, store: ApprovalStore) -> None:
    run = guard.emergency()
    with pytest.raises(Refused, match="needs a reason"):
        store.break_glass(guard.changing(run), reason=" ", ca_key=guard.ca_key)
    with pytest.raises(Refused, match="marked as an emergency"):
        store.break_glass(guard.changing(guard.put()), reason="it burns", ca_key=guard.ca_key)
    with pytest.raises(Refused, match="stands alone"):
        store.break_glass(guard.changing(run, guard.put()), reason="it burns", ca_key=guard.ca_key)
    assert guard.events() == []


def test_an_emergency_that_is_approved_the_long_way_is_as_short_and_as_loud(
    guard: GuardState, store: ApprovalStore
) -> None:
    request = store.request(guard.changing(guard.emergency()))
    with pytest.raises(Refused, match="5m at most"):
        store.approve(request.id, reason="it burns", ca_key=guard.ca_key, seconds=301)
    store.approve(request.id, reason="it burns", ca_key=guard.ca_key)
    assert "BREAK-GLASS" in guard.events()


def test_a_grant_is_covered_and_a_change_is_not(guard: GuardState, store: ApprovalStore) -> None:
    wide = guard.grant(None, root=TREE, size=10_000)
    approved = guard.approve(guard.changing(guard.put(), grant=wide))
    found = store.require(guard.changing(guard.put(), grant=guard.grant(CHECKPOINT)))
    assert found.read == approved.read
    assert isinstance(found.read.action, ReadGrant)
    assert found.read.grant.root == TREE
