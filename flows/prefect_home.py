"""Where Prefect keeps its state and how it behaves; set before ``prefect`` is imported, for it reads its settings then.

Prefect is the queue, the clock and the screen. Its home lies in the project's state folder, so that nothing of another
Prefect installation is read or changed. Runs go to the server that ``PREFECT_API_URL`` names, else to that of the
``dflash-ops serve`` which runs over the same state folder; without either an embedded server is started for the run.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from tasks import process
from tasks.state import state_dir

EMBEDDED_SERVER_START_SECONDS = 180  # the first start migrates the database: 15 s on two idle cores

AGENT_VARIABLES = ("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE")


def forget_agent() -> None:
    """Take the way to the operator's agent out of this process: what runs a flow never signs an approval."""
    for name in AGENT_VARIABLES:
        os.environ.pop(name, None)


def configure_prefect() -> None:
    """Put this project's Prefect settings into the environment; what the user has set there stays.

    The agent leaves the environment: whatever Prefect starts inherits it.
    """
    forget_agent()
    settings = {
        "PREFECT_HOME": str(home()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(EMBEDDED_SERVER_START_SECONDS),
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        # Runs keep their log on the server; the terminal shows what the project itself prints.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        # one writer at a time is SQLite's rule: a statement that has to wait is not a failure
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
    }
    # two servers over one SQLite file would lock each other out
    served = serving()
    if served is not None:
        settings["PREFECT_API_URL"] = served
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def home() -> Path:
    """The folder of Prefect's own files: ``$PREFECT_HOME``, else one in the state folder."""
    named = os.environ.get("PREFECT_HOME")
    return Path(named) if named else state_dir() / "prefect"


def server() -> str | None:
    """The API that runs go to; None where an embedded server would have to be started for them."""
    return os.environ.get("PREFECT_API_URL") or serving()


def serving() -> str | None:
    """The API of the ``dflash-ops serve`` that runs over this state folder; None when none does."""
    try:
        record = json.loads(_record().read_text(encoding="utf-8"))
        alive = process.birth(record["pid"]) == record["birth"]
        return str(record["api"]) if alive else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record_serving(api: str, workers: Iterable[int] = ()) -> None:
    """Write down that this process serves ``api`` with these worker processes.

    What is left of it after a crash names a process that is gone, and workers that may be there.
    """
    own, record = os.getpid(), _record()
    content = {
        "api": api,
        "pid": own,
        "birth": process.birth(own),
        "workers": {pid: process.birth(pid) for pid in workers},
    }
    new = record.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(record)


def left_over() -> list[int]:
    """The workers of the last ``dflash-ops serve`` that are still there."""
    try:
        workers = json.loads(_record().read_text(encoding="utf-8"))["workers"]
        alive = {pid: birth for pid, birth in workers.items() if birth is not None and process.birth(int(pid)) == birth}
        return list(map(int, alive))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def forget_serving() -> None:
    """Take the record of :func:`record_serving` away."""
    _record().unlink(missing_ok=True)


def _record() -> Path:
    return state_dir() / "serve.json"
