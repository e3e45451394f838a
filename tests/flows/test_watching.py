"""The watch with real parts: sshds, the gate, a Prefect server, a webhook; only the evaluator is a stand-in."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from flows import events
from flows.notify import save_block
from flows.watch_training import StandsStillError, watch_training
from flows.watching import Looks, PrefectRuns, PrefectUnreachableError, Watching, saved_trigger, sources, watch
from tasks import jobs
from tasks.evaluation import Suite
from tasks.inventory import Location
from tasks.ledger import Ledger, Watch
from tasks.ssh import ConnectionFailed
from tasks.watch import Rules, evaluation_key, plan_watch
from tests.flows.conftest import Operator, _send_what_waits
from tests.prefect_api import Server, ask, copy_database, free_port, run_here, state
from tests.prefect_api import running as server_running
from tests.receivers import Webhook, running
from tests.tasks import checkpoints

pytestmark = pytest.mark.timeout(600)  # a Prefect server takes minutes to start on a machine that has much to do


@dataclass
class Watched:
    """One folder on the protected host, its watch, and the server that its runs are at."""

    operator: Operator
    api: str
    watching: Watching

    @property
    def folder(self) -> Path:
        return self.operator.checkpoint.parent

    @property
    def source(self) -> Location:
        return self.operator.connector.inventory.location(self.watching.source)

    @property
    def ledger(self) -> Ledger:
        return Ledger.open(self.operator.folder)

    @property
    def stands(self) -> Watch:
        (found,) = self.ledger.watches()
        return found

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Those of the evaluation, the last one first."""
        name = self.watching.deployment.rpartition("/")[2]
        question = {"deployments": {"name": {"any_": [name]}}, "sort": "START_TIME_DESC"}
        found: list[dict[str, Any]] = ask(self.api, "flow_runs/filter", question)
        return found

    def look(self, watching: Watching | None = None) -> Watch:
        """One look of a process that knows nothing."""
        found = Looks(watching or self.watching).look()
        assert found is not None
        return found

    def approve(self, *, days: int = 10, **changes: Any) -> str:
        """The standing approval as the watch asks for it, or with another budget."""
        plan = plan_watch(self.source)
        assert plan is not None
        assert plan.grant is not None
        store = self.operator.connector.store
        wanted = plan.model_copy(update={"grant": plan.grant.model_copy(update=changes)})
        request = store.request(wanted, standing=True)
        store.approve(request.id, reason="test", ca_key=self.operator.site.ca_key, seconds=86_400 * days)
        return request.id

    def change_host(self, name: str = "kpro6", **changes: Any) -> None:
        hosts = json.loads(self.operator.hosts_file.read_text())
        hosts["hosts"][name] |= changes
        self.operator.hosts_file.write_text(json.dumps(hosts))


@pytest.fixture
def watched(operator: Operator, prefect_api: str, tmp_path: Path) -> Watched:
    """The checkpoints of ``kpro6``, with a deployment of the evaluation of the test's own."""
    from flows.deployments import deployment

    operator.checkpoint.unlink()
    prompts = tmp_path / "prompts.jsonl"
    name = f"watch-{tmp_path.name}"
    # the server knows the runs of all tests by their keys, which a suite of the test's own makes its own
    prompts.write_text(json.dumps({"id": name, "prompt": "def f():"}) + "\n")
    deployed = deployment("evaluate_checkpoint", operator.hosts_file)
    deployed.name = name
    deployed.apply()
    watching = Watching(
        source=f"kpro6:{operator.checkpoint.parent}",
        suite=Suite(prompts, max_new_tokens=4, ignore_eos=True),
        reports=tmp_path / "reports",
        hosts=operator.hosts_file,
        deployment=f"evaluate-checkpoint/{name}",
    )
    return Watched(operator, prefect_api, watching)


@pytest.fixture
def webhook(watched: Watched, prefect_api: str) -> Iterator[Webhook]:
    """Whom hosts.yaml has told."""
    with running(Webhook()) as receiver:
        save_block("custom-webhook/watch", receiver.url)
        hosts = json.loads(watched.operator.hosts_file.read_text())
        watched.operator.hosts_file.write_text(json.dumps(hosts | {"notify": ["custom-webhook/watch"]}))
        yield receiver


