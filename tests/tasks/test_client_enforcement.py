"""``enforcement: client`` against a real sshd on which nothing is installed: the ordinary one, by ordinary login."""

import dataclasses
import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from tasks import changes, process
from tasks.approvals import Approval
from tasks.channel import RequestFailed
from tasks.errors import FileChanged, Refused
from tasks.gate import GateSession, open_session
from tests.changing import approve_change, shell, with_second_person
from tests.sshds import Operator, Site

MIB = 1 << 20


@pytest.fixture
def client(site: Site, tmp_path: Path) -> Operator:
    """An operator for whom ``train`` is the ordinary sshd, and only this program enforces anything there."""
    return client_operator(site, tmp_path / "operator")


def client_operator(site: Site, folder: Path, **changes: Any) -> Operator:
    train = site.ordinary_entry() | {"role": "training", "enforcement": "client"}
    infer = {"address": "127.1.9.9", "host_keys": list(site.protected.host_keys)}
    operator = site.operator(folder, train=train | {"source_addresses": ["127.0.0.0/8"]} | changes, infer=infer)
    operator.connector.warn = lambda _: None
    return operator


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    file = folder / "step.pt"
    file.write_bytes(os.urandom(3 * MIB + 17))
    return file


def _open(client: Operator, approval: Approval) -> GateSession:
    return open_session(client.connector, client.train, approval)


def _read(session: GateSession, path: Path, offset: int, length: int) -> bytes:
    data = b""
    with session.read(str(path), offset, length) as stream:
        while len(data) < length and (more := os.read(stream.fileno(), length - len(data))):
            data += more
    return data


def test_an_approved_file_is_served_and_the_use_audited(client: Operator, step: Path) -> None:
    content = step.read_bytes()
    approval = client.approve(path=str(step))
    with _open(client, approval) as session:
        assert session.stat(str(step)).size == len(content)
        assert session.hash(str(step)) == hashlib.sha256(content).hexdigest()
        assert _read(session, step, MIB - 1, MIB + 2) == content[MIB - 1 : 2 * MIB + 1]
    assert [entry["serial"] for entry in client.events("consumption")] == [approval.serial]
    assert client.events("end")[-1]["outcome"] == "closed"


