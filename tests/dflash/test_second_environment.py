"""fla and triton installed, no GPU: transformers takes fla's kernels and dies; ours runs on torch and says so.

In an environment of its own (``make fla-env``), which shares torch and the rest with the first.
"""

import json
import os
import subprocess  # another interpreter is under test
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-fla" / "bin" / "python"
TAPS = """
import sys, torch
from safetensors.torch import save_file
from dflash.target import Target
target = Target.load(sys.argv[1], kernel=sys.argv[2])
ids = torch.arange(150)[None] % 500
save_file({"taps": target.taps(ids, (1, 3, 5)).taps}, sys.argv[3])
print(target.kernel)
"""
TRANSFORMERS = """
import sys, torch
from transformers import Qwen3_5ForCausalLM
Qwen3_5ForCausalLM.from_pretrained(sys.argv[1])(input_ids=torch.arange(9)[None])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no second environment; make fla-env"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU, so fla runs"),
]


def run(python, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_fla_and_triton_are_there_and_plain_transformers_dies(tiny_hybrid):
    assert run(PYTHON, "-c", "import fla, triton").returncode == 0
    died = run(PYTHON, "-c", TRANSFORMERS, tiny_hybrid.target)
    assert died.returncode == 1
    assert "0 active drivers" in died.stderr


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_the_torch_path_runs_and_gives_the_taps_of_the_first_environment(tiny_hybrid, tmp_path, kernel):
    taps = []
    for number, python in enumerate((PYTHON, sys.executable)):
        file = tmp_path / f"{number}.safetensors"
        done = run(python, "-c", TAPS, tiny_hybrid.target, kernel, file)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "torch\n"
        taps.append(load_file(file)["taps"])
    assert torch.equal(*taps)


def test_fla_is_refused_by_name(tiny_hybrid, tmp_path):
    done = run(PYTHON, "-c", TAPS, tiny_hybrid.target, "fla", tmp_path / "taps")
    assert "kernel fla was asked for, but the device is cpu" in done.stderr


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_an_evaluation_runs_there_and_records_the_kernel(tiny_hybrid, tmp_path, kernel):
    reports = []
    for python, folder in ((PYTHON, "second"), (sys.executable, "first")):
        pair = ("--target", tiny_hybrid.target, "--checkpoint", tiny_hybrid.drafter, "--prompts", tiny_hybrid.prompts)
        settings = ("--num-prompts", 3, "--max-new-tokens", 24, "--ignore-eos", "--kernel", kernel, "--device", "cpu")
        code = "from dflash.cli import main; main()"
        done = run(python, "-c", code, "evaluate", *pair, *settings, "--output", tmp_path / folder)
        assert done.returncode in (0, 3), done.stderr
        reports.append(json.loads((tmp_path / folder / "report.json").read_text()))
    second, first = reports
    assert second["target"]["kernel"] == "torch"
    assert second["versions"]["flash-linear-attention"]
    assert [prompt["token_ids"] for prompt in second["prompts"]] == [prompt["token_ids"] for prompt in first["prompts"]]
    assert second["metrics"]["tau"] == first["metrics"]["tau"]
