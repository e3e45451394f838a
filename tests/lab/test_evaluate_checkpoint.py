"""A checkpoint crosses the lab's two networks and gets its number, as a real Prefect run on a real server."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash.report import Report, read_report
from flows import prefect_home
from flows.pages import title
from tasks import process
from tasks.evaluation import Suite, plan_evaluation
from tasks.lab import CHECKPOINTS, MODELS, Lab
from tasks.ssh import Connector
from tests.prefect_api import LEAN, Server, ask, running
from tests.tiny import Pair

# a Prefect server takes minutes to start on a machine that has much to do, and so does an evaluation
pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

OPERATOR = [sys.executable, "-m", "flows"]
SMALL = ["--max-new-tokens", "24", "--num-prompts", "4", "--ignore-eos"]


@pytest.fixture(scope="module")
def furnished(lab: Lab, tiny_hybrid: Pair, training_checkpoints: Path) -> Lab:
    """The lab with target and reference drafter on the inference host and a checkpoint on the training host."""
    models = lab.host_path("ct129", MODELS)
    shutil.copytree(tiny_hybrid.target, models / "target", dirs_exist_ok=True)
    shutil.copytree(tiny_hybrid.drafter, models / "reference", dirs_exist_ok=True)
    return lab


@pytest.fixture
def checkpoint(furnished: Lab, training_checkpoints: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A fresh copy of step_100.pt in a folder of its own on the training host, as this machine sees it."""
    folder = furnished.host_path("kpro6", CHECKPOINTS) / request.node.name
    folder.mkdir(parents=True)
    yield Path(shutil.copy(training_checkpoints / "step_100.pt", folder))
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API address of a Prefect server of this module's own, in the lab's network."""
    with running(Server(tmp_path_factory.mktemp("prefect"), **LEAN)) as started:
        yield started.api


def test_a_checkpoint_gets_its_number_though_its_source_is_gone(
    furnished: Lab,
    tiny_hybrid: Pair,
    checkpoint: Path,
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefect_home.configure_prefect()
    from prefect.settings import PREFECT_API_URL, temporary_settings

    import flows.evaluate_checkpoint as flow

    relay = flow.relay

    def relay_then_remove(*arguments: Any, **named: Any) -> Any:
        relayed = relay(*arguments, **named)
        checkpoint.unlink()
        return relayed

    monkeypatch.setattr(flow, "relay", relay_then_remove)
    source = approve(furnished, checkpoint)
    suite = Suite(tiny_hybrid.prompts, max_new_tokens=24, num_prompts=4, ignore_eos=True)
    with temporary_settings({PREFECT_API_URL: server}):
        done = flow.evaluate_checkpoint(source, "ct129", suite, tmp_path, furnished.hosts_file)

    report = read_report(done.folder / "report.json")
    assert report == done.report
    assert report.valid, report.invalid_because
    assert report.checkpoint.step == 100
    assert report.metrics.tokens == 4 * 24
    assert report.reference_metrics is not None
    assert report.metrics.tau.pooled < report.reference_metrics.tau.pooled
    assert report.relay is not None
    assert report.relay.source == source
    assert report.relay.sha256 == report.checkpoint.sha256
    assert report.relay.selected == "drafter"
    assert (done.folder / "report.md").read_text().startswith(f"# {report.headline()}")
    assert sum(1 for _ in (done.folder / "rounds.jsonl").open()) == report.metrics.rounds
    assert_published(server, report, source)


def test_the_command_without_an_approval_is_refused_and_touches_nothing(
    furnished: Lab, tiny_hybrid: Pair, checkpoint: Path
) -> None:
    seen = [furnished.host_path("kpro6", path) for path in ("/var/log/sshd.log", "/var/lib/dflash-gate/gate.log")]
    before = [log.read_bytes() if log.exists() else b"" for log in seen]
    refused = operate(
        furnished, "evaluate", place(furnished, checkpoint), "--prompts", str(tiny_hybrid.prompts), *SMALL
    )
    assert refused.returncode == 77
    assert refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1
    assert "dflash-ops guard approve" in refused.stderr
    assert [log.read_bytes() if log.exists() else b"" for log in seen] == before


def test_what_the_suite_lacks_is_said_before_an_approval_is_asked_for(furnished: Lab, checkpoint: Path) -> None:
    asked = operate(furnished, "evaluate", place(furnished, checkpoint))
    assert asked.returncode == 2
    assert "--thinking" in asked.stderr
    assert "guard approve" not in asked.stderr


@pytest.mark.slow
def test_the_command_by_itself_runs_an_embedded_server(
    furnished: Lab, tiny_hybrid: Pair, checkpoint: Path, tmp_path: Path
) -> None:
    source = approve(furnished, checkpoint)
    asked = ["evaluate", source, "--prompts", str(tiny_hybrid.prompts), "--reports", str(tmp_path), *SMALL]
    done = operate(furnished, *asked, "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    report = read_report(Path(result["folder"]) / "report.json")
    assert result["metrics"]["tau"]["pooled"] == report.metrics.tau.pooled
    assert "[5/5] blocks" in done.stderr


@pytest.mark.slow
def test_a_number_that_must_not_be_believed_ends_with_exit_code_3(
    furnished: Lab, tiny_hybrid: Pair, checkpoint: Path, tmp_path: Path
) -> None:
    leave_out_a_tap(checkpoint)
    source = approve(furnished, checkpoint)
    done = operate(
        furnished, "evaluate", source, "--prompts", str(tiny_hybrid.prompts), "--reports", str(tmp_path), *SMALL
    )
    assert done.returncode == 3, done.stderr
    assert "not valid" in done.stdout
    assert "taps-as-reference" in done.stdout


@pytest.mark.slow
def test_a_failed_evaluation_says_what_the_host_said(furnished: Lab, tiny_hybrid: Pair, checkpoint: Path) -> None:
    import torch

    content = torch.load(checkpoint, weights_only=True)
    content["config"]["num_hidden_layers"] = 99
    torch.save(content, checkpoint)
    source = approve(furnished, checkpoint)
    done = operate(furnished, "evaluate", source, "--prompts", str(tiny_hybrid.prompts), *SMALL)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the evaluation on ct129 ended with exit code 1: ")
    assert "EvaluationFailed" not in last
    assert "Traceback" not in done.stderr


def place(lab: Lab, checkpoint: Path) -> str:
    """HOST:/path of a file that this machine keeps for the training host."""
    inside = checkpoint.relative_to(lab.host_path("kpro6", "/"))
    return f"kpro6:{lab.seen('kpro6', f'/{inside}')}"


def approve(lab: Lab, checkpoint: Path) -> str:
    """Approve what an evaluation of the checkpoint asks for; return its HOST:/path."""
    connector = Connector.load(lab.hosts_file)
    source = place(lab, checkpoint)
    plan = plan_evaluation([connector.inventory.location(source)], connector.inventory.host("ct129"))
    assert plan is not None
    request = connector.store.request(plan)
    connector.store.approve(request.id, reason="test", ca_key=lab.ca_key, seconds=600)
    return source


def operate(lab: Lab, *arguments: str) -> process.CompletedProcess[str]:
    """Run ``dflash-ops`` as the operator would, on the operator's side of the lab."""
    environment = {**os.environ, **lab.environment}
    environment.pop("PREFECT_API_URL", None)
    return process.run([*OPERATOR, *arguments], env=environment, check=False, timeout=600)


