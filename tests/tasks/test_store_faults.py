"""A store, a log or a clock that cannot be trusted approves nothing and lets nothing be used."""

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tasks import process
from tasks.approvals import Approval, ApprovalStore
from tasks.errors import Refused
from tests.guard_state import GuardState, make_key


@pytest.fixture
def guard(tmp_path: Path) -> GuardState:
    return GuardState(tmp_path)


@pytest.fixture
def store(guard: GuardState) -> ApprovalStore:
    return guard.store


@pytest.fixture
def put(guard: GuardState) -> Approval:
    """The approval of a change."""
    action = guard.put()
    return guard.approve(guard.changing(action)).of(action)


def spent(guard: GuardState) -> bool:
    return "consumption" in guard.events()


# --- certificates


def sign_again(guard: GuardState, approval: Approval, changes: dict[str, str], ca: Path | None = None) -> None:
    """Replace the certificate of ``approval`` by one of ``ca`` that differs in ``changes``."""
    head = guard.store.heads()[0]
    terms = {
        "id": f"{approval.id} {head}",
        "serial": str(approval.serial),
        "principal": "dflash-gate",
        "validity": "-1m:+9m",
        "command": f"dflash-gate {approval.digest}",
        "source": "10.1.2.1",
    } | changes
    argv = ["ssh-keygen", "-q", "-s", str(ca or guard.ca_key), "-I", terms["id"], "-z", terms["serial"]]
    argv += ["-n", terms["principal"], "-V", terms["validity"], "-O", "clear"]
    argv += ["-O", f"force-command={terms['command']}", "-O", f"source-address={terms['source']}"]
    public = Path(shutil.copy(approval.key_path.with_suffix(".pub"), guard.folder / "again.pub"))
    process.run([*argv, str(public)])
    shutil.copy(guard.folder / "again-cert.pub", approval.certificate_path)


def test_a_certificate_that_says_the_same_counts(guard: GuardState, store: ApprovalStore, put: Approval) -> None:
    sign_again(guard, put, {})
    found = store.require(guard.changing(guard.put())).of(guard.put())
    assert (found.id, found.serial, found.digest) == (put.id, put.serial, put.digest)
    store.consume(found)
    assert store.get(put.id).status == "spent"


@pytest.mark.parametrize(
    "changes",
    [
        {"id": f"00000000 {'e' * 64}"},
        {"id": "nobody"},
        {"serial": "7"},
        {"principal": "root"},
        {"validity": "-2m:-1m"},
        {"validity": "-1m:forever"},
        {"command": f"dflash-gate {'d' * 64}"},
        {"command": "/bin/sh"},
        {"source": "10.1.2.99"},
        {"source": "0.0.0.0/0"},
    ],
    ids=lambda changes: "-".join(f"{name}={value[:20]}" for name, value in changes.items()),
)
def test_a_certificate_with_another_field_does_not(
    guard: GuardState, store: ApprovalStore, put: Approval, changes: dict[str, str]
) -> None:
    sign_again(guard, put, changes)
    assert store.find(guard.changing(guard.put())) is None
    with pytest.raises(Refused, match="no longer in force"):
        store.consume(put)
    assert not spent(guard)


def test_a_certificate_of_another_ca_does_not(guard: GuardState, store: ApprovalStore, put: Approval) -> None:
    make_key(guard.folder / "other")
    sign_again(guard, put, {}, guard.folder / "other")
    assert store.find(guard.changing(guard.put())) is None
    with pytest.raises(Refused, match="no longer in force"):
        store.consume(put)


def test_certificates_of_one_request_are_not_exchanged(guard: GuardState, store: ApprovalStore) -> None:
    plan = guard.changing(guard.put(), guard.launch())
    one, other = guard.approve(plan).approvals
    shutil.copy(one.certificate_path, guard.folder / "kept")
    shutil.copy(other.certificate_path, one.certificate_path)
    shutil.copy(guard.folder / "kept", other.certificate_path)
    assert store.find(plan) is None
    with pytest.raises(Refused, match="no longer in force"):
        store.consume(one)


