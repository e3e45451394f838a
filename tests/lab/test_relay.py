"""A file from the training host to the inference host of the lab, and everything that can go wrong on its way."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash.errors import DFlashError, UsageError
from tasks import process
from tasks.approvals import ApprovalStore
from tasks.errors import Refused
from tasks.inventory import Inventory, Location
from tasks.journal import JournalError
from tasks.lab import Lab
from tasks.relay import FILE_BYTES, RelayResult, Settings, plan_relay, relay
from tasks.ssh import Connector, HostKeyError
from tasks.transfer import Progress, ReceiverError
from tests.relaying import command, ssh_children

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("every_progress")]

SOURCES = "/workspace/dflash/checkpoints"
DESTINATIONS = "/root/eval/cache"
IN_FLIGHT = 48 << 20  # more than all pipes and windows on the way hold together


@dataclass
class Desk:
    """The operator's side: what the command line makes of one ``hosts.yaml``."""

    lab: Lab
    known: Inventory
    store: ApprovalStore
    connector: Connector

    @classmethod
    def of(cls, lab: Lab, hosts: Path | None = None) -> "Desk":
        connector = Connector.load(hosts or lab.hosts_file)
        return cls(lab, connector.inventory, connector.store, connector)

    def place(self, host: str, path: str) -> Location:
        return self.known.location(f"{host}:{self.lab.seen(host, path)}")

    def approve(self, source: Location, *, max_bytes: int = FILE_BYTES) -> None:
        plan = plan_relay([source], "a test reads it", max_bytes=max_bytes)
        assert plan is not None
        self.store.approve(self.store.request(plan).id, reason="test", ca_key=self.lab.ca_key, seconds=600)

    def relay(
        self,
        source: Location,
        destination: Location,
        *,
        progress: Progress | None = None,
        max_bytes: int = FILE_BYTES,
        **options: Any,
    ) -> RelayResult:
        plan = plan_relay([source], "a test reads it", max_bytes=max_bytes)
        approval = None if plan is None else self.store.require(plan).read
        return relay(self.connector, approval, source, destination, progress=progress, **options)


@dataclass
class Way:
    """One source on the training host and its destination, each in a directory of its own."""

    desk: Desk
    source: Location
    destination: Location
    source_file: Path
    destination_file: Path

    def relay(self, progress: Progress | None = None, **options: Any) -> RelayResult:
        return self.desk.relay(self.source, self.destination, progress=progress, **options)

    def arrived(self) -> list[str]:
        """Every name in the destination's directory but that of an unfinished file."""
        folder = self.destination_file.parent
        names = os.listdir(folder) if folder.exists() else []
        return sorted(name for name in names if ".part-" not in name)

    def whole(self) -> bool:
        """Whether the file is there with its sidecar and equals the source."""
        name = self.destination_file.name
        arrived = self.arrived() == sorted([name, f"{name}.relay.json"])
        return arrived and self.destination_file.read_bytes() == self.source_file.read_bytes()


@pytest.fixture
def desk(lab: Lab) -> Desk:
    return Desk.of(lab)


@pytest.fixture
def way(desk: Desk, request: pytest.FixtureRequest) -> Iterator[Way]:
    """A way with a source of :data:`IN_FLIGHT` bytes and an approval."""
    name = f"{request.node.name.replace('[', '-').replace(']', '')}/step 1's «τ» $(true).pt"
    made = make_way(desk, name)
    made.source_file.parent.mkdir(parents=True)
    made.source_file.write_bytes(os.urandom(IN_FLIGHT))
    desk.approve(made.source)
    yield made
    made.source_file.unlink(missing_ok=True)
    made.destination_file.unlink(missing_ok=True)


def make_way(desk: Desk, name: str) -> Way:
    source, destination = f"{SOURCES}/{name}", f"{DESTINATIONS}/{name}"
    return Way(
        desk,
        desk.place("kpro6", source),
        desk.place("ct129", destination),
        desk.lab.host_path("kpro6", source),
        desk.lab.host_path("ct129", destination),
    )


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def at_first_bytes(action: Callable[[], object]) -> Progress:
    """A progress callback that acts once, when the first bytes have moved."""
    calls = []

    def progress(done: int, total: int) -> None:
        if done and not calls:
            calls.append(done)
            action()

    return progress


