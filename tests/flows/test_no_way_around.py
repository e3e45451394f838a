"""Nothing reaches a protected host past the gate, whatever command or flow runs."""

import hashlib
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import flows
from dflash.report import Comparison
from tasks import launching, process
from tasks.run_file import read_run
from tasks.watch import plan_watch
from tests import nightly_reports
from tests.flows.conftest import EVALUATOR, Operator
from tests.flows.test_cli_plan import commands
from tests.flows.test_cli_promote import DFLASH
from tests.prefect_api import ask
from tests.receivers import Webhook, running
from tests.tasks import checkpoints

pytestmark = pytest.mark.timeout(900)  # a Prefect server takes minutes to start on a machine that has much to do
REPOSITORY = Path(__file__).parents[2]
RELEASE = f"{sys.version_info.major}.{sys.version_info.minor}"
THROUGH = {"relay", "evaluate", "audit reconcile", "guard doctor", "guard break-glass", "guard revoke", "demo"}
THROUGH |= {"hosts check", "launch", "jobs list", "jobs status", "jobs logs", "jobs stop"}
THROUGH |= {"provision", "serve", "compare-nightly", "promote"}
"""The commands that pass the gate in the test below."""
NEVER_REFUSED = {"notify add", "notify test", "status"}
"""Those of the others that do there what they are for."""


def watched(folder: Path, steps: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """What tests/flows/watched.py wrote down."""
    log = folder / "watched.jsonl"
    # a home without keys: the doctor offers those of whoever runs it
    env = {**os.environ, "HOME": str(folder), **environment}
    argv = [sys.executable, "-m", "tests.flows.watched", str(log)]
    done = process.run(argv, input=json.dumps(steps), env=env, cwd=REPOSITORY, check=False, timeout=500)
    assert "Traceback" not in done.stderr, done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]


def reaches(entry: dict[str, Any], address: str) -> bool:
    """Whether an event could reach the protected host: its address or its name, in whatever form."""
    words = entry["words"]
    if entry["event"] == "subprocess.Popen" and Path(words[0]).name == "ssh" and words[2] == "-G":
        return False  # says what ssh's configuration means, and calls nobody
    named = any(word == "kpro6" or word.endswith("@kpro6") for word in words)
    return named or any(address in text for text in (*words, entry["files"]))


def around(entries: Sequence[dict[str, Any]], address: str) -> list[list[str]]:
    return [entry["words"] for entry in entries if "event" in entry and not entry["gate"] and reaches(entry, address)]


WAYS = ["connect", "datagram", "mapped", "popen", "name", "environment", "configuration", "system", "posix_spawn"]


@pytest.mark.parametrize("way", [*WAYS, "spawn", "exec"])
def test_the_watch_sees(way: str, tmp_path: Path) -> None:
    address = "127.9.9.9"
    assert around(watched(tmp_path, {"sneak": [way, address, "9"]}), address)


def test_no_command_and_no_flow_reaches_a_protected_host_but_through_the_gate(
    operator: Operator, prefect_api: str, tmp_path: Path
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"name": "watched", "command": ["/bin/sleep", "600"]}))
    watching = furnish(operator)
    job = launching.prepare(read_run(run), operator.connector.inventory.host("kpro6")).job
    # its server may have seen another test's run for the same checkpoint and the same prompts, which are a run's key
    asked = tmp_path / "prompts.jsonl"
    asked.write_text(json.dumps({"id": "a", "prompt": str(uuid4())}) + "\n")
    prompts = ["--prompts", str(asked)]
    # what serve asks: a watch that asked something else would call off what the other one began
    suite = {"prompts": str(asked), "thinking": "off"}
    with running(Webhook()) as webhook:
        steps = [
            {"command": ["notify", "add", "custom-webhook/watched"], "stdin": f"{webhook.url}\n"},
            ["notify", "test"],
            ["hosts", "list"],
            ["hosts", "check", "kpro6"],
            ["launch", "--config", str(run), "--on", "kpro6"],
            *(["jobs", "list", "kpro6"], ["jobs", "status", "kpro6", job], ["jobs", "logs", "kpro6", job]),
            *(["lab", "up"], ["lab", "status"], ["lab", "exec", "operator", "--", "true"], ["lab", "down"]),
            ["guard", "plan", "--", "relay", operator.source, f"ct129:{tmp_path}/there"],
            ["relay", operator.source, f"ct129:{tmp_path}/there"],
            ["guard", "requests", "--all"],
            ["guard", "countersign", "request of relay", "--name", "somebody", "--key", "nowhere"],
            ["guard", "deny", "request of relay", "--reason", "watched"],
            ["evaluate", operator.source, "--on", "ct129", *prompts, "--ignore-eos"],
            ["serve", "--watch", watching, *prompts],
            {"flow": "watch_training", "parameters": {"source": watching, "job": job, "suite": suite}},
            ["jobs", "stop", "kpro6", job],
            ["evaluate", operator.source, "--queue", *prompts],
            {"due": str(operator.checkpoint.parents[1])},
            ["compare-nightly", *prompts, "--max-new-tokens", "8"],
            ["promote", "200", "--yes-at-terminal", "--unconfirmed", "watched"],
            ["provision", "kpro6", "--profile", "slim", "--python", RELEASE],
            ["status"],
            ["guard", "revoke", "request of relay", "--reason", "watched"],
            ["guard", "standing", "request", "kpro6:/tree", "--sessions", "2", "--bytes", "1GB"],
            ["guard", "standing", "drop", "0000"],
            ["guard", "setup", "kpro6"],
            ["guard", "doctor", "kpro6"],
            ["guard", "break-glass", "kpro6", "--reason", "watched", "--", "/usr/bin/true"],
            ["audit", "show"],
            ["audit", "verify"],
            ["audit", "reconcile", "kpro6"],
            ["demo"],
        ]
        lab = {"hosts_file": str(operator.hosts_file), "checkpoint": str(operator.checkpoint)}
        lab["house"] = str(tmp_path / "house")
        before, begun = operator.connections(), datetime.now(UTC)
        entries = watched(tmp_path, {"commands": steps, "lab": lab}, PREFECT_API_URL=prefect_api)
    assert around(entries, operator.site.protected.address) == []
    runs = by_command(entries)
    others = {name for name in runs if name.startswith(("flow ", "due "))}
    assert {name for name, _ in commands()} == set(runs) - others
    assert {name for name, passed in runs.items() if passed} == THROUGH | others
    # the last time, after what was refused at first has been approved
    last = {name: entry for name in {*THROUGH, *others, *NEVER_REFUSED} for entry in entries if ran(entry, name)}
    assert {name: entry["said"] for name, entry in last.items() if entry["code"] != 0} == {}
    # one that was asked for with --queue, and what the watch found
    assert others == {"flow watch_training", f"due {operator.source}", f"due {watching}/step_200"}
    # not more: some of what the doctor tries ends on this side
    assert operator.connections() - before <= sum(runs.values())
    assert flows_of_the_project() == completed_flows(prefect_api, begun)