def leave_out_a_tap(checkpoint: Path) -> None:
    """Make a self-consistent checkpoint of one tap less: fc and config agree, and nothing complains about shapes."""
    import torch

    content = torch.load(checkpoint, weights_only=True)
    taps = content["config"]["dflash_config"]["target_layer_ids"]
    width = content["config"]["hidden_size"]
    content["config"]["dflash_config"]["target_layer_ids"] = taps[:-1]
    fc = content["model_state_dict"]["module.fc.weight"]
    content["model_state_dict"]["module.fc.weight"] = fc[:, : width * (len(taps) - 1)].clone()
    torch.save(content, checkpoint)


def assert_published(server: str, report: Report, source: str) -> None:
    """The run and its artifacts are on the server under names that say what they are."""
    (run,) = ask(server, "flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert run["name"] == f"evaluate {title(source)} on ct129"
    assert run["state_type"] == "COMPLETED"
    artifacts = {one["type"]: one for one in ask(server, "artifacts/filter", {"sort": "CREATED_DESC"})}
    rows = json.loads(artifacts["table"]["data"])
    assert [row["drafter"] for row in rows] == ["checkpoint", "reference"]
    assert rows[0]["τ"] == f"{report.metrics.tau.pooled:.3f}"
    assert artifacts["markdown"]["data"].startswith(f"# {report.headline()}")
