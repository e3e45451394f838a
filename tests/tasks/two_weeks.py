"""A world of two hosts, an operator's machine and a Prefect server in which a minute takes a millisecond.

Real are the ledger, the looks (over real, tiny checkpoints), the watch with all its rules, the bookkeeping of an
evaluation and the date of a night. What is missing is told by the clock of the world: connections, processes, Prefect.
A flow is a generator: at each of its steps its process can be killed.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.errors import DFlashError
from dflash.manifest import CONFIG, DRAFTER, MANIFEST
from tasks import ends, evaluating, jobs, looking
from tasks.approvals import Approval
from tasks.ends import LocalReader
from tasks.errors import Refused
from tasks.evaluation import job_id
from tasks.evaluation_jobs import JobVanishedError
from tasks.inventory import Location
from tasks.jobs import JobStatus
from tasks.ledger import MOST_ATTEMPTS, Seen
from tasks.look_memory import Memory
from tasks.looking import Look
from tasks.night_time import NightTime
from tasks.selection import select
from tasks.sources import LocalSource
from tasks.ssh import ConnectionFailed
from tasks.watch import CheckpointGoneError, Rules
from tasks.watch_grants import GrantEndedError
from tasks.watcher import Surroundings, Watcher
from tests.tasks import checkpoints
from tests.tasks.crashing import Asked, CountingLedger, Crash, CrashingLedger, SimRuns
from tests.tasks.watched import People

SUITE = "5" * 64
NIGHT = NightTime.of_cron("30 2 * * *", "Europe/Berlin")
BEGIN = 1_805_500_800.0  # 20 March 2027: summer time begins on the 28th
SAVE_MINUTES = 15
KEPT = 12
"""Checkpoints that the trainer leaves on its disk."""
PATIENCE_MINUTES = 5
RULES = Rules(at_once=3, most_waiting=6)
INFER: Any = SimpleNamespace(name="infer")


@dataclass
class Job:
    """One evaluation on the inference host."""

    ends: float
    vanished: bool = False


class World:
    """Everything, at one moment; :meth:`minutes` lets time pass."""

    def __init__(self, folder: Path, seed: int, *, by_event: bool, patch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.now, self.skew = BEGIN, 0.0
        self.disk = folder / "checkpoints"
        self.disk.mkdir(parents=True)
        self.templates = {
            "step": checkpoints.step(folder / "templates", 0),
            "zlab": checkpoints.zlab(folder / "templates", "zlab"),
        }
        self.state = folder / "state"
        self.state.mkdir()
        self.rules = replace(RULES, by_event=by_event)
        self.train_up = self.infer_up = self.approved = True
        self.down_until: dict[str, float] = {}
        self.training, self.step = True, 0
        self.writing: list[tuple[float, Callable[[], None]]] = []
        self.runs, self.people = SimRuns(lambda run: run in self.flows, self._point), People()
        self.flows: dict[str, Generator[None, None, None]] = {}
        self.jobs: dict[str, Job] = {}
        self.launches: Counter[str] = Counter()
        self.results: Counter[tuple[str, str, int]] = Counter()
        self.kept: dict[str, str] = {}
        self.events: list[Seen] = []
        self.requests_left: int | None = None
        self.points_left: int | None = None
        self.crashes = self.looks = 0
        self.night_tells: Counter[str] = Counter()
        self.night_records: Counter[str] = Counter()
        self.last_night: str | None = None
        self.missed_nights = 0
        patch.setattr(ends, "LocalReader", self._reader())
        patch.setattr(jobs, "status", lambda connector, host, approval, job: self._job_status(job))
        self.ledger = CountingLedger.open(self.state, clock=self.clock)
        self.ledger.results = self.results
        self.watcher: Watcher | None = None
        self.boot()

    # --- what can happen

    def minutes(self, count: int) -> None:
        for _ in range(count):
            self._minute()

    def save(self, kind: str, minutes: int = 1) -> None:
        """The trainer begins to write a checkpoint, and has written it after so many minutes."""
        self.step += 1
        match kind:
            case "step" | "zlab":
                name = f"step_{self.step}"
                folder = self.disk / name
                hidden = self.disk / f".{name}.partial"
                where = hidden if kind == "step" else folder
                where.mkdir()
                for file in sorted(self.templates[kind].iterdir()):
                    if file.name not in (MANIFEST, DRAFTER, "model.safetensors"):
                        shutil.copyfile(file, where / file.name)
                self.writing.append((self.now + 60 * minutes, lambda: self._complete(kind, where, folder)))
            case "file" | "latest":
                file = self.disk / (f"step_{self.step}.safetensors" if kind == "file" else "latest.safetensors")
                whole = checkpoints.weights(self.disk / ".whole", self.step).read_bytes()
                file.write_bytes(whole[: len(whole) // 2])
                self.writing.append((self.now + 60 * minutes, lambda: self._rest(file, whole)))

    def delete(self, place: int) -> None:
        """Somebody removes a checkpoint."""
        found = sorted(self.disk.glob("[!.]*"))
        if found:
            _remove(found[place % len(found)])

    def down(self, what: str, minutes: int) -> None:
        """``train``, ``infer``, ``prefect`` or ``machine`` is away for so many minutes."""
        self.down_until[what] = self.now + 60 * minutes
        if what == "machine":
            self.power_cut()
        self._set()

    def power_cut(self) -> None:
        """The operator's machine, or all that runs on it, is gone at once."""
        for flow in self.flows.values():
            flow.close()
        self.flows.clear()
        self.watcher, self.looked_well = None, False
        self.crashes += 1

    def kill(self, place: int) -> None:
        """``kill -9`` of one flow's process, of which the runner tells Prefect."""
        if self.flows:
            run = sorted(self.flows)[place % len(self.flows)]
            self.flows.pop(run).close()
            self.runs.set(run, "ended", "Crashed", "killed")
            self.crashes += 1

    def reboot_inference(self) -> None:
        """What ran there is gone, with nothing written about it."""
        for job in self.jobs.values():
            job.vanished = job.vanished or job.ends > self.now

    # --- what must always hold

    def check(self) -> None:
        twice = [key for key, count in self.results.items() if count > 1]
        assert not twice, f"more than one result: {twice}"
        again = [job for job, count in self.launches.items() if count > 1]
        assert not again, f"started twice: {again}"
        assert not [date for date, count in self.night_records.items() if count > 1]
        for attempt in self.ledger.open_attempts():
            assert (attempt.identity, attempt.suite, attempt.number) not in self.results
        if self.looked_well:
            assert len(self.ledger.queue(SUITE)) <= self.rules.most_waiting
            there = {checkpoint.path for checkpoint in self.ledger.checkpoints() if checkpoint.gone is None}
            assert {str(file.parent) for file in self.disk.glob(f"[!.]*/{MANIFEST}")} <= there
            assert [path for path in there if not Path(path).exists()] == []

    def settle(self) -> None:
        """The training is over and everything works; then every checkpoint has to get what is due to it."""
        self.training = False
        self.down_until.clear()
        self.skew, self.approved, self.requests_left, self.points_left = 0.0, True, None, None
        self._set()
        for _ in range(36 * 12):
            self.minutes(5)
            if self.looked_well and all(map(self._is_over, self.ledger.checkpoints())):
                break
        self.check()
        self.power_cut()
        watch = self.ledger.watch(str(self.disk))
        assert watch is not None
        assert watch.state == "watching", watch
        assert self.ledger.open_attempts() == []
        self._check_every_checkpoint()
        recorded = self.ledger.nights(SUITE)
        assert len({date for date, _ in recorded}) == len(recorded) == sum(self.night_records.values())
        # told once a night, and once more for a crash between telling and recording
        assert set(self.night_tells) >= {date for date, _ in recorded}

    def _check_every_checkpoint(self) -> None:
        known = {checkpoint.identity: checkpoint for checkpoint in self.ledger.checkpoints()}
        for identity, checkpoint in known.items():
            attempts = sorted(self.ledger.attempts(identity, SUITE), key=lambda one: one.number)
            assert [one.number for one in attempts] == list(range(1, len(attempts) + 1))
            numbers = [one for one in attempts if one.state == "evaluated"]
            assert len(numbers) <= 1
            assert not numbers or attempts[-1].state == "evaluated"
            for one in attempts:
                # what is superseded before anybody took it up has no other record than that
                assert self.results[identity, SUITE, one.number] == 1 or one.state == "superseded", one
            assert self._is_over(checkpoint), f"{checkpoint} has {attempts}"

    def _is_over(self, checkpoint: Seen) -> bool:
        attempts = self.ledger.attempts(checkpoint.identity, SUITE)
        last = max(attempts, key=lambda one: one.number, default=None)
        if last is None or last.is_open:
            return last is None and checkpoint.gone is not None
        return last.state != "failed" or len(attempts) >= MOST_ATTEMPTS or checkpoint.gone is not None

    # --- a minute

    @property
    def machine_up(self) -> bool:
        return "machine" not in self.down_until

    def clock(self) -> float:
        return self.now + self.skew

    def _minute(self) -> None:
        self.now += 60
        for what, end in list(self.down_until.items()):
            if self.now >= end:
                del self.down_until[what]
        self._set()
        for end, act in list(self.writing):
            if self.now >= end:
                self.writing.remove((end, act))
                act()
                self._prune()
        if self.training and int(self.now) % (60 * SAVE_MINUTES) == 0:
            self.save("step")
        if not self.machine_up:
            return
        if self.watcher is None:
            self.boot()
        self._look()
        self._flows()
        self._night()

    def boot(self) -> None:
        """A new process: nothing is remembered but what lies on the disk."""
        ledger = CrashingLedger.open(self.state, clock=self.clock)
        ledger.point, ledger.results = self._point, self.results  # type: ignore[method-assign]
        around = Surroundings(
            admit=self._admit,
            look=self._look_at_host,
            runs=self.runs,
            tell=self.people.tell,
            news=self._news,
            clock=self.clock,
        )
        self.watcher = Watcher(ledger, Location(None, str(self.disk)), SUITE, self.rules, around)
        if self.random.random() < 0.5:
            for run, found in self.runs.runs.items():
                if found.phase == "running":
                    self.runs.set(run, "ended", "Vanished")
        self.looked_well = False

    def _look(self) -> None:
        assert self.watcher is not None
        self.looks += 1
        try:
            watch = self.watcher.look()
            self.looked_well = watch.state == "watching"
        except Crash:
            self.power_cut()

    def _flows(self) -> None:
        if self.runs.away:
            return
        for seen in self.events:
            # an event can be lost, and come twice
            for _ in range(self.random.choice((0, 1, 1, 1, 2)) if self.rules.by_event else 0):
                self.runs.start_by_event(Asked(seen, 1))
        self.events.clear()
        for run in self.runs.waiting():
            self.flows[run] = self._evaluate(run, self.runs.asked[run])
            self.runs.set(run, "running", "Running")
        for run, flow in list(self.flows.items()):
            try:
                for _ in range(self.random.randint(1, 3)):
                    next(flow)
            except StopIteration:
                self._ended(run, "Completed", "")
            except DFlashError as error:
                self._ended(run, error.state_name, str(error))

    def _ended(self, run: str, state: str, message: str) -> None:
        del self.flows[run]
        # a server that lost its database knows nothing of it
        if run in self.runs.runs:
            self.runs.set(run, "ended", state, message)

    def _evaluate(self, run: str, asked: Asked) -> Generator[None, None, None]:
        """``evaluate_checkpoint`` in its order, a step at a time."""
        connector: Any = SimpleNamespace(inventory=SimpleNamespace(host=lambda name: INFER))
        suite: Any = SimpleNamespace(digest=lambda: SUITE)
        seen = asked.checkpoint
        with ExitStack() as held:
            opened = evaluating.opened(connector, self.ledger, suite, seen.identity, number=asked.number, flow_run=run)
            case = held.enter_context(opened)
            if not case.attempt.is_open:
                return
            yield
            place = evaluating.host_of_job(case, INFER)
            if place is None or case.job not in self.kept:
                self._relay(seen)
                yield
                identity = select(LocalSource(Path(seen.path))).identity if Path(seen.path).exists() else ""
                prepared: Any = SimpleNamespace(identity=identity, relay=SimpleNamespace(source=seen.path))
                evaluating.required_identity(case, prepared)
            while True:
                job = job_id("c", seen.identity, SUITE, case.attempt.number)
                self.kept[job] = seen.identity
                case = replace(case, attempt=self.ledger.advance(case.attempt, state="relayed", on="infer", job=job))
                yield
                self._require_inference()
                if job not in self.jobs:
                    self.launches[job] += 1
                    self.jobs[job] = Job(self.now + 60 * self.random.randint(3, 25))
                yield
                yield from self._wait(job)
                if not self.jobs[job].vanished:
                    break
                evaluating._fail(case, JobVanishedError("it is gone"))
                if case.attempt.number >= MOST_ATTEMPTS:
                    raise JobVanishedError("it is gone")
                yield
                case = replace(case, attempt=evaluating._next(case))
            yield
            self._require_inference()
            yield
            failed = self.random.random() < 0.05
            self.ledger.finish(case.attempt, "failed" if failed else "evaluated", tau=None if failed else 3.0)
            yield

    def _relay(self, seen: Seen) -> None:
        if not self.approved:
            refusal = Refused("it is not approved")
            refusal.state_name = "AwaitingApproval"  # type: ignore[misc]
            raise refusal
        if not self.train_up:
            raise ConnectionFailed("train is away")
        if not Path(seen.path).exists():
            self.ledger.miss(seen.identity)
            raise CheckpointGoneError("it is gone")

    def _wait(self, job: str) -> Generator[None, None, None]:
        away = 0
        while self.jobs[job].ends > self.now and not self.jobs[job].vanished:
            away = 0 if self.infer_up else away + 1
            if away > PATIENCE_MINUTES:
                raise ConnectionFailed("infer is away")
            yield

    def _require_inference(self) -> None:
        if not self.infer_up:
            raise ConnectionFailed("infer is away")

    def _job_status(self, job: str) -> JobStatus:
        if not self.infer_up:
            return JobStatus(job, "unreachable")
        found = self.jobs.get(job)
        if found is None:
            return JobStatus(job, "unknown job")
        return JobStatus(job, "vanished" if found.vanished else "running" if found.ends > self.now else "exited")

    def _night(self) -> None:
        """Prefect's schedule, with a late run for every night that was missed; each asks for its night by the date."""
        date = NIGHT.date(self.clock())
        if date != self.last_night:
            self.missed_nights += 1 if self.last_night is None else max(1, _days(self.last_night, date))
            self.last_night = date
        while self.missed_nights and not self.runs.away:
            if self.ledger.night(date, SUITE) is None:
                self.night_tells[date] += 1
                if self.random.random() < 0.05:
                    return  # its process is killed; Prefect's next try comes
                if self.ledger.record_night(date, SUITE, {"verdict": date}):
                    self.night_records[date] += 1
            self.missed_nights -= 1
            assert self.ledger.night(date, SUITE) is not None

    # --- the edges

    def _admit(self, previous: str | None) -> Approval | None:
        if not self.approved:
            raise GrantEndedError("it has ended")
        return None

    def _look_at_host(self, approval: Approval | None, memory: Memory, now: float) -> Look:
        if not self.train_up:
            raise ConnectionFailed("train is away")
        return looking.look(None, Location(None, str(self.disk)), None, memory, now)  # type: ignore[arg-type]

    def _news(self, seen: Seen) -> None:
        self._point()
        self.events.append(seen)

    def _point(self) -> None:
        if self.points_left is not None:
            self.points_left -= 1
            if self.points_left < 0:
                self.points_left = None
                raise Crash

    def _reader(self) -> type[LocalReader]:
        world = self

        class Flaky(LocalReader):
            """Requests to the training host, which can go away between any two of them."""

            def list(self, path: str) -> Any:
                self._asked()
                return super().list(path)

            def stat(self, path: str) -> Any:
                self._asked()
                return super().stat(path)

            def _asked(self) -> None:
                if world.requests_left is not None:
                    world.requests_left -= 1
                    if world.requests_left < 0:
                        world.requests_left = None
                        raise ConnectionFailed("the link went down in the middle")

        return Flaky

    def _set(self) -> None:
        self.train_up, self.infer_up = "train" not in self.down_until, "infer" not in self.down_until
        self.runs.away = "prefect" in self.down_until or not self.machine_up

    # --- the trainer's disk

    def _complete(self, kind: str, where: Path, folder: Path) -> None:
        if not where.exists():
            return  # somebody deleted it meanwhile
        if kind == "zlab":
            checkpoints.weights(where / "model.safetensors", self.step)
            return
        for name in (DRAFTER, MANIFEST):
            shutil.copyfile(self.templates["step"] / name, where / name)
        manifest = (where / MANIFEST).read_text().replace('"step": 0', f'"step": {folder.name.removeprefix("step_")}')
        (where / MANIFEST).write_text(manifest)
        assert (where / CONFIG).exists()
        where.rename(folder)

    def _rest(self, file: Path, whole: bytes) -> None:
        if file.exists():
            file.write_bytes(whole)

    def _prune(self) -> None:
        found = sorted(self.disk.glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns)
        for old in found[:-KEPT]:
            _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _days(earlier: str, later: str) -> int:
    from datetime import date

    return (date.fromisoformat(later) - date.fromisoformat(earlier)).days