def furnish(operator: Operator) -> str:
    """Give the hosts what the commands ask of them; a folder of checkpoints whose watch is approved."""
    remote = operator.checkpoint.parents[1]
    (remote / "jobs").mkdir()
    (remote / "models" / "drafter").mkdir(parents=True)
    hosts = json.loads(operator.hosts_file.read_text()) | {"notify": ["custom-webhook/watched"]}
    hosts["hosts"]["kpro6"]["environments"] = str(remote / "environments-of-training")
    hosts["hosts"]["ct129"]["reference"] = str(remote / "models" / "drafter")
    operator.hosts_file.write_text(json.dumps(hosts))

    weights = remote / "weights"
    weights.write_bytes(b"weights")
    made = nightly_reports.report(100)
    measured = {"path": str(weights), "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    better = Comparison(difference=0.5, ci95=(0.4, 0.6), prompts=72, verdict="better")
    update = {"checkpoint": made.checkpoint.model_copy(update=measured), "comparison": better}
    reports = nightly_reports.write(made.model_copy(update=update), remote / "nightly-report")
    (remote / "state.json").write_text("{}")
    program = remote / "environments" / "current" / "bin" / "dflash"
    other = program.with_name("dflash-export")
    other.write_text(DFLASH.format(python=sys.executable, state=str(remote / "state.json")))
    other.chmod(0o755)
    program.write_text(f'#!/bin/sh\n[ "$1" = evaluate ] || exec {other} "$@"\n' + EVALUATOR.format(reports=reports))

    folder = remote / "watched"
    folder.mkdir()
    checkpoints.step(folder, 200)
    connector = operator.connector
    plan = plan_watch(connector.inventory.location(f"kpro6:{folder}"))
    assert plan is not None
    request = connector.store.request(plan, standing=True)
    connector.store.approve(request.id, reason="watched", ca_key=operator.site.ca_key, seconds=86_400)
    return f"kpro6:{folder}"


@pytest.mark.slow
def test_no_attempt_of_the_doctor_goes_past_the_gate(operator: Operator, tmp_path: Path) -> None:
    before = operator.connections()
    entries = watched(tmp_path, {"commands": [["guard", "doctor", "kpro6", "--full"]], "lab": None})
    assert around(entries, operator.site.protected.address) == []
    assert by_command(entries)["guard doctor"] >= operator.connections() - before > 10


def by_command(entries: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How often each command, each called flow and each run that was due passed the gate."""
    names = sorted((name for name, _ in commands()), key=len)
    found: dict[str, int] = {}
    passed = 0
    for entry in entries:
        passed += "passed" in entry
        if "ran" in entry:
            # "guard standing" has a shorter name than its commands
            called = [name for name in names if ran(entry, name)]
            name = called[-1] if called else " ".join(entry["ran"])
            found[name] = found.get(name, 0) + passed
            passed = 0
    return found


def ran(entry: dict[str, Any], name: str) -> bool:
    words = name.split()
    return entry.get("ran", [])[: len(words)] == words


def flows_of_the_project() -> set[str]:
    """The names of all flows that are defined in the package."""
    from prefect import Flow

    modules = [importlib.import_module(f"flows.{module.name}") for module in pkgutil.iter_modules(flows.__path__)]
    return {one.name for module in modules for one in vars(module).values() if isinstance(one, Flow)}


def completed_flows(api: str, since: datetime) -> set[str]:
    """The names of all flows of which a run began after ``since`` and came to its end."""
    asked = {"start_time": {"after_": since.isoformat()}, "state": {"type": {"any_": ["COMPLETED"]}}}
    return {flow["name"] for flow in ask(api, "flows/filter", {"flow_runs": asked})}
