"""Each machine installs only what it needs: the operator's has no torch, the inference host no Prefect."""

import sys

import pytest

from tasks import process

BLOCKED = """
import sys
for name in {blocked}:
    sys.modules[name] = None
from flows.prefect_home import configure_prefect
configure_prefect()
import {wanted}
"""
MODEL = ("torch", "transformers", "tokenizers")
OPS = ("prefect", "fabric", "paramiko", "boto3", "cryptography")


@pytest.mark.parametrize(
    ("wanted", "blocked"),
    [
        ("flows.cli, flows.evaluate_checkpoint", MODEL),
        ("dflash.cli, dflash.evaluate, dflash.inspect", OPS),
        ("dflash.report, dflash.render, dflash.checkpoint_layout, dflash.config, dflash.prompts", MODEL + OPS),
        ("dflash.pages, dflash.trend, dflash.renderings, dflash.cli_report", (*MODEL, *OPS, "matplotlib")),
    ],
)
def test_imports_without_the_other_extra(wanted: str, blocked: tuple[str, ...]) -> None:
    program = BLOCKED.format(wanted=wanted, blocked=blocked)
    assert process.run([sys.executable, "-c", program], check=False).stderr == ""


def test_the_gate_needs_nothing_but_the_standard_library() -> None:
    from tests.sshds import GATE

    isolated = [sys.executable, "-ISc", f"import runpy; runpy.run_path({str(GATE)!r}, run_name='gate')"]
    assert process.run(isolated, check=False).stderr == ""
