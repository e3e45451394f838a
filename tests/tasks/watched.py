"""What surrounds a watch in tests: runs without Prefect, an operator's approvals, and people who are told."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dflash.errors import DFlashError
from tasks.ledger import Seen
from tasks.watch import Order, Run
from tasks.watcher import Notice


class Clock:
    """Seconds since 1970, set by hand."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class PrefectAwayError(DFlashError):
    state_name = "PrefectUnreachable"


@dataclass
class FakeRuns:
    """Runs by their id; a key has one."""

    runs: dict[str, Run] = field(default_factory=dict)
    orders: dict[str, Order] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    restarted: list[str] = field(default_factory=list)
    away: bool = False
    begun: Callable[[str], None] = lambda run: None

    def find(self, run: str) -> Run | None:
        self._answer()
        return self.runs.get(run)

    def start(self, order: Order) -> str:
        self._answer()
        if order.key not in self.keys:
            run = f"run-{len(self.keys) + 1}"
            self.keys[order.key] = run
            self.runs[run] = Run(run, "waiting", "Scheduled")
            self.orders[run] = order
            self.begun(run)
        return self.keys[order.key]

    def again(self, run: str) -> None:
        self._answer()
        self.restarted.append(run)
        self.set(run, "waiting", "AwaitingRetry")

    def set(self, run: str, phase: str, state: str, message: str = "") -> None:
        self.runs[run] = replace(self.runs[run], phase=phase, state=state, message=message)  # type: ignore[arg-type]

    def lose(self) -> None:
        """The server's database is gone."""
        self.runs.clear()
        self.orders.clear()
        self.keys.clear()

    def _answer(self) -> None:
        if self.away:
            raise PrefectAwayError("the Prefect server does not answer")


@dataclass
class People:
    """Who is told, and whether they can be."""

    notices: list[Notice] = field(default_factory=list)
    news: list[Seen] = field(default_factory=list)
    deaf: bool = False

    def tell(self, notice: Notice) -> None:
        if self.deaf:
            raise DFlashError("nobody could be told")
        self.notices.append(notice)

    @property
    def kinds(self) -> list[str]:
        return [notice.kind for notice in self.notices]
