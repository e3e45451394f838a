"""The command, run in the process of the test."""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from dflash.cli import main
from tests.dflash.servers import WireServer, servers


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


@pytest.fixture
def serve() -> Iterator[Callable[..., WireServer]]:
    """Start servers of given routes; they end with the test."""
    with servers() as start:
        yield start


@pytest.fixture(scope="module")
def tokenizer(tiny_dense):
    """The tiny targets' tokenizer."""
    from dflash.target import load_tokenizer

    return load_tokenizer(tiny_dense.target)