# --- files


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"second":null', '"second":1'),
        ('"ended":null', '"ended":false'),
        ('"serials":[', '"serials":[0,'),
        ('"approved":true', '"approved":"yes"'),
        ('"mode":420', '"mode":511'),
        ('"seconds":60', '"seconds":6000'),
        ('"origin":null', '"origin":{"deployment":1}'),
    ],
)
def test_an_altered_request_stops_everything(
    guard: GuardState, store: ApprovalStore, put: Approval, old: str, new: str
) -> None:
    file = store.folder / "requests" / f"{put.id}.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    for attempt in attempts(guard, put):
        with pytest.raises(Refused, match="corrupt, so nothing is approved; move it away"):
            attempt()
    assert not spent(guard)


def test_serials_that_are_not_those_of_the_certificates_approve_nothing(
    guard: GuardState, store: ApprovalStore, put: Approval
) -> None:
    file = store.folder / "requests" / f"{put.id}.json"
    for serials in ("[]", "[7]"):
        file.write_text(file.read_text().replace(f"[{put.serial}]", serials))
        assert store.find(guard.changing(guard.put())) is None
        with pytest.raises(Refused, match="no longer in force"):
            store.consume(put)


def test_a_request_that_says_it_was_not_used_is_not_believed(
    guard: GuardState, store: ApprovalStore, put: Approval
) -> None:
    file = store.folder / "requests" / f"{put.id}.json"
    assert "outcome" not in file.read_text()
    file.write_text(file.read_text().replace('"ended":null', '"ended":null,"outcome":"closed"'))
    assert store.get(put.id).status == "approved"
    store.consume(put)
    assert store.get(put.id).outcome == "unknown"


@pytest.mark.parametrize("gone", ["requests", "keys"])
def test_a_store_of_which_a_part_is_gone_lets_nothing_be_used(
    guard: GuardState, store: ApprovalStore, put: Approval, gone: str
) -> None:
    (store.folder / gone).rename(guard.folder / "away")
    with pytest.raises(Refused):
        store.consume(put)
    assert not spent(guard)


@pytest.mark.parametrize("where", ["requests", "keys", "lock"])
def test_something_in_the_way_of_the_store_stops_everything(
    guard: GuardState, store: ApprovalStore, put: Approval, where: str
) -> None:
    place = store.folder / where
    if where == "lock":
        place.unlink()
        place.mkdir()
    else:
        place.rename(guard.folder / "away")
        place.write_text("in the way")
    with pytest.raises(Refused, match=r"make .* readable and writable for yourself"):
        store.consume(put)
    with pytest.raises(Refused, match=r"make .* readable and writable for yourself"):
        store.request(guard.plan("/other"))
    assert not spent(guard)


def attempts(guard: GuardState, put: Approval) -> list[Callable[[], object]]:
    """Everything that could let something happen."""
    store = guard.store
    return [
        lambda: store.require(guard.changing(guard.put())),
        lambda: store.consume(put),
        lambda: store.approve(put.id, reason="a test", ca_key=guard.ca_key),
        lambda: store.countersign(put.id, name="ada", key=guard.folder / "ada"),
        lambda: store.break_glass(guard.changing(guard.emergency()), reason="it burns", ca_key=guard.ca_key),
    ]


# --- the audit log and the clock


@pytest.mark.parametrize("content", [b"garbage\n", b"{}\n", b'{"event":"x"', b"\xff\n"])
def test_a_corrupt_log_stops_everything(guard: GuardState, put: Approval, content: bytes) -> None:
    before = guard.audit.file.read_bytes()
    guard.audit.file.write_bytes(before + content)
    for attempt in attempts(guard, put):
        with pytest.raises(Refused, match=r"audit log .*audit verify"):
            attempt()
    assert not (guard.store.folder / "spent").exists()


def test_a_log_that_is_gone_or_unusable_lets_nothing_be_used(
    guard: GuardState, store: ApprovalStore, put: Approval
) -> None:
    guard.audit.file.rename(guard.folder / "away")
    with pytest.raises(Refused, match=r"audit log .* is gone"):
        store.consume(put)
    guard.audit.file.unlink()
    guard.audit.file.mkdir()
    for attempt in attempts(guard, put):
        with pytest.raises(Refused, match="nothing is approved without it"):
            attempt()


