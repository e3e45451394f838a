"""What a look leads to: what is begun, begun again and given up, and how a watch stands when it cannot look."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import DFlashError
from tasks import watch, watcher
from tasks.approvals import Approval
from tasks.errors import HostBusy, Refused
from tasks.inventory import Location
from tasks.ledger import Attempt, Ledger, LedgerError, Seen
from tasks.look_memory import Memory
from tasks.looking import Look, Whole
from tasks.ssh import ConnectionFailed, HostKeyError
from tasks.watch import Rules, Run, evaluation_key, hand_on, pause, take, verdict
from tasks.watch_grants import GrantEndedError
from tasks.watcher import Surroundings, Watcher
from tests.tasks.watched import Clock, FakeRuns, People

SUITE = "a" * 64
HERE = Location(None, "/c")
DAY = 86_400.0


@pytest.fixture
def clock() -> Clock:
    return Clock(1_800_000_000.0)


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Ledger:
    return Ledger.open(tmp_path, clock=clock)


@pytest.fixture
def runs() -> FakeRuns:
    return FakeRuns()


def whole(step: int) -> Whole:
    return Whole(f"/c/step_{step}", f"manifest:{step}", step, float(step))


def found(*steps: int, vanished: tuple[int, ...] = ()) -> Look:
    return Look(tuple(map(whole, steps)), tuple(f"manifest:{step}" for step in vanished), len(steps), {}, 0)


def see(ledger: Ledger, clock: Clock, *steps: int) -> None:
    take(ledger, HERE, found(*steps), clock.now)


# --- what is handed on


def test_what_is_new_is_named_once_the_newest_first(ledger: Ledger, clock: Clock) -> None:
    assert [seen.step for seen in take(ledger, HERE, found(1, 3, 2), clock.now)] == [3, 2, 1]
    assert take(ledger, HERE, found(1, 2, 3), clock.now) == ()


def test_as_many_are_begun_as_there_is_room_for_the_newest_first(ledger: Ledger, clock: Clock, runs: FakeRuns) -> None:
    see(ledger, clock, 1, 2, 3, 4)
    rules = Rules(at_once=2, most_waiting=3)
    handed = hand_on(ledger, HERE, SUITE, rules, runs, clock.now)
    assert [order.checkpoint.step for order in handed.begun] == [4, 3]
    assert [order.key for order in handed.begun] == [evaluation_key(f"manifest:{step}", SUITE, 1) for step in (4, 3)]
    assert [order.source for order in handed.begun] == ["/c/step_4", "/c/step_3"]
    assert hand_on(ledger, HERE, SUITE, rules, runs, clock.now).begun == ()
    ledger.finish(handed.begun[0].attempt, "evaluated", tau=3.0)
    assert [order.checkpoint.step for order in hand_on(ledger, HERE, SUITE, rules, runs, clock.now).begun] == [2]
    assert ledger.counts(SUITE)["superseded"] == 1


def test_after_days_of_downtime_the_newest_come_first_and_not_all_come(
    ledger: Ledger, clock: Clock, runs: FakeRuns
) -> None:
    see(ledger, clock, *range(1, 501))
    order = []
    while handed := hand_on(ledger, HERE, SUITE, Rules(at_once=1, most_waiting=5), runs, clock.now).begun:
        order.append(handed[0].checkpoint.step)
        ledger.finish(handed[0].attempt, "evaluated")
    assert order == [500, 499, 498, 497, 496]
    assert ledger.counts(SUITE) == {
        **{"seen": 0, "relayed": 0, "evaluated": 5},
        **{"invalid": 0, "failed": 0, "superseded": 495},
    }


def test_a_watch_starts_only_what_lies_in_its_own_folder(ledger: Ledger, clock: Clock, runs: FakeRuns) -> None:
    see(ledger, clock, 1)
    ledger.see(Seen("kpro6", "/c/step_2", "manifest:2", 2, clock.now))
    ledger.see(Seen("", "/c2/step_3", "manifest:3", 3, clock.now))
    begun = hand_on(ledger, HERE, SUITE, Rules(at_once=9), runs, clock.now).begun
    assert [order.checkpoint.step for order in begun] == [1]
    take(ledger, HERE, found(vanished=(2, 3)), clock.now)
    assert all(checkpoint.gone is None for checkpoint in ledger.checkpoints())


def test_a_checkpoint_that_an_event_starts_is_started_from_here_only_when_the_event_is_lost(
    ledger: Ledger, clock: Clock, runs: FakeRuns
) -> None:
    see(ledger, clock, 1, 2)
    rules = Rules(by_event=True)
    assert hand_on(ledger, HERE, SUITE, rules, runs, clock.now).begun == ()
    # the event of one of them started a run, which takes the first attempt
    ledger.finish(ledger.begin("manifest:1", SUITE, number=1, flow_run="by event"), "evaluated")
    clock.now += watch.EVENT_PATIENCE
    assert [one.checkpoint.step for one in hand_on(ledger, HERE, SUITE, rules, runs, clock.now).begun] == [2]
    # and the other event comes after all
    assert ledger.begin("manifest:2", SUITE, number=1).flow_run == "run-1"
    assert len(ledger.attempts()) == 2


def test_a_crash_between_ledger_and_prefect_leaves_one_run(ledger: Ledger, clock: Clock, runs: FakeRuns) -> None:
    see(ledger, clock, 1)
    attempt = ledger.begin("manifest:1", SUITE)  # and nothing told Prefect
    assert hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now).restarted[0].attempt.number == attempt.number
    assert list(runs.runs) == ["run-1"]
    # told, and not recorded
    see(ledger, clock, 2)
    begun = ledger.begin("manifest:2", SUITE)
    runs.start(watch.Order(begun, ledger.checkpoints(1)[0]))
    hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    assert list(runs.runs) == ["run-1", "run-2"]
    assert ledger.begin("manifest:2", SUITE).flow_run == "run-2"


def test_a_prefect_without_memory_gets_what_is_open_again(ledger: Ledger, clock: Clock, runs: FakeRuns) -> None:
    see(ledger, clock, 1, 2)
    hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    ledger.finish(ledger.begin("manifest:1", SUITE), "evaluated")
    runs.lose()
    assert [one.checkpoint.step for one in hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now).restarted] == [2]
    assert len(ledger.attempts()) == 2


def test_while_prefect_is_away_the_ledger_keeps_what_was_begun(ledger: Ledger, clock: Clock, runs: FakeRuns) -> None:
    see(ledger, clock, 1)
    runs.away = True
    with pytest.raises(DFlashError):
        hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    runs.away = False
    hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    assert list(runs.orders) == ["run-1"]
    assert len(ledger.attempts()) == 1


# --- what becomes of a run that left no result


def attempt(*, updated: float = 0.0, restarts: int = 0, not_before: float | None = None) -> Attempt:
    fields: dict[str, Any] = dict.fromkeys(["on", "job", "report", "tau", "ci95"])
    return Attempt(
        *("i", SUITE, 1, "seen"),
        **fields,
        flow_run="r",
        message="",
        updated=updated,
        restarts=restarts,
        not_before=not_before,
    )


ENDED = Run("r", "ended", "Crashed")
AWAY = Run("r", "ended", "HostUnreachable")


@pytest.mark.parametrize(
    ("case", "run", "held", "expected"),
    [
        (attempt(), None, False, "start"),
        (attempt(), Run("r", "waiting", "Scheduled"), False, "leave"),
        (attempt(updated=1000.0), Run("r", "running", "Running"), False, "leave"),
        (attempt(), Run("r", "running", "Running", alive=True), False, "leave"),
        (attempt(), Run("r", "running", "Running"), False, "postpone"),
        (attempt(), Run("r", "running", "Running"), True, "leave"),
        (attempt(), ENDED, True, "leave"),
        (attempt(), ENDED, False, "postpone"),
        (attempt(restarts=watch.MOST_RESTARTS), ENDED, False, "give up"),
        (attempt(restarts=50), AWAY, False, "postpone"),
        (attempt(), Run("r", "ended", "CheckpointGone"), False, "gone"),
        (attempt(), Run("r", "ended", "Cancelled"), False, "cancelled"),
        (attempt(not_before=1001.0, updated=999.0), AWAY, False, "leave"),
        (attempt(not_before=1000.0, updated=999.0), AWAY, False, "again"),
        (attempt(not_before=1000.0, updated=999.0), None, False, "start"),
        # the clock was set back by days: nothing waits for days
        (attempt(not_before=9e9, updated=9e9), AWAY, False, "again"),
    ],
)
def test_what_becomes_of_an_open_attempt(case: Attempt, run: Run | None, held: bool, expected: str) -> None:
    assert verdict(case, run, 1000.0, held=held) == expected


def test_pauses_double_up_to_half_an_hour() -> None:
    assert [pause(restarts) for restarts in range(7)] == [60, 120, 240, 480, 960, 1800, 1800]
    assert pause(10**6) == 1800


def test_a_run_that_met_a_host_that_is_away_is_run_again_for_as_long_as_it_is(
    ledger: Ledger, clock: Clock, runs: FakeRuns
) -> None:
    see(ledger, clock, 1)
    hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    for _ in range(50):
        runs.set("run-1", "ended", "HostUnreachable", "no route")
        while runs.runs["run-1"].phase == "ended":
            clock.now += 60
            hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    (still,) = ledger.attempts()
    assert (still.is_open, still.number, still.restarts, still.flow_run) == (True, 1, 50, "run-1")
    assert runs.restarted == ["run-1"] * 50
    assert "HostUnreachable: no route" in still.message


def test_a_run_that_keeps_crashing_is_given_up_with_a_word(ledger: Ledger, clock: Clock, runs: FakeRuns) -> None:
    see(ledger, clock, 1)
    hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    for _ in range(10**4):
        if runs.runs["run-1"].phase != "ended":
            runs.set("run-1", "ended", "Crashed", "killed")
        clock.now += 60
        if hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now).failed:
            break
    (ended,) = ledger.attempts()
    assert (ended.state, len(runs.restarted)) == ("failed", watch.MOST_RESTARTS)
    assert "Crashed: killed" in ended.message


def test_what_is_stuck_gives_its_place_to_the_next_one(ledger: Ledger, clock: Clock, runs: FakeRuns) -> None:
    see(ledger, clock, 1, 2)
    hand_on(ledger, HERE, SUITE, Rules(at_once=1), runs, clock.now)
    for _ in range(1000):
        if runs.runs["run-1"].phase != "ended":
            runs.set("run-1", "ended", "AwaitingApproval")
        clock.now += 60
        if begun := hand_on(ledger, HERE, SUITE, Rules(at_once=1), runs, clock.now).begun:
            break
    assert [order.checkpoint.step for order in begun] == [1]
    assert len(ledger.open_attempts()) == 2


def test_a_checkpoint_deleted_between_seen_and_relayed_fails_and_is_due_again_when_it_is_back(
    ledger: Ledger, clock: Clock, runs: FakeRuns
) -> None:
    see(ledger, clock, 1)
    hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    runs.set("run-1", "ended", "CheckpointGone")
    take(ledger, HERE, found(vanished=(1,)), clock.now)
    (gone,) = hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now).failed
    assert "deleted" in ledger.attempts(gone.attempt.identity)[0].message
    clock.now += DAY
    assert hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now).begun == ()
    see(ledger, clock, 1)
    assert [one.attempt.number for one in hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now).begun] == [2]


def test_a_run_that_somebody_cancelled_is_not_run_again(ledger: Ledger, clock: Clock, runs: FakeRuns) -> None:
    see(ledger, clock, 1)
    hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    runs.set("run-1", "ended", "Cancelled")
    hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now)
    clock.now += 30 * DAY
    assert hand_on(ledger, HERE, SUITE, Rules(), runs, clock.now).begun == ()
    assert [one.state for one in ledger.attempts()] == ["superseded"]


# --- one watch


@dataclass
class World:
    """Everything around one watch."""

    ledger: Ledger
    clock: Clock
    runs: FakeRuns
    people: People = field(default_factory=People)
    looks: list[Look] = field(default_factory=list)
    fails: Exception | None = None
    refuses: DFlashError | None = None
    ends: str | None = None
    previous: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new process."""
        around = Surroundings(
            admit=self.admit,
            look=self.look,
            runs=self.runs,
            tell=self.people.tell,
            warning=lambda approval, now: self.ends,
            news=self.people.news.append,
            clock=self.clock,
        )
        self.watcher = Watcher(self.ledger, HERE, SUITE, Rules(), around)

    def admit(self, previous: str | None) -> Approval | None:
        self.previous.append(previous)
        if self.refuses is not None:
            raise self.refuses
        return Approval("req1", None, True, 1, 0, Path(), Path())  # type: ignore[arg-type]

    def look(self, approval: Approval | None, memory: Memory, now: float) -> Look:
        if self.fails is not None:
            raise self.fails
        memory.changed = bool(self.looks)
        return self.looks.pop(0) if self.looks else found()

    def minutes(self, count: int) -> None:
        for _ in range(count):
            self.clock.now += 60
            self.watcher.look()


