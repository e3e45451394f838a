"""An evaluation on a real sshd: started once, found again whatever died meanwhile, its result recorded once."""

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from dflash import failure
from dflash.prompts import default_prompts
from dflash.report import RelayInfo
from tasks import evaluating, evaluation_jobs, job_status, jobs, process
from tasks.evaluating import Case
from tasks.evaluation import EvaluationError, NotProvisionedError, Suite, job_id, workspace
from tasks.evaluation_jobs import JobVanishedError, Prepared, find_or_start, follow
from tasks.inventory import Host
from tasks.ledger import MOST_ATTEMPTS, Ledger, Seen
from tasks.ssh import ConnectionFailed, Connector
from tests.evaluators import StandIn
from tests.sshds import Operator, Site, another_sshd
from tests.tiny import Pair

SUITE = Suite(default_prompts(), max_new_tokens=24, thinking="off")
IDENTITY = "step 100"


@dataclass
class Bench:
    """An operator with one inference host whose evaluator stands in."""

    operator: Operator
    there: StandIn
    hosts_file: Path
    state: Path

    @property
    def connector(self) -> Connector:
        return self.operator.connector

    @property
    def host(self) -> Host:
        return self.operator.infer

    @property
    def ledger(self) -> Ledger:
        return Ledger.open(self.state)

    @property
    def prepared(self) -> Prepared:
        checkpoint = str(self.there.home / "cache" / "step_100")
        relay = RelayInfo(source="train:/step_100.pt", sha256="00", selected="drafter", bytes=1)
        return Prepared(name="step_100", identity=IDENTITY, checkpoint=checkpoint, relay=relay)

    def job(self, attempt: int = 1) -> str:
        return job_id("step_100", IDENTITY, SUITE.digest(), attempt)

    @contextmanager
    def case(self) -> Iterator[Case]:
        ledger = self.ledger
        ledger.see(Seen("train", "/step_100.pt", IDENTITY, 100, 0.0))
        with evaluating.opened(self.connector, ledger, SUITE, IDENTITY) as case:
            yield case

    def states(self) -> list[tuple[int, str]]:
        return sorted((one.number, one.state) for one in self.ledger.attempts())


