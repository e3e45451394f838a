"""Fixtures of the tests that need further sshds."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import sshds
from tests.sshds import PROTECTED, Sshd


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Start an sshd that guards nothing by itself, with ``more`` at the end of its configuration."""
    with ExitStack() as running:

        def run(more: str = "", authorized_keys: str = "none") -> Sshd:
            program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
            if program is None:
                pytest.skip("no sshd is installed")
            folder = tmp_path / f"sshd-{len(list(tmp_path.glob('sshd-*')))}"
            made = sshds._start(program, folder, PROTECTED, authorized_keys=authorized_keys, more=more)
            running.callback(made.running.wait)
            running.callback(made.running.terminate)
            return made

        yield run
