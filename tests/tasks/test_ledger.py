"""The ledger: what is due, one attempt at a time, one result each, whoever calls it and whatever breaks."""

import multiprocessing
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import ledger as ledgers
from tasks import ledger_file
from tasks.ledger import Attempt, AttemptHeldError, Ledger, LedgerBusyError, LedgerError, Seen, Watch
from tests.tasks.watched import Clock

SUITE = "a" * 64


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Ledger:
    return Ledger.open(tmp_path, clock=clock)


def seen(step: int, *, path: str | None = None, written: float | None = None) -> Seen:
    """The checkpoint of ``step``; a later one was written later."""
    return Seen(
        "kpro6", path or f"/c/step_{step}", f"manifest:{step}", step, 5.0, float(step) if written is None else written
    )


def fill(ledger: Ledger, count: int) -> None:
    for step in range(1, count + 1):
        assert ledger.see(seen(step))


def steps(found: list[Seen]) -> list[int | None]:
    return [checkpoint.step for checkpoint in found]


def states(ledger: Ledger, step: int) -> list[str]:
    return [attempt.state for attempt in reversed(ledger.attempts(f"manifest:{step}", SUITE))]


def test_a_checkpoint_is_new_once_and_its_place_follows_it(ledger: Ledger) -> None:
    assert ledger.see(seen(1))
    assert not ledger.see(seen(1, path="/elsewhere/step_1"))
    (known,) = ledger.checkpoints()
    assert (known.path, known.seen) == ("/elsewhere/step_1", 5.0)


def test_what_is_due_comes_newest_first_and_older_ones_are_superseded(ledger: Ledger) -> None:
    fill(ledger, 6)
    assert steps(ledger.due(SUITE, limit=2)) == [6, 5]
    assert steps(ledger.due(SUITE, limit=2)) == [6, 5]
    assert ledger.counts(SUITE)["superseded"] == 4
    assert "2 newer" in ledger.attempts("manifest:1")[0].message
    ledger.see(seen(7))
    assert steps(ledger.due(SUITE, limit=2)) == [7, 6]
    assert states(ledger, 5) == ["superseded"]


def test_what_was_superseded_in_one_suite_is_due_in_another(ledger: Ledger) -> None:
    fill(ledger, 3)
    ledger.due(SUITE, limit=1)
    assert steps(ledger.due("b" * 64, limit=5)) == [3, 2, 1]


def test_the_queue_is_looked_at_without_changing_it(ledger: Ledger) -> None:
    fill(ledger, 3)
    ledger.due(SUITE, limit=2)
    assert steps(ledger.queue(SUITE)) == [3, 2]
    assert steps(ledger.due(SUITE, limit=1)) == [3]


def test_the_newest_is_the_one_written_last_and_then_the_one_of_the_later_step(ledger: Ledger) -> None:
    ledger.see(seen(900, written=1.0))
    ledger.see(seen(3, written=2.0))
    ledger.see(seen(4, written=2.0))
    assert steps(ledger.due(SUITE, limit=9)) == [4, 3, 900]


def test_a_checkpoint_in_whose_place_a_newer_lies_is_superseded(ledger: Ledger) -> None:
    ledger.see(seen(1, path="/c/latest"))
    ledger.see(seen(2, path="/c/latest"))
    assert steps(ledger.due(SUITE, limit=9)) == [2]
    assert "in its place" in ledger.attempts("manifest:1")[0].message


def test_a_checkpoint_that_is_gone_waits_until_it_lies_there_again(ledger: Ledger) -> None:
    fill(ledger, 2)
    assert ledger.miss("manifest:2")
    assert not ledger.miss("manifest:2")
    assert steps(ledger.due(SUITE, limit=9)) == [1]
    ledger.see(seen(2))
    assert steps(ledger.due(SUITE, limit=9)) == [2, 1]


