"""dflash-ops promote: what is confirmed, exported, linked and recorded, and what leaves everything as it was."""

import hashlib
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dflash.errors import DFlashError
from dflash.report import Comparison
from flows.cli import app
from tasks import process, promotion
from tasks.actions import Run
from tasks.audit import select
from tasks.changes import Output
from tasks.confirmation import promotion_suite
from tasks.ledger import Ledger, Seen
from tasks.ssh import ConnectionFailed
from tests import nightly_reports
from tests.flows.conftest import Operator
from tests.terminals import Terminal
from tests.tiny import Pair

DFLASH = """#!{python} -I
import hashlib, json, pathlib, sys
verb, path, state = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(pathlib.Path({state!r}).read_text())
if state.get("fails") == verb:
    sys.exit("error: no space left")
if verb == "export":
    content = path.read_bytes()
    out = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
    out.mkdir()
    (out / "model.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    print(json.dumps(dict(source_sha256=digest, files=[dict(name="model.safetensors", sha256=digest)])))
else:
    problems = state.get("problems", [])
    print(json.dumps(dict(step=None, problems=problems, tensors=[1], config=dict(block_size=16))))
"""
"""Stands in for the host's dflash, which has tests of its own."""


@dataclass
class Served:
    """An inference host that serves the reference drafter, and an operator at a terminal."""

    operator: Operator
    models: Path
    link: Path
    state: Path

    @classmethod
    def build(cls, operator: Operator, patch: pytest.MonkeyPatch) -> "Served":
        remote = operator.hosts_file.parent / "remote"
        models = remote / "models"
        (models / "drafter").mkdir(parents=True)
        hosts = json.loads(operator.hosts_file.read_text())
        more = {"reference": str(models / "drafter"), "server": {"kind": "sglang", "url": "http://localhost:30000"}}
        hosts["hosts"]["ct129"] |= more
        operator.hosts_file.write_text(json.dumps(hosts))
        state = remote / "state.json"
        program = remote / "environments" / "current" / "bin" / "dflash"
        program.write_text(DFLASH.format(python=sys.executable, state=str(state)))
        patch.setattr("flows.cli_promote.sys", SimpleNamespace(stdin=Terminal()))
        served = cls(operator, models, models / "drafter-promoted", state)
        served.host_is()
        return served

    def host_is(self, **state: Any) -> None:
        self.state.write_text(json.dumps(state))

    @property
    def ledger(self) -> Ledger:
        return Ledger.open()

    def measured(self, step: int, level: float, *, against_reference: str = "better") -> Path:
        """A checkpoint with a report on the promotion prompts; where its relayed weights lie on the host."""
        weights = self.models.parent / "cache" / f"step_{step}.safetensors"
        weights.parent.mkdir(exist_ok=True)
        weights.write_bytes(f"weights of {step}".encode())
        self.see(step, level, weights, hashlib.sha256(weights.read_bytes()).hexdigest(), against_reference)
        return weights

    def see(self, step: int, level: float, where: Path, sha256: str, verdict: str) -> None:
        ledger, identity = self.ledger, f"sha256:{step:08}"
        ledger.see(Seen("kpro6", f"/c/step_{step}", identity, step, 1.0, 1.0))
        made = nightly_reports.report(step, level)
        compared = Comparison(difference=0.5, ci95=(0.4, 0.6), prompts=72, verdict=verdict)  # type: ignore[arg-type]
        checkpoint = made.checkpoint.model_copy(update={"path": str(where), "sha256": sha256})
        made = made.model_copy(update={"checkpoint": checkpoint, "comparison": compared})
        folder = nightly_reports.write(made, self.operator.folder / "reports" / str(step))
        attempt = ledger.advance(ledger.begin(identity, promotion_suite().digest()), on="ct129")
        ledger.finish(attempt, "evaluated", report=str(folder))

    def run(self, *argv: str, answer: str = "y\n") -> Result:
        return CliRunner().invoke(app, ["promote", *argv], input=answer)

    def done(self, *argv: str, answer: str = "y\n") -> Result:
        result = self.run(*argv, answer=answer)
        assert result.exit_code == 0, result.exception or result.output
        return result

    def failed(self, *argv: str) -> str:
        error = self.run(*argv).exception
        assert isinstance(error, DFlashError), error
        return str(error)

    def records(self, event: str = "promotion") -> list[dict[str, Any]]:
        return select(self.operator.connector.audit.entries(), event=event)