def test_file_arrives_whole_and_verified(way: Way) -> None:
    seen: list[tuple[int, int]] = []
    result = way.relay(lambda done, total: seen.append((done, total)))
    content = way.source_file.read_bytes()
    assert way.destination_file.read_bytes() == content
    assert result.sha256 == hashlib.sha256(content).hexdigest()
    assert (result.bytes, result.source_bytes, result.moved) == (len(content),) * 3
    assert result.mb_per_s == pytest.approx(len(content) / 1e6 / result.seconds)
    assert (seen[0][0], seen[-1]) == (0, (len(content), len(content)))
    assert way.whole()
    sidecar = json.loads(way.destination_file.with_name(f"{way.destination_file.name}.relay.json").read_text())
    assert (sidecar["source"], sidecar["sha256"]) == (str(way.source), result.sha256)
    assert (sidecar["selected"], sidecar["bytes"]) == ("all as it is safetensors", len(content))


def test_what_is_there_already_does_not_move_again(way: Way) -> None:
    way.relay()
    first = way.destination_file.stat().st_ino
    assert way.relay().moved == 0
    assert (way.whole(), way.destination_file.stat().st_ino) == (True, first)


def test_what_was_changed_at_the_destination_moves_again(way: Way) -> None:
    way.relay()
    with way.destination_file.open("r+b") as file:
        file.write(b"spoilt")
    assert way.relay().moved == IN_FLIGHT
    assert way.whole()


def test_unprotected_source_needs_no_approval(desk: Desk) -> None:
    desk.lab.host_path("ct129", f"{DESTINATIONS}/here").write_bytes(b"free")
    desk.relay(desk.place("ct129", f"{DESTINATIONS}/here"), desk.place("ct129", f"{DESTINATIONS}/there"))
    assert desk.lab.host_path("ct129", f"{DESTINATIONS}/there").read_bytes() == b"free"


def test_plan_of_several_files_covers_each_of_them(desk: Desk) -> None:
    files = [make_way(desk, f"run_{step}/step_{step}.pt").source for step in (1, 2, 3)]
    together = plan_relay(files, "all")
    alone = [plan_relay([file], "one") for file in files]
    assert together is not None
    assert together.grant is not None
    assert all(plan is not None and plan.grant is not None and together.grant.covers(plan.grant) for plan in alone)
    assert len(together.grant.paths) == 6


def test_more_files_than_one_approval_can_name_are_refused(desk: Desk) -> None:
    files = [make_way(desk, f"many/step_{step}.pt").source for step in range(40)]
    with pytest.raises(UsageError, match="41 files are too many for one approval"):
        plan_relay(files, "all")


def test_files_of_two_hosts_are_not_one_plan(desk: Desk) -> None:
    with pytest.raises(UsageError, match="relay from one host at a time"):
        plan_relay([desk.place("kpro6", "/a"), desk.place("ct129", "/a")], "both")


def test_without_approval_nothing_happens_on_either_host(desk: Desk) -> None:
    way = make_way(desk, "unapproved/file")
    way.source_file.parent.mkdir()
    way.source_file.write_bytes(b"secret")
    logs = [desk.lab.host_path(host, "/var/log/sshd.log") for host in ("kpro6", "ct129")]
    before = [log.read_text() for log in logs]
    with pytest.raises(Refused, match="dflash-ops guard approve") as refused:
        way.relay()
    assert refused.value.exit_code == 77
    assert refused.value.request_id is not None
    assert [log.read_text() for log in logs] == before
    assert way.arrived() == []


def test_protected_destination_is_refused(way: Way) -> None:
    with pytest.raises(Refused, match="kpro6 is protected"):
        way.desk.relay(way.source, way.desk.place("kpro6", f"{SOURCES}/copy"))


