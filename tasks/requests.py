"""What was asked of the operator and what the answer was: the models, and their files of this machine.

The files are a queue, not an authority: an approval counts only while its certificates say the same.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks import process
from tasks.actions import LARGEST, Revoke, escape
from tasks.audit import LATEST
from tasks.errors import Refused
from tasks.plans import Plan

Time = Annotated[float, Field(ge=0, le=LATEST, allow_inf_nan=False)]
Serial = Annotated[int, Field(ge=1, le=LARGEST)]
ID = "[0-9a-f]{8}"
Status = Literal["pending", "approved", "denied", "ended", "spent"]


class Decision(BaseModel):
    """What the operator answered."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    approved: bool
    operator: str
    reason: str
    time: Time
    serials: tuple[Serial, ...] = ()
    """Of the certificates, in the order of the plan's actions."""


class Origin(BaseModel):
    """Who asked: a command, to be run again once approved, or a Prefect run, whose ``deployment`` is then started."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    command: tuple[str, ...] = ()
    """Arguments of dflash-ops."""
    deployment: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    flow_run: str | None = None


class Request(BaseModel):
    """One plan that waits for a decision, or had one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    created: Time
    standing: bool
    plan: Plan
    digest: str
    origin: Origin | None = None
    decision: Decision | None = None
    second: str | None = None
    """The second person who signed, where two are asked for."""
    ended: str | None = None
    """Why an approval no longer counts."""
    outcome: str | None = Field(default=None, exclude=True)
    """What became of the change that was used last; ``unknown`` when nothing says. Not in the file: read from the
    spent serials and the audit log."""

    @property
    def status(self) -> Status:
        if self.ended is not None:
            return "ended"
        if self.outcome is not None:
            return "spent"
        if self.decision is None:
            return "pending"
        return "approved" if self.decision.approved else "denied"

    @property
    def changes(self) -> tuple[int, ...]:
        """The serials of the changes' certificates; empty before the decision."""
        serials = () if self.decision is None else self.decision.serials
        return serials[len(self.plan.actions) - len(self.plan.changes) :]


def revocation(request: Request) -> Plan:
    """The plan that makes the host refuse every certificate of ``request`` from now on.

    Raises ``Refused`` for a request that has none: it was never approved.
    """
    if request.decision is None or not request.decision.serials:
        raise Refused(f"request {request.id} has no certificate that a host could be told to refuse")
    plan = request.plan
    changes = tuple(Revoke(host=plan.host, host_keys=plan.host_keys, serial=one) for one in request.decision.serials)
    return Plan(changes=changes, effect=f"what was approved as request {request.id} is refused there from now on")


class RequestFiles:
    """Requests, throw-away keys, certificates and second signatures under ``folder``.

    Every ``OSError`` becomes ``Refused``. Writing is under :meth:`locked`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._requests = folder / "requests"
        self._keys = folder / "keys"

    def read_all(self) -> list[Request]:
        """Every request, the oldest first."""
        with self.usable():
            files = sorted(self._requests.glob("*.json"))
            return sorted(map(self._read, files), key=lambda request: request.created)

    def read(self, request_id: str) -> Request | None:
        """One request, None when there is none; others that are corrupt do not matter to it."""
        file = self._requests / f"{request_id}.json"
        with self.usable():
            return self._read(file) if re.fullmatch(ID, request_id) and file.exists() else None

    def write(self, request: Request) -> None:
        """Replace the request's file, durably and as a whole."""
        write_whole(self._requests / f"{request.id}.json", request.model_dump_json().encode())

    def key(self, request_id: str, index: int) -> Path:
        """The throw-away key of one action of the plan."""
        return self._keys / f"{request_id}-{index}"

    def certificate(self, request_id: str, index: int) -> Path:
        return self._keys / f"{request_id}-{index}-cert.pub"

    def signature(self, request_id: str, index: int) -> Path:
        """The second person's signature of one action."""
        return self._keys / f"{request_id}-{index}.sig"

    def new_id(self) -> str:
        while (request_id := secrets.token_hex(4)) and (self._requests / f"{request_id}.json").exists():
            pass
        return request_id

    def make_keys(self, request: Request) -> None:
        """One throw-away key for each action of the plan."""
        for index in range(len(request.plan.actions)):
            key = self.key(request.id, index)
            comment = f"dflash request {request.id}"
            try:
                process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(key)])
            except process.ProcessError as error:
                raise Refused(f"no throw-away key could be made: {error}; nothing was requested") from None
            key.with_suffix(".pub").chmod(0o600)

    def delete_keys(self, request: Request) -> None:
        for index in range(len(request.plan.actions)):
            self.key(request.id, index).unlink(missing_ok=True)
            self.key(request.id, index).with_suffix(".pub").unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes here; the folders exist and are the user's own."""
        with self.usable():
            for folder in (self.folder, self._requests, self._keys):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o700)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Say what an ``OSError`` means here."""
        try:
            yield
        except OSError as error:
            raise Refused(
                f"guard store {escape(str(error.filename or self.folder))}: {error.strerror}; nothing is approved "
                f"without it: make {self.folder} readable and writable for yourself, or move it away and ask again"
            ) from None

    def _read(self, file: Path) -> Request:
        try:
            request = Request.model_validate_json(file.read_bytes())
        except ValidationError:
            request = None
        named = request is not None and re.fullmatch(ID, request.id) and request.id == file.stem
        if request is None or not named or request.digest != request.plan.digest():
            raise Refused(f"request file {file} is corrupt, so nothing is approved; move it away and ask again")
        return request.model_copy(update={"outcome": None})


def write_whole(file: Path, content: bytes) -> None:
    """Write ``content`` so that a crash leaves the old file or the new one, and sync it."""
    partial = file.with_name(f".{file.name}.part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as written:
        written.write(content)
        written.flush()
        os.fsync(written.fileno())
    partial.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make what was created or renamed in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
