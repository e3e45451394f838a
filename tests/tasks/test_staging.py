"""A file from sshd to sshd through each of the object stores, and everything that can go wrong there."""

import dataclasses
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import DFlashError
from tasks import journal, staged_senders, staging
from tasks.actions import Upload
from tasks.approvals import Approval, Approved
from tasks.inventory import Location
from tasks.link_speed import measure
from tasks.object_store import ObjectStore
from tasks.plans import Plan
from tasks.relay import RelayResult, Settings, plan_relay, relay
from tasks.staged_leftovers import sweep
from tasks.staged_relay import plan_staged_uploads, relay_staged
from tasks.store_errors import StoreAccessError, StoreBusyError, StoreError
from tasks.transfer import Progress
from tasks.ways import choose_way
from tests.object_stores import BUCKET, StoreServer
from tests.sshds import Operator

# one store is enough here: what they differ in is in the client's tests
pytestmark = [
    pytest.mark.usefixtures("every_progress"),
    pytest.mark.parametrize("any_server", ["seaweedfs", pytest.param("rclone", marks=pytest.mark.slow)], indirect=True),
]

CHUNK = 1 << 20
SIZE = 5 * CHUNK + 4321


@dataclasses.dataclass
class Way:
    """One source on the protected host and its destination, by way of a store."""

    operator: Operator
    store: ObjectStore
    server: StoreServer
    source_file: Path
    destination_file: Path
    state: Path
    notices: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.source_host = self.operator.train

    @property
    def source(self) -> Location:
        return Location(self.source_host, str(self.source_file))

    @property
    def destination(self) -> Location:
        return Location(self.operator.infer, str(self.destination_file))

    def relay(self, progress: Progress | None = None, **changes: Any) -> RelayResult:
        settings = Settings(range_bytes=CHUNK, patience=30.0)
        approval = self._approval()
        return relay_staged(
            self.operator.connector,
            self.store,
            approval,
            self.source,
            self.destination,
            **({"settings": settings, "progress": progress, "notice": self.notices.append} | changes),
        )

    def relay_over_ssh(self, progress: Progress | None = None) -> RelayResult:
        settings = Settings(range_bytes=CHUNK, streams=1)
        return relay(
            self.operator.connector,
            self._approval(),
            self.source,
            self.destination,
            settings,
            progress=progress,
        )

    def plan_uploads(self) -> Plan:
        plan = plan_staged_uploads(
            self.operator.connector,
            self.store,
            self._approval(),
            self.source,
            self.destination,
            settings=Settings(range_bytes=CHUNK),
        )
        assert plan is not None
        return plan

    def approve_uploads(self) -> Approved:
        store = self.operator.store
        return store.approve(store.request(self.plan_uploads()).id, reason="test", ca_key=self.operator.site.ca_key)

    def _approval(self) -> Approval | None:
        plan = plan_relay([self.source], "a test reads it")
        if plan is None:
            return None
        store, ca_key = self.operator.store, self.operator.site.ca_key
        approved = store.find(plan) or store.approve(store.request(plan).id, reason="test", ca_key=ca_key, seconds=600)
        return approved.read

    def whole(self) -> bool:
        """Whether it arrived, with its sidecar, and nothing of it is anywhere else."""
        names = sorted(path.name for path in self.destination_file.parent.iterdir())
        name = self.destination_file.name
        left = list((self.state / "relays").iterdir())
        if names != [name, f"{name}.relay.json"] or self.server.keys() or left:
            return False
        sidecar = json.loads(self.destination_file.with_name(f"{name}.relay.json").read_bytes())
        content = self.destination_file.read_bytes()
        return content == self.source_file.read_bytes() and sidecar["sha256"] == hashlib.sha256(content).hexdigest()

    def nothing_arrived(self) -> bool:
        folder = self.destination_file.parent
        return not folder.exists() or all(".part-" in path.name for path in folder.iterdir())