def test_an_attempt_that_is_open_is_begun_once(ledger: Ledger) -> None:
    fill(ledger, 1)
    first = ledger.begin("manifest:1", SUITE, flow_run="one")
    assert ledger.begin("manifest:1", SUITE).number == first.number == 1
    assert ledger.begin("manifest:1", SUITE, flow_run="two").flow_run == "two"
    assert ledger.due(SUITE, limit=9) == []
    ledger.finish(first, "evaluated")
    assert ledger.begin("manifest:1", SUITE).number == 2


def test_whoever_was_started_for_an_attempt_gets_that_one_also_when_it_has_ended(ledger: Ledger) -> None:
    fill(ledger, 1)
    first = ledger.begin("manifest:1", SUITE, number=1)
    ledger.finish(first, "evaluated", tau=3.5)
    again = ledger.begin("manifest:1", SUITE, number=1, flow_run="late")
    assert (again.is_open, again.tau, again.flow_run) == (False, 3.5, None)
    assert ledger.begin("manifest:1", SUITE, number=2).is_open
    assert not ledger.begin("manifest:1", SUITE, number=1).is_open


@pytest.mark.parametrize("number", [0, 2, -1])
def test_an_attempt_out_of_its_turn_is_refused(ledger: Ledger, number: int) -> None:
    fill(ledger, 1)
    with pytest.raises(LedgerError, match=r"0 were begun|no attempt"):
        ledger.begin("manifest:1", SUITE, number=number)


def test_an_attempt_does_not_begin_before_the_last_one_has_ended(ledger: Ledger) -> None:
    fill(ledger, 1)
    ledger.begin("manifest:1", SUITE)
    with pytest.raises(LedgerError, match="1 were begun"):
        ledger.begin("manifest:1", SUITE, number=2)


def test_a_checkpoint_that_nobody_saw_is_not_evaluated(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="was ever seen"):
        ledger.begin("manifest:1", SUITE)
    assert ledger.attempts() == []


def test_an_attempt_has_one_result(ledger: Ledger) -> None:
    fill(ledger, 1)
    attempt = ledger.advance(ledger.begin("manifest:1", SUITE), state="relayed", on="ct129", job="job-1")
    assert ledger.advance(attempt, state="seen").state == "relayed"
    assert ledger.finish(attempt, "evaluated", report="/r", tau=3.5, ci95=(3.0, 4.0), message="well")
    assert not ledger.finish(attempt, "failed", message="too late")
    ledger.advance(attempt, state="relayed", on="elsewhere")
    (found,) = ledger.attempts()
    assert (found.state, found.on, found.job, found.report) == ("evaluated", "ct129", "job-1", "/r")
    assert (found.tau, found.ci95, found.message) == (3.5, (3.0, 4.0), "well")


def test_only_results_finish_and_only_open_states_advance(ledger: Ledger) -> None:
    fill(ledger, 1)
    attempt = ledger.begin("manifest:1", SUITE)
    with pytest.raises(LedgerError, match="no result"):
        ledger.finish(attempt, "relayed")
    with pytest.raises(LedgerError, match="is a result"):
        ledger.advance(attempt, state="evaluated")
    assert attempt.is_open


def test_what_failed_is_due_again_after_longer_and_longer_pauses_and_then_no_more(ledger: Ledger, clock: Clock) -> None:
    fill(ledger, 1)
    waited = []
    for number in range(1, ledgers.MOST_ATTEMPTS + 1):
        (due,) = ledger.due(SUITE, limit=9)
        attempt = ledger.begin(due.identity, SUITE)
        assert attempt.number == number
        ledger.finish(attempt, "failed")
        begun = clock.now
        while number < ledgers.MOST_ATTEMPTS and not ledger.due(SUITE, limit=9):
            clock.now += 60
        waited.append(clock.now - begun)
    assert waited == [900, 3600, 14_400, 57_600, 0]
    clock.now += 1e9
    assert ledger.due(SUITE, limit=9) == []
    assert states(ledger, 1) == ["failed"] * 5


