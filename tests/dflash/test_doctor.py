"""``dflash doctor``: every check of a checkpoint, in a small measurement."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash.checks import CHECKS
from dflash.doctor import to_table, verdict
from dflash.report import Check
from tests.dflash.pairs import write_drafter, write_prompts, write_target

Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    write_target(directory / "target")
    write_drafter(directory / "drafter")
    write_drafter(directory / "narrow", taps=[1, 3])
    write_prompts(directory / "prompts.jsonl")
    return directory


@pytest.fixture
def doctor(run_dflash: Run, files: Path) -> Run:
    def run(checkpoint: str, *options: object) -> SimpleNamespace:
        pair = ("--target", files / "target", "--checkpoint", files / checkpoint, "--prompts", files / "prompts.jsonl")
        return run_dflash("doctor", *pair, "--max-new-tokens", 24, "--device", "cpu", *options)

    return run


def test_a_sound_pair_is_shown_check_by_check(doctor: Run) -> None:
    result = doctor("drafter")
    assert result.returncode == 0, result.err
    for name in CHECKS:
        assert any(line.startswith(f"{name} ") for line in result.out.splitlines()), name
    assert "not verified" in result.out
    assert result.out.strip().splitlines()[-1].startswith("nothing is wrong: ")
    assert "[5/5] blocks" in result.err


def test_a_fault_is_exit_code_three_and_named_last(doctor: Run) -> None:
    result = doctor("narrow")
    assert result.returncode == 3
    assert "FAIL" in result.out
    assert result.out.strip().splitlines()[-1] == "not valid: taps-as-reference"


def test_json_holds_every_check(doctor: Run, files: Path, tmp_path: Path) -> None:
    first = json.loads((files / "prompts.jsonl").read_text().splitlines()[0])
    (tmp_path / "training.jsonl").write_text(json.dumps({"text": first["prompt"]}) + "\n")
    result = doctor("drafter", "--json", "--training-data", tmp_path / "training.jsonl")
    found = {check["name"]: check for check in json.loads(result.out)}
    assert set(CHECKS) <= set(found)
    assert (found["prompt-overlap"]["status"], found["prompt-overlap"]["measured"]) == ("warn", 1)
    assert found["target-class"]["status"] == "pass"


def test_streamed_layers_leave_open_what_needs_the_whole_target(doctor: Run, files: Path) -> None:
    """The target is loaded to write the completions, so the source of its states is known; without it, it is not."""
    result = doctor("drafter", "--json", "--kernel", "torch")
    known = {check["name"]: check["status"] for check in json.loads(result.out)}
    assert (known["tap-source"], known["reference-agreement"]) == ("pass", "pass")


def test_what_cannot_be_measured_is_an_error(doctor: Run, files: Path) -> None:
    result = doctor("nothing")
    assert result.returncode == 1
    assert "nothing" in result.err


def test_the_verdict_names_failures_else_counts() -> None:
    def check(name: str, status: str) -> Check:
        return Check.model_validate(
            {"name": name, "status": status, "measured": 0.12345, "limit": None, "explanation": "not verified: x\ty"}
        )

    sound = [check("a", "pass"), check("b", "pass"), check("c", "warn"), check("d", "skipped")]
    assert verdict(sound) == "nothing is wrong: 2 passed, 1 warn, 1 not verified"
    assert verdict([*sound, check("e", "fail"), check("f", "fail")]) == "not valid: e, f"
    table = to_table(sound)
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    assert columns[1] == ["pass", "pass", "warn", "not verified"]
    assert columns[2] == ["0.1235, limit –\nx\\ty"] * 3 + ["x\\ty"]