def test_a_clock_set_back_stops_everything(guard: GuardState, put: Approval, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now - 3600)
    for attempt in attempts(guard, put):
        with pytest.raises(Refused, match="set the clock right"):
            attempt()
    monkeypatch.undo()
    assert not (guard.store.folder / "spent").exists()


# --- a disk that fills up, a crash


def on_a_full_disk(folder: Path, what: str, approval: Approval | None) -> str:
    guard = object.__new__(GuardState)
    guard.folder = folder
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        if what == "request":
            guard.store.request(guard.plan("/other"))
        elif what == "consume":
            assert approval is not None
            guard.store.consume(approval)
        else:
            guard.store.deny(what, reason="no")
    except Refused as refused:
        return str(refused)
    return "done"


def test_on_a_full_disk_nothing_is_asked_decided_or_used(guard: GuardState, put: Approval) -> None:
    waiting = guard.store.request(guard.plan())
    before = guard.audit.file.read_bytes()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for what in ("request", "consume", waiting.id):
            said = pool.submit(on_a_full_disk, guard.folder, what, put).result()
            assert said.startswith(("guard store", "audit log", "no throw-away key")), said
    assert guard.audit.file.read_bytes() == before
    assert guard.store.get(waiting.id).status == "pending"
    assert [request.status for request in guard.store.requests()] == ["spent", "pending"]


@pytest.mark.parametrize("place", ["tasks.requests.RequestFiles.write", "tasks.signing.sign"])
def test_a_crash_while_approving_approves_nothing_and_can_be_tried_again(
    guard: GuardState, store: ApprovalStore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    plan = guard.changing(guard.put(), guard.launch())
    request = store.request(plan)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, crash)
    with pytest.raises(KeyboardInterrupt):
        store.approve(request.id, reason="a test", ca_key=guard.ca_key)
    monkeypatch.undo()
    assert store.get(request.id).status == "pending"
    assert store.find(plan) is None
    assert guard.events() == ["request", "decision", "unsigned"]
    store.approve(request.id, reason="again", ca_key=guard.ca_key)
    assert store.find(plan) is not None
    assert guard.audit.verify(store.heads()) == []


def test_a_half_written_request_is_none(guard: GuardState, store: ApprovalStore, put: Approval) -> None:
    (store.folder / "requests" / f".{put.id}.json.part").write_text("{")
    assert [request.id for request in store.requests()] == [put.id]
    store.consume(put)


# --- what the user may not write

ATTEMPT = """
import sys
from pathlib import Path
from dflash.errors import run_cli
from tests.guard_state import GuardState
guard = object.__new__(GuardState)
guard.folder = Path(sys.argv[1])
put = guard.changing(guard.put())
run_cli(lambda: guard.store.consume(guard.store.require(put).of(guard.put())))
"""


def attempt_without_privileges(guard: GuardState) -> process.CompletedProcess[str]:
    """Use the approved change in a process that may only do what the modes of files say, also as root."""
    plain = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"] if os.geteuid() == 0 else []
    argv = [*plain, sys.executable, "-c", ATTEMPT, str(guard.folder)]
    return process.run(argv, check=False, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("place", "mode", "said"),
    [
        ("audit.jsonl", 0o400, "audit log"),
        ("requests/*.json", 0o000, "guard store"),
        ("keys/*-cert.pub", 0o000, "is not approved"),
    ],
)
def test_what_cannot_be_read_or_written_lets_nothing_be_used(
    guard: GuardState, store: ApprovalStore, put: Approval, place: str, mode: int, said: str
) -> None:
    (file,) = store.folder.glob(place)
    file.chmod(mode)
    result = attempt_without_privileges(guard)
    file.chmod(0o600)
    assert result.returncode == 77, result
    assert said in result.stderr
    assert not spent(guard)
    store.consume(store.require(guard.changing(guard.put())).of(guard.put()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("place", ["", "spent"])
def test_a_folder_that_is_somebody_elses_lets_nothing_be_used(
    guard: GuardState, store: ApprovalStore, put: Approval, place: str
) -> None:
    folder = store.folder / place
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    os.chown(folder, 65534, 65534)
    result = attempt_without_privileges(guard)
    assert result.returncode == 77, result
    assert "nothing is approved without it" in result.stderr
    assert not spent(guard)
