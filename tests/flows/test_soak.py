"""Half an hour of it, with real servers and hosts, while something is killed every few seconds.

``DFLASH_SOAK_MINUTES`` says how long; what is killed when follows from ``DFLASH_SOAK_SEED``.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from flows.interrupted import alive
from tasks.ledger import Attempt
from tests.flows.stage import Stage, staged, wait_until
from tests.prefect_api import Server
from tests.sshds import Site

MINUTES = float(os.environ.get("DFLASH_SOAK_MINUTES", "30"))
SEED = int(os.environ.get("DFLASH_SOAK_SEED", "1"))
SAVE_SECONDS, FAULT_SECONDS = 15.0, 11.0
SETTLE_SECONDS = 900.0
DATABASE_MB = 200.0
ENOUGH = 50
BEGIN_LINE = 'echo "$2" >> {record}\n'

pytestmark = [pytest.mark.slow, pytest.mark.timeout(int(MINUTES * 60 + 2 * SETTLE_SECONDS + 600))]


@pytest.fixture
def stage(own_site: Site, shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """An operator who serves, whose evaluations take some seconds and write down which began."""
    with staged(own_site, tmp_path, evaluation_seconds=4.0) as made:
        monkeypatch.setenv("DFLASH_STATE", str(made.state))
        program = made.folder / "remote" / "environments" / "current" / "bin" / "dflash"
        program.write_text(program.read_text().replace("sleep ", BEGIN_LINE.format(record=begun(made)) + "sleep "))
        made.migrated(shared_server)
        made.approve()
        yield made


def begun(stage: Stage) -> Path:
    """The record of evaluations that began: where each writes its report."""
    return stage.folder / "begun"


class Faults:
    """What goes wrong, one after the other, as chance has it."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._chance = stage, random.Random(SEED)
        self.count: Counter[str] = Counter()

    def strike(self) -> None:
        fault = self._chance.choice([self.kill_serve, self.kill_run, self.kill_run, self.drop_host, self.end_serve])
        fault()
        self.count[fault.__name__] += 1

    def kill_serve(self) -> None:
        self._stage.served[-1].kill()

    def end_serve(self) -> None:
        os.killpg(self._stage.served[-1].pid, signal.SIGTERM)

    def kill_run(self) -> None:
        ours = f"DFLASH_STATE={self._stage.state}".encode()
        for pid in alive().values():
            with suppress(OSError):
                # other tests may have runs on this machine
                if ours in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)

    def drop_host(self) -> None:
        self._stage.site.ordinary.restart()


def test_every_checkpoint_has_one_result_whatever_is_killed(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    faults, saved = Faults(stage), 0
    stage.serve()
    before = stage.database_size()
    end = time.monotonic() + MINUTES * 60
    next_save, next_fault = time.monotonic(), time.monotonic() + FAULT_SECONDS
    while time.monotonic() < end:
        if stage.served[-1].poll() is not None:
            stage.serve()
        if time.monotonic() >= next_save:
            saved += 1
            stage.save(saved)
            next_save = time.monotonic() + SAVE_SECONDS
        if time.monotonic() >= next_fault:
            faults.strike()
            next_fault = time.monotonic() + FAULT_SECONDS
        time.sleep(0.2)
    wait_until(lambda: over(stage, saved), SETTLE_SECONDS)

    ledger = stage.ledger
    assert sorted(seen.step or 0 for seen in ledger.checkpoints()) == list(range(1, saved + 1))
    for seen in ledger.checkpoints():
        attempts = ledger.attempts(seen.identity)
        measured = [attempt for attempt in attempts if attempt.state == "evaluated"]
        assert len(measured) == 1 or passed_over(attempts), attempts
    started = Counter(begun(stage).read_text().split())
    assert set(started.values()) == {1}, "an evaluation was started twice"

    grown, runs = stage.database_size() - before, stage.ended_runs()
    with capsys.disabled():
        print(f"\nsoak: {saved} checkpoints, {dict(faults.count)}, {len(stage.served)} lives of serve")
        print(f"soak: {grown.told(runs)}")
    # few runs would have to bear what every life of serve writes
    assert grown.in_two_weeks(runs) < DATABASE_MB or saved < ENOUGH


def passed_over(attempts: Sequence[Attempt]) -> bool:
    """Whether newer ones took its place: at once, or after the first attempt's runs were killed too often."""
    last, *before = attempts
    return last.state == "superseded" and all(attempt.message.startswith("its run ended") for attempt in before)


def over(stage: Stage, saved: int) -> bool:
    """Whether every checkpoint that was saved is known and has a result, or was passed over for newer ones."""
    if stage.served[-1].poll() is not None:
        stage.serve()
    ledger = stage.ledger
    known = ledger.checkpoints()
    results = [ledger.attempts(seen.identity) for seen in known]
    done = [attempts for attempts in results if any(one.state in ("evaluated", "superseded") for one in attempts)]
    return len(done) == saved and not ledger.open_attempts()
