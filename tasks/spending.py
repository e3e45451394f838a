"""Which approvals were used: spent serials and, where no host keeps them, the budgets of read grants.

A change is spent once: by a file that only one can create, synced before anything happens. The audit log is asked as
well, so that a removed file gives nothing back.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.actions import LARGEST, ReadGrant
from tasks.audit import Audit
from tasks.errors import Refused
from tasks.requests import sync_folder, write_whole

UNKNOWN = "unknown"
"""Outcome of a change that was begun and of which nothing says how it ended."""


class _Budget(BaseModel):
    """What is left of a read grant."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sessions: Annotated[int, Field(ge=0, le=LARGEST)]
    bytes: Annotated[int, Field(ge=0, le=LARGEST)]


class Spending:
    """The records under ``folder``; every call is under the store's lock."""

    def __init__(self, folder: Path, audit: Audit) -> None:
        self._spent = folder / "spent"
        self._budgets = folder / "budgets"
        self._audit = audit

    def is_spent(self, serial: int) -> bool:
        """Whether the change with this certificate was begun."""
        return os.path.lexists(self._spent / str(serial)) or any(self._used(serial))

    def spend(self, serial: int, **record: Any) -> None:
        """Spend a change, durably; raises ``Refused`` when it is spent already."""
        self._make(self._spent)
        try:
            if any(self._used(serial)):
                raise FileExistsError
            descriptor = os.open(self._spent / str(serial), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise Refused(
                f"the approval with serial {serial} was used already, and one approval is for one use; nothing was "
                "done: run the command again to ask anew"
            ) from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(record).encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._spent)

    def outcomes(self) -> dict[int, str]:
        """Serial → how the use of it ended, :data:`UNKNOWN` when nothing says, for every certificate that was used."""
        found: dict[int, str] = {}
        for entry in self._audit.uses():
            ended = entry["event"] == "end"
            found[entry["serial"]] = str(entry.get("outcome", UNKNOWN)) if ended else UNKNOWN
        if self._spent.is_dir():
            for serial in map(int, filter(str.isdecimal, os.listdir(self._spent))):
                found.setdefault(serial, UNKNOWN)
        return found

    def open_session(self, serial: int, grant: ReadGrant) -> None:
        """Debit one session of a grant; raises ``Refused`` when none is left."""
        left = self._left(serial, grant, begun=any(self._used(serial)))
        if left.sessions < 1:
            raise Refused(f"all {grant.sessions} sessions of the approval are used; run the command again to ask anew")
        self._keep(serial, _Budget(sessions=left.sessions - 1, bytes=left.bytes))

    def debit(self, serial: int, grant: ReadGrant, count: int) -> None:
        """Debit ``count`` bytes of a grant, before they are asked for; raises ``Refused`` when fewer are left."""
        if count < 0:
            raise Refused(f"{count} bytes cannot be debited")
        left = self._left(serial, grant, begun=True)
        if left.bytes < count:
            raise Refused(
                f"{left.bytes} of {grant.bytes} bytes of the approval are left, {count} are needed; run the command "
                "again to ask anew, for more"
            )
        self._keep(serial, _Budget(sessions=left.sessions, bytes=left.bytes - count))

    def _left(self, serial: int, grant: ReadGrant, *, begun: bool) -> _Budget:
        """What is left; a record that is missing although the grant was used leaves nothing to believe."""
        file = self._budgets / f"{serial}.json"
        try:
            left = _Budget.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            if not begun:
                return _Budget(sessions=grant.sessions, bytes=grant.bytes)
            raise Refused(f"budget {file} is gone, so nothing is left of it; ask for a new approval") from None
        except ValidationError:
            raise Refused(f"budget {file} is corrupt, so nothing is left of it; ask for a new approval") from None
        if left.sessions > grant.sessions or left.bytes > grant.bytes:
            raise Refused(f"budget {file} says more than was approved; ask for a new approval")
        return left

    def _keep(self, serial: int, left: _Budget) -> None:
        self._make(self._budgets)
        write_whole(self._budgets / f"{serial}.json", left.model_dump_json().encode())

    def _used(self, serial: int) -> Iterator[dict[str, Any]]:
        return (entry for entry in self._audit.uses(serial) if entry["event"] == "consumption")

    def _make(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
