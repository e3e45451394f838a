"""Why a command failed, as a file for the program that started it and may be away when it ends. Imports no torch."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import DFlashError
from dflash.json_text import json_text

DISK_FULL = "DiskFull"


class Failure(BaseModel):
    """``state`` is :attr:`DFlashError.state_name`, what a run that ends so is called; ``message`` says why it did."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    state: str
    message: str


@contextmanager
def told(file: Path | None) -> Iterator[None]:
    """Write a :class:`DFlashError` that leaves the block into ``file`` as well, whole or not at all.

    A file that cannot be written changes nothing: the error is on stderr too.
    """
    try:
        yield
    except DFlashError as error:
        if file is not None:
            partial = file.with_name(f".{file.name}.{os.getpid()}")
            with suppress(OSError):
                partial.write_text(json_text(Failure(state=_state(error), message=str(error))))
                partial.replace(file)
        raise


def _state(error: DFlashError) -> str:
    """A full disk has one name, whichever file it was that did not fit."""
    behind: BaseException | None = error
    while behind is not None and not (isinstance(behind, OSError) and behind.errno in (errno.ENOSPC, errno.EDQUOT)):
        behind = behind.__cause__ or behind.__context__
    return error.state_name if behind is None else DISK_FULL


def parse_failure(text: str | bytes) -> Failure | None:
    """What :func:`told` wrote; None when it is nothing of the kind."""
    try:
        return Failure.model_validate_json(text)
    except ValidationError:
        return None