@pytest.fixture
def bench(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    there = StandIn.make(tmp_path / "there")
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("DFLASH_STATE", str(state))
    monkeypatch.setattr(job_status, "BEAT_SECONDS", 1.0)  # a heart that stood still for so long has stopped
    hosts_file = tmp_path / "hosts.yaml"
    hosts_file.write_text(site.hosts_text(infer=there.entry))
    return Bench(site.operator(state, infer=there.entry), there, hosts_file, state)


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def measured(bench: Bench, **changes: Any) -> tuple[Case, list[str]]:
    lines: list[str] = []
    with bench.case() as case:
        done = evaluating.measure(case, bench.host, bench.prepared, lines.append, poll=0.1, **changes)
        report, folder = evaluating.bring_home(done, bench.host, bench.state / "reports")
        assert evaluating.record(done, report, folder)
    return done, lines


def test_an_evaluation_is_started_once_followed_and_recorded_with_its_report(bench: Bench) -> None:
    bench.there.let_go()
    done, lines = measured(bench)
    assert lines == [f"[1/1] τ of {bench.job()}"]
    assert bench.states() == [(1, "evaluated")]
    (attempt,) = bench.ledger.attempts()
    assert attempt.report == str(bench.state / "reports" / bench.job())
    assert attempt.tau == 4.0
    assert (attempt.on, attempt.job) == ("infer", bench.job())
    report = json.loads((Path(attempt.report) / "report.json").read_text())
    assert report["relay"]["source"] == "train:/step_100.pt"
    # whoever comes late changes nothing
    assert not find_or_start(bench.connector, bench.host, PurePosixPath("/x"), SUITE, bench.job())
    with bench.case() as again:
        assert again.attempt.number == 2  # somebody asks for it once more
    assert not evaluating.record(done, *evaluating.bring_home(done, bench.host, bench.state / "reports"))
    assert bench.there.starts() == {bench.job(): 1}


@pytest.mark.slow
def test_two_at_once_start_one_job(bench: Bench) -> None:
    started: list[bool] = []

    def start() -> None:
        started.append(find_or_start(bench.connector, bench.host, PurePosixPath("/x"), SUITE, bench.job()))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(started) == [False, False, True]
    bench.there.let_go()
    follow(bench.connector, bench.host, bench.job(), lambda line: None, poll=0.1)
    assert bench.there.starts() == {bench.job(): 1}


WORK = """
import sys
from pathlib import Path
from tasks import evaluating
from tasks.evaluation_jobs import Prepared
from tasks.ledger import Ledger
from tasks.ssh import Connector
from tests.tasks.test_evaluation_jobs import IDENTITY, SUITE

connector = Connector.load(Path(sys.argv[1]))
prepared = Prepared.model_validate_json(sys.argv[2])
with evaluating.opened(connector, Ledger.open(), SUITE, IDENTITY) as case:
    evaluating.measure(case, connector.inventory.host("infer"), prepared, print, poll=0.1)
"""


def test_a_job_whose_process_was_killed_is_adopted_and_not_started_again(bench: Bench) -> None:
    with bench.case():
        pass
    argv = [sys.executable, "-c", WORK, str(bench.hosts_file), bench.prepared.model_dump_json()]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    working = process.start(argv, env=env, start_new_session=True)
    wait_until(lambda: bool(bench.there.starts()))
    assert bench.ledger.is_held(bench.ledger.open_attempts()[0])
    os.kill(working.pid, signal.SIGKILL)
    working.wait()

    with bench.case() as case:
        assert case.attempt.number == 1
        assert evaluating.host_of_job(case, bench.host) == bench.host
    bench.there.let_go()
    _, lines = measured(bench)
    assert lines == [f"{bench.job()} is there already and is followed", f"[1/1] τ of {bench.job()}"]
    assert bench.there.starts() == {bench.job(): 1}
    assert bench.states() == [(1, "evaluated")]


@pytest.mark.slow
def test_a_link_that_breaks_in_the_middle_is_taken_up_again(bench: Bench, site: Site) -> None:
    seen: list[str] = []

    def break_the_link(line: str) -> None:
        seen.append(line)
        site.ordinary.crash()
        bench.there.let_go()
        threading.Timer(1.0, site.ordinary.restart).start()

    with bench.case() as case:
        evaluating.measure(case, bench.host, bench.prepared, break_the_link, poll=0.1, patience=60)
    assert seen == [f"[1/1] τ of {bench.job()}"]
    assert bench.there.starts() == {bench.job(): 1}


def test_a_host_that_stays_away_leaves_the_attempt_open_and_the_job_to_be_found(bench: Bench, site: Site) -> None:
    try:
        with pytest.raises(ConnectionFailed, match="it may well run") as away, bench.case() as case:
            evaluating.measure(
                case, bench.host, bench.prepared, lambda line: site.ordinary.crash(), poll=0.1, patience=0.5
            )
        assert away.value.state_name == "HostUnreachable"
        assert evaluation_jobs.is_away(bench.connector, bench.host)
        assert bench.states() == [(1, "relayed")]
        with pytest.raises(ConnectionFailed), bench.case() as case:
            evaluating.host_of_job(case, bench.host)
    finally:
        site.ordinary.restart()
    bench.there.let_go()
    measured(bench)
    assert bench.states() == [(1, "evaluated")]
    assert bench.there.starts() == {bench.job(): 1}


@pytest.mark.slow
def test_a_job_that_vanished_fails_its_attempt_and_the_next_one_is_made(bench: Bench) -> None:
    def power_cut(line: str) -> None:
        if line.endswith(bench.job(1)):
            bench.there.kill_jobs()
            bench.there.let_go()

    with bench.case() as case:
        done = evaluating.measure(case, bench.host, bench.prepared, power_cut, poll=0.1)
        assert bench.ledger.is_held(done.attempt)
    assert done.attempt.number == 2
    assert bench.states() == [(1, "failed"), (2, "relayed")]
    assert bench.there.starts() == {bench.job(1): 1, bench.job(2): 1}


@pytest.mark.slow
def test_a_job_that_vanishes_every_time_is_given_up(bench: Bench) -> None:
    with pytest.raises(JobVanishedError) as vanished, bench.case() as case:
        evaluating.measure(case, bench.host, bench.prepared, lambda line: bench.there.kill_jobs(), poll=0.1)
    assert vanished.value.state_name == "JobVanished"
    assert bench.states() == [(number, "failed") for number in range(1, MOST_ATTEMPTS + 1)]


def test_why_an_evaluation_failed_is_the_state_that_the_host_named(bench: Bench) -> None:
    said = '{"state": "KernelRefused", "message": "fla was asked for"}'
    (bench.there.home / "failure.json").write_text(said)
    bench.there.let_go()
    with (
        pytest.raises(evaluation_jobs.KernelRefusedError, match="ended with exit code 1: fla was"),
        bench.case() as case,
    ):
        evaluating.measure(case, bench.host, bench.prepared, lambda line: None, poll=0.1)
    (attempt,) = bench.ledger.attempts()
    assert attempt.state == "failed"
    assert "fla was asked for" in attempt.message
    assert attempt.job is not None
    assert Prepared.kept(attempt.job) is None


def test_a_state_that_is_none_of_an_evaluation_is_not_taken_over(bench: Bench) -> None:
    told = failure.Failure(state="Completed", message="\x1b[2Jwell")
    error = evaluation_jobs.explained(bench.host, jobs.JobStatus("j", "exited", exit=1), told, "last line")
    assert error.state_name == "EvaluationFailed"
    assert str(error) == "the evaluation on infer ended with exit code 1: \\x1b[2Jwell"
    unsaid = evaluation_jobs.explained(
        bench.host, jobs.JobStatus("j", "exited", exit=-9, message="ended by SIGKILL"), None, ""
    )
    assert "ended by SIGKILL: the host ran out of memory, or somebody killed it" in str(unsaid)
    assert "dflash-ops jobs logs infer j" in str(unsaid)


@pytest.mark.slow
def test_a_report_that_is_gone_fails_the_attempt(bench: Bench) -> None:
    bench.there.let_go()
    with bench.case() as case:
        done = evaluating.measure(case, bench.host, bench.prepared, lambda line: None, poll=0.1)
        place = Path(workspace(bench.host, bench.job()).output)
        (place / "rounds.jsonl").unlink()
        with pytest.raises(EvaluationError, match=r"rounds\.jsonl is not there") as lost:
            evaluating.bring_home(done, bench.host, bench.state / "reports")
    assert lost.value.state_name == "ReportLost"
    assert bench.states() == [(1, "failed")]
    assert not list((bench.state / "reports").iterdir())


@pytest.mark.slow
def test_a_full_disk_here_leaves_the_report_there_for_the_next_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.there.let_go()
    write = Path.write_text

    def full(path: Path, *arguments: Any, **named: Any) -> int:
        if path.name == "report.md":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments, **named)

    with bench.case() as case:
        done = evaluating.measure(case, bench.host, bench.prepared, lambda line: None, poll=0.1)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full)
            with pytest.raises(evaluation_jobs.DiskFullError, match="free space here; it is still infer:") as no_room:
                evaluating.bring_home(done, bench.host, bench.state / "reports")
    assert no_room.value.state_name == "DiskFull"
    assert not list((bench.state / "reports").iterdir())
    assert bench.states() == [(1, "relayed")]
    measured(bench)
    assert bench.states() == [(1, "evaluated")]