@pytest.fixture
def world(ledger: Ledger, clock: Clock, runs: FakeRuns) -> World:
    return World(ledger, clock, runs)


def test_a_look_that_finds_something_new_says_so_and_starts_it(world: World) -> None:
    world.looks = [found(1)]
    stands = world.watcher.look()
    assert (stands.state, stands.looked, stands.request) == ("watching", world.clock.now, "req1")
    assert [seen.step for seen in world.people.news] == [1]
    assert list(world.runs.orders) == ["run-1"]
    assert world.watcher.pause() == 60
    world.minutes(3)
    assert len(world.people.news) == len(world.runs.orders) == 1
    assert world.previous[-1] == "req1"


def test_a_grant_that_ends_stops_the_watch_by_name_and_tells_once(world: World) -> None:
    world.minutes(2)
    looked = world.clock.now
    world.refuses = GrantEndedError("it has ended; request 2 waits: dflash-ops guard approve 2 --valid 30d")
    world.minutes(3 * 60)
    stands = world.ledger.watch("/c")
    assert stands is not None
    assert (stands.state, stands.looked, stands.request) == ("GrantEnded", looked, "req1")
    assert [(one.kind, one.subject) for one in world.people.notices] == [
        ("stands still", "GrantEnded: /c is not watched")
    ]
    assert "guard approve 2" in world.people.notices[0].body
    # asking the store costs no host anything: an approval is taken up within a minute
    assert world.watcher.pause() == 60
    world.restart()
    world.minutes(5)
    assert len(world.people.notices) == 1
    world.refuses = None
    world.minutes(1)
    assert world.people.kinds == ["stands still", "goes on"]
    assert world.ledger.watches()[0].state == "watching"


