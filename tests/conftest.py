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

LAB, PREFECT = "lab", "prefect"

pytest_plugins = ["tests.tiny", "tests.labs", "tests.sshds", "tests.object_stores"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share the tests out over the processes of ``make test``: by file, but what has to be together is together.

    There is one lab a machine, and a Prefect server takes long to start. Those shares are the longest, and begin first.
    """
    shares = {item: _share(item) for item in items}
    items.sort(key=lambda item: shares[item] not in (LAB, PREFECT))
    for item, share in shares.items():
        item.add_marker(pytest.mark.xdist_group(share))


def _share(item: pytest.Item) -> str:
    if item.nodeid.startswith("tests/lab/"):
        return LAB
    return PREFECT if "shared_server" in getattr(item, "fixturenames", ()) else item.nodeid.partition("::")[0]


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)
