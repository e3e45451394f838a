"""The host's log and the program's, compared line by line and behind a real gate."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import UsageError
from tasks.errors import Refused
from tasks.gate import open_session
from tasks.inventory import Host
from tasks.reconcile import Difference, host_log, plan_reconcile, reconcile, reconcile_host
from tests.sshds import Operator, Site

DIGEST = "a" * 64
START = 1_800_000_000.0


def opened(serial: int, at: float = START, digest: str = DIGEST, **more: Any) -> bytes:
    return line("session opened", serial, at, digest=digest, **more)


def line(event: str, serial: int | None, at: float = START, **more: Any) -> bytes:
    return json.dumps({"time": at, "event": event, "serial": serial} | more).encode()


def approved(*serials: int) -> dict[str, Any]:
    return {"time": START - 60, "event": "decision", "serials": list(serials)}


def used(serial: int, at: float = START, digest: str = DIGEST) -> dict[str, Any]:
    return {"time": at, "event": "consumption", "serial": serial, "digest": digest}


def ended(serial: int, outcome: str = "closed") -> dict[str, Any]:
    return {"time": START + 1, "event": "end", "serial": serial, "outcome": outcome}


def what(differences: list[Difference]) -> list[tuple[str, int]]:
    return [(one.side, one.serial) for one in differences]


def test_the_same_uses_on_both_sides_are_no_difference() -> None:
    audit = [approved(1, 2), used(1), ended(1), used(1), ended(1), used(2), ended(2)]
    log = [opened(1), line("read", 1, path="/f", length=9), line("session ended", 1), opened(1), opened(2)]
    assert reconcile(audit, log) == []


def test_a_use_that_only_the_host_knows() -> None:
    audit = [approved(1), used(1), ended(1)]
    (found,) = reconcile(audit, [opened(1), opened(1, START + 50)])
    assert (found.side, found.serial, found.time) == ("host", 1, START + 50)
    assert "2 uses, and this machine made 1" in found.what
    (found,) = reconcile(audit, [opened(1), opened(7)])
    assert (found.side, found.serial) == ("host", 7)
    assert "no decision here is about" in found.what


def test_a_use_that_only_the_program_knows() -> None:
    audit = [approved(1, 2), used(1), ended(1), used(2, START + 5), ended(2, "exit 0")]
    (found,) = reconcile(audit, [opened(1)])
    assert (found.side, found.serial, found.time) == ("program", 2, START + 5)
    assert "outcome: exit 0" in found.what
    (found,) = reconcile([approved(1), used(1)], [line("tidied", None), opened(3, START + 1)])[:1]
    assert "outcome: unknown" in found.what


@pytest.mark.parametrize("outcome", ["ConnectionFailed: no route", "HostKeyError: other", "Refused: train refused"])
def test_a_use_that_never_arrived_is_no_difference(outcome: str) -> None:
    assert reconcile([approved(1, 2), used(1), ended(1), used(2), ended(2, outcome)], [opened(1)]) == []


def test_another_action_under_the_same_serial() -> None:
    (found,) = reconcile([approved(1), used(1), ended(1)], [opened(1, digest="b" * 64)])
    assert found.side == "host"
    assert "another action" in found.what


def test_an_attempt_with_a_certificate_that_was_never_decided_about() -> None:
    audit = [approved(1), used(1), ended(1)]
    refused = line("refused", 9, message="\x1b[2Jnot yours")
    (found,) = reconcile(audit, [opened(1), refused, line("refused", 1)])
    assert (found.side, found.serial) == ("host", 9)
    assert "your CA signed it" in found.what
    assert "\x1b" not in str(found)


def test_what_is_older_than_the_hosts_log_is_named_once() -> None:
    audit = [approved(1, 2), used(1, START - 9000), ended(1), used(1, START - 8000), ended(1), used(2), ended(2)]
    (found,) = reconcile(audit, [opened(2)])
    assert found.side == "program"
    assert "2 uses are from before the host's log begins" in found.what


def test_what_was_used_while_the_log_was_read_may_be_missing_there() -> None:
    audit = [approved(1, 2), used(1), ended(1), used(2, START + 100)]
    assert reconcile(audit, [opened(1)], until=START + 50) == []
    assert what(reconcile(audit, [opened(1)])) == [("program", 2)]


@pytest.mark.parametrize(
    "garbage", [b"", b"[]", b"{}", b'{"time":"x","event":"y"}', b'{"time":-1,"event":"y"}', b"\xff", b"[" * 5000]
)
def test_a_line_that_is_no_entry_is_named(garbage: bytes) -> None:
    found = reconcile([approved(1), used(1), ended(1)], [opened(1), garbage])
    assert [one.what.startswith("line 2 of its log is not an entry") for one in found] == [True]


def test_a_host_without_a_log_of_its_own(operator: Operator) -> None:
    with pytest.raises(UsageError, match="it is not protected"):
        plan_reconcile(operator.infer)
    client = operator.train.model_copy(update={"enforcement": "client"})
    with pytest.raises(UsageError, match="only sent along"):
        plan_reconcile(client)


def _host(operator: Operator, site: Site) -> Host:
    return operator.train.model_copy(update={"gate_state": str(site.gate_state)})


def _differences(operator: Operator, site: Site) -> list[Difference]:
    host = _host(operator, site)
    store = operator.store
    request = store.request(plan_reconcile(host))
    approved = store.approve(request.id, reason="test", ca_key=site.ca_key)
    mine = {entry["serial"] for entry in operator.audit.entries() if "serial" in entry} | {approved.read.serial}
    # the sshds of the tests serve many operators, so what is not this one's is left out
    return [one for one in reconcile_host(operator.connector, host, approved.read) if one.serial in mine]


def test_the_log_of_a_real_gate_agrees_until_somebody_else_uses_the_key(
    operator: Operator, site: Site, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1000)
    approval = operator.approve(path=str(file))
    for _ in range(2):
        with open_session(operator.connector, operator.train, approval) as session, session.read(str(file), 0, 9) as it:
            assert it.length == 9
            os.read(it.fileno(), 9)
    assert _differences(operator, site) == []
    audit = operator.audit.file.read_text()
    open_session(operator.connector, operator.train, approval).close()
    operator.audit.file.write_text(audit)
    (found,) = _differences(operator, site)
    assert (found.side, found.serial) == ("host", approval.serial)
    assert "3 uses, and this machine made 2" in found.what


def test_an_audit_log_that_claims_more_than_happened(operator: Operator, site: Site) -> None:
    approval = operator.approve(path="/etc/hostname")
    open_session(operator.connector, operator.train, approval).close()
    operator.store.consume(approval)
    (found,) = _differences(operator, site)
    assert (found.side, found.serial) == ("program", approval.serial)
    assert "2 uses" in found.what


def test_the_log_is_read_only_with_an_approval(operator: Operator, site: Site) -> None:
    host = _host(operator, site)
    approval = operator.approve(path="/etc/hostname")
    with pytest.raises(Refused, match="was not approved"):
        host_log(operator.connector, host, approval)
