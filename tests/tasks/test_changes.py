"""Changes through real sshds: on a protected host, on one where the client enforces, and on an ordinary one."""

import hashlib
import http.server
import io
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dflash.errors import UsageError
from tasks import changes, public_keys, ssh
from tasks.actions import AnyChange, Part, Revoke, Run, Signal, Upload
from tasks.approvals import Approval
from tasks.changes import ContentError, NothingToRevokeError
from tasks.channel import RequestFailed
from tasks.errors import Refused
from tasks.gate import open_session
from tasks.inventory import Host
from tasks.plans import Plan
from tasks.routes import RouteError, Settings
from tests.changing import approve_change, approve_changes, launch_of, leave_mark, on, put_of, shell, with_second_person
from tests.sshds import Operator, Site, write_gate_configuration
from tests.tasks.test_client_enforcement import client_operator


@dataclass
class Place:
    """A host and who may change it."""

    operator: Operator
    host: Host
    output: list[tuple[str, bytes]] = field(default_factory=list)

    def approval(self, action: AnyChange) -> Approval | None:
        return approve_change(self.operator, action) if self.host.protected else None

    def run(self, action: Run, approval: Approval | None = None) -> int:
        approval = approval or self.approval(action)
        return changes.run(self.operator.connector, self.host, approval, action, lambda *said: self.output.append(said))

    def put(self, path: Path, content: bytes, source: BinaryIO | None = None, **more: Any) -> None:
        action = put_of(self.host, path, content, **more)
        changes.put(self.operator.connector, self.host, self.approval(action), action, source or io.BytesIO(content))

    def launch(self, jobs: Path, script: str, *arguments: str, **more: Any) -> int:
        action = launch_of(self.host, jobs, script, *arguments, **more)
        return changes.launch(self.operator.connector, self.host, self.approval(action), action)

    def signal(self, jobs: Path, name: str) -> int:
        common = on(self.host)
        action = Signal(**common, jobs=str(jobs), job="train-1", signal=name)  # type: ignore[arg-type]
        return changes.signal(self.operator.connector, self.host, self.approval(action), action)

    def said(self, stream: str) -> bytes:
        return b"".join(data for name, data in self.output if name == stream)


@pytest.fixture(params=["protected", "client", "ordinary"])
def place(request: pytest.FixtureRequest, site: Site, tmp_path: Path) -> Place:
    """Each kind of host."""
    if request.param == "client":
        operator = client_operator(site, tmp_path / "operator")
        return Place(operator, operator.train)
    operator = site.operator(tmp_path / "operator")
    return Place(operator, operator.train if request.param == "protected" else operator.infer)


WITH_AND_WITHOUT_A_GATE = pytest.mark.parametrize("place", ["protected", "ordinary"], indirect=True)


@pytest.fixture
def protected(operator: Operator) -> Place:
    return Place(operator, operator.train)


def test_a_command_runs_as_it_was_approved(place: Place, tmp_path: Path) -> None:
    odd = ["a b", "$(touch /tmp/never)", "line\nbreak", "'\"", "; exit 9", "*", "", "é"]
    action = shell(
        place.host,
        'pwd; echo "$SET-$HOME"; printf "<%s>" "$@"; echo bad >&2; cat; exit 3',
        *odd,
        cwd=str(tmp_path),
        env=(("SET", "to $this"),),
    )
    assert place.run(action) == 3
    words = "".join(f"<{word}>" for word in odd)
    assert place.said("stdout").decode() == f"{tmp_path}\nto $this-\n{words}"
    assert place.said("stderr") == b"bad\n"


def test_a_command_that_a_signal_ends_says_so(protected: Place) -> None:
    assert protected.run(shell(protected.host, "kill -USR1 $$")) == -10


def test_much_output_comes_whole_and_in_order(protected: Place) -> None:
    action = shell(protected.host, "seq 200000; seq 1000 >&2", bytes=1 << 21)
    assert protected.run(action) == 0
    assert protected.said("stdout") == b"".join(b"%d\n" % number for number in range(1, 200001))
    assert protected.said("stderr") == b"".join(b"%d\n" % number for number in range(1, 1001))


