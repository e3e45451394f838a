"""Fixtures of the whole suite live in the modules named here."""

import os
import signal

import pytest

# a shell starts jobs in the background with Ctrl-C ignored, and the commands that the tests interrupt would inherit it
signal.signal(signal.SIGINT, signal.default_int_handler)

# before torch is imported: tests share the cores with the lab's hosts, and thread teams that wait for each other waste
# them, five times the CPU and more
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.tiny", "tests.labs", "tests.sshds", "tests.object_stores"]

ON_HOSTS = ("tests/flows/", "tests/lab/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest share, which one process has to do alone, begins first."""
    items.sort(key=lambda item: not item.nodeid.startswith(ON_HOSTS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Share the tests out by file over the processes of ``make test``; those with hosts go one after the other.

    Namespaces, their addresses and the lab are there once a machine.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "hosts" if nodeid.startswith(ON_HOSTS) else nodeid.partition("::")[0]

    return ByFile(config, log)
