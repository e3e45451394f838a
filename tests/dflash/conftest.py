"""The command, run in the process of the test."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dflash.cli import main


@pytest.fixture
def run_dflash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Run the command here (importing transformers takes seconds): ``returncode``, ``out``, ``err``."""

    def run(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["dflash", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        return SimpleNamespace(returncode=code, **capsys.readouterr()._asdict())

    return run