def test_a_full_disk_there_is_named_and_says_what_to_do(bench: Bench) -> None:
    answer = evaluation_jobs._broken(bench.host, "/cache/p could not be written", OSError("No space left on device"))
    assert answer.state_name == "DiskFull"
    assert "free space there" in str(answer)


def test_a_host_without_an_environment_says_how_it_gets_one(bench: Bench) -> None:
    (bench.there.home / "environments" / "current" / "bin" / "dflash").unlink()
    with bench.case() as case, pytest.raises(NotProvisionedError, match="dflash-ops provision infer"):
        evaluating.measure(case, bench.host, bench.prepared, lambda line: None)
    assert bench.states() == [(1, "failed")]
    assert jobs.status(bench.connector, bench.host, None, bench.job()).state == "unknown job"


@dataclass(frozen=True)
class Piece:
    """A checkpoint in the queue, and the hosts that went away with it."""

    number: int
    not_on: tuple[str, ...] = ()


@pytest.mark.slow  # as a whole, with Prefect, in tests/flows/test_workers.py
def test_two_hosts_share_a_queue_and_one_that_dies_loses_and_doubles_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flows/evaluate_checkpoint.py does it, without the server: what is shown is that the ledger and the jobs' names
    suffice. tests/flows/test_workers.py has the real queue."""
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "state"))
    count = 3
    with another_sshd(site, f"second-{tmp_path.name}", "127.1.230.173") as second:
        stands = {name: StandIn.make(tmp_path / name) for name in ("infer", "other")}
        entries = {"infer": stands["infer"].entry, "other": site.ordinary_entry(second, **stands["other"].entry)}
        operator = site.operator(tmp_path / "state", **entries)
        ledger = Ledger.open(tmp_path / "state")
        for number in range(count):
            ledger.see(Seen("train", f"/step_{number}.pt", f"step {number}", number, 0.0))
        queue = [Piece(number) for number in range(count)]
        done: list[tuple[int, str]] = []
        back = threading.Event()

        def work(name: str) -> None:
            host = operator.inventory.host(name)
            while len(done) < count:
                try:
                    piece = queue.pop(0)
                except IndexError:
                    time.sleep(0.05)
                    continue
                try:
                    evaluate(operator.connector, ledger, host, piece, tmp_path / "reports")
                    done.append((piece.number, name))
                except ConnectionFailed:
                    queue.append(Piece(piece.number, (*piece.not_on, name)))
                    back.wait()

        threads = [threading.Thread(target=work, args=(name,)) for name in stands]
        for thread in threads:
            thread.start()
        stands["infer"].let_go()
        wait_until(lambda: len(done) >= 1 and len(stands["other"].starts()) == 1)
        second.crash()
        stands["other"].kill_jobs()
        wait_until(lambda: len(done) >= count - 1)
        second.restart()
        stands["other"].let_go()
        back.set()
        for thread in threads:
            thread.join(60)
        assert sorted(number for number, _ in done) == list(range(count))
        attempts = ledger.attempts()
        assert sorted(one.identity for one in attempts if one.state == "evaluated") == sorted(
            f"step {number}" for number in range(count)
        )
        assert all(times == 1 for stand in stands.values() for times in stand.starts().values())
        assert {name for _, name in done} >= {"infer"}
        assert stands["other"].starts()


def evaluate(connector: Connector, ledger: Ledger, host: Host, piece: Piece, reports: Path) -> None:
    relay = RelayInfo(source="train:/x", sha256="00", selected="drafter", bytes=1)
    prepared = Prepared(name=f"step_{piece.number}", identity=f"step {piece.number}", checkpoint="/x", relay=relay)
    with evaluating.opened(connector, ledger, SUITE, prepared.identity) as case:
        place = evaluating.host_of_job(case, host, piece.not_on) or host
        done = evaluating.measure(case, place, prepared, lambda line: None, poll=0.1, patience=0.5)
        evaluating.record(done, *evaluating.bring_home(done, place, reports))


@pytest.mark.slow
def test_what_a_host_was_left_with_is_ended_when_its_attempt_has_a_result_elsewhere(bench: Bench) -> None:
    with bench.case() as case:
        job = bench.job()
        bench.prepared.keep(job)
        left = Case(
            case.connector, case.ledger, SUITE, case.ledger.advance(case.attempt, on="infer", job=job), case.holding
        )
        find_or_start(bench.connector, bench.host, PurePosixPath("/x"), SUITE, job)
        assert not evaluating.end_leftover(left, bench.host)
        bench.ledger.advance(left.attempt, on="other")
        assert evaluating.end_leftover(left, bench.host)
    ended = jobs.follow(bench.connector, bench.host, None, job, lambda piece: None, poll=0.1)
    assert (ended.state, ended.exit) == ("exited", -signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_evaluation_runs_as_a_job_with_every_setting_and_takes_its_turn(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_hybrid: Pair
) -> None:
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    program = tmp_path / "environments" / "current" / "bin" / "dflash"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\ncd {Path(__file__).parents[2]} && exec {sys.executable} -m dflash "$@"\n')
    program.chmod(0o755)
    entry = {name: str(tmp_path / name) for name in ("environments", "jobs", "cache")}
    gpu = {"device": "cpu", "kernel": "torch", "dtype": "float32", "reserve_gib": 0.1}
    models = {"target": str(tiny_hybrid.target), "reference": str(tiny_hybrid.drafter)}
    operator = site.operator(tmp_path / "state", infer={**entry, **models, "gpu": gpu})
    suite = Suite(tiny_hybrid.prompts, max_new_tokens=12, num_prompts=2, ignore_eos=True)
    said: dict[str, list[str]] = {"first": [], "second": []}
    for job in said:
        assert find_or_start(
            operator.connector, operator.infer, PurePosixPath(str(tiny_hybrid.drafter)), suite, f"evaluate-{job}"
        )
    for job, lines in said.items():
        follow(operator.connector, operator.infer, f"evaluate-{job}", lines.append)
        place = workspace(operator.infer, f"evaluate-{job}")
        report = evaluation_jobs.fetch_report(operator.connector, operator.infer, place, None, tmp_path / job)
        assert report.valid, report.invalid_because
        assert report.metrics.tokens == 2 * 12
        assert report.timings["share"] >= 0
    # one of the two had to wait for the other's turn to end
    assert sum("waiting for its turn: cpu is used by process" in line for lines in said.values() for line in lines) >= 1
    assert list((tmp_path / "cache" / "evaluations").iterdir())
    assert [file.name for file in (tmp_path / "cache" / "gpu-locks").iterdir()] == ["cpu.lock"]