def test_either_end_may_be_this_machine(way: Way, tmp_path: Path) -> None:
    here = Location(None, str(tmp_path / "copy"))
    assert way.desk.relay(way.source, here).bytes == IN_FLIGHT
    assert (tmp_path / "copy").read_bytes() == way.source_file.read_bytes()
    way.desk.relay(here, way.destination)
    assert way.whole()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: None, "No such file or directory"),
        (lambda file: file.mkdir(), "holds nothing; expected a manifest.json"),
        (lambda file: os.mkfifo(file), "is neither a file nor a directory: name one"),
        (lambda file: file.touch(), "is empty: relay it when it has been written"),
        (lambda file: file.write_bytes(bytes(2_000_000)), "2 MB, but 1 MB were asked for"),
    ],
    ids=["missing", "directory", "fifo", "empty", "larger than asked for"],
)
def test_unfit_source_is_named(
    desk: Desk, make: Callable[[Path], object], message: str, request: pytest.FixtureRequest
) -> None:
    way = make_way(desk, f"unfit {request.node.callspec.id}/file")
    way.source_file.parent.mkdir()
    make(way.source_file)
    desk.approve(way.source, max_bytes=1_000_000)
    with pytest.raises(DFlashError, match=message) as error:
        desk.relay(way.source, way.destination, max_bytes=1_000_000)
    assert "\n" not in str(error.value)
    assert way.arrived() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: os.truncate(file, IN_FLIGHT + 1), "changed while read"),
        (lambda file: os.truncate(file, IN_FLIGHT // 2), "changed while read"),
        (lambda file: os.utime(file, (0, 0)), "changed while read"),
        (lambda file: file.unlink(), "vanished while it was read"),
        (lambda file: (file.with_name("new").write_bytes(b"new"), file.with_name("new").rename(file)), "changed while"),
    ],
    ids=["growing", "truncated", "touched", "vanishing", "replaced"],
)
def test_source_that_changes_while_it_is_read_never_gets_its_final_name(
    way: Way, change: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(DFlashError, match=message) as error:
        way.relay(at_first_bytes(lambda: change(way.source_file)))
    assert "\n" not in str(error.value)
    assert way.arrived() == []


def test_unprotected_source_that_changes_is_noticed_too(desk: Desk) -> None:
    file = desk.lab.host_path("ct129", f"{DESTINATIONS}/growing")
    file.write_bytes(b"first")
    with pytest.raises(DFlashError, match="changed while"):
        desk.relay(
            desk.place("ct129", f"{DESTINATIONS}/growing"),
            desk.place("ct129", f"{DESTINATIONS}/grown"),
            progress=at_first_bytes(lambda: os.utime(file, (0, 0))),
        )
    assert not desk.lab.host_path("ct129", f"{DESTINATIONS}/grown").exists()


def test_used_up_grant_refuses(desk: Desk) -> None:
    way = make_way(desk, "used up/file")
    way.source_file.parent.mkdir()
    way.source_file.write_bytes(bytes(700_000))
    desk.approve(way.source, max_bytes=1_000_000)
    desk.relay(way.source, way.destination, max_bytes=1_000_000)
    way.destination_file.unlink()
    with pytest.raises(Refused):
        desk.relay(way.source, way.destination, max_bytes=1_000_000)
    assert not way.destination_file.exists()


def test_directory_as_destination_is_refused(way: Way) -> None:
    way.destination_file.mkdir(parents=True)
    with pytest.raises(ReceiverError, match="is a directory: give the file's full name"):
        way.relay()
    way.destination_file.rmdir()


def test_destination_below_a_file_is_refused(way: Way) -> None:
    in_the_way = way.destination_file.parent
    in_the_way.write_bytes(b"in the way")
    with pytest.raises(ReceiverError, match=r"ct129:.*is not a directory, or is below a file"):
        way.relay()
    assert in_the_way.read_bytes() == b"in the way"
    in_the_way.unlink()


def test_full_destination_is_found_before_the_first_byte(way: Way) -> None:
    if not way.desk.lab.privileged:
        pytest.skip("mounting a small disk needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", "/mnt"]
    assert way.desk.lab.exec("ct129", mount).returncode == 0
    called: list[int] = []
    try:
        with pytest.raises(ReceiverError, match=rf"no room for '/mnt/file': {IN_FLIGHT} bytes needed, \d+ free"):
            way.desk.relay(
                way.source, way.desk.place("ct129", "/mnt/file"), progress=lambda done, total: called.append(done)
            )
        assert way.desk.lab.exec("ct129", ["ls", "-A", "/mnt"]).stdout.strip() == ""
        assert called == []
    finally:
        way.desk.lab.exec("ct129", ["umount", "/mnt"])


def test_host_that_does_not_come_back_ends_the_relay_and_the_next_one_moves_the_rest(way: Way) -> None:
    """Ranges that were confirmed before the crash do not move again."""
    parts = Settings(range_bytes=IN_FLIGHT // 12, patience=0.5)

    def crash_late(done: int, total: int) -> None:
        if done > total * 0.8:
            way.desk.lab.kill_sshd("ct129")

    try:
        with pytest.raises(DFlashError, match="ct129"):
            way.relay(crash_late, settings=parts)
        assert way.arrived() == []
    finally:
        way.desk.lab.restart_sshd("ct129")
    result = way.relay(settings=parts)
    assert way.whole()
    assert 0 < result.moved < IN_FLIGHT // 2
    assert result.sha256 == hashlib.sha256(way.source_file.read_bytes()).hexdigest()


def test_rewritten_source_begins_anew_after_a_broken_relay(way: Way) -> None:
    parts = Settings(range_bytes=IN_FLIGHT // 12, patience=0.5)
    with pytest.raises(ZeroDivisionError):
        way.relay(lambda done, total: done > total * 0.8 and 1 // 0, settings=parts)
    way.source_file.write_bytes(os.urandom(IN_FLIGHT))
    way.desk.approve(way.source, max_bytes=FILE_BYTES - 1)
    result = way.desk.relay(way.source, way.destination, settings=parts, max_bytes=FILE_BYTES - 1)
    assert result.moved == IN_FLIGHT
    assert way.whole()


def test_several_streams_bring_the_same_file(way: Way) -> None:
    result = way.relay(settings=Settings(streams=2, range_bytes=IN_FLIGHT // 7, reread=True))
    assert (way.whole(), result.streams) == (True, 2)
    assert result.sha256 == hashlib.sha256(way.source_file.read_bytes()).hexdigest()


def test_bytes_that_changed_on_the_destinations_disk_are_found_by_reading_again(way: Way) -> None:
    parts = Settings(range_bytes=IN_FLIGHT // 12, reread=True)

    def spoil(done: int, total: int) -> None:
        if done > total // 2:
            (part,) = (path for path in way.destination_file.parent.iterdir() if ".part-" in path.name)
            with part.open("r+b") as file:
                file.write(b"spoilt")

    with pytest.raises(ReceiverError, match=r"at 0 are not on the disk as they came: relay it again"):
        way.relay(spoil, settings=parts)
    assert way.arrived() == []
    way.relay(settings=parts)
    assert way.whole()


def test_two_relays_of_one_file_at_once_are_one(way: Way) -> None:
    refused: list[str] = []

    def another() -> None:
        with pytest.raises(JournalError, match=r"is on its way to .* already") as error:
            way.relay()
        refused.append(str(error.value))

    way.relay(at_first_bytes(another))
    assert len(refused) == 1
    assert way.whole()


@pytest.mark.parametrize("host", ["kpro6", "ct129"])
def test_wrong_host_key_stops_before_authentication(lab: Lab, tmp_path: Path, host: str) -> None:
    process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"])
    tree = yaml.safe_load(lab.hosts_file.read_text())
    tree["hosts"][host]["host_keys"] = [(tmp_path / "other.pub").read_text()]
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(tree))
    way = make_way(Desk.of(lab, tmp_path / "hosts.yaml"), f"wrong key of {host}/file")
    way.source_file.parent.mkdir()
    way.source_file.write_bytes(b"content")
    way.desk.approve(way.source)
    with pytest.raises(HostKeyError, match=rf"{host} .* showed the host key"):
        way.relay()
    assert way.arrived() == []


def start(way: Way, *options: str) -> process.Popen[bytes]:
    return command(f"kpro6:{way.source.path}", f"ct129:{way.destination.path}", *options)


def finish(running: process.Popen[bytes]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    printed, said = running.communicate(timeout=120)
    return running.returncode, printed.decode(), said.decode()


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)]
)
def test_interrupted_command_leaves_nothing_and_a_second_one_works(way: Way, signum: int, code: int) -> None:
    size = 120_000_000  # more than half a second at the lab's read limit
    os.truncate(way.source_file, size)
    running = start(way)
    folder = way.destination_file.parent
    wait_until(lambda: folder.exists() and any(".part-" in name for name in os.listdir(folder)))
    ends = [way.desk.known.host(name) for name in ("kpro6", "ct129")]

    def connections() -> list[int]:
        return [child for end in ends for child in ssh_children(running.pid, end)]

    wait_until(lambda: len(connections()) == 2)
    children = connections()
    assert len(children) == 2
    running.send_signal(signum)
    ended, _, said = finish(running)
    assert ended == code
    assert said.splitlines()[:-1] == (
        []
        if signum == signal.SIGKILL
        else ["interrupted: nothing half has its final name; the same command goes on with what is missing"]
    )
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert way.arrived() == []

    ended, printed, said = finish(start(way, "--json"))
    assert ended == 0, said
    result = json.loads(printed)
    assert (result["bytes"], way.destination_file.stat().st_size) == (size, size)
    assert result["sha256"] == hashlib.sha256(way.source_file.read_bytes()).hexdigest()
    assert int(said.split()[-1]) < 150 * 1024  # KiB at the peak
    assert way.whole()


def test_plan_shows_what_is_asked_and_touches_nothing(desk: Desk) -> None:
    way = make_way(desk, "planned/file")
    requests = len(desk.store.requests())
    ended, printed, said = finish(start(way, "--plan"))
    assert ended == 0, said
    assert str(FILE_BYTES) in printed
    assert "not approved" in printed
    assert len(desk.store.requests()) == requests
    desk.approve(way.source)
    assert "approved: " in finish(start(way, "--plan"))[1]
