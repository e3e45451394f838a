"""Nothing reaches a protected host past the gate, whatever command or flow runs."""

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import flows
from tasks import launching, process
from tasks.run_file import read_run
from tests.flows.conftest import Operator
from tests.flows.test_cli_plan import commands
from tests.prefect_api import ask

pytestmark = pytest.mark.timeout(600)  # a Prefect server takes minutes to start on a machine that has much to do
REPOSITORY = Path(__file__).parents[2]
THROUGH = {"relay", "evaluate", "audit reconcile", "guard doctor", "guard break-glass", "guard revoke", "demo"}
THROUGH |= {"hosts check", "launch", "jobs list", "jobs status", "jobs logs", "jobs stop"}
"""The commands that pass the gate in the test below."""


def watched(folder: Path, steps: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """What tests/flows/watched.py wrote down."""
    log = folder / "watched.jsonl"
    # a home without keys: the doctor offers those of whoever runs it
    env = {**os.environ, "HOME": str(folder), **environment}
    argv = [sys.executable, "-m", "tests.flows.watched", str(log)]
    done = process.run(argv, input=json.dumps(steps), env=env, cwd=REPOSITORY, check=False, timeout=280)
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
    prompts = ["--prompts", "prompts/tiny.jsonl", "--ignore-eos"]
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"name": "watched", "command": ["/bin/sleep", "600"]}))
    (operator.checkpoint.parents[1] / "jobs").mkdir()
    job = launching.prepare(read_run(run), operator.connector.inventory.host("kpro6")).job
    steps = [
        ["hosts", "list"],
        ["hosts", "check", "kpro6"],
        ["launch", "--config", str(run), "--on", "kpro6"],
        *(["jobs", "list", "kpro6"], ["jobs", "status", "kpro6", job], ["jobs", "logs", "kpro6", job]),
        ["jobs", "stop", "kpro6", job],
        *(["lab", "up"], ["lab", "status"], ["lab", "exec", "operator", "--", "true"], ["lab", "down"]),
        ["guard", "plan", "--", "relay", operator.source, f"ct129:{tmp_path}/there"],
        ["relay", operator.source, f"ct129:{tmp_path}/there"],
        ["guard", "requests", "--all"],
        ["guard", "countersign", "request of relay", "--name", "somebody", "--key", "nowhere"],
        ["guard", "deny", "request of relay", "--reason", "watched"],
        ["evaluate", operator.source, "--on", "ct129", *prompts],
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
    before = operator.connections()
    entries = watched(tmp_path, {"commands": steps, "lab": lab}, PREFECT_API_URL=prefect_api)
    assert around(entries, operator.site.protected.address) == []
    runs = by_command(entries)
    assert {name for name, _ in commands()} == set(runs)
    assert {name for name, passed in runs.items() if passed} == THROUGH
    # the last time, after what was refused at first has been approved
    last = {name: entry for name in THROUGH for entry in entries if ran(entry, name)}
    assert {name: entry["said"] for name, entry in last.items() if entry["code"] != 0} == {}
    # not more: some of what the doctor tries ends on this side
    assert operator.connections() - before <= sum(runs.values())
    assert flows_of_the_project() == {
        flow_name(prefect_api, run["flow_id"])
        for run in ask(prefect_api, "flow_runs/filter", {"sort": "START_TIME_DESC"})
        if operator.source in run["name"]
    }


@pytest.mark.slow
def test_no_attempt_of_the_doctor_goes_past_the_gate(operator: Operator, tmp_path: Path) -> None:
    before = operator.connections()
    entries = watched(tmp_path, {"commands": [["guard", "doctor", "kpro6", "--full"]], "lab": None})
    assert around(entries, operator.site.protected.address) == []
    assert by_command(entries)["guard doctor"] >= operator.connections() - before > 10


def by_command(entries: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How often each command that ran passed the gate."""
    names = sorted((name for name, _ in commands()), key=len)
    found: dict[str, int] = {}
    passed = 0
    for entry in entries:
        passed += "passed" in entry
        if "ran" in entry:
            # "guard standing" has a shorter name than its commands
            name = [name for name in names if ran(entry, name)][-1]
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


def flow_name(api: str, flow_id: str) -> str:
    (found,) = ask(api, "flows/filter", {"flows": {"id": {"any_": [flow_id]}}})
    return str(found["name"])
