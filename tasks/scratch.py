"""A folder of this process for small files: it goes with the process, or with the next one where that was killed."""

import fcntl
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

LOCK = "in-use"
OLD_SECONDS = 3600.0
"""After which a folder without a lock is one that its process did not live to lock."""


class Scratch:
    """A new folder, with this user's rights alone; ``name`` is its path.

    What killed processes left under the same ``prefix`` is removed first: their folders' locks are free.
    """

    def __init__(self, prefix: str) -> None:
        sweep(prefix)
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.name = self._folder.name
        unlocked = Path(self.name, f"{LOCK}.new")
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # only now can somebody else find it, and finds it locked
        unlocked.rename(unlocked.with_name(LOCK))


def sweep(prefix: str) -> list[str]:
    """Remove the folders of ``prefix`` that this user's dead processes left, and return their names."""
    made_so = re.compile(re.escape(prefix) + "[a-z0-9_]{8}")
    removed = []
    with os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if made_so.fullmatch(entry.name) and _is_left(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.name)
    return removed


def _is_left(entry: "os.DirEntry[str]") -> bool:
    with suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        if not entry.is_dir(follow_symlinks=False) or found.st_uid != os.geteuid():
            return False
        try:
            lock = os.open(os.path.join(entry.path, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return time.time() - found.st_mtime > OLD_SECONDS
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(lock)
    return False
