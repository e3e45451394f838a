"""Sessions with the gate behind a real sshd, and with the same program on an ordinary host."""

import dataclasses
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from tasks import channel, public_keys, sent_gate
from tasks.approvals import Approval
from tasks.channel import GateError
from tasks.errors import FileChanged, HostBusy, Refused
from tasks.gate import GateSession, open_session
from tasks.ssh import ConnectionFailed, HostKeyError
from tests.sshds import Operator, Site

MIB = 1 << 20


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    file = folder / "step.pt"
    file.write_bytes(os.urandom(3 * MIB + 17))
    return file


@pytest.fixture(params=["protected", "ordinary"])
def session(request: pytest.FixtureRequest, operator: Operator, step: Path) -> GateSession:
    """A session on each kind of host, with everything below the file's folder in reach."""
    if request.param == "ordinary":
        return open_session(operator.connector, operator.infer, None)
    return open_session(operator.connector, operator.train, operator.approve(root=str(step.parent)))


def _read(session: GateSession, path: Path, offset: int, length: int) -> bytes:
    with session.read(str(path), offset, length) as stream:
        return _take(stream.fileno(), stream.length)


def _take(descriptor: int, length: int) -> bytes:
    """``length`` bytes, or fewer when the stream ends."""
    data = b""
    while len(data) < length and (more := os.read(descriptor, length - len(data))):
        data += more
    return data


def test_both_kinds_of_host_answer_alike(session: GateSession, step: Path) -> None:
    content = step.read_bytes()
    with session:
        found = session.stat(str(step))
        assert (found.kind, found.size, found.inode) == ("file", len(content), step.stat().st_ino)
        assert [entry.name for entry in session.list(str(step.parent))] == ["step.pt"]
        assert session.hash(str(step)) == hashlib.sha256(content).hexdigest()
        assert _read(session, step, 0, len(content)) == content
        assert _read(session, step, MIB - 1, MIB + 2) == content[MIB - 1 : 2 * MIB + 1]
        assert _read(session, step, 5, 0) == b""
        assert session.stat(str(step)) == found


def test_a_failed_request_leaves_the_session_usable(session: GateSession, step: Path) -> None:
    with session:
        with pytest.raises(GateError, match="No such file"):
            session.stat(str(step.with_name("missing")))
        with pytest.raises(GateError, match="Not a directory"):
            session.list(str(step))
        with pytest.raises(GateError, match="were asked for"), session.read(str(step), 1, 4 * MIB):
            pytest.fail("nothing was to come")
        assert session.stat(str(step)).kind == "file"


def test_a_file_that_changes_is_refused(session: GateSession, step: Path) -> None:
    session.stat(str(step))
    step.write_bytes(b"other")
    with pytest.raises(FileChanged, match="changed while read"):
        session.hash(str(step))
    with pytest.raises(GateError, match="has ended"):
        session.stat(str(step))


def test_a_reader_that_stops_early_ends_the_session_and_keeps_its_own_error(session: GateSession, step: Path) -> None:
    def stop() -> None:
        with session.read(str(step), 0, 3 * MIB) as stream:
            os.read(stream.fileno(), 10)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        stop()
    with pytest.raises(GateError, match="has ended"):
        session.stat(str(step))


def test_progress_of_a_hash(operator: Operator, step: Path) -> None:
    seen: list[int] = []
    approval = operator.approve(path=str(step), rate=2 * MIB)
    with open_session(operator.connector, operator.train, approval) as session:
        session.hash(str(step), progress=seen.append)
    assert seen
    assert seen == sorted(seen)


def test_use_and_end_of_an_approval_are_audited(operator: Operator, step: Path) -> None:
    approval = operator.approve(path=str(step))
    with open_session(operator.connector, operator.train, approval) as session:
        assert [entry["request"] for entry in operator.events("consumption")] == [approval.id]
        assert operator.events("end") == []
        _read(session, step, 0, 1000)
    (used,), (ended,) = operator.events("consumption"), operator.events("end")
    assert (used["host"], used["serial"], used["digest"]) == ("train", approval.serial, approval.digest)
    assert (ended["request"], ended["outcome"], ended["bytes"]) == (approval.id, "closed", 1000)
    assert operator.audit.verify() == []