def test_a_checkpoint_that_appears_is_evaluated_once_under_a_standing_grant(watched: Watched) -> None:
    touched = watched.operator.connections()
    assert watched.look().state == "AwaitingApproval"
    assert watched.operator.connections() == touched
    granted = watched.approve()
    assert watched.look().state == "watching"
    assert watched.runs == []

    checkpoints.step(watched.folder, 400)
    assert (watched.stands.request, watched.look().state) == (granted, "watching")
    (run,) = watched.runs
    (attempt,) = watched.ledger.open_attempts()
    assert (attempt.flow_run, attempt.number) == (run["id"], 1)
    key = evaluation_key(attempt.identity, watched.watching.suite.digest(), 1)
    assert run["idempotency_key"] == key

    run_here(run["id"])
    assert state(watched.api, run["id"]) == ("COMPLETED", "Completed")
    (ended,) = watched.ledger.attempts()
    assert (ended.state, ended.on, ended.flow_run) == ("evaluated", "ct129", run["id"])
    assert ended.report is not None
    assert Path(ended.report, "report.json").is_file()
    # the next looks find it known, and nothing is asked of the operator
    for _ in range(2):
        assert watched.look().state == "watching"
    assert len(watched.runs) == len(watched.ledger.attempts()) == 1
    assert [request.id for request in watched.operator.connector.store.requests()] == [granted]


@pytest.mark.slow
def test_a_prefect_that_lost_its_runs_gets_what_is_open_again_and_what_is_done_stays_done(watched: Watched) -> None:
    watched.approve()
    for number in (1, 2):
        checkpoints.written(checkpoints.step(watched.folder, number), 1000.0 + number)
    watched.look(replace(watched.watching, rules=Rules(at_once=1)))
    (first,) = watched.runs
    run_here(first["id"])
    watched.look()
    waiting = [run["id"] for run in watched.runs if run["id"] != first["id"]]
    delete(watched.api, *waiting, first["id"])
    assert watched.runs == []
    watched.look()
    (again,) = watched.runs
    assert again["parameters"]["source"].endswith("/step_1")
    run_here(again["id"])
    states = {attempt.identity: (attempt.state, attempt.number) for attempt in watched.ledger.attempts()}
    assert sorted(states.values()) == [("evaluated", 1), ("evaluated", 1)]


