"""Where two persons are asked for, one is not enough, and the second is really another."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import countersigning, process
from tasks.approvals import ApprovalStore
from tasks.errors import Refused
from tests.guard_state import PASSPHRASE, GuardState, make_key
from tests.terminals import at_a_terminal

COUNTERSIGN = """
import sys
from pathlib import Path
from typing import Any
from dflash.errors import run_cli
from tests.guard_state import GuardState
guard = object.__new__(GuardState)
guard.folder = Path(sys.argv[1])
run_cli(lambda: guard.store.countersign(sys.argv[2], name="ada", key=guard.folder / "ada"))
"""


@pytest.fixture
def guard(tmp_path: Path) -> GuardState:
    return GuardState(tmp_path, two_person=True)


@pytest.fixture
def store(guard: GuardState) -> ApprovalStore:
    return guard.store


def test_one_person_is_not_enough_and_the_refusal_names_the_others(guard: GuardState, store: ApprovalStore) -> None:
    approved = guard.approve(guard.plan())
    assert store.find(guard.plan()) is None
    with pytest.raises(Refused) as caught:
        store.require(guard.plan())
    assert caught.value.request_id == approved.id
    assert f"ada or bob may sign request {approved.id}: dflash-ops guard countersign {approved.id}" in str(caught.value)
    assert [request.id for request in store.requests()] == [approved.id]


@pytest.mark.parametrize("first", ["operator", "second"])
def test_two_persons_approve_in_either_order(guard: GuardState, store: ApprovalStore, first: str) -> None:
    plan = guard.changing(guard.put(), guard.launch(), grant=guard.grant())
    request = store.request(plan)
    if first == "operator":
        guard.approve(plan)
    store.countersign(request.id, name="ada", key=guard.folder / "ada")
    if first == "second":
        assert store.find(plan) is None
        guard.approve(plan)
    approved = store.require(plan)
    for approval in approved.approvals:
        assert approval.second_person == "ada"
        assert approval.second_signature is not None
        assert approval.second_signature.read_text().startswith("-----BEGIN SSH SIGNATURE-----")
        verify(guard, approval.second_signature, f"{approval.digest} {request.id}", "ada")
    store.consume(approved.of(guard.put()))
    assert guard.events().count("countersignature") == 1


def verify(guard: GuardState, signature: Path, message: str, name: str) -> None:
    """As the gate and anybody else can: with ssh-keygen and the public key alone."""
    signers = guard.folder / "signers"
    signers.write_text(f"{name} {guard.keys[name]}\n")
    argv = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", name, "-n", "dflash-approval", "-s", str(signature)]
    process.run(argv, input=message)


@pytest.mark.parametrize(
    ("name", "key", "reason"),
    [
        ("ada", "bob", "is not that of ada"),
        ("eve", "ada", "names ada, bob"),
        ("ada", "ca", "is not that of ada"),
        ("ada", "nowhere", "No such file"),
        ("ada", "ada.pub", "not a private key"),
    ],
)
def test_only_a_person_with_the_persons_key_is_the_second(
    guard: GuardState, store: ApprovalStore, name: str, key: str, reason: str
) -> None:
    approved = guard.approve(guard.plan())
    with pytest.raises(Refused, match=reason):
        store.countersign(approved.id, name=name, key=guard.folder / key)
    assert store.find(guard.plan()) is None
    assert "countersignature" not in guard.events()


def test_a_signature_for_something_else_is_none(guard: GuardState, store: ApprovalStore) -> None:
    mine = guard.approve(guard.plan("/mine"))
    store.countersign(mine.id, name="ada", key=guard.folder / "ada")
    other = guard.approve(guard.plan("/other"))
    keys = store.folder / "keys"
    shutil.copy(keys / f"{mine.id}-0.sig", keys / f"{other.id}-0.sig")
    file = store.folder / "requests" / f"{other.id}.json"
    file.write_text(file.read_text().replace('"second":null', '"second":"ada"'))
    assert store.get(other.id).second == "ada"
    assert store.find(guard.plan("/other")) is None
    with pytest.raises(Refused, match="no longer in force"):
        store.consume(other.read)
    assert store.find(guard.plan("/mine")) is not None


def test_a_signature_under_another_persons_name_or_purpose_is_none(guard: GuardState, store: ApprovalStore) -> None:
    approved = guard.approve(guard.plan())
    store.countersign(approved.id, name="ada", key=guard.folder / "ada")
    approval = store.require(guard.plan()).read
    assert approval.second_signature is not None
    known = guard.inventory.guard
    assert countersigning.verify(known, approval.id, approval.action, "ada", approval.second_signature)
    assert not countersigning.verify(known, approval.id, approval.action, "bob", approval.second_signature)
    assert not countersigning.verify(known, approval.id, approval.action, "eve", approval.second_signature)
    assert not countersigning.verify(known, "0" * 8, approval.action, "ada", approval.second_signature)
    message = guard.folder / "message"
    message.write_text(f"{approval.digest} {approval.id}")
    process.run(["ssh-keygen", "-q", "-Y", "sign", "-f", str(guard.folder / "ada"), "-n", "file", str(message)])
    shutil.copy(guard.folder / "message.sig", approval.second_signature)
    assert store.find(guard.plan()) is None


@pytest.mark.parametrize("content", [None, "", "garbage", "-----BEGIN SSH SIGNATURE-----\n-----END SSH SIGNATURE-----"])
def test_a_signature_that_is_gone_or_corrupt_is_none(
    guard: GuardState, store: ApprovalStore, content: str | None
) -> None:
    approved = guard.approve(guard.plan())
    store.countersign(approved.id, name="ada", key=guard.folder / "ada")
    signature = store.folder / "keys" / f"{approved.id}-0.sig"
    if content is None:
        signature.unlink()
    else:
        signature.write_text(content)
    assert store.find(guard.plan()) is None


def test_a_person_who_is_struck_from_the_inventory_signed_nothing(guard: GuardState, store: ApprovalStore) -> None:
    approved = guard.approve(guard.plan())
    store.countersign(approved.id, name="ada", key=guard.folder / "ada")
    del guard.keys["ada"]
    guard.hosts_file.write_text(guard.hosts_text())
    assert guard.store.find(guard.plan()) is None
    # nobody else can sign that one any more, so it is asked for anew
    with pytest.raises(Refused, match="guard approve") as caught:
        guard.store.require(guard.plan())
    assert caught.value.request_id != approved.id


def test_where_one_person_is_enough_no_signature_goes_to_the_gate(guard: GuardState, store: ApprovalStore) -> None:
    approved = guard.approve(guard.plan())
    store.countersign(approved.id, name="ada", key=guard.folder / "ada")
    guard.two_person = False
    guard.hosts_file.write_text(guard.hosts_text())
    assert guard.store.require(guard.plan()).read.second_signature is None


def test_a_second_signature_is_given_once_and_to_what_still_counts(guard: GuardState, store: ApprovalStore) -> None:
    approved = guard.approve(guard.plan())
    store.countersign(approved.id, name="ada", key=guard.folder / "ada")
    with pytest.raises(Refused, match="signed by ada already"):
        store.countersign(approved.id, name="bob", key=guard.folder / "bob")
    denied = store.request(guard.plan("/denied"))
    store.deny(denied.id, reason="no")
    with pytest.raises(Refused, match="is denied already"):
        store.countersign(denied.id, name="bob", key=guard.folder / "bob")


def test_a_request_that_is_decided_while_it_is_signed_gets_no_second_signature(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = store.request(guard.plan())
    really = countersigning.sign

    def sign(*arguments: Any) -> list[Path]:
        guard.store.deny(request.id, reason="no")
        return really(*arguments)

    monkeypatch.setattr("tasks.countersigning.sign", sign)
    with pytest.raises(Refused, match="was changed while it was signed"):
        store.countersign(request.id, name="ada", key=guard.folder / "ada")
    assert store.get(request.id).second is None
    assert "countersignature" not in guard.events()


def test_an_emergency_needs_one(guard: GuardState, store: ApprovalStore) -> None:
    run = guard.emergency()
    store.break_glass(guard.changing(run), reason="it burns", ca_key=guard.ca_key)
    approval = store.require(guard.changing(run)).of(run)
    assert approval.second_signature is None
    store.consume(approval)
    assert store.get(approval.id).status == "spent"


def test_a_second_persons_key_without_a_passphrase_signs_in_the_lab_only(guard: GuardState) -> None:
    approved = guard.approve(guard.plan())
    guard.lab = False
    guard.hosts_file.write_text(guard.hosts_text())
    with pytest.raises(Refused, match=r"no passphrase.*ssh-keygen -p"):
        guard.store.countersign(approved.id, name="ada", key=guard.folder / "ada")


def test_at_a_terminal_the_second_person_types_a_passphrase_once(guard: GuardState) -> None:
    for file in ("ada", "ada.pub"):
        (guard.folder / file).unlink()
    guard.keys["ada"] = make_key(guard.folder / "ada", passphrase=PASSPHRASE)
    guard.hosts_file.write_text(guard.hosts_text())
    plan = guard.changing(guard.put(), guard.launch())
    approved = guard.approve(plan)
    argv = [str(guard.folder), approved.id]
    code, said = at_a_terminal(COUNTERSIGN, argv, ("passphrase", "wrong"))
    assert code == 77, said
    assert guard.store.find(plan) is None
    code, said = at_a_terminal(COUNTERSIGN, argv, ("passphrase", PASSPHRASE))
    assert code == 0, said
    assert guard.store.require(plan).approvals[1].second_person == "ada"


@dataclass
class Nobody:
    def isatty(self) -> bool:
        return False


def test_a_second_persons_passphrase_needs_a_terminal(guard: GuardState, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("ada", "ada.pub"):
        (guard.folder / file).unlink()
    guard.keys["ada"] = make_key(guard.folder / "ada", passphrase=PASSPHRASE)
    guard.hosts_file.write_text(guard.hosts_text())
    approved = guard.approve(guard.plan())
    monkeypatch.setattr("sys.stdin", Nobody())
    with pytest.raises(Refused, match="no terminal"):
        guard.store.countersign(approved.id, name="ada", key=guard.folder / "ada")
