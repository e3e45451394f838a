"""Faults of a relay that need a host with disks and a network of its own."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tasks.lab import Lab
from tasks.transfer import ReceiverError
from tests.lab.test_relay import IN_FLIGHT, Way, at_first_bytes, desk, way

__all__ = ["desk", "way"]

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("every_progress")]
DISK = "/mnt"


@contextmanager
def small_disk(lab: Lab, options: str) -> Iterator[None]:
    """A disk of ct129's own, in memory."""
    if not lab.privileged:
        pytest.skip("mounting a small disk needs root")
    lab.exec("ct129", ["mount", "-t", "tmpfs", "-o", options, "tmpfs", DISK], check=True)
    try:
        yield
    finally:
        lab.exec("ct129", ["umount", DISK], check=True)


def names(lab: Lab) -> list[str]:
    return lab.exec("ct129", ["ls", "-A", DISK], check=True).stdout.split()


def test_read_only_destination_is_named(way: Way) -> None:
    lab = way.desk.lab
    with small_disk(lab, "ro"):
        with pytest.raises(ReceiverError, match=os.strerror(errno.EROFS)):
            way.desk.relay(way.source, way.desk.place("ct129", f"{DISK}/file"))
        assert names(lab) == []


def test_disk_that_others_fill_meanwhile_has_the_room_that_was_reserved(way: Way) -> None:
    """What has no room is the sidecar, and without it the file gets no name; then nothing has to move again."""
    lab, destination = way.desk.lab, way.desk.place("ct129", f"{DISK}/file")

    def fill() -> None:
        lab.exec("ct129", ["dd", "if=/dev/zero", f"of={DISK}/filler", "bs=64k"])

    with small_disk(lab, f"size={IN_FLIGHT + (8 << 20)}"):
        with pytest.raises(ReceiverError, match=os.strerror(errno.ENOSPC)):
            way.desk.relay(way.source, destination, progress=at_first_bytes(fill))
        assert "file" not in names(lab)
        lab.exec("ct129", ["rm", f"{DISK}/filler"], check=True)
        assert way.desk.relay(way.source, destination).moved == 0
        assert sorted(names(lab)) == ["file", "file.relay.json"]
        copied = lab.exec("ct129", ["sha256sum", f"{DISK}/file"], check=True).stdout.split()[0]
        assert copied == lab.exec("operator", ["sha256sum", str(way.source_file)], check=True).stdout.split()[0]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["kpro6", "ct129"])
def test_host_without_network_for_30_s_is_waited_for(way: Way, host: str) -> None:
    lab = way.desk.lab
    if not lab.privileged:
        pytest.skip(lab.weaker)

    def cut() -> None:
        lab.cut_link(host)
        threading.Timer(30.0, lab.restore_link, [host]).start()

    way.relay(at_first_bytes(cut))
    assert way.whole()