@pytest.mark.slow
def test_a_run_that_ended_without_a_result_is_run_again_under_its_id_and_its_job_is_not_started_twice(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import evaluating

    watched.approve()
    checkpoints.step(watched.folder, 1)
    watched.look()
    (run,) = watched.runs

    def lost(*_: Any, **__: Any) -> Any:
        raise ConnectionFailed("ct129: the link went down")

    with monkeypatch.context() as patch:
        patch.setattr(evaluating, "fetch_report", lost)
        run_here(run["id"])
    assert state(watched.api, run["id"]) == ("FAILED", "HostUnreachable")
    before = sorted((watched.folder.parent / "jobs").iterdir())
    watched.look()
    (attempt,) = watched.ledger.open_attempts()
    assert attempt.not_before is not None
    assert "HostUnreachable" in attempt.message
    watched.ledger.postpone(attempt, seconds=-60, message=attempt.message)
    watched.look()
    assert state(watched.api, run["id"]) == ("SCHEDULED", "AwaitingRetry")
    run_here(run["id"])
    assert [(one.state, one.number) for one in watched.ledger.attempts()] == [("evaluated", 1)]
    assert sorted((watched.folder.parent / "jobs").iterdir()) == before
    assert len(watched.runs) == 1


@pytest.mark.slow
def test_the_job_of_a_run_that_somebody_cancelled_is_ended_and_its_checkpoint_superseded(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import evaluating

    def cut(*_: Any, **__: Any) -> None:
        raise ConnectionFailed("ct129: the link went down")

    watched.approve()
    checkpoints.step(watched.folder, 1)
    connector = watched.operator.connector
    host = connector.inventory.host("ct129")
    (evaluator,) = Path(str(host.environments)).glob("current/bin/dflash")
    evaluator.write_text("#!/bin/sh\nexec sleep 600\n")
    watched.look()
    (run,) = watched.runs
    with monkeypatch.context() as patch:
        patch.setattr(evaluating, "follow", cut)
        run_here(run["id"])
    (attempt,) = watched.ledger.open_attempts()
    assert attempt.job is not None
    assert jobs.status(connector, host, None, attempt.job).state == "running"
    ask(watched.api, f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    watched.look()
    assert [(one.state, one.message) for one in watched.ledger.attempts()] == [("superseded", "its run was cancelled")]
    deadline = time.monotonic() + 60
    while jobs.status(connector, host, None, attempt.job).state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_a_checkpoint_deleted_between_seen_and_relayed_ends_in_a_state_of_that_name(watched: Watched) -> None:
    watched.approve()
    directory = checkpoints.step(watched.folder, 1)
    watched.look()
    shutil.rmtree(directory)
    (run,) = watched.runs
    run_here(run["id"])
    assert state(watched.api, run["id"]) == ("FAILED", "CheckpointGone")
    watched.look()
    (attempt,) = watched.ledger.attempts()
    assert (attempt.state, "deleted" in attempt.message) == ("failed", True)
    assert watched.ledger.checkpoints()[0].gone is not None


@pytest.mark.slow
def test_a_grant_that_is_used_up_in_the_middle_stops_the_watch_by_name_and_people_are_told(
    watched: Watched, webhook: Webhook
) -> None:
    granted = watched.approve(sessions=8)
    for number in range(8):
        checkpoints.step(watched.folder, number)
        assert watched.look(replace(watched.watching, rules=Rules(at_once=0))).state == "watching"
    assert len(watched.ledger.checkpoints()) == 8
    stopped = watched.look()
    assert stopped.state == "GrantEnded"
    assert "all 8 sessions are used" in stopped.message
    (request,) = [one for one in watched.operator.connector.store.requests() if one.status == "pending"]
    assert f"dflash-ops guard approve {request.id} --valid 30d" in stopped.message
    watched.look()
    told = [one for one in webhook.received if "GrantEnded" in one["subject"]]
    assert [one["body"] for one in told] == [stopped.message]
    # an approval is all that it takes
    store = watched.operator.connector.store
    store.approve(request.id, reason="go on", ca_key=watched.operator.site.ca_key, seconds=86_400)
    assert watched.look().state == "watching"
    assert watched.stands.request != granted
    assert webhook.received[-1]["subject"] == f"{watched.watching.source} is watched again"


@pytest.mark.slow
def test_a_grant_that_ends_within_two_days_is_said_with_the_command_that_approves_the_next(
    watched: Watched, webhook: Webhook
) -> None:
    granted = watched.approve(days=1)
    watched.look()
    (told,) = webhook.received
    assert "ends soon" in told["subject"]
    (request,) = [one for one in watched.operator.connector.store.requests() if one.status == "pending"]
    assert granted in told["body"]
    assert f"guard approve {request.id}" in told["body"]
    assert watched.stands.state == "watching"


def test_a_host_that_is_away_has_a_state_of_that_name_and_is_asked_less_often(watched: Watched) -> None:
    watched.approve()
    watched.look()
    looked = watched.stands.looked
    watched.change_host(port=free_port())
    looks = Looks(watched.watching)
    pauses = []
    for _ in range(3):
        found = looks.look()
        pauses.append(looks.pause)
    assert found is not None
    assert (found.state, found.looked, pauses) == ("HostUnreachable", looked, [60, 120, 240])
    watched.change_host(port=watched.operator.site.protected.port)
    assert looks.look().state == "watching"  # type: ignore[union-attr]
    assert looks.pause == 60


@pytest.mark.slow
def test_while_prefect_is_away_looks_go_on_and_what_they_find_is_started_later(watched: Watched) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    watched.approve()
    checkpoints.step(watched.folder, 1)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        found = watched.look()
    assert (found.state, found.looked is not None) == ("PrefectUnreachable", True)
    assert len(watched.ledger.checkpoints()) == 1
    assert watched.runs == []
    assert watched.look().state == "watching"
    assert len(watched.runs) == 1


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([503, 503, 404], None),
        ([503] * 3, r"is busy \(HTTP status 503\); what is due stays in the ledger"),
        ([500], r"refused a request \(HTTP status 500\)"),
    ],
)
def test_a_server_that_is_busy_for_a_moment_is_asked_again(answers: list[int], told: str | None) -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED, temporary_settings

    left = list(answers)

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(left.pop(0))
            for name, value in (("Retry-After", "0"), ("Content-Length", "2")):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Busy) as listening:
        serving = threading.Thread(target=listening.serve_forever)
        serving.start()
        api = f"http://127.0.0.1:{listening.server_port}/api"
        runs = PrefectRuns(Watching("kpro6:/c", Suite(Path("prompts.jsonl"))))
        try:
            with temporary_settings({PREFECT_API_URL: api, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}):
                if told is None:
                    assert runs.find("00000000-0000-0000-0000-000000000001") is None
                else:
                    with pytest.raises(PrefectUnreachableError, match=told):
                        runs.find("00000000-0000-0000-0000-000000000001")
        finally:
            listening.shutdown()
            serving.join()
    assert left == []