@pytest.fixture
def way(
    operator: Operator, server: StoreServer, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Way:
    state = tmp_path / "state"
    monkeypatch.setenv("DFLASH_STATE", str(state))
    source = tmp_path / "there" / "step 1's «τ» $(true).pt"
    source.parent.mkdir()
    source.write_bytes(os.urandom(SIZE))
    return Way(operator, store, server, source, tmp_path / "here" / "step_1.pt", state)


def test_file_arrives_and_nothing_of_it_stays_in_the_store(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told: list[int] = []
    result = way.relay(lambda done, total: told.append(done))
    assert way.whole()
    assert result.sha256 == hashlib.sha256(way.source_file.read_bytes()).hexdigest()
    assert (result.bytes, result.moved, way.notices) == (SIZE, SIZE, [])
    assert told == sorted(told)
    assert told[-1] == SIZE
    audit = "".join(json.dumps(entry) for entry in way.operator.audit.entries())
    for secret in (way.server.secret_key, "X-Amz-Signature"):
        assert secret not in caplog.text + audit


@pytest.mark.slow
def test_few_chunks_are_in_the_store_at_once(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The destination is slower than the source; without the bound all would lie there."""
    most: list[int] = []
    fetch = staging.Receiver.fetch

    def slow(*arguments: Any, **more: Any) -> str:
        time.sleep(0.2)
        most.append(sum(found.key.startswith("relay/") for found in way.store.list("relay/")))
        return fetch(*arguments, **more)

    monkeypatch.setattr(staging.Receiver, "fetch", slow)
    way.source_file.write_bytes(os.urandom(10 * CHUNK))
    way.relay()
    assert way.whole()
    assert 2 <= max(most) <= staging.MOST_WAITING + 2


@pytest.mark.slow
class TestFaults:
    def test_lost_chunk_is_sent_again(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        self._before_first_fetch(
            monkeypatch, lambda: way.server.client().delete_object(Bucket=BUCKET, Key=way.server.keys()[0])
        )
        way.relay()
        assert way.whole()
        assert any("was lost in" in notice and "sending it again" in notice for notice in way.notices)

    def test_changed_chunk_is_sent_again(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        self._before_first_fetch(monkeypatch, lambda: self._spoil(way))
        way.relay()
        assert way.whole()
        assert any("came out of" in notice for notice in way.notices)

    @pytest.mark.slow
    def test_store_that_changes_a_chunk_every_time_is_given_up(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        place = ObjectStore.put

        def spoiling(store: ObjectStore, key: str, length: int, chunks: Iterator[memoryview]) -> None:
            place(store, key, length, (bytes(len(chunk)) if "probe" not in key else chunk for chunk in chunks))

        monkeypatch.setattr(ObjectStore, "put", spoiling)
        with pytest.raises(StoreError, match=r"came out of .*, 3 times: relay it with --via ssh"):
            way.relay()
        assert way.nothing_arrived()
        assert way.server.keys() == []

    def test_expired_url_is_made_anew(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        sign, expired = ObjectStore.presign_get, [True]

        def first_expired(store: ObjectStore, key: str, **_: Any) -> str:
            return sign(store, key, seconds=-5 if "probe" not in key and expired and expired.pop() else 900)

        monkeypatch.setattr(ObjectStore, "presign_get", first_expired)
        way.relay()
        assert way.whole()
        (notice,) = way.notices
        assert "answered 40" in notice
        assert "trying again" in notice
        assert "X-Amz" not in notice

    @pytest.mark.slow
    def test_secret_that_becomes_wrong_in_the_middle_is_named(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        sign = ObjectStore.presign_get

        def spoil(store: ObjectStore, key: str, **more: Any) -> str:
            return sign(store, key, **more)[:-4] + "beef"

        way.store.probe()
        monkeypatch.setattr(ObjectStore, "probe", lambda store: None)
        monkeypatch.setattr(ObjectStore, "presign_get", spoil)
        with pytest.raises(DFlashError, match="403") as error:
            way.relay()
        assert "beef" not in str(error.value)
        assert way.nothing_arrived()
        assert way.server.keys() == []

    def test_wrong_secret_moves_nothing(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-but-wrong")
        way.store = ObjectStore(way.server.staging())
        with pytest.raises(StoreAccessError, match="refused the credentials"):
            way.relay()
        assert way.nothing_arrived()

    def test_bucket_that_goes_in_the_middle_is_named(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        def remove_bucket() -> None:
            while len(way.server.keys()) <= staging.MOST_WAITING:
                time.sleep(0.05)
            # no chunk is on its way now, which might bring the bucket back
            way.server.clear()
            way.server.client().delete_bucket(Bucket=BUCKET)

        self._before_first_fetch(monkeypatch, remove_bucket)
        try:
            with pytest.raises(StoreAccessError, match="there is no such bucket"):
                way.relay()
        finally:
            way.server.client().create_bucket(Bucket=BUCKET)
        assert way.nothing_arrived()
        result = way.relay()
        assert way.whole()
        assert result.sha256 == hashlib.sha256(way.source_file.read_bytes()).hexdigest()

    def test_busy_store_is_waited_for(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        place, busy = ObjectStore.put, [True, True]

        def sometimes(store: ObjectStore, key: str, *arguments: Any) -> None:
            if "probe" not in key and busy:
                busy.pop()
                raise StoreBusyError("answered 503")
            place(store, key, *arguments)

        monkeypatch.setattr(ObjectStore, "put", sometimes)
        way.relay()
        assert way.whole()
        # one session looked at the file and one read all of it: no busy answer cost another
        assert len(way.operator.events("consumption")) == 2

    def test_source_that_changes_never_gets_its_final_name(self, way: Way) -> None:
        def rewrite() -> None:
            way.source_file.write_bytes(os.urandom(SIZE))

        with pytest.raises(DFlashError, match="changed while"), at_fourth("fetch", rewrite):
            way.relay()
        assert list(way.destination_file.parent.iterdir()) == []
        assert way.server.keys() == []

    @staticmethod
    def _before_first_fetch(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
        fetch, waiting = staging.Receiver.fetch, [act]

        def after(*arguments: Any, **more: Any) -> str:
            if waiting:
                waiting.pop()()
            return fetch(*arguments, **more)

        monkeypatch.setattr(staging.Receiver, "fetch", after)

    @staticmethod
    def _spoil(way: Way) -> None:
        key = way.server.keys()[0]
        content = bytearray(way.server.content(key))
        content[1000] ^= 1
        way.server.client().put_object(Bucket=BUCKET, Key=key, Body=bytes(content))


class TestByHost:
    """The source's host puts the chunks into the store by itself."""

    def test_unprotected_host_does_without_being_asked(self, way: Way) -> None:
        way.source_host = way.operator.infer
        result = way.relay()
        assert way.whole()
        assert result.sha256 == hashlib.sha256(way.source_file.read_bytes()).hexdigest()
        assert (result.moved, way.notices) == (SIZE, [])

    def test_protected_host_does_what_was_approved_and_nothing_is_read_by_this_machine(
        self, way: Way, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(staged_senders, "PARTS_AT_ONCE", 3)
        uploads = way.approve_uploads()
        assert [len(approval.action.parts) for approval in uploads.approvals] == [3, 3]  # type: ignore[attr-defined]
        way.relay(uploads=uploads)
        assert way.whole()
        ends = {entry["serial"]: entry for entry in way.operator.events("end")}
        assert [ends[approval.serial]["bytes"] for approval in uploads.approvals] == [3 * CHUNK, SIZE - 3 * CHUNK]
        # but for its first bytes, which tell whether it is a checkpoint
        assert sum(entry["bytes"] for entry in ends.values()) == SIZE + 4

    @pytest.mark.slow
    def test_chunk_that_is_lost_behind_a_spent_approval_is_read_by_the_grant(
        self, way: Way, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        TestFaults._before_first_fetch(
            monkeypatch,
            lambda: way.server.client().delete_object(Bucket=BUCKET, Key=way.server.keys()[0]),
        )
        uploads = way.approve_uploads()
        way.relay(uploads=uploads)
        assert way.whole()
        read = sum(entry["bytes"] for entry in way.operator.events("end")) - SIZE
        assert read == CHUNK + 4

    @pytest.mark.slow
    def test_plan_names_every_byte_and_object_and_is_the_same_until_something_arrives(self, way: Way) -> None:
        plan = way.plan_uploads()
        assert plan == way.plan_uploads()
        (upload,) = plan.changes
        assert isinstance(upload, Upload)
        assert (upload.bytes, upload.endpoint, upload.bucket) == (SIZE, way.server.endpoint, BUCKET)
        with pytest.raises(ZeroDivisionError), at_fourth("fetch", break_off):
            way.relay()
        (rest,) = way.plan_uploads().changes
        assert isinstance(rest, Upload)
        assert set(rest.parts) < set(upload.parts)

    @pytest.mark.slow
    def test_store_that_is_busy_for_the_host_is_waited_for(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        """The host's own word on it is not one that tells busy from broken."""
        way.source_host = way.operator.infer
        sign, busy = ObjectStore.presign_put, [True]

        def expired(store: ObjectStore, key: str, **more: Any) -> str:
            return (
                sign(store, key, seconds=-5) if "probe" not in key and busy and busy.pop() else sign(store, key, **more)
            )

        monkeypatch.setattr(ObjectStore, "presign_put", expired)
        way.relay()
        assert way.whole()
        (notice,) = way.notices
        assert re.search(r"took no 'relay/.*: 40[03]", notice)
        assert "X-Amz" not in notice


class TestLinks:
    def test_each_link_is_measured_and_nothing_stays(self, way: Way) -> None:
        way.source_host = way.operator.infer
        links = measure(way.operator.connector, way.store, None, way.source, way.destination)
        assert min(vars(links)[name] for name in vars(links) if name != "trouble") > 1
        assert way.server.keys() == []
        assert list(way.destination_file.parent.iterdir()) == []

    @pytest.mark.slow
    def test_protected_host_is_not_asked_to_upload(self, way: Way) -> None:
        links = measure(way.operator.connector, way.store, way._approval(), way.source, way.destination)
        assert links.source_to_store is None
        assert links.here_to_store is not None
        (end,) = way.operator.events("end")
        assert end["bytes"] == SIZE

    @pytest.mark.slow
    def test_store_that_cannot_be_used_is_said_to_be_why(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-but-wrong")
        store = ObjectStore(way.server.staging())
        links = measure(way.operator.connector, store, way._approval(), way.source, way.destination)
        choice = choose_way(links, SIZE, chunk=CHUNK)
        assert choice.way == "ssh"
        assert "refused the credentials" in choice.why


@contextmanager
def at_fourth(method: str, act: Callable[[], object]) -> Iterator[None]:
    """Act when a receiver is asked for the fourth time to do ``method``."""
    real, asked = getattr(staging.Receiver, method), []

    def ask(*arguments: Any, **more: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 4:
            act()
        return real(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging.Receiver, method, ask)
        yield


def break_off() -> None:
    raise ZeroDivisionError


def test_relay_that_broke_goes_on_with_what_is_missing(way: Way) -> None:
    with pytest.raises(ZeroDivisionError), at_fourth("fetch", break_off):
        way.relay()
    assert way.nothing_arrived()
    assert way.server.keys() == []
    result = way.relay()
    assert way.whole()
    assert 0 < result.moved < SIZE
    assert result.sha256 == hashlib.sha256(way.source_file.read_bytes()).hexdigest()


@pytest.mark.parametrize("first", ["s3", pytest.param("ssh", marks=pytest.mark.slow)])
def test_relay_goes_on_by_the_other_way(way: Way, first: str) -> None:
    one, other = (way.relay, way.relay_over_ssh) if first == "s3" else (way.relay_over_ssh, way.relay)
    with pytest.raises(ZeroDivisionError), at_fourth("fetch" if first == "s3" else "stored", break_off):
        one()
    assert 0 < other().moved < SIZE
    assert way.whole()


def killed_in_the_middle(way: Way) -> list[str]:
    """Relay in a process of its own that dies when some of it has arrived and some is in the store: its keys."""
    child = os.fork()
    if child == 0:
        try:
            with at_fourth("fetch", lambda: os.kill(os.getpid(), 9)):
                way.relay()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == 9
    return waiting_in_store(way)


def waiting_in_store(way: Way) -> list[str]:
    """The keys of the chunks that the journal knows to be in the store."""
    (file,) = (way.state / "relays").glob("*.json")
    notes = journal.read(file)
    assert notes is not None
    sent = [number for number, span in enumerate(notes.spans) if span.sha256 and not span.stored]
    return [f"relay/{notes.transfer}/{number:05}" for number in sent]


def test_killed_relay_goes_on_with_what_it_left_in_the_store(way: Way) -> None:
    left = killed_in_the_middle(way)
    assert set(left) <= set(way.server.keys())
    uploaded: list[str] = []
    place = ObjectStore.put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "put", lambda store, key, *rest: (uploaded.append(key), place(store, key, *rest))[1])
        result = way.relay()
    assert way.whole()
    assert result.moved < SIZE
    assert not set(uploaded) & set(left)


def test_what_a_killed_relay_left_is_swept_by_the_next_when_nobody_goes_on_with_it(way: Way) -> None:
    killed_in_the_middle(way)
    left = way.server.keys()
    assert sweep(way.store) == []
    (file,) = (way.state / "relays").glob("*.json")
    file.unlink()
    way.relay()
    assert left
    assert way.whole()


def test_what_another_machine_left_is_swept_after_a_day_and_nothing_else(way: Way) -> None:
    others = ["other/thing", "relay/notes.txt", f"relay/{'0' * 15}x/00001", f"relay/{'0' * 16}/manifest"]
    ours = [f"relay/{'ab' * 8}/00007", f"relay/{'ab' * 8}/00008", f"relay/probe-{'0' * 16}"]
    for key in others + ours:
        way.store.put(key, 1, [b"x"])
    assert sweep(way.store) == []
    assert sorted(sweep(way.store, now=lambda: time.time() + 25 * 3600)) == ours
    assert way.server.keys() == sorted(others)
