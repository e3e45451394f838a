"""Two sshds, a guard over them and a Prefect server, for the tests of commands and flows.

They are this folder's own: those of tests/sshds.py live in whichever network the lab has brought the run into.
"""

import getpass
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash.metrics import judge, summarize
from dflash.report import CheckpointInfo, PromptResult, Report, Settings, TargetInfo
from dflash.rounds_file import write_rounds
from tasks import public_keys
from tasks.ssh import Connector
from tests.prefect_api import LEAN, QUIET, Server, keep_unused, running
from tests.sshds import Site, both_sshds

EVALUATOR = """#!/bin/sh
while [ "$1" != --output ]; do shift; done
mkdir -p "$2" && cp {reports}/* "$2"
"""
"""Stands in for ``dflash evaluate``, which has tests of its own: leaves a report that was written before."""


@dataclass(frozen=True)
class Operator:
    """The operator's files and the two hosts: ``kpro6`` behind the gate, ``ct129`` an ordinary login."""

    site: Site
    folder: Path
    hosts_file: Path
    checkpoint: Path
    """On the protected host; both hosts share this machine's files."""

    @property
    def connector(self) -> Connector:
        return Connector.load(self.hosts_file)

    @property
    def source(self) -> str:
        return f"kpro6:{self.checkpoint}"

    def connections(self) -> int:
        """How often anything connected to the protected host."""
        return self.site.protected.logged().count("Connection from")


@pytest.fixture(scope="session")
def own_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two sshds in the network that the run began in."""
    with both_sshds(tmp_path_factory.mktemp("sshds-of-flows")) as running:
        yield running


@pytest.fixture
def operator(own_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    """An operator without any approval yet, with a checkpoint on the protected host, whose log knows nobody else."""
    (own_site.gate_state / "gate.log").unlink(missing_ok=True)
    remote = tmp_path / "remote"
    evaluator = remote / "environments" / "current" / "bin" / "dflash"
    evaluator.parent.mkdir(parents=True)
    evaluator.write_text(EVALUATOR.format(reports=_report(remote / "report")))
    evaluator.chmod(0o755)
    checkpoint = remote / "checkpoints" / "step_100.safetensors"
    checkpoint.parent.mkdir()
    save_file({"fc.weight": np.ones((16, 16), np.float32)}, checkpoint)
    hosts_file = tmp_path / "hosts.yaml"
    hosts_file.write_text(json.dumps(_hosts(own_site, remote)))
    state = tmp_path / "state"
    monkeypatch.setenv("DFLASH_STATE", str(state))
    monkeypatch.setenv("DFLASH_HOSTS", str(hosts_file))
    return Operator(own_site, state, hosts_file, checkpoint)


def _hosts(site: Site, remote: Path) -> dict[str, Any]:
    ca = public_keys.normalise(site.ca_key.with_suffix(".pub").read_text())
    protected = {
        "role": "training",
        "address": site.protected.address,
        "port": site.protected.port,
        "user": getpass.getuser(),
        "host_keys": list(site.protected.host_keys),
        "source_addresses": ["127.0.0.0/8"],
        "gate_state": str(site.gate_state),
        "jobs": str(remote / "jobs"),
    }
    folders = {name: str(remote / name) for name in ("environments", "jobs", "cache", "target")}
    guard = {"ca_public_key": ca, "ca_key": str(site.ca_key), "lab": True}
    return {"version": 1, "guard": guard, "hosts": {"kpro6": protected, "ct129": site.ordinary_entry(**folders)}}


def _report(folder: Path) -> Path:
    """A folder with the files of a finished evaluation."""
    rounds = [judge("a", 0, [1, 2, 3], [0, 0, 0], [1, 2, 3, 4])]
    metrics = summarize(rounds, [], {}, seed=0)
    settings = {"mode": "replay", "max_new_tokens": 4, "ignore_eos": True, "thinking": None, "block_size": 4}
    settings |= {"mask_token_id": 1, "target_layer_ids": [1], "prompts": "p", "prompts_sha256": "22", "num_prompts": 1}
    settings |= {"max_blocks": None, "completions": "target", "completion_agreement": 1.0, "device": "cpu", "seed": 0}
    target = {"path": "t", "class": "C", "tensors": 3, "kernel": "torch", "dtype": "float32", "fingerprint": "11"}
    report = Report(
        created=datetime(2026, 2, 6, tzinfo=UTC),
        valid=True,
        invalid_because=[],
        checkpoint=CheckpointInfo(path="step_100.pt", sha256="00", format="pt", step=100, config_source="key config"),
        target=TargetInfo.model_validate(target),
        settings=Settings.model_validate(settings),
        versions={},
        metrics=metrics,
        prompts=[PromptResult(id="a", text="x", tokens=4, rounds=1, tau=4.0, token_ids=[1])],
        checks=[],
        timings={},
    )
    folder.mkdir()
    (folder / "report.json").write_text(report.to_json())
    write_rounds(folder / "rounds.jsonl", rounds)
    (folder / "report.md").write_text("# a report\n")
    return folder


@pytest.fixture
def prefect_api(prefect_server: str) -> Iterator[str]:
    """The address of a real Prefect server's API, to which this process is set for the test."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_server}):
        try:
            yield prefect_server
        finally:
            _send_what_waits()


@pytest.fixture(scope="package")
def prefect_server(shared_server: Server) -> str:
    """The address of the API of a Prefect server, one for the run."""
    return shared_server.api


@pytest.fixture(scope="package")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prefect server for this folder, not for longer: idle it takes a fifth of a core. Its settings are ours too."""
    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "PREFECT_HOME": str(home)}.items():
            patch.setenv(name, value)
        with running(Server(home, **LEAN)) as server:
            keep_unused(server)
            yield server


def _send_what_waits() -> None:
    """Logs and events of this process; otherwise it tries at its end, for a minute, to send them to a server gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.utilities.asyncutils import run_coro_as_sync

    async def drain() -> None:
        for waiting in (APILogWorker.instance().drain(), EventsWorker.drain_all()):
            if inspect.isawaitable(waiting):
                await waiting

    run_coro_as_sync(drain())