def test_a_hosts_yaml_that_is_being_edited_stops_nothing_for_longer(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.approve()
    looks = Looks(watched.watching)
    assert looks.look() is not None
    good = watched.operator.hosts_file.read_text()
    watched.operator.hosts_file.write_text(good[: len(good) // 2])
    for _ in range(3):
        assert looks.look() is None
    watched.operator.hosts_file.write_text(good)
    assert looks.look().state == "watching"  # type: ignore[union-attr]
    said = [line for line in capsys.readouterr().err.splitlines() if "stands still" in line]
    assert len(said) == 1
    assert str(watched.operator.hosts_file) in said[0]


@pytest.mark.slow
def test_a_damaged_ledger_is_said_to_people_once_and_one_that_was_moved_away_begins_anew(
    watched: Watched, webhook: Webhook
) -> None:
    watched.approve()
    checkpoints.step(watched.folder, 1)
    ledger = watched.operator.folder / "ledger.sqlite3"
    watched.operator.folder.mkdir(exist_ok=True)
    ledger.write_bytes(b"this was a database once, and is as long as its header " * 30)
    looks = Looks(watched.watching)
    assert [looks.look(), looks.look()] == [None, None]
    (told,) = [one for one in webhook.received if "Ledger" in one["subject"]]
    assert "move it away" in told["body"]
    ledger.rename(ledger.with_suffix(".old"))
    assert looks.look().state == "watching"  # type: ignore[union-attr]
    assert len(watched.ledger.checkpoints()) == 1


@pytest.mark.slow
def test_the_loop_looks_until_it_is_told_to_stop_and_wakes_whoever_starts_runs(watched: Watched) -> None:
    watched.approve()
    checkpoints.step(watched.folder, 1)
    stop = threading.Event()
    watch(watched.watching, stop=stop, wake=stop.set)
    assert len(watched.runs) == 1
    watch(watched.watching, stop=stop)
    assert len(watched.runs) == 1


@pytest.mark.slow
def test_an_event_starts_the_evaluation_instead_and_nothing_is_evaluated_twice(
    watched: Watched, shared_server: Server, tmp_path: Path
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.deployments import deployment

    home = tmp_path / "prefect"
    copy_database(shared_server, home)
    by_event = replace(watched.watching, rules=Rules(by_event=True))
    server = Server(home, PREFECT_SERVER_UI_ENABLED="false")
    with server_running(server), temporary_settings({PREFECT_API_URL: server.api}):
        here = replace(watched, api=server.api)
        options = {"triggers": [saved_trigger(by_event)]}
        triggered = deployment("evaluate_checkpoint", watched.operator.hosts_file, **options)
        triggered.name = watched.watching.deployment.rpartition("/")[2]
        triggered.apply()
        watched.approve()
        checkpoints.step(watched.folder, 1)
        assert watched.look(by_event).state == "watching"
        (run,) = appeared(here, 1)
        (checkpoint,) = watched.ledger.checkpoints()
        assert run["parameters"]["identity"] == checkpoint.identity
        run_here(run["id"])
        # the same news in other words is another event, and a run of its own
        again = {"identity": checkpoint.identity, "source": run["parameters"]["source"], "attempt": 1}
        events.emit(events.CHECKPOINT_SAVED, checkpoint.identity, **again)
        assert watched.look(by_event).state == "watching"
        for other in appeared(here, 2):
            run_here(other["id"])
        attempts = watched.ledger.attempts()
        assert [(one.state, one.number, one.flow_run) for one in attempts] == [("evaluated", 1, run["id"])]
        _send_what_waits()


@pytest.mark.slow
def test_a_look_by_its_flow_ends_in_the_state_of_the_watch(watched: Watched) -> None:
    parameters: dict[str, Any] = {
        "source": watched.watching.source,
        "suite": watched.watching.suite,
        "reports": watched.watching.reports,
        "hosts": watched.operator.hosts_file,
    }
    ended = watch_training(**parameters, return_state=True)
    assert (ended.name, "guard approve" in ended.message) == ("AwaitingApproval", True)
    with pytest.raises(StandsStillError, match="guard approve"):
        watch_training(**parameters)
    watched.approve()
    done = watch_training(**parameters)
    assert [one.state for one in done.watches] == ["watching"]


@pytest.mark.slow
def test_a_look_by_its_flow_says_how_the_launched_job_is(watched: Watched) -> None:
    parameters: dict[str, Any] = {"suite": watched.watching.suite, "hosts": watched.operator.hosts_file}
    source = f"ct129:{watched.folder}"
    done = watch_training(source=source, job="train-1", **parameters)
    assert done.job.state == "unknown job"
    watched.change_host("ct129", port=free_port())
    ended = watch_training(source=source, job="train-1", **parameters, return_state=True)
    assert ended.name == "HostUnreachable"


def test_every_training_host_with_checkpoints_is_watched_where_nobody_says_what(watched: Watched) -> None:
    assert sources(watched.operator.connector.inventory) == ()
    watched.change_host(checkpoints="/workspace/checkpoints")
    assert sources(watched.operator.connector.inventory) == ("kpro6:/workspace/checkpoints",)


def appeared(watched: Watched, count: int) -> list[dict[str, Any]]:
    """The runs of the evaluation once there are so many."""
    deadline = time.monotonic() + 120
    while len(watched.runs) < count:
        assert time.monotonic() < deadline, "no event started it"
        time.sleep(0.5)
    assert len(watched.runs) == count
    return watched.runs


def delete(api: str, *runs: str) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        for run in runs:
            client.delete_flow_run(UUID(run))
