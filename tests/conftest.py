"""Fixtures of the whole suite live in the modules named here."""

import os
import signal
from pathlib import Path

import pytest

# a shell starts jobs in the background with Ctrl-C ignored, and the commands that the tests interrupt would inherit it
signal.signal(signal.SIGINT, signal.default_int_handler)

# before torch is imported: tests share the cores with the lab's hosts, and thread teams that wait for each other waste
# them, five times the CPU and more
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.tiny", "tests.labs", "tests.sshds"]

ROOT = Path(__file__).parent
ON_HOSTS = ("flows", "lab", "tasks")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share the tests out by file over the processes of ``make test``; those with hosts go one after the other.

    Namespaces, their addresses and the lab are there once a machine.
    """
    for item in items:
        place = item.path.relative_to(ROOT)
        group = "hosts" if place.parts[0] in ON_HOSTS else str(place)
        item.add_marker(pytest.mark.xdist_group(group))