@pytest.mark.parametrize("state", ["evaluated", "invalid", "superseded"])
def test_what_has_a_result_is_not_due(ledger: Ledger, clock: Clock, state: ledgers.State) -> None:
    fill(ledger, 1)
    ledger.finish(ledger.begin("manifest:1", SUITE), state)
    clock.now += 1e9
    assert ledger.due(SUITE, limit=9) == []


def test_a_postponed_attempt_counts_its_restarts(ledger: Ledger, clock: Clock) -> None:
    fill(ledger, 1)
    attempt = ledger.postpone(ledger.begin("manifest:1", SUITE), seconds=60, message="the host is away")
    assert (attempt.restarts, attempt.not_before, attempt.message) == (1, clock.now + 60, "the host is away")
    assert ledger.resume(attempt).not_before is None
    assert [one.restarts for one in ledger.open_attempts(SUITE)] == [1]


def test_a_night_is_recorded_once(ledger: Ledger) -> None:
    assert ledger.night("2027-03-28", SUITE) is None
    assert ledger.record_night("2027-03-28", SUITE, {"verdict": "better"})
    assert not ledger.record_night("2027-03-28", SUITE, {"verdict": "worse"})
    ledger.record_night("2027-03-29", SUITE, {"verdict": "equal"})
    assert ledger.nights(SUITE) == [("2027-03-29", {"verdict": "equal"}), ("2027-03-28", {"verdict": "better"})]


def test_a_watch_keeps_since_when_it_is_in_its_state(ledger: Ledger, clock: Clock) -> None:
    ledger.record_watch(Watch("kpro6:/c", "HostUnreachable"))
    clock.now += 60
    still = ledger.record_watch(Watch("kpro6:/c", "HostUnreachable", message="no route"))
    assert clock.now - still.since == 60
    assert ledger.record_watch(Watch("kpro6:/c", "watching", looked=clock.now)).since == clock.now
    assert [watch.state for watch in ledger.watches()] == ["watching"]
    ledger.remember("kpro6:/c", {"told": 1})
    assert ledger.memory("kpro6:/c") == {"told": 1}
    assert ledger.forget_watch("kpro6:/c")
    assert (ledger.watch("kpro6:/c"), ledger.memory("kpro6:/c")) == (None, {})


def test_what_was_recorded_is_there_after_a_crash_in_the_middle_of_the_next_transaction(tmp_path: Path) -> None:
    def crash() -> None:
        ledger = Ledger.open(tmp_path)
        fill(ledger, 3)
        with ledger._file.transaction() as connection:
            connection.execute("DELETE FROM checkpoints")
            os._exit(0)

    assert in_child(crash) == 0
    assert steps(Ledger.open(tmp_path).due(SUITE, limit=9)) == [3, 2, 1]


def test_processes_that_begin_at_once_get_one_attempt_and_record_one_result(tmp_path: Path) -> None:
    fill(Ledger.open(tmp_path), 5)
    context = multiprocessing.get_context("fork")
    barrier, won = context.Barrier(4), context.Queue()

    def race() -> None:
        ledger = Ledger.open(tmp_path)
        barrier.wait()
        for step in range(1, 6):
            attempt = ledger.begin(f"manifest:{step}", SUITE, number=1)
            if ledger.finish(attempt, "evaluated", tau=float(os.getpid())):
                won.put(step)

    children = [context.Process(target=race) for _ in range(4)]
    for child in children:
        child.start()
    results = sorted(won.get(timeout=30) for _ in range(5))
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 4
    assert results == [1, 2, 3, 4, 5]
    assert won.empty()
    assert len(Ledger.open(tmp_path).attempts()) == 5


def test_a_forked_child_and_its_parent_use_the_same_ledger(ledger: Ledger, tmp_path: Path) -> None:
    fill(ledger, 1)
    assert in_child(lambda: fill_from(ledger, 2)) == 0
    fill_from(ledger, 3)
    assert steps(ledger.checkpoints()) == [3, 2, 1]


