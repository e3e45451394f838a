"""The ``lab`` fixture: one real lab for the whole run, entered on the operator's side."""

import ctypes
import functools
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks import process
from tasks.lab import Lab, LabBusyError
from tasks.lab_isolated import can_isolate

PATIENCE = 240.0  # less than the time-out of one test
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000


@dataclass(frozen=True)
class MachineNetwork:
    """The machine's own network, from whichever namespace one looks."""

    namespace: int
    before: str
    """Addresses and routes as they were before a lab came up."""

    def now(self) -> str:
        """Addresses and routes of the machine, without the seconds that count down in them."""
        inside = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self.namespace}", "--"]
        looks = (["address"], ["route", "show", "table", "all"], ["-6", "route", "show", "table", "all"])
        text = "".join(process.run([*inside, "ip", "-o", *look]).stdout for look in looks)
        return re.sub(r"\b(valid_lft|preferred_lft|expires) \S+", "", text)


@pytest.fixture(scope="session")
def machine_network() -> Iterator[MachineNetwork]:
    """The machine's network as it was before the run's lab; read where a lab has namespaces only."""
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    before = MachineNetwork(namespace, "").now() if can_isolate() else ""
    yield MachineNetwork(namespace, before)
    os.close(namespace)


@pytest.fixture(scope="session")
def lab(machine_network: MachineNetwork) -> Iterator[Lab]:
    """A lab with a state folder of its own, ``DFLASH_STATE`` and ``DFLASH_HOSTS`` set, this thread inside its network.

    Another lab on this machine, of a demo or a second test run, is waited for.
    """
    if shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("no sshd here: `make test` installs it as root, otherwise install openssh-server")
    # not pytest's folder: that may be a tmpfs, and the hosts' files have to be on a disk
    state = Path(tempfile.mkdtemp(prefix="dflash-lab-", dir="/var/tmp"))
    running = _up(state)
    try:
        with pytest.MonkeyPatch.context() as patch, running.entered():
            for name, value in running.environment.items():
                patch.setenv(name, value)
            yield running
    finally:
        # a lab that cannot be taken down keeps its folder: something may still be mounted in it
        running.down()
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


def on_a_machine_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test in a thread that has an empty network and an empty /run, and so no lab and no namespace names."""

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        failed: list[BaseException] = []

        def body() -> None:
            try:
                if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "unshare")
                process.run(["mount", "--make-rprivate", "/"])
                process.run(["mount", "-t", "tmpfs", "tmpfs", "/run"])
                process.run(["ip", "link", "set", "lo", "up"])
                test(**arguments)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    return run