@pytest.fixture
def over_ssh(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served.build(operator, monkeypatch)


@pytest.fixture
def served(over_ssh: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The same with the commands of the host run by this machine, in whose files they work anyway: a session takes
    most of a command's time."""

    def here(connector: object, host: object, approval: object, action: Run, output: Output) -> int:
        done = process.run(action.argv, env=dict(action.env), check=False)
        output("stdout", done.stdout.encode())
        output("stderr", done.stderr.encode())
        return done.returncode

    monkeypatch.setattr(promotion.changes, "run", here)
    return over_ssh


def test_a_promotion_over_ssh(over_ssh: Served) -> None:
    over_ssh.measured(100, 1.0)
    done = json.loads(over_ssh.done("100", "--yes-at-terminal", "--json", answer="").stdout)
    assert done["current"] == "drafter-step_100-00000100"
    assert (over_ssh.link / "model.safetensors").read_text() == "weights of 100"


def test_a_promotion_and_its_rollback(served: Served) -> None:
    for step, level in ((100, 1.0), (200, 1.1)):
        served.measured(step, level)
    first = served.done("100")
    assert served.link.resolve() == served.models / "drafter-step_100-00000100"
    assert "promote step 100 to ct129:" in first.output
    assert "against the reference, better" in first.output
    second = served.done("200")
    assert "against what is served now, better" in second.output
    assert (served.link / "model.safetensors").read_text() == "weights of 200"
    assert (served.models / "drafter-step_100-00000100").is_dir()
    assert f"--speculative-draft-model-path {served.link}" in second.stdout
    assert "no server was restarted" in second.stdout

    back = json.loads(served.done("--rollback", "--yes-at-terminal", "--json", answer="").stdout)
    assert back["current"] == "drafter-step_100-00000100"
    assert back["previous"] == "drafter-step_200-00000200"
    assert served.link.resolve().name == back["current"]
    # what was written before is kept and served again when it is what was written
    served.done("200")
    assert [entry["step"] for entry in served.records()] == [100, 200, 200]
    assert [entry["directory"] for entry in served.records("rollback")] == ["drafter-step_100-00000100"]


def test_a_rollback_whose_drafter_does_not_load_is_said_to_be_done(served: Served) -> None:
    for step, level in ((100, 1.0), (200, 1.1)):
        served.measured(step, level)
        served.done(str(step))
    (served.operator.hosts_file.parent / "remote" / "environments" / "current" / "bin" / "dflash").unlink()
    back = served.done("--rollback")
    assert "names drafter-step_100-00000100" in back.stdout
    assert back.stdout.rstrip().endswith("no server was restarted")
    assert "how a server is started with it cannot be told: " in back.stderr
    assert served.link.resolve().name == "drafter-step_100-00000100"


def test_a_host_without_an_environment_says_how_it_gets_one(served: Served) -> None:
    served.measured(100, 1.0)
    (served.operator.hosts_file.parent / "remote" / "environments" / "current" / "bin" / "dflash").unlink()
    assert "dflash-ops provision ct129" in served.failed("100")
    assert not served.link.is_symlink()


def test_what_is_served_already_is_not_promoted_again(served: Served) -> None:
    served.measured(100, 1.0)
    served.done("100")
    again = served.done("100", answer="")
    assert "names drafter-step_100-00000100" in again.stdout
    assert len(served.records()) == 1


def test_a_no_or_no_terminal_does_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.measured(100, 1.0)
    refused = served.run("100", answer="n\n")
    assert refused.exit_code == 1
    assert "nothing was done" in refused.output
    monkeypatch.setattr("flows.cli_promote.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: False)))
    assert "at a terminal" in served.failed("100", "--yes-at-terminal")
    assert not served.link.is_symlink()
    assert served.records() == []
    assert sorted(one.name for one in served.models.iterdir()) == ["drafter"]


def test_one_that_is_not_confirmed_needs_a_reason_that_stays(served: Served) -> None:
    served.measured(100, 1.0, against_reference="no difference shown")
    assert "not confirmed: against the reference, no difference shown" in served.failed("100")
    assert not served.link.is_symlink()
    served.done("100", "--unconfirmed", "the reference cannot be served")
    (record,) = served.records()
    assert record["unconfirmed"] == "the reference cannot be served"
    served.measured(200, 0.9)
    assert "against what is served now, worse" in served.failed("200")


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ({"fails": "export"}, "could not export .*: no space left"),
        ({"fails": "inspect"}, "does not load: no space left"),
        ({"problems": ["fc.weight: not a number"]}, "does not load: fc.weight: not a number"),
    ],
    ids=["export fails", "reading fails", "a faulty export"],
)
def test_what_does_not_load_is_not_served(served: Served, host: dict[str, Any], why: str) -> None:
    served.measured(100, 1.0)
    served.done("100")
    served.measured(200, 1.1)
    served.host_is(**host)
    assert re.search(why, served.failed("200"))
    assert served.link.resolve().name == "drafter-step_100-00000100"
    assert [entry["step"] for entry in served.records()] == [100]


@pytest.mark.parametrize("session", range(7))
def test_a_host_that_goes_away_at_any_step_serves_what_it_served_and_the_next_try_ends_it(
    served: Served, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.measured(100, 1.0)
    served.done("100")
    served.measured(200, 1.1)
    sessions, here = iter(range(100)), promotion.changes.run

    def goes_away(*arguments: Any) -> int:
        if next(sessions) == session:
            raise ConnectionFailed("ct129: no answer")
        return here(*arguments)

    monkeypatch.setattr(promotion.changes, "run", goes_away)
    assert "no answer" in served.failed("200")
    assert served.link.resolve().name == "drafter-step_100-00000100"
    served.done("200")
    assert served.link.resolve().name == "drafter-step_200-00000200"


def test_other_weights_than_those_measured_are_not_served(served: Served) -> None:
    weights = served.measured(100, 1.0)
    weights.write_bytes(b"others")
    assert "is not what was measured" in served.failed("100")
    assert not served.link.is_symlink()
    # what that left was never right, so it is not taken for it
    weights.write_bytes(b"weights of 100")
    assert "is not what an earlier export wrote" in served.failed("100")


def test_a_served_drafter_that_is_no_link_is_left_alone(served: Served) -> None:
    served.measured(100, 1.0)
    served.link.mkdir()
    assert "is no link" in served.failed("100")
    assert served.link.is_dir()
    assert served.records() == []


def test_the_plan_says_what_would_be_done_and_asks_nobody(served: Served) -> None:
    weights = served.measured(100, 1.0)
    before = served.operator.site.ordinary.logged()
    steps = json.loads(served.done("100", "--plan", "--json").stdout)
    assert [one["step"] for one in steps] == [
        "asked",
        "compared",
        "confirmed",
        "exported",
        "read again",
        "link changed",
    ]
    assert str(served.models / "drafter-step_100-00000100") in served.done("100", "--plan", "--json").stdout
    assert served.operator.site.ordinary.logged() == before
    assert weights.exists()


def test_a_step_or_a_rollback_is_asked_for(served: Served) -> None:
    assert "which step" in served.failed()
    assert "which step" in served.failed("100", "--rollback")
    assert "has named nothing before" in served.failed("--rollback")
    assert "no checkpoint of step 7 was seen" in served.failed("7")


@pytest.mark.slow
def test_the_real_export_is_read_by_the_real_reader(over_ssh: Served, tiny_hybrid: Pair) -> None:
    served = over_ssh
    program = served.models.parent / "environments" / "current" / "bin" / "dflash"
    program.unlink()
    program.symlink_to(Path(sys.executable).with_name("dflash"))
    shutil.rmtree(served.models / "drafter")
    shutil.copytree(tiny_hybrid.drafter, served.models / "drafter")
    relayed = shutil.copytree(tiny_hybrid.drafter, served.models.parent / "cache" / "step_100")
    sha256 = hashlib.sha256((relayed / "model.safetensors").read_bytes()).hexdigest()
    served.see(100, 1.0, relayed, sha256, "better")
    done = json.loads(served.done("100", "--yes-at-terminal", "--json").stdout)
    assert sorted(one.name for one in served.link.iterdir()) == ["config.json", "model.safetensors"]
    assert str(served.link) in done["commands"][0]
