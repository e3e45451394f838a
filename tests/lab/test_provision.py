"""A host that reaches nothing gets the whole evaluation profile, torch included, across the lab's network."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import process
from tasks.lab import ENVIRONMENTS, Lab
from tasks.provisioning import observe, questions
from tasks.ssh import Connector
from tests.labs import MachineNetwork

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1800)]

RELEASE = f"{sys.version_info.major}.{sys.version_info.minor}"
GATHER = """
import sys
from tasks.inventory import load
from tasks.provisioning import Observation, decide, prepare
host = load().host("ct129")
seen = Observation.model_validate_json(sys.stdin.read())
prepare(decide(host, seen, "eval", python=sys.argv[1]), seen)
"""


@pytest.fixture
def environments(lab: Lab) -> Iterator[Path]:
    """The inference host's folder as this machine sees it; ``current`` leads to where it led when the test ends."""
    folder = lab.host_path("ct129", ENVIRONMENTS["ct129"])
    before = os.readlink(folder / "current")
    yield folder
    (folder / "current").unlink()
    (folder / "current").symlink_to(before)


def test_the_evaluation_profile_is_gathered_sent_and_runs(
    lab: Lab, machine_network: MachineNetwork, environments: Path
) -> None:
    if not lab.privileged:
        pytest.skip("without namespaces the host reaches what this machine reaches")
    connector = Connector.load(lab.hosts_file)
    host = connector.inventory.host("ct129")
    seen = observe(connector, host, None, questions(host))
    assert seen.facts.index is None or not seen.facts.index.reachable
    # the operator's side of the lab reaches no index either, as the machine itself does
    outside = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{machine_network.namespace}", "--"]
    gather = [*outside, sys.executable, "-c", GATHER, RELEASE]
    process.run(gather, input=seen.model_dump_json(), timeout=1200, env={**os.environ, **lab.environment})

    first = provision(lab)
    assert first["changed"] is True
    assert os.readlink(environments / "current") == os.path.basename(str(first["path"]))
    code = "import torch, transformers, dflash.evaluate; print(torch.ones(2).sum().item())"
    told = lab.exec("ct129", [f"{first['path']}/bin/python", "-I", "-c", code], timeout=300, check=True)
    assert told.stdout.strip() == "2.0"
    assert "evaluate" in lab.exec("ct129", [f"{ENVIRONMENTS['ct129']}/current/bin/dflash", "--help"], check=True).stdout

    second = provision(lab)
    assert second == {**first, "changed": False}


def provision(lab: Lab) -> dict[str, object]:
    """``dflash-ops provision`` on the operator's side."""
    argv = [sys.executable, "-m", "flows", "provision", "ct129", "--profile", "eval", "--python", RELEASE, "--json"]
    environment = {**os.environ, **lab.environment}
    environment.pop("PREFECT_API_URL", None)
    done = process.run(argv, env=environment, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    made: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return made
