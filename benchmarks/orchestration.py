"""How long it takes from a look to the first line of an evaluation, what a run costs around it, and what stays behind.

A real Prefect server, real sshds and the real flows, all on this machine; the evaluator is a stand-in that sleeps.

    python benchmarks/orchestration.py [--only latency,status,database] [--checkpoints 10]

Prints one line a number with its limit, and exits with 1 when one is over it. Other work on the machine makes them
worse, so each line also says how busy it was.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tasks import process
from tasks.ledger import Ledger, Seen, Watch
from tests.flows.database_size import Size
from tests.flows.stage import Stage, staged, wait_until
from tests.prefect_api import REPOSITORY, ask
from tests.sshds import both_sshds

LATENCY_SECONDS, OVERHEAD, STATUS_SECONDS, DATABASE_MB = 5.0, 1.3, 1.0, 200.0
EVALUATION_SECONDS = 20.0
LEDGER = 1000
WAIT_SECONDS = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="latency,status,database", help="which, joined by commas")
    parser.add_argument("--checkpoints", type=int, default=10, help="how many are saved, one after the other")
    asked = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="orchestration-") as folder:
        wanted = asked.only.split(",")
        if "status" in wanted:
            good &= status(Path(folder) / "status")
        if {"latency", "database"} & set(wanted):
            with serving(Path(folder)) as stage:
                before = stage.database_size()
                good &= latency(stage, asked.checkpoints)
                good &= database(stage, before)
    sys.exit(0 if good else 1)


@contextmanager
def serving(folder: Path) -> Iterator[Stage]:
    """An operator who serves and whose watch is approved."""
    (folder / "sshds").mkdir()
    with both_sshds(folder / "sshds") as site:
        (folder / "stage").mkdir()
        with staged(site, folder / "stage", evaluation_seconds=EVALUATION_SECONDS) as stage:
            os.environ["DFLASH_STATE"] = str(stage.state)
            stage.approve()
            stage.serve()
            yield stage


def latency(stage: Stage, count: int) -> bool:
    """From the look that found a checkpoint whole to the flow's first step; and the whole around its steps."""
    stage.save(1)  # the first run also brings this machine's file cache up to date
    wait_until(lambda: len(stage.results()) == 1, WAIT_SECONDS)
    for number in range(2, count + 2):
        stage.save(number)
        wait_until(lambda done=number: len(stage.results()) == done, WAIT_SECONDS)
        wait_until(lambda: not under_way(stage), WAIT_SECONDS)
    begun, whole = [], []
    for seen in stage.ledger.checkpoints():
        if seen.step == 1:
            continue
        (attempt,) = stage.ledger.attempts(seen.identity)
        run, steps = flow_run(stage, str(attempt.flow_run))
        begun.append(moment(run["start_time"]) - seen.seen)
        measured = sum(moment(step["end_time"]) - moment(step["start_time"]) for step in steps)
        whole.append((moment(run["end_time"]) - moment(run["start_time"])) / measured)
    good = told("look to first line", statistics.median(begun), "s, median", LATENCY_SECONDS, begun)
    return good & told("run by the sum of its steps", statistics.median(whole), "×, median", OVERHEAD, whole)


def database(stage: Stage, before: Size) -> bool:
    """What a thousand runs leave in the server's database, and two weeks of them."""
    grown, ended = stage.database_size() - before, stage.ended_runs()
    print(f"  {grown.told(ended)}")
    return told("two weeks of runs", grown.in_two_weeks(ended), "MB", DATABASE_MB, [])


def status(folder: Path) -> bool:
    """``dflash-ops status`` with a thousand checkpoints in the ledger, as a command; CPU seconds of it as well."""
    folder.mkdir()
    fill(Ledger.open(folder), LEDGER)
    env = {**os.environ, "DFLASH_STATE": str(folder), "DFLASH_HOSTS": str(REPOSITORY / "hosts.yaml")}
    walls, spent = [], []
    for _ in range(5):
        begin, used = time.perf_counter(), cpu()
        process.run([sys.executable, "-m", "flows", "status"], env=env, cwd=REPOSITORY, timeout=60)
        walls.append(time.perf_counter() - begin)
        spent.append(cpu() - used)
    print(f"  CPU: {statistics.median(spent):.2f} s, median of {len(spent)}")
    return told("status of a thousand checkpoints", statistics.median(walls), "s, median", STATUS_SECONDS, walls)


def fill(ledger: Ledger, count: int) -> None:
    now = time.time()
    for number in range(count):
        path = f"/workspace/dflash/checkpoints/step_{number * 500}"
        seen = Seen("kpro6", path, f"{number:064x}", number * 500, now - count + number)
        ledger.see(seen)
        attempt = ledger.advance(ledger.begin(seen.identity, "ab" * 32), state="relayed", on="ct129", job=f"e{number}")
        ledger.finish(attempt, "evaluated", tau=3.0 + number / 1000, ci95=(3.0, 3.2), report="/reports/x")
    ledger.record_watch(Watch("kpro6:/workspace/dflash/checkpoints", "watching", looked=now))


def under_way(stage: Stage) -> bool:
    going = {"flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING"]}}}}
    return bool(ask(stage.api, "flow_runs/count", going))


def flow_run(stage: Stage, run: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A flow run and the runs of its tasks."""
    (found,) = ask(stage.api, "flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    wait_until(lambda: len(_steps(stage, run)) >= 3, 60)  # they reach the server as events, behind the run itself
    return found, _steps(stage, run)


def _steps(stage: Stage, run: str) -> list[dict[str, Any]]:
    steps = ask(stage.api, "task_runs/filter", {"task_runs": {"flow_run_id": {"any_": [run]}}})
    return [step for step in steps if step["end_time"] is not None]


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def told(what: str, measured: float, unit: str, limit: float, all_of_them: list[float]) -> bool:
    """Print a number beside its limit; whether it keeps to it."""
    spread = f" [{min(all_of_them):.2f} … {max(all_of_them):.2f}]" if all_of_them else ""
    verdict = "ok" if measured <= limit else "OVER"
    busy = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{what}: {measured:.2f} {unit}{spread}, limit {limit:g}: {verdict} ({busy})", flush=True)
    return measured <= limit


if __name__ == "__main__":
    main()
