"""Where Prefect keeps its state and how it behaves; set before ``prefect`` is imported, for it reads its settings then.

Prefect is the queue, the clock and the screen. Its home lies in the project's state folder, so that nothing of another
Prefect installation is read or changed. With ``PREFECT_API_URL`` set, runs go to that server; without it an embedded
server is started for the run.
"""

import os

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
        "PREFECT_HOME": str(state_dir() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(EMBEDDED_SERVER_START_SECONDS),
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        # Runs keep their log on the server; the terminal shows what the project itself prints.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