def test_every_command_says_once_that_it_can_be_bypassed(
    site: Site, tmp_path: Path, step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = client_operator(site, tmp_path / "operator")
    client.connector.warn = type(client.connector)(client.inventory, client.store, client.audit).warn
    approval = client.approve(path=str(step))
    for _ in range(2):
        _open(client, approval).close()
    errors = capsys.readouterr().err
    assert errors.count("only this program checks what was approved") == 1
    assert "goes past it" in errors


def test_without_an_approval_nothing_is_sent(client: Operator, site: Site) -> None:
    before = site.ordinary.logged()
    with pytest.raises(Refused, match="train is protected"):
        open_session(client.connector, client.train, None)
    with pytest.raises(Refused, match="train is protected"):
        client.connector.connect(client.train)
    assert site.ordinary.logged() == before


def test_what_lies_outside_of_the_grant_is_refused_there(client: Operator, step: Path) -> None:
    link, fifo = step.with_name("link"), step.with_name("pipe")
    link.symlink_to("/etc/passwd")
    os.mkfifo(fifo)
    for path, why in ((Path("/etc/passwd"), "was not approved"), (link, "'/etc/passwd' was not approved")):
        with pytest.raises(Refused, match=why), _open(client, client.approve(root=str(step.parent))) as session:
            session.stat(str(path))
    with pytest.raises(Refused, match="'hash' is not among"):
        _open(client, client.approve(path=str(step), verbs=("stat", "read"))).hash(str(step))
    with _open(client, client.approve(root=str(step.parent))) as session, pytest.raises(RequestFailed, match="regular"):
        session.hash(str(fifo))


def test_bytes_are_debited_before_they_are_asked_for(client: Operator, step: Path) -> None:
    approval = client.approve(path=str(step), bytes=4 * MIB)
    with _open(client, approval) as session:
        assert len(_read(session, step, 0, 3 * MIB)) == 3 * MIB
    with pytest.raises(Refused, match="bytes of the approval are left"), _open(client, approval) as session:
        _read(session, step, 0, 2 * MIB)
    with pytest.raises(Refused, match="bytes of the approval are left"), _open(client, approval) as session:
        session.hash(str(step))
    with _open(client, approval) as session:
        assert len(_read(session, step, 0, MIB)) == MIB
    moved = sum(entry["bytes"] for entry in client.events("end"))
    assert moved == 4 * MIB


def test_a_file_is_the_one_that_was_first_seen_over_all_sessions(client: Operator, step: Path) -> None:
    approval = client.approve(path=str(step))
    with _open(client, approval) as session:
        session.stat(str(step))
    step.write_bytes(os.urandom(100))
    with pytest.raises(Refused, match="not the file that was first seen"), _open(client, approval) as session:
        session.hash(str(step))
    tree = client.approve(root=str(step.parent))
    with _open(client, tree) as session:
        session.stat(str(step))
    step.write_bytes(os.urandom(50))
    with _open(client, tree) as session:
        assert session.stat(str(step)).size == 50
        session.stat(str(step))
        step.write_bytes(os.urandom(51))
        with pytest.raises(FileChanged, match="changed while read"):
            _read(session, step, 0, 50)


def test_where_two_have_to_sign_one_alone_is_refused(client: Operator, site: Site, step: Path, tmp_path: Path) -> None:
    two = with_second_person(client, tmp_path / "second")
    approval = two.approve(path=str(step))
    before = len(site.ordinary.logged())
    with pytest.raises(Refused, match="no second person signed"):
        _open(two, approval)
    two.store.countersign(approval.id, name="second", key=tmp_path / "second")
    found = two.store.find(two.store.get(approval.id).plan)
    assert found is not None
    other = dataclasses.replace(found.read, second_signature=_signed_for_something_else(two, step, tmp_path / "second"))
    with pytest.raises(Refused, match="no second person signed"):
        _open(two, other)
    assert site.ordinary.logged()[before:] == ""
    with _open(two, found.read) as session:
        assert session.stat(str(step)).kind == "file"


def test_an_emergency_is_for_minutes(client: Operator, site: Site) -> None:
    action = shell(client.train, "true", break_glass=True)
    approval = approve_change(client, action)
    before = len(site.ordinary.logged())
    options = ("-O", "clear", "-O", f"force-command=dflash-gate {approval.digest}", "-O", "source-address=127.0.0.0/8")
    longer = client.forge(approval, "-I", _key_id(approval), "-z", str(approval.serial), "-V", "-1m:+10m", *options)
    with pytest.raises(Refused, match="break-glass is for a certificate of minutes"):
        changes.run(client.connector, client.train, longer, action, lambda *_: None)
    assert client.events("consumption") == []
    assert site.ordinary.logged()[before:] == ""
    assert changes.run(client.connector, client.train, approval, action, lambda *_: None) == 0


def _key_id(approval: Approval) -> str:
    return process.run(["ssh-keygen", "-L", "-f", str(approval.certificate_path)]).stdout.split('"')[1]


def _signed_for_something_else(two: Operator, step: Path, key: Path) -> Path | None:
    approval = two.approve(path=str(step), bytes=7)
    two.store.countersign(approval.id, name="second", key=key)
    found = two.store.find(two.store.get(approval.id).plan)
    assert found is not None
    return found.read.second_signature


def test_a_certificate_out_of_its_terms_is_refused_before_anything_is_sent(
    client: Operator, site: Site, step: Path
) -> None:
    approval = client.approve(path=str(step))
    command, source = f"force-command=dflash-gate {approval.digest}", "source-address=127.0.0.0/8"
    numbers = itertools.count()
    valid = ("-I", _key_id(approval), "-z", str(approval.serial), "-V", "-1m:+10m", "-O", "clear")

    def altered(*options: str, **more: str) -> Approval:
        forged = client.forge(approval, *valid, *options, **more)
        kept = forged.certificate_path.with_name(f"{next(numbers)}-cert.pub")
        return dataclasses.replace(forged, certificate_path=forged.certificate_path.rename(kept))

    sound = altered("-O", command, "-O", source)
    with _open(client, sound) as session:
        session.stat(str(step))
    before = len(site.ordinary.logged())
    for forged in (
        altered("-O", command, "-O", source, "-V", "-10m:-1m"),
        altered("-O", command, "-O", source, "-V", "+1m:+10m"),
        altered("-O", command, "-O", source, "-z", "7"),
        altered("-O", command, "-O", source, "-I", "another"),
        altered("-O", command, "-O", "source-address=10.9.9.9"),
        altered("-O", command),
        altered("-O", source),
        altered("-O", f"force-command=dflash-gate {'0' * 64}", "-O", source),
        altered("-O", command, "-O", source, "-O", "permit-pty"),
        altered("-O", command, "-O", source, principal="root"),
        altered("-O", command, "-O", source, "-h"),
    ):
        with pytest.raises(Refused):
            _open(client, forged)
        assert client.events("refusal")[-1]["message"]
    for flipped in _damaged(approval):
        with pytest.raises(Refused):
            _open(client, flipped)
    assert len(client.events("refusal")) == 11 + len(_damaged(approval)) > 20
    assert site.ordinary.logged()[before:] == ""


def _damaged(approval: Approval) -> list[Approval]:
    """The certificate with one character of its body changed, at each of several places."""
    kind, body, *rest = approval.certificate_path.read_text().split(" ")
    found = []
    for place in range(40, len(body) - 4, len(body) // 12):
        other = "A" if body[place] != "A" else "B"
        file = approval.certificate_path.with_name(f"damaged-{place}")
        file.write_text(" ".join([kind, body[:place] + other + body[place + 1 :], *rest]))
        found.append(dataclasses.replace(approval, certificate_path=file))
    return found