def test_two_days_before_it_ends_there_is_one_warning_for_each_grant(world: World) -> None:
    world.minutes(70)
    assert world.people.notices == []
    world.ends = "the watch of /c will stand still tomorrow"
    world.minutes(130)
    world.restart()
    world.minutes(130)
    assert world.people.kinds == ["ends soon"]
    assert world.people.notices[0].body == world.ends
    assert world.ledger.watches()[0].state == "watching"


def test_a_host_that_is_away_is_asked_less_often_by_name_and_people_hear_of_it_after_an_hour(world: World) -> None:
    world.minutes(1)
    world.fails = ConnectionFailed("kpro6: no route")
    pauses = []
    for _ in range(9):
        stands = world.watcher.look()
        pauses.append(world.watcher.pause())
        world.clock.now += pauses[-1]
        assert stands.state == "HostUnreachable"
        assert "no route" in stands.message
    assert pauses == [60, 120, 240, 480, 900, 900, 900, 900, 900]
    assert world.people.kinds == ["stands still"]
    world.fails = None
    world.minutes(1)
    assert (world.watcher.pause(), world.people.kinds) == (60, ["stands still", "goes on"])


def test_a_short_absence_disturbs_nobody(world: World) -> None:
    world.fails = ConnectionFailed("away")
    world.minutes(10)
    world.fails = None
    world.minutes(10)
    assert world.people.notices == []