def test_an_attempt_at_work_in_another_process_is_held_until_that_ends(ledger: Ledger) -> None:
    fill(ledger, 1)
    attempt = ledger.begin("manifest:1", SUITE)
    context = multiprocessing.get_context("fork")
    holding, end = context.Event(), context.Event()

    def hold() -> None:
        with ledger.held(attempt):
            holding.set()
            end.wait(60)
            os._exit(9)  # as kill -9: nothing is released by hand

    child = context.Process(target=hold)
    child.start()
    assert holding.wait(30)
    assert ledger.is_held(attempt)
    with pytest.raises(AttemptHeldError, match="another process"), ledger.held(attempt):
        raise AssertionError
    end.set()
    child.join(30)
    assert not ledger.is_held(attempt)
    with ledger.held(attempt):
        pass


def test_holding_leaves_no_file_behind_and_what_is_raised_inside_comes_out(ledger: Ledger, tmp_path: Path) -> None:
    fill(ledger, 1)
    attempt = ledger.begin("manifest:1", SUITE)
    with pytest.raises(BlockingIOError), ledger.held(attempt):
        raise BlockingIOError("not ours")
    assert list((tmp_path / "attempts").iterdir()) == []


def test_a_locked_ledger_says_so(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.05)
    other = sqlite3.connect(tmp_path / ledgers.FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    # whoever only reads, as the status, does not wait
    assert Ledger.open(tmp_path).counts(SUITE)["seen"] == 0
    with pytest.raises(LedgerBusyError, match="locked") as caught:
        fill(Ledger.open(tmp_path), 1)
    assert caught.value.state_name == "LedgerLocked"
    other.execute("ROLLBACK")
    assert Ledger.open(tmp_path).checkpoints() == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.write_bytes(b"no database, though it is as long as a header has to be " * 30), "damaged"),
        (lambda file: sqlite3.connect(file).execute("PRAGMA user_version = 99"), "version 99"),
        (lambda file: file.mkdir(), "unable to open"),
    ],
)
def test_a_file_that_is_no_ledger_is_named_with_what_to_do(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(tmp_path / ledgers.FILE)
    with pytest.raises(LedgerError, match=says) as caught:
        Ledger.open(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.state_name == "LedgerUnusable"


def test_a_ledger_that_was_moved_away_begins_anew(tmp_path: Path, ledger: Ledger) -> None:
    fill(ledger, 2)
    for file in tmp_path.glob(f"{ledgers.FILE}*"):
        file.rename(file.with_name(f"old-{file.name}"))
    fresh = Ledger.open(tmp_path)
    fill(fresh, 2)
    assert steps(fresh.due(SUITE, limit=9)) == [2, 1]


def test_a_thousand_checkpoints_are_counted_and_listed(ledger: Ledger) -> None:
    fill(ledger, 1000)
    for step in range(1, 991):
        ledger.finish(ledger.begin(f"manifest:{step}", SUITE), "evaluated", tau=3.0)
    assert ledger.counts(SUITE) == {
        **{"seen": 10, "relayed": 0, "evaluated": 990},
        **{"invalid": 0, "failed": 0, "superseded": 0},
    }
    assert steps(ledger.due(SUITE, limit=3)) == [1000, 999, 998]
    assert len(ledger.attempts(suite=SUITE)) == 997
    assert len(ledger.checkpoints()) == 1000


def fill_from(ledger: Ledger, step: int) -> None:
    assert ledger.see(seen(step))


def in_child(act: Callable[[], object]) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join(30)
    return child.exitcode


def test_an_attempt_says_whether_it_is_open() -> None:
    fields = dict.fromkeys(["on", "job", "flow_run", "report", "tau", "ci95"])
    for state, is_open in [("seen", True), ("relayed", True), ("failed", False), ("superseded", False)]:
        attempt = Attempt("i", SUITE, 1, state, message="", updated=0.0, **fields)  # type: ignore[arg-type]
        assert attempt.is_open is is_open
