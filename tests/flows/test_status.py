"""``dflash-ops status``: what it gathers, and that it fits one screen."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flows import status
from flows.cli import app
from flows.cli_status import screen
from flows.prefect_home import forget_serving, record_serving
from flows.status import GrantRow, HostRow, Number, Queue, RunRow, Status
from flows.watching import PrefectUnreachableError
from tasks import process, watcher
from tasks.inventory import load
from tasks.ledger import Attempt, Ledger, Seen, Watch
from tasks.look_memory import Known, Memory
from tests.prefect_api import REPOSITORY

NOW = 1_800_000_000.0
SUITE = "ab" * 32


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """An empty ledger in a state folder of the test's own; no Prefect server is known there."""
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path))
    monkeypatch.setenv("DFLASH_HOSTS", str(REPOSITORY / "hosts.yaml"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return Ledger.open(clock=lambda: NOW)


def recorded(ledger: Ledger, step: int, state: str, **result: object) -> Attempt:
    """An attempt at a checkpoint that ended."""
    seen = Seen("kpro6", f"/workspace/dflash/checkpoints/step_{step}", f"{step:064x}", step, NOW)
    ledger.see(seen)
    attempt = ledger.advance(ledger.begin(seen.identity, SUITE), state="relayed", on="ct129", job=f"e{step}")
    ledger.finish(attempt, state, **result)  # type: ignore[arg-type]
    return attempt


def gathered() -> Status:
    return status.gather(load(REPOSITORY / "hosts.yaml"), clock=lambda: NOW + 60)


def shown(found: Status, width: int = 80) -> str:
    terminal = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    terminal.print(screen(found, width))
    return terminal.export_text()


def test_numbers_are_the_last_results_with_their_checkpoints(ledger: Ledger) -> None:
    recorded(ledger, 100, "evaluated", tau=3.25, ci95=(3.1, 3.4), report="/reports/100")
    recorded(ledger, 200, "invalid", message="not valid: position-ids")
    recorded(ledger, 300, "superseded", message="20 newer checkpoints wait already")
    found = gathered()
    by_step = {number.step: number for number in found.numbers}
    assert set(by_step) == {100, 200}
    assert (by_step[100].tau, by_step[100].ci95, by_step[100].on) == (3.25, (3.1, 3.4), "ct129")
    assert by_step[100].place == "kpro6:/workspace/dflash/checkpoints/step_100"
    counts = {state: count for state, count in found.checkpoints[SUITE].items() if count}
    assert counts == {"evaluated": 1, "invalid": 1, "superseded": 1}
    text = shown(found)
    assert "3.250" in text
    assert "not valid: position-ids" in " ".join(text.split())


def test_only_what_a_watch_asks_of_every_checkpoint_counts_those_that_wait_for_it(ledger: Ledger) -> None:
    recorded(ledger, 100, "evaluated", tau=3.25)
    ledger.see(Seen("kpro6", "/workspace/dflash/checkpoints/step_200", "2" * 64, 200, NOW))
    assert gathered().checkpoints[SUITE]["seen"] == 0
    ledger.record_watch(Watch("kpro6:/workspace", watcher.WATCHING, looked=NOW))
    ledger.remember("kpro6:/workspace", {"suite": SUITE})
    assert gathered().checkpoints[SUITE]["seen"] == 1


def test_a_host_is_known_by_its_watch_else_by_its_last_evaluation(ledger: Ledger) -> None:
    recorded(ledger, 100, "evaluated", tau=3.0)
    ledger.record_watch(Watch("kpro6:/workspace", "HostUnreachable", looked=NOW - 600, message="no route to it"))
    hosts = {host.name: host for host in gathered().hosts}
    assert (hosts["kpro6"].known, hosts["kpro6"].since) == ("HostUnreachable", NOW - 600)
    assert hosts["kpro6"].protected
    ledger.record_watch(
        Watch("kpro6:/workspace", PrefectUnreachableError.state_name, looked=NOW - 5, message="it is busy")
    )
    assert next(host.known for host in gathered().hosts if host.name == "kpro6") == "answered the last look"
    assert hosts["ct129"].known == "last evaluation: evaluated"


def test_nothing_is_watched_where_nothing_serves(ledger: Ledger) -> None:
    ledger.record_watch(Watch("kpro6:/workspace", watcher.WATCHING, looked=NOW))
    record_serving("http://127.0.0.1:9/api")
    assert [watch.state for watch in gathered().watches] == ["watching"]
    forget_serving()
    found = gathered()
    assert [watch.state for watch in found.watches] == ["stopped"]
    ledger.record_watch(Watch("kpro6:/workspace", PrefectUnreachableError.state_name, looked=NOW, message="it is busy"))
    assert [watch.state for watch in gathered().watches] == ["stopped"]
    assert "start it to go on watching" in " ".join(shown(found).split())


def test_without_a_server_the_queue_says_so_and_all_else_is_shown(ledger: Ledger) -> None:
    recorded(ledger, 100, "evaluated", tau=3.25)
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 0, result.exception
    assert "no dflash-ops serve runs over this state folder" in result.stdout
    assert "3.250" in result.stdout


def test_a_server_that_is_gone_is_named(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    queue = gathered().queue
    assert queue.api == "http://127.0.0.1:9/api"
    assert "does not answer" in queue.problem


@pytest.fixture
def server() -> Iterator[str]:
    """The API of something that answers as a Prefect server does, with one run of each kind."""

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.endswith("/flows/filter"):
                found = [{"id": "1", "name": "evaluate-checkpoint"}, {"id": "2", "name": "nightly-comparison"}]
            elif "RUNNING" in asked["flow_runs"]["state"]["type"]["any_"]:
                begun = {"name": "evaluate step_100", "state_name": "Running", "start_time": "2027-01-15T08:00:00Z"}
                of_chance = {"name": "opal-jacamar", "flow_id": "1", "parameters": {"source": "kpro6:/c/step_200"}}
                found = [begun, {**of_chance, "state_name": "Submitting", "state_type": "PENDING"}]
            elif "FAILED" in asked["flow_runs"]["state"]["type"]["any_"]:
                told = {"state_name": "NotACheckpoint", "state": {"message": "it holds step_1"}, "name": "evaluate c"}
                found = [
                    {**told, "parameters": {"source": "kpro6:/c"}, "end_time": "2027-01-15T08:00:00Z"},
                    {**told, "parameters": {"identity": "22"}, "end_time": "2027-01-15T07:59:00Z"},
                    {**told, "parameters": {}, "end_time": "2027-01-14T07:59:00Z"},
                ]
            else:
                late = {"state_name": "Late", "state_type": "SCHEDULED"}
                found = [
                    {"name": "a-b", "flow_id": flow, **late, "next_scheduled_start_time": when}
                    for flow, when in (("1", "2027-01-15T08:00:30Z"), ("2", "2027-01-16T02:30:00Z"))
                ]
            content = json.dumps(found).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answering) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/api"
        listening.shutdown()
        thread.join()


def test_the_queue_tells_what_runs_from_what_is_due_and_what_comes_next(server: str) -> None:
    queue = status.queue(server, 1_800_000_060.0)  # 08:01:00 of that day
    assert [(run.name, run.state) for run in queue.going] == [
        ("evaluate step_100", "Running"),
        ("evaluate-checkpoint kpro6:/c/step_200", "Submitting"),
    ]
    assert [run.name for run in queue.waiting] == ["evaluate-checkpoint"]
    assert queue.next is not None
    assert queue.next.name == "nightly-comparison"


def test_a_run_that_failed_and_that_no_watch_sees_to_is_shown_for_a_day_with_why(server: str) -> None:
    queue = status.queue(server, NOW + 60)
    assert queue.failed == [RunRow("evaluate c", "NotACheckpoint", NOW, "it holds step_1")]
    text = " ".join(shown(Status(NOW + 60, [], [], queue, {}, [], [])).split())
    assert "NotACheckpoint evaluate c 1m ago: it holds step_1" in text


def test_it_fits_one_screen_and_shows_what_runs_out() -> None:
    hosts = [
        HostRow("kpro6", "training", "10.1.2.6", True, "watching", NOW),
        HostRow("ct129", "inference", "10.1.230.172", False, "–", None),
    ]
    grants = [GrantRow("a1", "kpro6", "/workspace/" + "deep/" * 20, NOW + 86_400, True)]
    going = [RunRow(f"evaluate kpro6:/workspace/dflash/checkpoints/step_{step}", "Running", NOW) for step in range(3)]
    found = Status(
        NOW + 60,
        hosts,
        [Watch("kpro6:/workspace/dflash/checkpoints", "GrantEnded", message="approve it: dflash-ops guard approve a1")],
        Queue("http://127.0.0.1:4200/api", "", going, [], RunRow("nightly", "Scheduled", NOW + 3600)),
        {SUITE: {"evaluated": 1000}},
        [Number("kpro6:/w/step_1", 1, "invalid", None, None, "ct129", None, "not valid: fc-shape", NOW)],
        grants,
    )
    text = shown(found)
    lines = text.splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= 80 for line in lines)
    assert "step 1 not valid: fc-shape" in text
    assert text.index("ends in") < text.index("queue"), "what runs out is not below the lower edge of a small window"
    for said in (
        "GrantEnded",
        "dflash-ops guard approve a1",
        "ends in",
        "3 running, 0 waiting",
        "in 59",
        "1000 evaluated",
    ):
        assert said in text


def test_in_a_narrow_window_no_word_is_broken_and_no_figure_lost() -> None:
    place = "kpro6:/workspace/dflash/checkpoints/step_20000"
    failed = RunRow(f"evaluate {place}", "Failed", NOW, "the host ran out of memory")
    found = Status(
        NOW + 60,
        [HostRow("ct129", "inference", "10.1.230.172", False, "last evaluation: evaluated", NOW)],
        [],
        Queue("http://127.0.0.1:4200/api", "", [RunRow(f"evaluate {place}", "Running", NOW)], failed=[failed]),
        {},
        [Number(place, 20000, "evaluated", 3.581, (3.4, 3.8), "ct129", None, "", NOW)],
        [],
    )
    text = shown(found, 60)
    assert all(len(line) <= 60 for line in text.splitlines())
    for said in ("last evaluation: evaluated", "for 1m", "3.581", "3.40 … 3.80", "step_20000", "ran out", "memory"):
        assert said in text


def test_with_nothing_yet_it_says_how_to_begin() -> None:
    text = shown(Status(NOW, [], [], Queue(None, "no dflash-ops serve runs over this state folder"), {}, [], []))
    for said in ("guard standing request HOST:/FOLDER", "dflash-ops serve starts it", "dflash-ops evaluate HOST:/PATH"):
        assert said in text


def test_a_failed_attempt_says_when_it_is_tried_again_or_that_it_is_not(ledger: Ledger) -> None:
    recorded(ledger, 100, "failed", message="the host ran out of memory")
    assert [number.again for number in gathered().numbers] == [None]
    assert "it is not tried again by itself" in " ".join(shown(gathered()).split())
    ledger.record_watch(Watch("kpro6:/workspace", watcher.WATCHING, looked=NOW))
    ledger.remember("kpro6:/workspace", {"suite": SUITE})
    assert [number.again for number in gathered().numbers] == [NOW + 900]
    assert "it is tried again in 14m" in " ".join(shown(gathered()).split())
    ledger.begin(f"{100:064x}", SUITE)
    assert [number.again for number in gathered().numbers] == [None]


def test_what_lies_in_a_watched_folder_and_is_broken_is_shown_with_why(ledger: Ledger) -> None:
    known = Known("1:2", "unfinished", NOW, reason="its directory is cut short")
    memory = Memory({"step_300.pt": known, "step_400.pt": Known("1:3", "settling", NOW)})
    ledger.record_watch(Watch("kpro6:/workspace", watcher.WATCHING, looked=NOW))
    ledger.remember("kpro6:/workspace", {"suite": SUITE, "look": memory.dump()})
    found = gathered()
    assert [(one.place, one.reason) for one in found.unfinished] == [
        ("kpro6:/workspace/step_300.pt", "its directory is cut short")
    ]
    assert "kpro6:/workspace/step_300.pt looked 1m ago its directory is cut short" in " ".join(shown(found).split())


def test_what_a_host_calls_itself_cannot_steer_the_terminal(ledger: Ledger) -> None:
    ledger.record_watch(Watch("kpro6:/x\x1b[2J", "LookFailed", message="\x1b]0;owned\x07"))
    assert "\x1b" not in shown(gathered())


def test_it_is_there_at_once_because_it_loads_nothing_that_reaches_a_host_or_computes() -> None:
    code = (
        "import sys, flows.cli_status; print(*{'fabric', 'numpy', 'paramiko', 'prefect', 'torch'} & set(sys.modules))"
    )
    done = process.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [])
