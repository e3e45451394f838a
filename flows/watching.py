"""The loop that watches one folder of checkpoints, in the process of ``dflash-ops serve``: a look a minute.

No flow run looks; one exists only for a checkpoint that is evaluated. The loop survives what fails around it: a host,
an approval, the Prefect server, hosts.yaml while it is being edited. What it knows stands in the ledger.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dflash.errors import DFlashError
from dflash.prompts import default_prompts
from flows import events
from flows.interrupted import alive
from flows.notify import notify
from flows.prefect_home import configure_prefect, forget_agent
from tasks import looking, watch_grants
from tasks.actions import said
from tasks.approvals import Approval
from tasks.evaluating import end_job
from tasks.evaluation import Suite
from tasks.inventory import Inventory, Location
from tasks.ledger import Ledger, LedgerError, Seen, Watch
from tasks.ssh import Connector
from tasks.state import state_dir
from tasks.watch import LOOK_SECONDS, WATCH_DAYS, Order, Rules, Run, source_of
from tasks.watcher import TOLD_AFTER, LookFailedError, Notice, Surroundings, Watcher, state_of

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events import DeploymentEventTrigger

DEPLOYMENT = "evaluate-checkpoint/dflash"
BUSY, BUSY_RETRIES = 503, 2
"""What a server whose database is locked answers, and how often it is asked again, after some seconds each."""


class PrefectUnreachableError(DFlashError):
    """The Prefect server does not answer, or does not do what it is asked."""

    state_name = "PrefectUnreachable"


@dataclass(frozen=True)
class Watching:
    """What is watched, and how what is found is evaluated."""

    source: str
    """HOST:/folder."""
    suite: Suite
    on: str | None = None
    """The inference host; None leaves it to the deployment's workers, or to the only one there is."""
    reports: Path | None = None
    """Where reports go; None: the state folder's ``reports``."""
    rules: Rules | None = None
    """None: as many evaluations at once as there are inference hosts, and one that is relayed meanwhile."""
    hosts: Path | None = None
    deployment: str = DEPLOYMENT

    def parameters(self) -> dict[str, Any]:
        """Those of every evaluation, as plain JSON."""
        return {
            "on": self.on,
            "suite": asdict(self.suite) | {"prompts": str(self.suite.prompts.absolute())},
            "reports": str((self.reports or state_dir() / "reports").absolute()),
            "hosts": None if self.hosts is None else str(self.hosts.absolute()),
        }


def default_suite() -> Suite:
    """What every checkpoint is asked where nobody says what: the shipped prompts, answered without thinking."""
    return Suite(default_prompts(), thinking="off")


def sources(inventory: Inventory) -> tuple[str, ...]:
    """What is watched where nobody says what: the checkpoints of every training host of hosts.yaml that names them."""
    return tuple(
        f"{host.name}:{host.checkpoints}"
        for host in inventory.hosts.values()
        if host.role == "training" and host.checkpoints is not None
    )


def watch(watching: Watching, *, stop: threading.Event, wake: Callable[[], None] = lambda: None) -> None:
    """Watch until ``stop`` is set; ``wake`` is called when there are new runs to be started."""
    looks = Looks(watching, wake)
    while not stop.wait(looks.pause):
        looks.look()


def saved_trigger(watching: Watching) -> "DeploymentEventTrigger":
    """The trigger by which ``dflash.checkpoint.saved`` starts the evaluation of a checkpoint, for its deployment.

    To be used with :attr:`Rules.by_event`. A run takes the first attempt at its checkpoint and no other, so an event
    that comes twice, or behind the watch, evaluates nothing again.
    """
    from prefect.events import DeploymentEventTrigger

    def number(name: str) -> dict[str, Any]:
        template = {"__prefect_kind": "jinja", "template": "{{ event.payload." + name + " }}"}
        return {"__prefect_kind": "json", "value": template}

    parameters = watching.parameters() | {
        "source": "{{ event.payload.source }}",
        "identity": "{{ event.payload.identity }}",
        "attempt": number("attempt"),
    }
    return DeploymentEventTrigger(
        name=f"evaluate what is saved in {watching.source}",
        expect={events.CHECKPOINT_SAVED},
        match_related={},
        parameters=parameters,
    )


