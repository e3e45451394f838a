"""A file system that is soon full, for the tests of full disks."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """One of ``size``, as mount has it, in memory at ``place``; skips the test where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this container may not mount a file system: {mounted.stderr}")
    try:
        yield place
    finally:
        # lazily: what a test started there may live a moment longer
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free on ``disk``."""
    room = os.statvfs(disk)
    (disk / "filling").write_bytes(bytes(room.f_bavail * room.f_frsize))
    assert os.statvfs(disk).f_bavail == 0