@pytest.mark.parametrize(
    ("failure", "state", "told"),
    [
        (HostKeyError("another machine"), "HostKeyMismatch", True),
        (Refused("the clock went back"), "Refused", False),
        (OSError(28, "No space left on device"), "DiskFull", False),
        (OSError(5, "Input/output error"), "LookFailed", False),
        (DFlashError("something"), "LookFailed", False),
    ],
)
def test_what_keeps_a_watch_from_looking_has_a_name(world: World, failure: Exception, state: str, told: bool) -> None:
    world.fails = failure
    stands = world.watcher.look()
    assert (stands.state, str(failure) in stands.message) == (state, True)
    assert bool(world.people.notices) is told


def test_a_host_whose_sessions_are_all_in_use_is_still_watched(world: World) -> None:
    world.looks = [found(1, 2, 3)]
    world.watcher.look()
    world.fails = HostBusy("2 sessions are open")
    world.ledger.finish(world.ledger.open_attempts()[0], "evaluated")
    world.minutes(1)
    assert world.ledger.watches()[0].state == "watching"
    # what is relayed has the sessions; the next one may be begun
    assert len(world.runs.orders) == 3
    world.minutes(120)
    assert world.ledger.watches()[0].state == "HostBusy"


def test_evaluations_go_on_while_the_watch_cannot_look_and_nothing_new_is_begun(world: World) -> None:
    world.looks = [found(1, 2, 3)]
    world.watcher.look()
    world.fails = ConnectionFailed("away")
    world.runs.set("run-1", "ended", "Crashed")
    world.ledger.finish(world.ledger.begin("manifest:2", SUITE), "evaluated")
    world.minutes(5)
    assert world.runs.restarted == ["run-1"]
    assert len(world.runs.orders) == 2


