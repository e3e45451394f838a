"""The command: streams, exit codes, one-line errors."""

import json
import os
import shutil
import subprocess  # the command under test is a process
import sys

import pytest

from dflash.errors import DFlashError
from dflash.failure import told
from dflash.manifest import file_sha256
from tests.dflash.pairs import write_drafter, write_prompts, write_target


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    write_target(directory / "target")
    write_drafter(directory / "drafter")
    write_drafter(directory / "narrow", taps=[1, 3])
    write_prompts(directory / "prompts.jsonl")
    return directory


def evaluation(files, output, *arguments, checkpoint="drafter", prompts="prompts.jsonl"):
    return [
        *("evaluate", "--target", files / "target", "--checkpoint", files / checkpoint),
        *("--prompts", files / prompts, "--output", output, "--max-new-tokens", 12, "--device", "cpu", *arguments),
    ]


def process(*arguments):
    code = "import sys; from dflash.cli import main; sys.argv[0] = 'dflash'; main()"
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


def test_phases_go_to_stderr_and_the_headline_to_stdout(files, tmp_path):
    done = process(*evaluation(files, tmp_path / "report", "--ignore-eos"))
    assert done.returncode == 0, done.stderr
    # A phase that takes long on a busy machine adds indented lines of progress.
    assert [line for line in done.stderr.splitlines() if not line.startswith(" ")] == [
        "[1/5] tokenizer …",
        "[2/5] reference completions …",
        "[3/5] target and hidden states …",
        "[4/5] drafter …",
        "[5/5] blocks …",
    ]
    assert done.stdout.startswith("τ ")
    assert done.stdout.count("\n") == 1


def test_json_prints_the_metrics(run_dflash, files, tmp_path):
    done = run_dflash(*evaluation(files, tmp_path / "report", "--ignore-eos", "--json"))
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert json.loads(done.out) == report["metrics"]


def test_a_failed_check_exits_with_3_and_the_report_is_written(run_dflash, files, tmp_path):
    done = run_dflash(*evaluation(files, tmp_path / "report", "--reference", files / "drafter", checkpoint="narrow"))
    assert done.returncode == 3, done.err
    assert done.out == "not valid: taps-as-reference\n"
    assert json.loads((tmp_path / "report" / "report.json").read_text())["valid"] is False


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--mode", "guess"], 2),
        (["--max-new-tokens", "0"], 2),
        (["--thinking", "maybe"], 2),
        (["--device", "fpga"], 2),
        (["--server", "nowhere"], 1),
        (["--reference", "/nonexistent"], 1),
    ],
)
def test_wrong_usage_is_2_and_failure_is_1(run_dflash, files, tmp_path, arguments, code):
    done = run_dflash(*evaluation(files, tmp_path / "report", *arguments))
    assert done.returncode == code, done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "report").exists()


def test_an_error_is_one_line(run_dflash, files, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"id": "a"}\n')
    done = run_dflash(*evaluation(files, tmp_path / "report", prompts=tmp_path / "prompts.jsonl"))
    assert done.returncode == 1
    phase, error = done.err.splitlines()
    assert phase == "[1/5] tokenizer …"
    assert error.startswith(f"error: {tmp_path}/prompts.jsonl:1: expected an object with id")


def test_chats_without_thinking_are_wrong_usage(run_dflash, files, tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"id": "a", "messages": [{"role": "user", "content": "w1"}]}\n')
    done = run_dflash(*evaluation(files, tmp_path / "report", prompts=tmp_path / "chats.jsonl"))
    assert done.returncode == 2
    assert "--thinking on or --thinking off" in done.err


def test_inspect_shows_config_and_tensors(run_dflash, files):
    done = run_dflash("inspect", files / "drafter")
    assert done.returncode == 0, done.err
    assert "zlab" in done.out
    assert "layers.1.mlp.down_proj.weight" in done.out
    raw = json.loads(run_dflash("inspect", files / "drafter", "--json").out)
    assert raw["config"]["block_size"] == 6
    assert len(raw["tensors"]) == 11 * 2 + 3


def test_a_checkpoint_whose_path_is_no_text_is_told_as_json(run_dflash, files, tmp_path):
    odd = tmp_path / os.fsdecode(b"drafter-\xff")
    shutil.copytree(files / "drafter", odd)
    done = run_dflash("inspect", odd, "--json")
    assert done.returncode == 0, done.err
    assert json.loads(done.out)["path"] == str(odd)


def test_a_failure_names_a_path_that_is_no_text(tmp_path):
    odd = os.fsdecode(b"/runs/\xff")
    with pytest.raises(DFlashError), told(tmp_path / "failure.json"):
        raise DFlashError(f"{odd} is gone")
    assert json.loads((tmp_path / "failure.json").read_text())["message"] == f"{odd} is gone"


def test_inspect_lists_what_is_wrong_and_exits_with_1(run_dflash, files, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((files / "narrow" / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((files / "drafter" / "config.json").read_bytes())
    done = run_dflash("inspect", tmp_path)
    assert done.returncode == 1
    assert "takes 2 taps" in " ".join(done.out.split())


def test_help_imports_no_torch():
    code = "import sys; import dflash.cli, dflash.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_export_shows_the_whole_digest_and_path(run_dflash, files, tmp_path):
    output = tmp_path / ("long" * 20) / "drafter"
    done = run_dflash("export", files / "drafter", "--format", "zlab", "--output", output)
    assert done.returncode == 0, done.err
    shown = "".join(done.out.split())
    assert str(output) in shown
    assert file_sha256(output / "model.safetensors") in shown
    assert str(output) in "".join(run_dflash("inspect", output).out.split())


def test_a_verifier_that_the_layout_has_no_place_for_is_wrong_usage(run_dflash, files, tmp_path):
    done = run_dflash(
        *("export", files / "drafter", "--format", "zlab", "--output", tmp_path / "x", "--verifier", "target")
    )
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "--verifier target: only --format speculators" in done.err
