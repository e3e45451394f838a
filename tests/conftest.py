"""Fixtures of the whole suite live in the modules named here."""

import os
import shutil
import signal
import tempfile

import pytest

# a shell starts jobs in the background with Ctrl-C ignored, and the commands that the tests interrupt would inherit it
signal.signal(signal.SIGINT, signal.default_int_handler)

# before torch is imported: tests share the cores with the lab's hosts, and thread teams that wait for each other waste
# them, five times the CPU and more
os.environ.setdefault("OMP_NUM_THREADS", "1")

# what a test does not place elsewhere must not land among the state of whoever runs it
STATE = os.environ["DFLASH_STATE"] = tempfile.mkdtemp(prefix="dflash-tests-")

pytest_plugins = ["tests.tiny", "tests.labs", "tests.sshds", "tests.object_stores"]

TOGETHER = ("tests/lab/", "tests/flows/")
"""Folders whose tests one process has to do: there is one lab a machine, and a Prefect server takes long to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one process has to do alone takes longest, and begins first."""
    items.sort(key=lambda item: not item.nodeid.startswith(TOGETHER))


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Share the tests out over the processes of ``make test``: by file, or by folder what has to be together."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])

    return ByFile(config, log)
