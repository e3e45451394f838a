"""Where the operator's machine keeps what must survive a command."""

import os
from pathlib import Path


def state_dir() -> Path:
    """``$DFLASH_STATE``, else ``~/.local/state/dflash``; made with mode 0700 when it is not there."""
    named = os.environ.get("DFLASH_STATE")
    path = Path(named) if named else Path.home() / ".local" / "state" / "dflash"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
