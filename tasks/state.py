"""Where the operator's machine keeps what must survive a command."""

import os
from pathlib import Path

from tasks.errors import Refused


def state_dir() -> Path:
    """``$DFLASH_STATE``, else ``~/.local/state/dflash``; made with mode 0700 when it is not there.

    Raises ``Refused`` when it cannot be: there are no approvals and no audit log without it.
    """
    named = os.environ.get("DFLASH_STATE")
    try:
        path = Path(named) if named else Path.home() / ".local" / "state" / "dflash"
    except RuntimeError:
        raise Refused("this user has no home folder for the state; name a folder in $DFLASH_STATE") from None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"state folder {path}: {error.strerror}; name one of your own in $DFLASH_STATE") from None
    return path
