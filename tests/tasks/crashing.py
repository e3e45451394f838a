"""What can be killed anywhere or lose its memory: a ledger's process, and a Prefect server with its runs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tasks.ledger import Attempt, Ledger, Seen, State
from tasks.watch import Order, Run
from tests.tasks.watched import FakeRuns


class Crash(BaseException):
    """A process is gone, in the middle of whatever it did."""


class CountingLedger(Ledger):
    """The ledger, with the results that it took."""

    results: Counter[tuple[str, str, int]]

    def finish(self, attempt: Attempt, state: State, **fields: Any) -> bool:
        taken = super().finish(attempt, state, **fields)
        self.results[attempt.identity, attempt.suite, attempt.number] += taken
        return taken


class CrashingLedger(CountingLedger):
    """The ledger, as a process that can be killed before and after every change sees it."""

    point: Callable[[], None] = staticmethod(lambda: None)


def _crashing(name: str) -> None:
    original = getattr(CountingLedger, name)

    def around(self: CrashingLedger, *arguments: Any, **named: Any) -> Any:
        self.point()
        result = original(self, *arguments, **named)
        self.point()
        return result

    setattr(CrashingLedger, name, around)


for _name in ("see", "miss", "due", "begin", "postpone", "resume", "finish", "remember", "record_watch"):
    _crashing(_name)


@dataclass(frozen=True)
class Asked:
    """What a flow run is for."""

    checkpoint: Seen
    number: int


class SimRuns(FakeRuns):
    """Prefect: it may be away, lose its memory, or be told of a crash late or never."""

    def __init__(self, runs_now: Callable[[str], bool], point: Callable[[], None]) -> None:
        super().__init__()
        self._runs_now, self._point = runs_now, point
        self.asked: dict[str, Asked] = {}
        self.queue: list[str] = []
        self.started = 0

    def find(self, run: str) -> Run | None:
        found = super().find(run)
        return None if found is None else replace(found, alive=self._runs_now(run))

    def start(self, order: Order) -> str:
        self._answer()
        self._point()
        if order.key not in self.keys:
            self.keys[order.key] = self._new(Asked(order.checkpoint, order.attempt.number))
        self._point()
        return self.keys[order.key]

    def again(self, run: str) -> None:
        self._point()
        super().again(run)
        self._point()

    def start_by_event(self, asked: Asked) -> None:
        self._new(asked)

    def waiting(self) -> list[str]:
        ready = [run for run in self.queue if run in self.runs and not self._runs_now(run)]
        self.queue = [run for run in self.queue if self._runs_now(run)]
        return ready

    def set(self, run: str, phase: str, state: str, message: str = "") -> None:
        super().set(run, phase, state, message)
        if phase == "waiting":
            self.queue.append(run)

    def lose(self) -> None:
        super().lose()
        self.asked.clear()

    def _new(self, asked: Asked) -> str:
        self.started += 1
        run = f"run-{self.started}"
        self.asked[run] = asked
        self.runs[run] = Run(run, "waiting", "Scheduled")
        self.queue.append(run)
        return run