class Looks:
    """One watch, made anew when hosts.yaml or the prompts change."""

    def __init__(self, watching: Watching, wake: Callable[[], None] = lambda: None) -> None:
        forget_agent()
        configure_prefect()
        self.watching, self._wake = watching, wake
        self.pause = 0.0
        self._made_of: tuple[Any, ...] = ()
        self._watcher: Watcher | None = None
        self._complained = self._told = ""

    def look(self) -> Watch | None:
        """Look once; None when not even the ledger could be used. Nothing is raised: the loop goes on."""
        self.pause = LOOK_SECONDS
        try:
            found = self.look_or_raise()
        except DFlashError as error:
            self._complain(error)
            return None
        except Exception as error:
            # a fault of this program must not end the watch; the next look may have better luck
            traceback.print_exception(error, file=sys.stderr)
            self._complain(error)
            return None
        self._complained = self._told = ""
        return found

    def look_or_raise(self) -> Watch:
        """Look once; raises what keeps even the state of the watch from being written down."""
        watcher = self._current()
        found = watcher.look()
        self.pause = watcher.pause()
        if watcher.handed.begun or watcher.handed.restarted:
            self._wake()
        return found

    def _current(self) -> Watcher:
        file = self.watching.hosts or Path(os.environ.get("DFLASH_HOSTS") or "hosts.yaml")
        changed = file.stat().st_mtime_ns if file.exists() else 0
        made_of = (changed, self.watching.suite.digest())
        if self._watcher is None or made_of != self._made_of:
            self._watcher, self._made_of = self._made(), made_of
        return self._watcher

    def _made(self) -> Watcher:
        watching, connector, ledger = self.watching, Connector.load(self.watching.hosts), Ledger.open()
        source = connector.inventory.location(watching.source)
        around = _Around(watching, connector, source)
        surroundings = Surroundings(
            admit=lambda previous: watch_grants.admit(connector.store, source, previous),
            look=lambda approval, memory, now: looking.look(connector, source, approval, memory, now),
            runs=PrefectRuns(watching),
            tell=around.tell,
            warning=around.warning,
            news=around.news,
            cancelled=around.cancelled,
        )
        rules = watching.rules or Rules(at_once=1 + _inference_hosts(connector.inventory))
        return Watcher(ledger, source, watching.suite.digest(), rules, surroundings)

    def _complain(self, error: Exception) -> None:
        """Say what keeps it from looking where somebody will read it, once and not every minute."""
        what = f"{type(error).__name__}: {error}"
        if what != self._complained:
            self._complained = what
            print(f"the watch of {self.watching.source} stands still: {what}", file=sys.stderr, flush=True)
        name, due = self._recorded(error)
        if due and self._told != what:
            self._told = what
            try:
                inventory = Connector.load(self.watching.hosts).inventory
                notify(inventory, f"{name}: {self.watching.source} is not watched", str(error))
            except DFlashError as unheard:
                print(unheard, file=sys.stderr, flush=True)

    def _recorded(self, error: Exception) -> tuple[str, bool]:
        """The state that the watch is in, for ``status`` to show, and whether people are to hear of it by now."""
        if isinstance(error, LedgerError):
            return error.state_name, True
        name = state_of(error) if isinstance(error, DFlashError | OSError) else LookFailedError.state_name
        try:
            ledger = Ledger.open()
            before = ledger.watch(self.watching.source) or Watch(self.watching.source, "")
            watch = ledger.record_watch(replace(before, state=name, message=str(error)))
        except DFlashError:
            return name, False
        return name, time.time() - watch.since >= TOLD_AFTER


def _inference_hosts(inventory: Inventory) -> int:
    return sum(host.role == "inference" for host in inventory.hosts.values())