@pytest.mark.parametrize(
    ("script", "limits", "why"),
    [
        ("sleep 1000", {"seconds": 1}, "longer than the approved 1 s"),
        ("cat /dev/zero", {"bytes": 1 << 16}, "wrote more than"),
    ],
)
def test_a_command_is_ended_at_its_limits(protected: Place, script: str, limits: dict[str, int], why: str) -> None:
    with pytest.raises(RequestFailed, match=why):
        protected.run(shell(protected.host, f"echo $$; {script}", **limits))
    assert len(protected.said("stdout")) <= 1 << 16
    _wait_until_gone(int(protected.said("stdout").split()[0]))


def test_a_command_ends_with_the_client_that_wanted_it(place: Place) -> None:
    started: list[int] = []

    def interrupt(_: str, data: bytes) -> None:
        started.extend(map(int, data.split()))
        raise KeyboardInterrupt

    action = shell(place.host, "echo $$; sleep 1000", seconds=600)
    with pytest.raises(KeyboardInterrupt):
        changes.run(place.operator.connector, place.host, place.approval(action), action, interrupt)
    _wait_until_gone(started[0])
    if place.host.protected:
        assert place.operator.events("end")[-1]["outcome"].startswith("KeyboardInterrupt")


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_program_that_is_not_there_is_a_failure(protected: Place) -> None:
    action = Run(**on(protected.host), argv=("/no/such/program",), seconds=10)
    with pytest.raises(RequestFailed, match="No such file"):
        protected.run(action)


def test_a_change_is_spent_before_it_is_sent_and_its_end_recorded(protected: Place, tmp_path: Path) -> None:
    operator = protected.operator
    action = shell(protected.host, "exit 3")
    approval = approve_change(operator, action)
    assert protected.run(action, approval) == 3
    (used,), (ended,) = operator.events("consumption"), operator.events("end")
    assert (used["serial"], used["digest"]) == (approval.serial, action.digest())
    assert (ended["serial"], ended["outcome"]) == (approval.serial, "exit 3")
    request = operator.store.get(approval.id)
    assert (request.status, request.outcome) == ("spent", "exit 3")
    with pytest.raises(Refused, match="was used already") as refused:
        protected.run(action, approval)
    assert refused.value.exit_code == 77
    assert operator.events("refusal")[-1]["serial"] == approval.serial
    assert operator.audit.verify() == []


def test_a_failed_change_is_spent_with_its_reason(protected: Place, tmp_path: Path) -> None:
    action = put_of(protected.host, tmp_path / "missing" / "file", b"x")
    approval = approve_change(protected.operator, action)
    with pytest.raises(RequestFailed, match="No such file"):
        changes.put(protected.operator.connector, protected.host, approval, action, io.BytesIO(b"x"))
    assert "No such file" in str(protected.operator.store.get(approval.id).outcome)


def test_an_approval_of_something_else_is_refused_before_anything_is_sent(
    protected: Place, site: Site, tmp_path: Path
) -> None:
    operator, marks = protected.operator, tmp_path / "marks"
    one, other = leave_mark(protected.host, marks, "one"), leave_mark(protected.host, marks, "other")
    first, second = approve_changes(operator, one, other)
    grant = operator.approve(path="/etc/hostname")
    before = site.protected.logged()
    for approval, action in ((first, other), (second, one), (grant, one)):
        with pytest.raises(Refused, match="is of another action"):
            changes.run(operator.connector, protected.host, approval, action, lambda *_: None)
    with pytest.raises(Refused, match="is for train, not for infer"):
        changes.run(operator.connector, operator.infer, first, one, lambda *_: None)
    with pytest.raises(Refused, match="is protected"):
        changes.run(operator.connector, protected.host, None, one, lambda *_: None)
    assert len(operator.events("refusal")) == 5
    assert operator.events("consumption") == []
    assert site.protected.logged() == before
    assert protected.run(one, first) == 0


@pytest.fixture
def second_person(operator: Operator, site: Site, tmp_path: Path) -> Iterator[Operator]:
    """An operator who needs a second person, as the gate knows."""
    two = with_second_person(operator, tmp_path / "second")
    keys = [public_keys.fingerprint(key) for key in site.protected.host_keys]
    persons = dict(two.inventory.guard.second_persons)
    write_gate_configuration(site.folder, host_keys=keys, second_persons=persons)
    yield two
    write_gate_configuration(site.folder, host_keys=keys)


