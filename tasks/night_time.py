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

DEFAULT_AT = "02:30"
DEFAULT_ZONE = "UTC"


@dataclass(frozen=True)
class NightTime:
    """The hour of the nightly comparison; made by :meth:`parse`."""

    hour: int
    minute: int
    timezone: str

    @classmethod
    def parse(cls, at: str = DEFAULT_AT, timezone: str = DEFAULT_ZONE) -> Self:
        """``at`` as in 02:30, ``timezone`` as in Europe/Berlin. Raises ``UsageError``."""
        written = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", at)
        if written is None:
            raise UsageError(f"'{escape(at)}' is not a time of day; write it as in 02:30")
        try:
            ZoneInfo(timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise UsageError(f"'{escape(timezone)}' is no time zone known here; write it as in Europe/Berlin") from None
        return cls(int(written[1]), int(written[2]), timezone)

    @property
    def cron(self) -> str:
        """The schedule, to be read in :attr:`timezone`."""
        return f"{self.minute} {self.hour} * * *"

    def date(self, now: float) -> str:
        """The date (YYYY-MM-DD) of the last night that was due at ``now``, in seconds since the epoch."""
        wall = datetime.fromtimestamp(now, UTC).astimezone(ZoneInfo(self.timezone))
        due = (wall.hour, wall.minute) >= (self.hour, self.minute)
        return (wall.date() - timedelta(days=0 if due else 1)).isoformat()
