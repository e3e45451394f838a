"""What breaks a relay, over two real sshds: it ends with the right file or with an error and nothing under its name."""

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import DFlashError
from tasks import streams
from tasks.errors import Refused
from tasks.gate import open_session
from tasks.inventory import Location
from tasks.journal import JournalError
from tasks.relay import RelayResult, relay
from tasks.ssh import ConnectionFailed
from tasks.transfer import Pace, ReceiverError, SourceChangedError
from tests.proxies import TO_CLIENT, TO_SERVER, Proxy, between
from tests.relaying import MIB, Way, command, fork, once, parts, peak_memory, ssh_children, wait_until, working_on
from tests.sshds import Site, both_sshds

pytestmark = pytest.mark.usefixtures("every_progress")

SIZE = 16 * MIB
"""More than pipes and windows on the way hold together."""
VICTIMS = ("relay", "ssh to train", "ssh to infer", "sshd of train", "sshd of infer")
HOSTS = ("train", "infer")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two sshds of this module's own: it kills them."""
    with both_sshds(tmp_path_factory.mktemp("sshds")) as running:
        yield running


@pytest.fixture
def way(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Way:
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "operator"))
    made = Way.through(site, tmp_path)
    made.lay(SIZE)
    return made


@pytest.fixture
def links(site: Site) -> Iterator[dict[str, Proxy]]:
    """A bad link to each host; a way through them has its entries."""
    with (
        between(site.protected.address, site.protected.port) as to_train,
        between(site.ordinary.address, site.ordinary.port) as to_infer,
    ):
        yield {"train": to_train, "infer": to_infer}


@pytest.fixture
def bad_way(site: Site, links: dict[str, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Way:
    """As ``way``, through ``links``."""
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "operator"))
    made = Way.through(site, tmp_path, {host: {"port": link.port} for host, link in links.items()})
    made.lay(SIZE)
    return made


# --- kill -9


class Murder:
    """Kills one of the five at a moment of a relay; an sshd comes back a moment later."""

    def __init__(self, site: Site, way: Way, victim: str, chance: random.Random) -> None:
        self._way, self._chance = way, chance
        self._what, _, host = victim.rpartition(" ")
        self._host = way.operator.inventory.host(host) if self._what else None
        self._sshd = site.protected if host == "train" else site.ordinary
        self.comebacks: list[threading.Timer] = []

    def __call__(self) -> None:
        assert self._way.nothing_arrived()
        if self._host is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._what.startswith("sshd"):
            self._sshd.crash()
            comeback = threading.Timer(self._chance.uniform(0.0, 1.0), self._sshd.restart)
            comeback.start()
            self.comebacks.append(comeback)
        else:
            os.kill(self._chance.choice(ssh_children(os.getpid(), self._host)), signal.SIGKILL)