def test_use_is_audited_before_anything_is_sent(
    operator: Operator, step: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    approval = operator.approve(path=str(step))
    before = site.protected.logged()

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(operator.connector, "start_gate", crash)
    with pytest.raises(KeyboardInterrupt):
        open_session(operator.connector, operator.train, approval)
    assert [entry["request"] for entry in operator.events("consumption")] == [approval.id]
    assert site.protected.logged() == before


def test_without_an_approval_nothing_is_sent_to_a_protected_host(operator: Operator, site: Site) -> None:
    before = site.protected.logged()
    with pytest.raises(Refused, match="train is protected"):
        open_session(operator.connector, operator.train, None)
    assert site.protected.logged() == before


def _refusal(operator: Operator, approval: Approval, path: Path, verb: str = "stat") -> Refused:
    with pytest.raises(Refused) as caught, open_session(operator.connector, operator.train, approval) as session:
        getattr(session, verb)(str(path))
    assert caught.value.exit_code == 77
    assert caught.value.request_id == approval.id
    assert operator.events("refusal")[-1]["request"] == approval.id
    return caught.value


def test_refusals_of_the_gate_reach_the_operator(operator: Operator, step: Path) -> None:
    approval = operator.approve(path=str(step), verbs=("stat", "read"))
    assert "train refused: '/etc/passwd' was not approved" in str(_refusal(operator, approval, Path("/etc/passwd")))
    assert "'hash' is not among the approved verbs" in str(_refusal(operator, approval, step, "hash"))
    other = operator.approve(path="/etc/hostname")
    mixed = dataclasses.replace(approval, key_path=other.key_path, certificate_path=other.certificate_path)
    assert "is not the approved one" in str(_refusal(operator, mixed, step))
    link = step.with_name("link")
    link.symlink_to("/etc/passwd")
    tree = operator.approve(root=str(step.parent))
    assert "'/etc/passwd' was not approved" in str(_refusal(operator, tree, link))
    # none of these took the approval away
    assert operator.store.find(operator.store.get(approval.id).plan) is not None


def test_a_spent_approval_is_retired_so_that_the_next_use_asks_anew(operator: Operator, step: Path) -> None:
    for changes in ({"sessions": 1}, {"bytes": 3 * MIB + 17}):
        approval = operator.approve(path=str(step), **changes)
        with open_session(operator.connector, operator.train, approval) as session:
            session.hash(str(step))
        _refusal(operator, approval, step, "hash")
        plan = operator.store.get(approval.id).plan
        assert operator.store.find(plan) is None
        with pytest.raises(Refused, match="dflash-ops guard approve") as asked:
            operator.store.require(plan)
        assert asked.value.request_id != approval.id


def test_a_certificate_that_sshd_does_not_take_is_a_refusal(operator: Operator, step: Path) -> None:
    approval = operator.approve(path=str(step))
    options = ("-O", "clear", "-O", f"force-command=dflash-gate {approval.digest}", "-O", "source-address=10.9.9.9")
    forged = operator.forge(approval, "-V", "-1m:+10m", *options)
    assert "sshd did not accept the certificate" in str(_refusal(operator, forged, step))


def test_another_server_in_place_of_the_protected_host_gets_no_certificate(
    site: Site, tmp_path: Path, step: Path
) -> None:
    changes = {"address": "127.124588", "port": site.ordinary.port}
    approval = site.operator(tmp_path / "operator").approve(path=str(step))
    operator = site.operator(tmp_path / "operator", train=changes, infer={"port": site.ordinary.second_port})
    before = len(site.ordinary.logged())
    with pytest.raises(HostKeyError, match=r"train .* showed the host key ssh-ed25519 SHA256:") as error:
        open_session(operator.connector, operator.train, approval)
    assert public_keys.fingerprint(site.ordinary.host_keys[0]) in str(error.value)
    assert "publickey" not in site.ordinary.logged()[before:]


def test_a_host_that_is_down_is_no_refusal(site: Site, tmp_path: Path, step: Path) -> None:
    approval = site.operator(tmp_path / "operator").approve(path=str(step))
    operator = site.operator(tmp_path / "operator", train={"port": 1})
    with pytest.raises(ConnectionFailed, match=r"train \(127\.1\.2\.6 port 1\): .*refused"):
        open_session(operator.connector, operator.train, approval)
    assert operator.events("end")[-1]["outcome"].startswith("ConnectionFailed")


def _read_to_the_end(operator: Operator, approval: Approval, path: Path, length: int, wait: float = 0) -> None:
    """Read as a pump does: a stream that ends early is an error of the reader."""
    with (
        open_session(operator.connector, operator.train, approval) as session,
        session.read(str(path), 0, length) as stream,
    ):
        time.sleep(wait)
        taken = len(_take(stream.fileno(), length))
        if taken < length:
            raise EOFError(taken)


def test_the_deadline_ends_a_read_in_the_middle(operator: Operator, step: Path) -> None:
    with step.open("wb") as file:
        file.truncate(1 << 30)
    approval = operator.approve(path=str(step), rate=2 * MIB, bytes=1 << 31, seconds=5)
    with pytest.raises(Refused, match="expired in the middle") as refusal:
        _read_to_the_end(operator, approval, step, 1 << 30)
    assert isinstance(refusal.value.__cause__, EOFError)
    assert 0 < refusal.value.__cause__.args[0] < 20 * MIB
    assert time.time() >= approval.not_after


def test_the_deadline_ends_a_session_whose_reader_stands_still(operator: Operator, step: Path) -> None:
    with step.open("wb") as file:
        file.truncate(1 << 28)
    approval = operator.approve(path=str(step), bytes=1 << 31, seconds=5)
    with pytest.raises(Refused, match="expired in the middle"):
        _read_to_the_end(operator, approval, step, 1 << 28, wait=approval.not_after - time.time() + 1)


def test_parallel_sessions_never_get_more_than_the_budget(operator: Operator, step: Path) -> None:
    """Two reads that each fit alone: together they get the budget and not a byte more."""
    with step.open("wb") as file:
        file.truncate(8 * MIB)
    budget = 10 * MIB + 5
    approval = operator.approve(path=str(step), bytes=budget, rate=8 * MIB)
    opened = threading.Barrier(2)
    taken, refused = [], []

    def read() -> None:
        try:
            with open_session(operator.connector, operator.train, approval) as session:
                opened.wait(60)
                with session.read(str(step), 0, 8 * MIB) as stream:
                    taken.append(len(_take(stream.fileno(), stream.length)))
                    if taken[-1] < 8 * MIB:
                        raise EOFError
        except Refused as refusal:
            refused.append(str(refusal))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) >= 1
    assert budget - 2 * MIB <= sum(taken) <= budget


