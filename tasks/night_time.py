"""When a night's comparison is due, and which night a moment belongs to.

The night is named by the date on which it was due, by the wall clock of one time zone. So a run that comes late, after
midnight or after days without the machine, is the last night's and not one more; and an hour that is skipped or comes
twice at the change to and from summer time makes neither a night too few nor one too many.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dflash.errors import UsageError
from tasks.actions import escape

DEFAULT_CRON = "30 2 * * *"
DEFAULT_ZONE = "UTC"


@dataclass(frozen=True)
class NightTime:
    """The hour of the nightly comparison; made by :meth:`of_cron`."""

    hour: int
    minute: int
    timezone: str

    @classmethod
    def of_cron(cls, cron: str = DEFAULT_CRON, timezone: str = DEFAULT_ZONE) -> Self:
        """Minute and hour of ``cron``, as in ``30 2 * * *``, in ``timezone``, as in Europe/Berlin.

        Raises ``UsageError`` when the schedule names no single time of day, or the zone is not known.
        """
        written = re.fullmatch(r"\s*([0-9]{1,2})\s+([0-9]{1,2})\s+\S+\s+\S+\s+\S+\s*", cron)
        if written is None or int(written[1]) > 59 or int(written[2]) > 23:
            raise UsageError(f"'{escape(cron)}' is not one time of a night; write minute and hour as in '30 2 * * *'")
        try:
            ZoneInfo(timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise UsageError(f"'{escape(timezone)}' is no time zone known here; write it as in Europe/Berlin") from None
        return cls(int(written[2]), int(written[1]), timezone)

    def date(self, now: float) -> str:
        """The date (YYYY-MM-DD) of the last night that was due at ``now``, in seconds since the epoch."""
        wall = datetime.fromtimestamp(now, UTC).astimezone(ZoneInfo(self.timezone))
        due = (wall.hour, wall.minute) >= (self.hour, self.minute)
        return (wall.date() - timedelta(days=0 if due else 1)).isoformat()
