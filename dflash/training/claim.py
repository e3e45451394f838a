"""One run writes into an output, and no second one beside it: they would cut each other's metrics and checkpoints."""

import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash.errors import DFlashError, UsageError, one_line

LOCK = ".lock"
"""Its content says who holds it; that it is held is the kernel's to know, which drops it with the process."""


class OutputInUseError(DFlashError):
    """Another run writes into the output."""


class RunOutputError(UsageError):
    """The output is no directory that this run may write into."""


@contextmanager
def sole_writer(output: Path) -> Iterator[None]:
    """``output``, made if need be, is this process's alone for as long as the block lasts.

    Raises :class:`OutputInUseError` that names the other process, and :class:`RunOutputError` where nothing can be
    written. A file system without locks is taken as it is.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RunOutputError(
            f"output {output} cannot be written into ({error.strerror}); choose another, or see to its permissions"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                holder = one_line(os.pread(descriptor, 200, 0).decode(errors="replace").strip())
                raise OutputInUseError(
                    f"another run writes into {output} ({holder or 'it does not say which'}); wait for it, stop it "
                    f"with SIGTERM, or choose another output"
                ) from None
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