def test_the_second_persons_signature_reaches_the_gate(second_person: Operator, tmp_path: Path) -> None:
    two, marks = second_person, tmp_path / "marks"
    action, alone = leave_mark(two.train, marks), leave_mark(two.train, marks, "alone")
    approval = approve_change(two, action)
    two.store.countersign(approval.id, name="second", key=tmp_path / "second")
    approved = two.store.require(Plan(changes=(action,), effect="a test changes something"))
    assert changes.run(two.connector, two.train, approved.of(action), action, lambda *_: None) == 0
    with pytest.raises(Refused):
        changes.run(two.connector, two.train, approve_change(two, alone), alone, lambda *_: None)
    assert marks.read_text() == "ran\n"


def test_a_way_that_cannot_be_followed_spends_nothing(
    protected: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    action = leave_mark(protected.host, tmp_path / "marks")
    approval = approve_change(protected.operator, action)
    with monkeypatch.context() as patched:
        patched.setattr(ssh, "effective_settings", lambda address: Settings(address, proxy_command="nc"))
        with pytest.raises(RouteError, match="ProxyCommand"):
            protected.run(action, approval)
    assert protected.operator.events("consumption") == []
    assert protected.run(action, approval) == 0


@WITH_AND_WITHOUT_A_GATE
def test_a_file_is_written_whole_and_replaces_only_what_it_may(place: Place, tmp_path: Path) -> None:
    target, content = tmp_path / "config", os.urandom(3 << 20)
    place.put(target, content, mode=0o600)
    assert target.read_bytes() == content
    assert target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RequestFailed, match="replaced"):
        place.put(target, b"other")
    place.put(target, b"new", replaces=hashlib.sha256(content).hexdigest())
    assert target.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir() if file.name != "operator"] == ["config"]