def test_a_third_session_is_refused_and_the_approval_stays(operator: Operator, step: Path) -> None:
    approval = operator.approve(path=str(step))
    with (
        open_session(operator.connector, operator.train, approval),
        open_session(operator.connector, operator.train, approval),
    ):
        refusal = _refusal(operator, approval, step)
        assert isinstance(refusal, HostBusy)
        assert "2 sessions are open" in str(refusal)
    with open_session(operator.connector, operator.train, approval) as session:
        assert session.stat(str(step)).kind == "file"


def test_a_gate_that_falls_silent_is_given_up(operator: Operator, step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_gate, "ORDINARY", "import time; print('{\"ok\": true}', flush=True); time.sleep(60)")
    session = open_session(operator.connector, operator.infer, None)
    monkeypatch.setattr(channel, "REPLY_SECONDS", 0.5)
    with pytest.raises(GateError, match="did not answer"), session:
        session.stat(str(step))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('hello')", "it answered b'hello'"),
        ("print('{\"ok\": 1}')", "it answered"),
        ('print(\'{"ok": false, "message": "\\\\u001b[2J"}\')', r"infer: \\x1b\[2J"),
        ("import sys; sys.exit('no such thing')", "exit status 1: no such thing"),
        ("print('[' * 50000, end='')", "exit status 0"),
    ],
)
def test_what_is_no_gate_is_an_error_of_one_line(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    monkeypatch.setattr(sent_gate, "ORDINARY", program)
    with pytest.raises(GateError, match=message) as error:
        open_session(operator.connector, operator.infer, None)
    assert "\n" not in str(error.value)


STAT = '{"ok": true, "kind": "file", "mtime_ns": 1, "inode": 1, "device": 1, "size": %s}'
NAMED = '{"ok": true, "entries": [{"kind": "file", "mtime_ns": 1, "inode": 1, "device": 1, "size": 1, "name": "%s"}]}'


def _answering(operator: Operator, monkeypatch: pytest.MonkeyPatch, answer: str) -> GateSession:
    """A session with a host that answers every request with ``answer`` and a sleep."""
    program = (
        f"import time\nprint('{{\"ok\": true}}', flush=True)\ninput()\nprint({answer}, flush=True)\ntime.sleep(60)"
    )
    monkeypatch.setattr(sent_gate, "ORDINARY", program)
    return open_session(operator.connector, operator.infer, None)


@pytest.mark.parametrize("size", ["-1", "9" * 100, "9" * 5000, "1e400", "NaN"])
def test_a_size_that_cannot_be_is_not_believed(operator: Operator, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    session = _answering(operator, monkeypatch, repr(STAT % size))
    with pytest.raises(GateError, match="broke"):
        session.stat("/x")


@pytest.mark.parametrize("name", ["../../x", "..", "", "/x", "a/b", "a\\u0000b"])
def test_a_name_that_leads_elsewhere_is_not_believed(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    session = _answering(operator, monkeypatch, repr(NAMED % name))
    with pytest.raises(GateError, match="its reply to list cannot be read"):
        session.list("/x")


@pytest.mark.parametrize("answer", ['"hashed": "x"', '"hashed": -1', '"sha256": "00"', '"sha256": [1]'])
def test_a_hash_that_is_none_is_not_believed(operator: Operator, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    session = _answering(operator, monkeypatch, repr(f'{{"ok": true, {answer}}}'))
    with pytest.raises(GateError, match="its reply to hash cannot be read"):
        session.hash("/x")


def test_a_line_without_end_before_bytes_is_given_up(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    session = _answering(operator, monkeypatch, "'a' * 10**6")
    with pytest.raises(GateError, match="its reply does not end"), session.read("/x", 0, 1):
        pytest.fail("nothing was to come")


def test_a_long_refusal_is_shortened(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    session = _answering(
        operator, monkeypatch, '\'{"ok": false, "refused": true, "message": "\' + \'a\' * 10**5 + \'"}\''
    )
    with pytest.raises(Refused) as caught:
        session.stat("/x")
    assert len(str(caught.value)) < 600


def test_names_that_are_not_utf8_are_listed(session: GateSession, step: Path) -> None:
    os.close(os.open(os.fsencode(step.parent) + b"/\xff", os.O_CREAT))
    with session:
        assert [entry.name for entry in session.list(str(step.parent))] == ["step.pt", "\udcff"]
