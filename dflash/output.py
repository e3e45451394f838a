"""A directory that appears whole or not at all. Imports no torch."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash.errors import DFlashError


class OutputError(DFlashError):
    """The output cannot be written where it was asked for; nothing of it is left behind."""


@contextmanager
def whole_directory(output: Path) -> Iterator[Path]:
    """A temporary directory beside ``output`` that is on disk and takes its name when the block ends without an error.

    ``output`` must not exist or be an empty directory. Raises :class:`OutputError`, also for an :class:`OSError` of the
    block that nothing closer has named.
    """
    final = Path(os.path.realpath(output))  # a directory cannot be renamed to a link, nor to "."
    partial: Path | None = None
    try:
        if final.exists() and (not final.is_dir() or any(final.iterdir()) or final.is_mount()):
            raise OutputError(
                f"--output {output} exists and is not an empty directory of its own; choose another or remove it"
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        partial.chmod(0o755 & ~_umask())
        yield partial
        for path in (*partial.iterdir(), partial):
            to_disk(path)
        partial.rename(final)
        to_disk(final.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and partial is not None:
            raise OutputError(f"--output {output} was filled by somebody else meanwhile; choose another") from None
        raise OutputError(
            f"--output {output} could not be written ({error.strerror or error}); nothing was left there"
        ) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Wait until what a file or directory holds is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