@dataclass(frozen=True)
class _Around:
    """What one watch tells, and whom."""

    watching: Watching
    connector: Connector
    source: Location

    def tell(self, notice: Notice) -> None:
        name, request = str(self.source), notice.watch.request
        if notice.kind == "ends soon":
            events.emit(events.GRANT_ENDS_SOON, request or name, source=name, message=notice.body)
        elif notice.watch.state == "GrantEnded":
            events.emit(events.GRANT_ENDED, request or name, source=name, message=notice.body)
        notify(self.connector.inventory, notice.subject, notice.body)

    def warning(self, approval: Approval, now: float) -> str | None:
        spent = watch_grants.used(self.connector.audit, approval)
        text = watch_grants.warning(self.source, approval, spent, now)
        if text is None:
            return None
        waiting = watch_grants.ask(self.connector.store, self.source)
        return f"{text}: dflash-ops guard approve {waiting.id} --valid {WATCH_DAYS}d"

    def news(self, seen: Seen) -> None:
        events.emit(
            events.CHECKPOINT_SAVED,
            seen.identity,
            source=source_of(seen),
            identity=seen.identity,
            step=seen.step,
            attempt=1,
        )

    def cancelled(self, order: Order) -> None:
        """What was cancelled here must not go on there. A host that does not answer now keeps its job."""
        on, job = order.attempt.on, order.attempt.job
        if on is not None and job is not None and on in self.connector.inventory.hosts:
            end_job(self.connector, self.connector.inventory.host(on), job)


class PrefectRuns:
    """Runs of the evaluation at the configured Prefect server; :class:`tasks.watch.Runs`."""

    def __init__(self, watching: Watching) -> None:
        self._watching = watching

    def find(self, run: str) -> Run | None:
        """See :class:`tasks.watch.Runs`; so do the others. Raises :class:`PrefectUnreachableError`."""
        from prefect.client.schemas.objects import StateType
        from prefect.exceptions import ObjectNotFound

        with _asking() as client:
            try:
                found = client.read_flow_run(UUID(run))
            except ObjectNotFound:
                return None
        state = found.state
        if found.deployment_id is None and (state is None or state.is_final()):
            return None  # a command's, which nothing could start again
        if state is None or state.type in (StateType.SCHEDULED, StateType.PENDING, StateType.PAUSED):
            return Run(run, "waiting", "" if state is None else str(state.name))
        if state.is_final():
            return Run(run, "ended", str(state.name), state.message or "")
        return Run(run, "running", str(state.name), alive=run in alive())

    def start(self, order: Order) -> str:
        from prefect.exceptions import ObjectNotFound

        name = self._watching.deployment
        parameters = self._watching.parameters() | {
            "source": order.source,
            "identity": order.attempt.identity,
            "attempt": order.attempt.number,
        }
        with _asking() as client:
            try:
                deployment = client.read_deployment_by_name(name)
            except ObjectNotFound:
                raise PrefectUnreachableError(
                    f"the Prefect server has no deployment {name}: dflash-ops serve makes it when it starts"
                ) from None
            run = client.create_flow_run_from_deployment(
                deployment.id, parameters=parameters, idempotency_key=order.key
            )
        return str(run.id)

    def again(self, run: str) -> None:
        from prefect.states import Scheduled

        with _asking() as client:
            # forced, because the server has it for ended; only its process decides what is still to be done
            client.set_flow_run_state(UUID(run), Scheduled(name="AwaitingRetry"), force=True)


@contextmanager
def _asking() -> "Iterator[SyncPrefectClient]":
    """A client of the server; what goes wrong with the server in the block is one named error."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    try:
        # a server that is busy for a moment is asked again; for one that is away the next look is soon enough
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: BUSY_RETRIES}), get_client(sync_client=True) as client:
            yield client
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        raise PrefectUnreachableError(
            f"the Prefect server {'is busy' if code == BUSY else 'refused a request'} (HTTP status {code}); what is "
            "due stays in the ledger and is started with a later look: see the log of dflash-ops serve should it last"
        ) from error
    except (httpx.HTTPError, PrefectException, OSError) as error:
        raise PrefectUnreachableError(
            f"the Prefect server does not answer ({type(error).__name__}: {said(str(error))}); what is due stays in "
            "the ledger and is started when it does: is dflash-ops serve running?"
        ) from error
