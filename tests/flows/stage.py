"""A training host, inference hosts and an operator who serves: everything real but the evaluator, and quick to look."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flows.prefect_home import AGENT_VARIABLES
from tasks import process
from tasks.inventory import Location
from tasks.ledger import Attempt, Ledger
from tasks.ssh import Connector
from tasks.watch import plan_watch
from tests.flows import conftest
from tests.flows.database_size import Size
from tests.prefect_api import QUIET, REPOSITORY, Server, ask, copy_database, free_port, healthy
from tests.sshds import Site
from tests.tasks import checkpoints

EVALUATOR = """#!/bin/sh
while [ "$1" != --output ]; do shift; done
sleep {seconds}
mkdir -p "$2" && cp {reports}/* "$2"
"""
SERVE_SECONDS = 240.0
STOP_SECONDS = 120.0


@dataclass
class Stage:
    """The hosts ``kpro6``, whose checkpoints are watched, and ``ct129``; all files below ``folder``."""

    site: Site
    folder: Path
    look: float = 1.0
    """Seconds between two looks."""
    served: list[process.Popen[bytes]] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    """Of every server here, as in life: what outlives one finds the next."""

    @classmethod
    def build(cls, site: Site, folder: Path, *, evaluation_seconds: float = 0.0, look: float = 1.0) -> "Stage":
        stage = cls(site, folder, look)
        remote = folder / "remote"
        evaluator = remote / "environments" / "current" / "bin" / "dflash"
        evaluator.parent.mkdir(parents=True)
        evaluator.write_text(EVALUATOR.format(seconds=evaluation_seconds, reports=conftest._report(remote / "report")))
        evaluator.chmod(0o755)
        stage.checkpoints.mkdir()
        hosts = conftest._hosts(site, remote)
        hosts["hosts"]["kpro6"]["checkpoints"] = str(stage.checkpoints)
        stage.hosts_file.write_text(json.dumps(hosts))
        stage.prompts.write_text('{"id": "a", "prompt": "def f():"}\n')
        stage.state.mkdir(mode=0o700)
        return stage

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def hosts_file(self) -> Path:
        return self.folder / "hosts.yaml"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def checkpoints(self) -> Path:
        """On the training host; the hosts share this machine's files."""
        return self.folder / "remote" / "checkpoints"

    @property
    def source(self) -> Location:
        return self.connector.inventory.location(f"kpro6:{self.checkpoints}")

    @property
    def connector(self) -> Connector:
        return Connector.load(self.hosts_file)

    @property
    def ledger(self) -> Ledger:
        return Ledger.open(self.state)

    @property
    def environment(self) -> dict[str, str]:
        """Of the operator's commands: no agent, and no Prefect but that of the state folder."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        kept = {name: value for name, value in kept.items() if name not in AGENT_VARIABLES}
        return kept | QUIET | {"DFLASH_STATE": str(self.state), "DFLASH_HOSTS": str(self.hosts_file)}

    def approve(self, *, seconds: int = 86_400) -> str:
        """Approve the watch, as the operator does; the request's id. The state folder has to be this process's."""
        store = self.connector.store
        plan = plan_watch(self.source)
        assert plan is not None
        request = store.request(plan, standing=True)
        store.approve(request.id, reason="test", ca_key=self.site.ca_key, seconds=seconds)
        return request.id

    def save(self, step: int) -> Path:
        """A new checkpoint, whole at once."""
        return checkpoints.step(self.checkpoints, step)

    def migrated(self, server: Server) -> None:
        """Begin with the database of ``server``, which saves making a new one."""
        copy_database(server, self.state / "prefect")

    def command(self, *arguments: str) -> str:
        """What a command of the operator prints."""
        argv = [sys.executable, "-m", "flows", *arguments]
        return process.run(argv, env=self.environment, cwd=REPOSITORY, timeout=120).stdout

    def serve(self, *options: str, **environment: str) -> process.Popen[bytes]:
        """Start serving and return when it does; its output is in ``serve.log``."""
        argv = [sys.executable, "-m", "tests.flows.quick_serve", str(self.look), "serve", "--port", str(self.port)]
        argv += ["--prompts", str(self.prompts), "--max-new-tokens", "4", *options]
        with self.log_file.open("ab") as log:
            begun = log.tell()
            running = process.start(
                argv,
                env=self.environment | environment,
                cwd=REPOSITORY,
                stdin=process.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.served.append(running)
        wait_until(
            lambda: b": serving http" in self.log_file.read_bytes()[begun:] or running.poll() is not None, SERVE_SECONDS
        )
        assert running.poll() is None, self.log
        return running

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def log_file(self) -> Path:
        return self.folder / "serve.log"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def serving(self) -> bool:
        """Whether it serves now, and does not just begin or end."""
        return (self.state / "serve.json").exists() and healthy(self.api)

    def database_size(self) -> Size:
        """What the server's database holds."""
        return Size.of(self.state / "prefect" / "prefect.db")

    def ended_runs(self) -> int:
        """How many flow runs there were that are not waiting for their time."""
        ended = {"flow_runs": {"state": {"type": {"not_any_": ["SCHEDULED"]}}}}
        return int(ask(self.api, "flow_runs/count", ended))

    def results(self) -> list[Attempt]:
        """The attempts that have a result."""
        return [attempt for attempt in self.ledger.attempts() if not attempt.is_open]

    def end(self) -> None:
        """End whatever still serves, and all it started."""
        for running in self.served:
            if running.poll() is None:
                running.send_signal(signal.SIGTERM)
        for running in self.served:
            try:
                running.wait(STOP_SECONDS)
            except process.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


@contextmanager
def staged(site: Site, folder: Path, **options: float) -> Iterator[Stage]:
    """A stage while the block lasts."""
    stage = Stage.build(site, folder, **options)
    try:
        yield stage
    finally:
        stage.end()


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Return when ``condition`` holds; fails after ``seconds``, which is far more than it takes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
