"""What Prefect forgets and when, so that weeks of runs stay small.

Nothing that counts is lost with a run, an event or a log line: numbers are in reports, what was evaluated is in the
ledger, what was allowed is in the audit log.
"""

import json
from dataclasses import dataclass

from dflash.errors import UsageError

DAY = 86_400
HOUR = 3_600
PASSING = ("flow-run.heartbeat", "task-run.Pending", "task-run.Running", "task-run.Completed")
"""Events that nobody asks for after a while."""


@dataclass(frozen=True)
class Retention:
    """For how many days ended runs, with their logs and artifacts, and events are kept."""

    runs: float = 30.0
    events: float = 3.0

    def __post_init__(self) -> None:
        for name, days in vars(self).items():
            if days * DAY <= HOUR:
                raise UsageError(f"--keep-{name} {days:g} days is too short: Prefect keeps at least an hour")


def settings(keep: Retention, *, every: float = HOUR) -> dict[str, str]:
    """The environment in which a Prefect server looks every ``every`` seconds for what is older, and deletes it.

    Heartbeats, and what steps tell, are kept for an hour: the former say only whether a run is alive, the latter stand
    in the server's table of steps by then.
    """
    passing = {f"prefect.{what}": HOUR for what in PASSING}
    vacuum = "PREFECT_SERVER_SERVICES_DB_VACUUM"
    return {
        f"{vacuum}_ENABLED": "events,flow_runs",
        f"{vacuum}_LOOP_SECONDS": f"{every:g}",
        f"{vacuum}_RETENTION_PERIOD": f"{round(keep.runs * DAY)}",
        f"{vacuum}_EVENT_RETENTION_OVERRIDES": json.dumps(passing),
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": f"PT{round(keep.events * DAY)}S",
    }