def kill_and_resume(site: Site, way: Way, victim: str, chance: random.Random) -> RelayResult:
    """Relay, kill ``victim`` when a random part has moved, relay again where that ended it."""
    settings = parts(SIZE, 6, streams=chance.randint(1, 2))
    murder = Murder(site, way, victim, chance)
    moment = once(chance.randrange(1, SIZE * 9 // 10), murder)
    if victim != "relay":
        result = way.relay(moment, settings=settings)
        for comeback in murder.comebacks:
            comeback.join()
        return result
    killed = fork(way, moment, settings=settings)
    assert killed.end() is None
    assert way.nothing_arrived()
    stored = way.stored_bytes()
    # the hosts find out that nobody is there any more, and let go of the file and of the session slots
    wait_until(lambda: not working_on(way.destination_file.parent) and not site.protected.sessions())
    result = way.relay(settings=settings)
    assert 0 < result.moved <= SIZE - stored
    return result


@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_at_some_moment_the_file_arrives_all_the_same(site: Site, way: Way, victim: str) -> None:
    kill_and_resume(site, way, victim, random.Random(victim))
    assert way.whole()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_killed_at_random_moments_the_file_arrives_all_the_same(site: Site, way: Way, seed: int) -> None:
    chance = random.Random(seed)
    victim = VICTIMS[seed % len(VICTIMS)]
    if victim != "relay" or seed % 2:
        kill_and_resume(site, way, victim, chance)
    else:
        # not only while bytes move: before the first, and while the file gets its name
        settings = parts(SIZE, 6, streams=chance.randint(1, 2))
        for _ in range(3):
            killed = fork(way, settings=settings)
            killed.answers.poll(chance.uniform(0.0, 2.0))
            killed.kill()
            killed.end()
            assert way.nothing_arrived() or way.destination_file.read_bytes() == way.source_file.read_bytes()
            wait_until(lambda: not site.protected.sessions())
        way.relay(settings=settings)
    assert way.whole()


def test_children_die_with_the_relay_on_both_sides(bad_way: Way, links: dict[str, Proxy]) -> None:
    """Killed with all its streams at work and a link that hangs: no ssh stays, and when it is back no gate either."""
    answer, tell = os.pipe()

    def wait_in_the_thick_of_it(done: int, _: int) -> None:
        children = [child for host in HOSTS for child in ssh_children(os.getpid(), bad_way.host(host))]
        if done and len(children) == 4:
            os.write(tell, " ".join(map(str, children)).encode())
            threading.Event().wait()

    relaying = fork(bad_way, wait_in_the_thick_of_it, settings=parts(SIZE, 6, streams=2, bandwidth=SIZE // 4))
    ours = [int(child) for child in os.read(answer, 1000).split()]
    for link in links.values():
        link.cut()
    relaying.kill()
    assert relaying.end() is None
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in ours))
    for link in links.values():
        link.restore()
    wait_until(lambda: not working_on(bad_way.destination_file.parent) and not working_on(bad_way.source_file.parent))
    for end in (answer, tell):
        os.close(end)
    assert bad_way.nothing_arrived()


def test_range_of_a_stream_that_is_lost_goes_over_another(way: Way) -> None:
    killed: list[int] = []

    def kill_the_second(*_: int) -> None:
        if threading.current_thread().name == "stream 2" and not killed:
            killed.append(ssh_children(os.getpid(), way.host("infer"))[-1])
            os.kill(killed[0], signal.SIGKILL)

    way.relay(kill_the_second, settings=parts(SIZE, 6, streams=2, bandwidth=SIZE // 6))
    assert way.whole()
    assert len(killed) == 1


# --- the link


def _cut_for(seconds: float, links: dict[str, Proxy], way: Way) -> list[str]:
    """Relay, pull both plugs in the middle for so long, and return what was noticed."""
    notices: list[str] = []

    def cut() -> None:
        for link in links.values():
            link.cut()
            threading.Timer(seconds, link.restore).start()

    way.relay(once(SIZE // 3, cut), settings=parts(SIZE, 6, streams=2), notice=notices.append)
    return notices


def test_link_that_is_cut_for_3_s_is_waited_for(bad_way: Way, links: dict[str, Proxy]) -> None:
    assert _cut_for(3.0, links, bad_way) == []
    assert bad_way.whole()


@pytest.mark.slow
def test_link_that_is_cut_for_30_s_is_waited_for(bad_way: Way, links: dict[str, Proxy]) -> None:
    assert _cut_for(30.0, links, bad_way) == []
    assert bad_way.whole()


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_connections_that_a_router_forgot_are_given_up_and_made_anew(
    bad_way: Way, links: dict[str, Proxy], host: str
) -> None:
    """Neither end is told. The host's slot, its gate and its receiver's lock are free again in time."""
    notices: list[str] = []

    def forget() -> None:
        links[host].cut()
        links[host].restore(forget=True)

    bad_way.relay(once(SIZE // 3, forget), settings=parts(SIZE, 6, streams=2), notice=notices.append)
    assert bad_way.whole()
    assert any(host in notice for notice in notices)


def test_dropped_link_is_made_anew(bad_way: Way, links: dict[str, Proxy]) -> None:
    notices: list[str] = []
    result = bad_way.relay(once(SIZE // 2, links["infer"].drop), settings=parts(SIZE, 6), notice=notices.append)
    assert bad_way.whole()
    assert (len(notices), result.moved) == (1, SIZE)
    assert "infer" in notices[0]


@pytest.mark.parametrize(("host", "direction"), [("train", TO_CLIENT), ("infer", TO_SERVER)])
def test_flipped_bit_on_the_way_costs_one_range(
    bad_way: Way, links: dict[str, Proxy], host: str, direction: str
) -> None:
    notices: list[str] = []
    spoil = once(SIZE // 4, lambda: links[host].flip(SIZE // 8, direction))
    bad_way.relay(spoil, settings=parts(SIZE, 6), notice=notices.append)
    assert bad_way.whole()
    assert len(notices) == 1
    assert host in notices[0]


def test_link_that_spoils_every_try_ends_the_relay_with_an_error(
    bad_way: Way, links: dict[str, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MOST_BROKEN_RANGES", 3)
    notices: list[str] = []
    links["infer"].spoil(SIZE // 2)
    with pytest.raises(ConnectionFailed, match="infer"):
        bad_way.relay(settings=parts(SIZE, 1), notice=notices.append)
    assert len(notices) == 2
    assert bad_way.nothing_arrived()


def test_destination_that_cannot_be_reached_is_said_at_once(bad_way: Way, links: dict[str, Proxy]) -> None:
    links["infer"].close()
    notices: list[str] = []
    with pytest.raises(ConnectionFailed, match=r"infer .*refused"):
        bad_way.relay(notice=notices.append)
    assert notices == []


def test_connects_are_paced_to_what_an_sshd_lets_wait(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five streams with two connections each, to an sshd that lets no more wait for their login than one has."""
    assert 2 * streams.CONNECTS_AT_ONCE < 10, "OpenSSH's own MaxStartups is 10:30:100"
    monkeypatch.setattr(streams, "CONNECTS_AT_ONCE", 1)
    config = site.ordinary.config
    text = config.read_text()
    config.write_text(text.replace("MaxStartups 100:30:200", "MaxStartups 2:100:2"))
    site.ordinary.restart()
    try:
        way = Way.through(site, tmp_path, source="infer")
        way.lay(SIZE)
        notices: list[str] = []
        result = way.relay(settings=parts(SIZE, 20, streams=5, bandwidth=SIZE // 2), notice=notices.append)
    finally:
        config.write_text(text)
        site.ordinary.restart()
    assert (way.whole(), result.streams, notices) == (True, 5, [])


@pytest.mark.timeout(60)
def test_stream_that_finds_no_session_slot_is_not_waited_for(way: Way) -> None:
    """A host serves two sessions; somebody else's is open all the time."""
    operator = way.operator
    with open_session(operator.connector, operator.train, operator.approve(path="/etc/hostname")):
        notices: list[str] = []
        noticed = threading.Event()

        def notice(text: str) -> None:
            notices.append(text)
            noticed.set()

        first_try = once(1, lambda: noticed.wait(50))
        way.relay(first_try, settings=parts(SIZE, 6, streams=2, patience=1000), notice=notice)
    assert way.whole()
    assert "sessions are open" in notices[0]


def test_bandwidth_limit_holds_for_all_streams_together(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of both asks the same limit; of time only the lower bound is one that no slow machine breaks."""
    made: list[Any] = []

    class Counted(Pace):
        def __init__(self, rate: int) -> None:
            super().__init__(rate)
            self.asked = 0
            made.append(self)

        def __call__(self, count: int) -> None:
            self.asked += count
            super().__call__(count)

    monkeypatch.setattr("tasks.relay.Pace", Counted)
    result = way.relay(settings=parts(SIZE, 6, streams=2, bandwidth=SIZE))
    assert way.whole()
    assert [pace.asked for pace in made] == [SIZE]
    assert result.seconds > 0.9


# --- the source


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("train", lambda file: file.write_bytes(os.urandom(SIZE)), "changed while read"),
        ("train", lambda file: file.unlink(), "vanished while it was read"),
        ("infer", lambda file: os.truncate(file, SIZE // 2), "changed while read"),
    ],
    ids=["rewritten", "deleted", "unprotected, truncated"],
)
def test_source_that_changes_in_the_middle_leaves_nothing(
    site: Site, tmp_path: Path, source: str, change: Callable[[Path], object], message: str
) -> None:
    way = Way.through(site, tmp_path, source=source)
    way.lay(SIZE)
    with pytest.raises(DFlashError, match=message) as error:
        way.relay(once(SIZE // 3, lambda: change(way.source_file)), settings=parts(SIZE, 4, streams=2))
    assert "\n" not in str(error.value)
    # what arrived is of use to nobody
    assert way.names() == []
    assert list((way.state / "relays").glob("*.json")) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.write_bytes(os.urandom(SIZE)), "changed while read"),
        (lambda file: os.truncate(file, 0), "became shorter while it was read"),
        (lambda file: file.unlink(), "vanished while it was read"),
    ],
    ids=["rewritten", "truncated", "deleted"],
)
def test_source_on_this_machine_that_changes_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], message: str
) -> None:
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "operator"))
    source, destination = tmp_path / "source", tmp_path / "here" / "file"
    source.write_bytes(os.urandom(SIZE))
    ends = Location(None, str(source)), Location(None, str(destination))
    nobody: Any = None
    with pytest.raises(SourceChangedError, match=message):
        relay(nobody, None, *ends, parts(SIZE, 1, bandwidth=SIZE), progress=once(1, lambda: change(source)))
    assert os.listdir(destination.parent) == []


def test_source_found_changed_at_the_end_leaves_nothing_either(way: Way) -> None:
    with pytest.raises(SourceChangedError, match="vanished while it was read"):
        way.relay(once(SIZE, way.source_file.unlink))
    assert way.names() == []


def test_used_up_grant_ends_the_relay_and_a_new_one_moves_only_the_rest(site: Site, way: Way) -> None:
    """What a lost link made move twice was debited twice."""
    settings = parts(SIZE, 6)
    kill = Murder(site, way, "ssh to infer", random.Random(1))
    with pytest.raises(Refused, match="ask for a new approval") as refused:
        way.relay(once(SIZE * 5 // 16, kill), settings=settings, max_bytes=SIZE)
    assert refused.value.request_id is not None
    assert way.nothing_arrived()
    stored = way.stored_bytes()
    assert stored >= SIZE // 2
    result = way.relay(settings=settings, max_bytes=SIZE)
    assert result.moved == SIZE - stored
    assert way.whole()


# --- the destination


def test_directory_and_symbolic_link_as_destination_are_refused_before_a_byte(way: Way) -> None:
    way.destination_file.mkdir(parents=True)
    moved: list[int] = []
    with pytest.raises(ReceiverError, match="is a directory: give the file's full name"):
        way.relay(lambda done, _: moved.append(done))
    way.destination_file.rmdir()
    way.destination_file.symlink_to(way.source_file)
    with pytest.raises(ReceiverError, match=r"is a symbolic link to .*: name the file itself"):
        way.relay(lambda done, _: moved.append(done))
    assert (moved, way.destination_file.is_symlink()) == ([], True)


def test_journal_that_cannot_be_written_ends_the_relay_and_the_next_one_brings_the_file(way: Way) -> None:
    lose = once(SIZE // 2, lambda: shutil.rmtree(way.state / "relays"))
    with pytest.raises(JournalError, match=r"relays.*No such file.*make room"):
        way.relay(lose, settings=parts(SIZE, 6))
    assert way.nothing_arrived()
    way.relay(settings=parts(SIZE, 6))
    assert way.whole()


def test_two_operators_relay_one_file_at_once(site: Site, way: Way, tmp_path: Path) -> None:
    """Each has its own part; the file is one's or the other's, whole, with that one's sidecar."""
    other = Way.through(site, tmp_path, name="other")
    settings = parts(SIZE, 6, bandwidth=3 * SIZE)
    at_once = fork(other, settings=settings)
    way.relay(settings=settings)
    assert isinstance(at_once.end(), RelayResult)
    assert way.whole()
    assert other.whole()


def test_two_relays_of_one_operator_are_one(way: Way) -> None:
    refused: list[object] = []
    settings = parts(SIZE, 6)
    way.relay(once(SIZE // 2, lambda: refused.append(fork(way, settings=settings).end())), settings=settings)
    assert "is on its way to" in str(refused[0])
    assert way.whole()


# --- memory


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_relay_of_20_gb_takes_no_more_memory_than_one_of_20_mb(site: Site, way: Way, tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(site.hosts_text())
    environment = os.environ | {"DFLASH_HOSTS": str(tmp_path / "hosts.yaml"), "DFLASH_STATE": str(way.state)}
    peaks = []
    for size in (20 * 10**6, 20 * 10**9):
        way.source_file.write_bytes(b"")
        os.truncate(way.source_file, size)
        ends = f"infer:{way.source.path}", f"infer:{way.destination.path}"
        peaks.append(peak_memory(command(*ends, environment=environment)))
        assert way.destination_file.stat().st_size == size
        way.destination_file.unlink()
    assert max(peaks) < 150 * 10**6
    assert peaks[1] < peaks[0] + 16 * MIB