def test_progress_of_a_put(protected: Place, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    content = bytes(3 << 20)
    action = put_of(protected.host, tmp_path / "file", content)
    approval = approve_change(protected.operator, action)
    source = io.BytesIO(b"before" + content + b"")
    source.seek(6)
    changes.put(
        protected.operator.connector,
        protected.host,
        approval,
        action,
        source,
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(number << 20, 3 << 20) for number in (1, 2, 3)]
    assert (tmp_path / "file").read_bytes() == content


def test_other_bytes_than_the_approved_ones_spend_nothing(protected: Place, tmp_path: Path) -> None:
    action = put_of(protected.host, tmp_path / "file", b"approved")
    approval = approve_change(protected.operator, action)
    for content in (b"approvet", b"approved and more", b"appro", b""):
        with pytest.raises(ContentError, match="make a new plan"):
            changes.put(protected.operator.connector, protected.host, approval, action, io.BytesIO(content))
    assert protected.operator.events("consumption") == []
    changes.put(protected.operator.connector, protected.host, approval, action, io.BytesIO(b"approved"))
    assert (tmp_path / "file").read_bytes() == b"approved"


class _Pipe(io.BytesIO):
    """Cannot be read twice."""

    def seekable(self) -> bool:
        return False


@pytest.mark.parametrize("content", [b"approvet", b"appro"])
def test_other_bytes_that_show_too_late_are_not_written(protected: Place, tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ContentError, match="nothing was written"):
        protected.put(tmp_path / "file", b"approved", _Pipe(content))
    _wait_until_empty(tmp_path)


def _wait_until_empty(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while [file for file in folder.iterdir() if file.name != "operator"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@WITH_AND_WITHOUT_A_GATE
def test_a_job_outlives_its_session_and_is_launched_and_signalled_once(place: Place, tmp_path: Path) -> None:
    pid = place.launch(tmp_path, 'echo "$1"; trap "exit 5" TERM; while :; do sleep 0.05; done', "working")
    folder = tmp_path / "train-1"
    about = json.loads((folder / "job.json").read_text())
    assert (about["job"], about["pid"]) == ("train-1", pid)
    with pytest.raises(RequestFailed, match="File exists"):
        place.launch(tmp_path, "echo twice")
    assert Path(f"/proc/{pid}").exists()
    while "working" not in (folder / "output.log").read_text():
        time.sleep(0.02)
    assert place.signal(tmp_path, "TERM") == pid
    deadline = time.monotonic() + 60
    while not (folder / "exit").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert json.loads((folder / "exit").read_text())["exit"] == 5
    with pytest.raises(RequestFailed, match="ended"):
        place.signal(tmp_path, "KILL")


@dataclass
class Store:
    """An object store as far as a presigned PUT goes."""

    endpoint: str
    objects: dict[str, bytes]


@pytest.fixture
def store() -> Iterator[Store]:
    objects: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            objects[self.path.partition("?")[0]] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("ETag", '"abc"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Store(f"http://127.0.0.1:{server.server_port}", objects)
    server.shutdown()
    thread.join()
    server.server_close()


def _upload_of(host: Host, store: Store, file: Path, *spans: tuple[int, int]) -> Upload:
    found = file.stat()
    parts = tuple(
        Part(offset=offset, length=length, key=f"relay/{number}") for number, (offset, length) in enumerate(spans)
    )
    identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return Upload(
        **on(host), path=str(file), identity=identity, endpoint=store.endpoint, bucket="b", parts=parts, seconds=30
    )


def test_parts_of_a_file_reach_the_object_store(place: Place, store: Store, tmp_path: Path) -> None:
    file, content = tmp_path / "step.pt", os.urandom(3 << 20)
    file.write_bytes(content)
    action = _upload_of(place.host, store, file, (0, 5), (1 << 20, 2 << 20))
    urls = [f"{store.endpoint}/b/relay/{number}?X-Amz-Signature=secret" for number in range(2)]
    seen: list[tuple[int, int]] = []
    taken = changes.upload(
        place.operator.connector,
        place.host,
        place.approval(action),
        action,
        urls,
        lambda done, total: seen.append((done, total)),
    )
    wanted = [content[:5], content[1 << 20 :]]
    assert [store.objects[f"/b/relay/{number}"] for number in range(2)] == wanted
    assert [(each.part, each.sha256, each.crc32) for each in taken] == [
        (number, hashlib.sha256(part).hexdigest(), zlib.crc32(part)) for number, part in enumerate(wanted)
    ]
    assert taken[0].etag.strip('"') == "abc"
    assert seen == [(5, 5 + (2 << 20)), (5 + (2 << 20), 5 + (2 << 20))]
    if place.host.protected:
        assert "secret" not in place.operator.audit.file.read_text()


def test_a_url_that_leads_elsewhere_sends_nothing_and_is_not_repeated(
    protected: Place, store: Store, tmp_path: Path
) -> None:
    file = tmp_path / "step.pt"
    file.write_bytes(b"content")
    action = _upload_of(protected.host, store, file, (0, 5))
    with pytest.raises((RequestFailed, Refused)) as failed:
        changes.upload(
            protected.operator.connector,
            protected.host,
            protected.approval(action),
            action,
            [f"{store.endpoint}/b/relay/1?X-Amz-Signature=secret"],
        )
    assert "secret" not in str(failed.value)
    assert store.objects == {}


def test_as_many_urls_as_parts_or_nothing_is_spent(protected: Place, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "step.pt"
    file.write_bytes(b"content")
    action = _upload_of(protected.host, store, file, (0, 5))
    with pytest.raises(UsageError, match="0 URLs for 1 parts"):
        changes.upload(
            protected.operator.connector, protected.host, approve_change(protected.operator, action), action, []
        )
    assert protected.operator.events("consumption") == []


def test_a_revoked_certificate_is_refused_by_the_host_also_in_an_open_session(protected: Place, tmp_path: Path) -> None:
    operator = protected.operator
    (tmp_path / "file").write_text("content")
    grant = operator.approve(path=str(tmp_path / "file"))
    action = Revoke(**on(protected.host), serial=grant.serial)
    approval = approve_change(operator, action)
    with open_session(operator.connector, protected.host, grant) as session:
        session.hash(str(tmp_path / "file"))
        changes.revoke(operator.connector, protected.host, approval, action)
        with pytest.raises(Refused, match="revoked"):
            session.hash(str(tmp_path / "file"))


def test_where_nothing_looks_at_certificates_revoking_spends_nothing(site: Site, tmp_path: Path) -> None:
    operator = client_operator(site, tmp_path / "operator")
    action = Revoke(**on(operator.train), serial=7)
    approval = approve_change(operator, action)
    with pytest.raises(NothingToRevokeError, match="the key is deleted"):
        changes.revoke(operator.connector, operator.train, approval, action)
    assert operator.events("consumption") == []