def test_looking_goes_on_while_prefect_is_away(world: World) -> None:
    world.runs.away = True
    world.looks = [found(1)]
    stands = world.watcher.look()
    assert (stands.state, stands.looked, world.watcher.pause()) == ("PrefectUnreachable", world.clock.now, 60)
    assert [seen.step for seen in world.people.news] == [1]
    world.runs.away = False
    world.minutes(1)
    assert world.ledger.watches()[0].state == "watching"
    assert list(world.runs.orders) == ["run-1"]


def test_what_is_open_in_a_suite_that_is_not_asked_any_more_ends_unless_somebody_is_at_work(world: World) -> None:
    world.looks = [found(1, 2)]
    world.watcher.look()
    at_work = world.ledger.begin("manifest:2", SUITE)
    world.restart()
    world.watcher.suite = "b" * 64
    with world.ledger.held(at_work):
        world.watcher.look()
    states = {one.identity: one.state for one in world.ledger.attempts(suite=SUITE)}
    assert states == {"manifest:1": "superseded", "manifest:2": "seen"}
    assert len(world.ledger.open_attempts("b" * 64)) == 2
    world.restart()
    world.watcher.suite = "b" * 64
    world.watcher.look()
    assert len(world.ledger.open_attempts("b" * 64)) == 2


def test_what_could_not_be_told_is_told_with_a_later_look(world: World) -> None:
    world.people.deaf = True
    world.refuses = GrantEndedError("it has ended")
    world.minutes(2)
    assert "nobody could be told" in world.ledger.watches()[0].message
    world.people.deaf = False
    world.minutes(2)
    assert world.people.kinds == ["stands still"]


def test_what_a_look_found_is_found_again_when_the_ledger_could_not_take_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = []

    def look(approval: Approval | None, memory: Memory, now: float) -> Look:
        new = not memory.plain
        memory.plain["known"], memory.changed = "1", True
        memories.append(new)
        return found(*([1] if new else []))

    world.watcher._around = Surroundings(admit=world.admit, look=look, runs=world.runs, tell=world.people.tell)
    with monkeypatch.context() as patch:
        patch.setattr(watcher, "take", lambda *_: (_ for _ in ()).throw(LedgerError("disk full")))
        with pytest.raises(LedgerError):
            world.watcher.look()
    world.watcher.look()
    world.watcher.look()
    assert memories == [True, True, False]
    assert len(world.ledger.checkpoints()) == 1
