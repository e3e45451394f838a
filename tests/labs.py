"""The ``lab`` fixture: one real lab for the whole run, entered on the operator's side."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.lab import Lab, LabBusyError

PATIENCE = 600.0


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab with a state folder of its own, ``DFLASH_STATE`` and ``DFLASH_HOSTS`` set, this thread inside its network.

    Another lab on this machine, of a demo or a second test run, is waited for.
    """
    if shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("no sshd here: `make test` installs it as root, otherwise install openssh-server")
    # not pytest's folder: that may be a tmpfs, and the hosts' files have to be on a disk
    state = Path(tempfile.mkdtemp(prefix="dflash-lab-", dir="/var/tmp"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            running = _up(state)
            try:
                for name, value in running.environment.items():
                    patch.setenv(name, value)
                with running.entered():
                    yield running
            finally:
                running.down()
    finally:
        shutil.rmtree(state)


def _up(state: Path) -> Lab:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return Lab.up(state, outlive=False)
        except LabBusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
