"""The doctor's attempts under an approval, against a real gate and against hosts that refuse too little."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from string import Template

import pytest

from dflash.errors import UsageError
from tasks import doctor_sessions
from tasks.approvals import Approved
from tasks.doctor_sessions import attempt, full_plan
from tasks.errors import HostBusy, Refused
from tasks.finding import Finding
from tests.sshds import GATE, MATCH, Operator, Site

OPEN_GATE = """#!{python} -I
import hashlib, json, os, subprocess, sys
def reply(**fields): os.write(1, json.dumps({{"ok": True, **fields}}).encode() + b"\\n")
action = sys.stdin.buffer.readline()
reply()
if b'"kind":"run"' in action:
    import base64
    said = subprocess.run(json.loads(action)["argv"], capture_output=True).stdout
    reply(stream="stdout", data=base64.b64encode(said).decode())
    reply(exit=0)
    sys.exit(0)
for line in sys.stdin.buffer:
    request = json.loads(line)
    data = open(request["path"], "rb").read()
    if request["verb"] == "stat":
        reply(kind="file", size=len(data), mtime_ns=0, inode=1, device=1)
    elif request["verb"] == "hash":
        reply(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    else:
        reply(length=request["length"])
        os.write(1, data[request["offset"]:][:request["length"]])
        reply()
"""


def approved(operator: Operator, gate: Path, site: Site) -> Approved:
    host = operator.train.model_copy(update={"gate_state": str(site.gate_state)})
    request = operator.store.request(full_plan(host, gate=str(gate)))
    return operator.store.approve(request.id, reason="test", ca_key=site.ca_key)


def attempted(operator: Operator, site: Site, gate: Path = GATE, full: Approved | None = None) -> dict[str, Finding]:
    host = operator.train.model_copy(update={"gate_state": str(site.gate_state)})
    full = full or approved(operator, gate, site)
    return {one.name: one for one in attempt(operator.connector, host, full, str(gate), lambda _: None)}


def with_status(found: dict[str, Finding], status: str) -> set[str]:
    return {name for name, one in found.items() if one.status == status}


def test_a_guarded_host_refuses_all_of_it(site: Site, tmp_path: Path) -> None:
    operator = site.operator(tmp_path / "operator", train={"source_addresses": ["127.0.0.1"]})
    found = attempted(operator, site)
    assert tuple(found) == doctor_sessions.ROWS
    owners = {"gate and job user"}  # who owns this checkout and its folders is not the gate's doing
    assert with_status(found, "fail") <= owners, found
    assert with_status(found, "pass") >= set(found) - owners, found
    assert "used" in found["replay"].measured
    assert "not the approved one" in found["altered action line"].measured
    assert found["other source address"].measured.startswith("refused from ")
    assert "approved ones left" in found["budget"].measured
    assert [entry["event"] for entry in operator.audit.entries()].count("retire") == 1


def test_a_gate_that_lets_everything_through_fails(site: Site, tmp_path: Path, start: Callable[..., object]) -> None:
    gate = tmp_path / "gate"
    gate.write_text(OPEN_GATE.format(python=sys.executable))
    gate.chmod(0o755)
    (tmp_path / "gate.json").write_text("{}")
    operator = guarded_by(site, tmp_path, start, gate)
    found = attempted(operator, site, gate)
    failed = {"replay", "altered action line", "other action", "gate program", "budget"}
    assert with_status(found, "fail") - {"gate and job user"} == failed, found
    assert "was shipped" in found["gate program"].measured
    assert "an altered gate could answer this too" in found["gate program"].explanation


def guarded_by(site: Site, folder: Path, start: Callable[..., object], gate: Path, *lines: str) -> Operator:
    """An operator whose protected host has the guard's block of sshd_config with another gate and without ``lines``."""
    block = Template(MATCH.read_text()).substitute(
        user="*",
        ca=site.ca_key.with_suffix(".pub"),
        principals=site.folder / "principals",
        revoked=site.folder / "revoked",
        gate=gate,
        config=site.folder / "gate.json",
    )
    kept = [line for line in block.splitlines() if not line.strip().startswith(lines or ("#",))]
    sshd = start("\n".join(kept))
    train = {"port": sshd.port, "host_keys": list(sshd.host_keys)}  # type: ignore[attr-defined]
    return site.operator(folder / "operator", train=train)


@pytest.mark.parametrize(
    ("complaint", "status"),
    [("dflash@host: Permission denied (publickey).", "pass"), ("ssh: connect to host: Connection refused", "skipped")],
)
def test_a_connection_that_did_not_come_about_refused_nothing(complaint: str, status: str) -> None:
    answer = doctor_sessions._Answer(255, b"", complaint)
    assert doctor_sessions._refused_by_gate("altered action line", answer, "it is refused").status == status


@pytest.mark.parametrize("refusal", [HostBusy("two sessions are open"), Refused("sshd did not accept it")])
def test_a_budget_of_which_nothing_was_read_is_not_found_well(
    site: Site, operator: Operator, monkeypatch: pytest.MonkeyPatch, refusal: Refused
) -> None:
    def refuse(*_: object) -> None:
        raise refusal

    full = approved(operator, GATE, site)
    monkeypatch.setattr(doctor_sessions, "open_session", refuse)
    host, read = operator.train, full.read
    found = doctor_sessions._Attempts(operator.connector, host, full, str(GATE), read, read).budget()
    assert (found.status, found.measured) == ("fail", str(refusal))


@pytest.mark.slow
def test_forwarding_that_sshd_allows_fails(
    site: Site, tmp_path: Path, start: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate permits everything here, as the guard never signs one: what is left is sshd's own block."""
    operator = guarded_by(site, tmp_path, start, GATE, "DisableForwarding")
    monkeypatch.setattr(doctor_sessions, "SECONDS", 5.0)  # a forward that is allowed goes on until then
    full = permitting_all(operator, approved(operator, GATE, site))
    failed = with_status(attempted(operator, site, full=full), "fail")
    assert {"port forwarding", "jump host", "agent forwarding"} <= failed
    guarded = guarded_by(site, tmp_path / "again", start, GATE)
    full = permitting_all(guarded, approved(guarded, GATE, site))
    found = attempted(guarded, site, full=full)
    assert found["port forwarding"].status == found["jump host"].status == "pass"


def permitting_all(operator: Operator, full: Approved) -> Approved:
    read = operator.forge(full.read, "-V", "-1m:+10m")
    return dataclasses.replace(full, approvals=(read, *full.approvals[1:]))


@pytest.mark.parametrize(
    ("said", "status", "says"),
    [
        ("0 555 /proc/self\n7 700 /state\n0 755 /sbin/gate\n0 755 /sbin\n0 755 /\n", "pass", "job is user 0"),
        ("7 555 /proc/self\n7 700 /state\n0 755 /sbin/gate\n0 755 /sbin\n0 755 /\n", "warn", "one user"),
        ("0 555 /proc/self\n7 700 /state\n7 755 /sbin/gate\n0 755 /sbin\n0 755 /\n", "fail", "/sbin/gate is of user 7"),
        ("0 555 /proc/self\n7 700 /state\n0 775 /sbin/gate\n0 755 /sbin\n0 755 /\n", "fail", "with mode 775"),
        ("0 555 /proc/self\n7 700 /state\n0 755 /sbin/gate\n0 777 /sbin\n0 755 /\n", "fail", "/sbin is of user 0"),
        ("0 555 /proc/self\n7 700 /state\n0 755 /sbin/gate\n0 1777 /sbin\n0 755 /\n", "pass", "job is user 0"),
        ("0 555 /proc/self\n7 750 /state\n0 755 /sbin/gate\n0 755 /sbin\n0 755 /\n", "fail", "can be entered"),
        ("0 555 /proc/self\n7 700 /state\n", "fail", "0 555"),
        ("nonsense", "fail", "nonsense"),
    ],
)
def test_who_owns_what(operator: Operator, said: str, status: str, says: str) -> None:
    host = operator.train.model_copy(update={"gate_state": "/state"})
    found = doctor_sessions.judge_owners(host, "/sbin/gate", said)
    assert found.status == status
    assert says in found.measured


def test_nothing_is_asked_of_a_host_on_which_nothing_is_installed(operator: Operator) -> None:
    for host in (operator.infer, operator.train.model_copy(update={"enforcement": "client"})):
        with pytest.raises(UsageError, match="leave --full out"):
            full_plan(host)
