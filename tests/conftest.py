"""Fixtures of the whole suite live in the modules named here."""

import functools
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

# a shell starts jobs in the background with Ctrl-C ignored, and the commands that the tests interrupt would inherit it
signal.signal(signal.SIGINT, signal.default_int_handler)

# before torch is imported: tests share the cores with the lab's hosts, and thread teams that wait for each other waste
# them, five times the CPU and more
os.environ.setdefault("OMP_NUM_THREADS", "1")

# what a test does not place elsewhere must not land among the state of whoever runs it
STATE = os.environ["DFLASH_STATE"] = tempfile.mkdtemp(prefix="dflash-tests-")

ROOT = Path(__file__).parents[1]
LAB, PREFECT = "lab", "prefect"

pytest_plugins = ["tests.tiny", "tests.labs", "tests.sshds", "tests.object_stores"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The shares that one process has to do alone take longest, and begin first."""
    items.sort(key=lambda item: _share(item.nodeid) not in (LAB, PREFECT))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Share the tests out over the processes of ``make test``: by file, but what has to be together is together.

    There is one lab a machine, and a Prefect server takes long to start.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByShare(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _share(nodeid)

    return ByShare(config, log)


def _share(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return LAB if file.startswith("tests/lab/") else PREFECT if _asks_prefect(file) else file


@functools.cache
def _asks_prefect(file: str) -> bool:
    text = (ROOT / file).read_text(encoding="utf-8")
    return any(fixture in text for fixture in ("prefect_api", "prefect_server", "shared_server"))


@pytest.fixture
def every_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens "in the middle" hangs on a report of progress; a fast relay must not be over before the next one."""
    for module in ("tasks.staging", "tasks.streams"):
        monkeypatch.setattr(f"{module}.PROGRESS_SECONDS", 0.0)


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)
