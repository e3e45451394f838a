"""Requests and what the operator decided about them, in files of this machine.

The files are a queue, not an authority: an approval counts only while its certificate, signed by the operator's CA,
says the same, and the host's own sshd checks that certificate again. Everything fails closed: what is missing, corrupt
or unwritable approves nothing and raises ``Refused``.
"""

import fcntl
import getpass
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks import certificates, process
from tasks.actions import ReadGrant, escape, is_text
from tasks.audit import CLOCK_TOLERANCE, LATEST, Audit, show_time
from tasks.certificates import Certificate, CertificateError, Terms
from tasks.errors import Refused
from tasks.inventory import Host, Inventory
from tasks.plans import Plan
from tasks.quantities import show_duration
from tasks.state import state_dir

DEFAULT_SECONDS = 3600
LONGEST_SECONDS = 24 * 3600
"""Longest validity of an approval that is not standing."""


Time = Annotated[float, Field(ge=0, le=LATEST, allow_inf_nan=False)]


class Decision(BaseModel):
    """What the operator answered."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    approved: bool
    operator: str
    reason: str
    time: Time


class Request(BaseModel):
    """One plan that waits for a decision, or had one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    created: Time
    standing: bool
    plan: Plan
    digest: str
    decision: Decision | None = None
    ended: str | None = None
    """Why an approval no longer counts."""

    @property
    def status(self) -> Literal["pending", "approved", "denied", "ended"]:
        if self.ended is not None:
            return "ended"
        if self.decision is None:
            return "pending"
        return "approved" if self.decision.approved else "denied"


@dataclass(frozen=True)
class Approval:
    """A certificate in force and the key it is for."""

    id: str
    grant: ReadGrant
    """What was approved: its canonical form goes to the gate. It may be wider than what was asked."""
    standing: bool
    serial: int
    not_after: int
    """Seconds since the epoch."""
    key_path: Path
    certificate_path: Path

    @property
    def host(self) -> str:
        return self.grant.host

    @property
    def digest(self) -> str:
        return self.grant.digest()


class ApprovalStore:
    """Requests, throw-away keys and certificates under one folder; safe for several processes at once."""

    def __init__(self, inventory: Inventory, audit: Audit, folder: Path | None = None) -> None:
        self.folder = folder or state_dir() / "guard"
        self._inventory = inventory
        self._audit = audit

    def require(self, plan: Plan) -> Approval:
        """The approval for ``plan``; without one ``Refused``, naming the request and the command that approves it."""
        approval = self.find(plan)
        if approval is not None:
            return approval
        request = self.request(plan)
        self._audit.append("refusal", request=request.id, host=plan.host, digest=request.digest)
        raise Refused(
            f"{plan.host} is protected and this is not approved: {escape(plan.effect)}; nothing was done there. "
            f"Request {request.id} waits; to approve it: dflash-ops guard approve {request.id}",
            request_id=request.id,
        )

    def find(self, plan: Plan) -> Approval | None:
        """An unexpired approval of exactly ``plan``, else one that covers it, else None."""
        self._check_host(plan)
        self._audit.check_clock()
        digest = plan.digest()
        fitting = [
            request
            for request in self.requests()
            if request.status == "approved" and request.plan.grant.covers(plan.grant)
        ]
        approvals = [approval for request in fitting if (approval := self._in_force(request)) is not None]
        return max(approvals, key=lambda approval: (approval.digest == digest, approval.not_after), default=None)

    def request(self, plan: Plan, *, standing: bool = False) -> Request:
        """The pending request for ``plan``: the one there is, else a new one with a throw-away key of its own."""
        self._check_host(plan)
        digest = plan.digest()
        with self._locked():
            for waiting in self.requests():
                if (waiting.status, waiting.digest, waiting.standing) == ("pending", digest, standing):
                    return waiting
            request = Request(id=self._new_id(), created=time.time(), standing=standing, plan=plan, digest=digest)
            self._make_key(request.id)
            self._audit.append("request", request=request.id, host=plan.host, digest=digest, standing=standing)
            self._write(request)
            return request

    def requests(self) -> list[Request]:
        """Every request, the oldest first."""
        with self._usable():
            files = sorted(self._requests.glob("*.json"))
            return sorted(map(self._read, files), key=lambda request: request.created)

    def get(self, request_id: str) -> Request:
        """One request by its id; raises ``Refused`` when there is none."""
        for request in self.requests():
            if request.id == request_id:
                return request
        raise Refused(f"no request {escape(request_id)!r}; 'dflash-ops guard requests' lists those that wait")

    def approve(
        self,
        request_id: str,
        *,
        reason: str,
        ca_key: Path,
        seconds: int = DEFAULT_SECONDS,
        operator: str | None = None,
        shown: Request | None = None,
    ) -> Approval:
        """Sign the request's key for ``seconds`` from now. ssh-keygen may ask for the passphrase at the terminal.

        ``shown`` is the request as the operator read it: one whose file was changed meanwhile is refused.

        The decision enters the audit chain first and its head is signed into the certificate, so that the log cannot
        lose the decision later. Raises ``Refused`` for a request that is decided, no reason, a host that changed since,
        the wrong CA key or passphrase, and a validity that only a standing approval may have.
        """
        request = self._undecided(request_id, reason)
        if shown is not None and request != shown:
            raise Refused(f"request {request.id} was changed while it was shown; look at it again")
        host = self._check_host(request.plan)
        if seconds > LONGEST_SECONDS and not request.standing:
            raise Refused(
                f"{show_duration(seconds)} is too long for one request (at most {show_duration(LONGEST_SECONDS)}); "
                "for more, ask for a standing approval: dflash-ops guard standing request"
            )
        key = certificates.check_ca_key(ca_key, self._inventory.guard, host)
        decision = Decision(approved=True, operator=operator or getpass.getuser(), reason=reason, time=time.time())
        serial = secrets.randbelow(2**63 - 1) + 1
        head = self._record_decision(request, decision, serial=serial, seconds=seconds)
        terms = Terms(request.id, head, request.digest, serial, host.source_addresses)
        try:
            self._sign(request, decision, terms, seconds, ca_key, encrypted=key.encrypted)
        except (Refused, KeyboardInterrupt) as error:
            message = str(error) or "interrupted"
            self._audit.append("unsigned", request=request.id, host=host.name, serial=serial, message=message)
            raise
        return self._approval(self.get(request.id))

    def deny(self, request_id: str, *, reason: str, operator: str | None = None) -> None:
        """Answer no; the throw-away key is deleted."""
        request = self._undecided(request_id, reason)
        decision = Decision(approved=False, operator=operator or getpass.getuser(), reason=reason, time=time.time())
        self._record_decision(request, decision)
        with self._locked():
            self._check_still_undecided(request)
            self._write(request.model_copy(update={"decision": decision}))
            self._delete_key(request.id)

    def standing(self) -> list[Approval]:
        """The standing approvals in force: each is a live credential on this machine."""
        live = [request for request in self.requests() if request.standing and request.status == "approved"]
        return [approval for request in live if (approval := self._in_force(request)) is not None]

    def drop(self, request_id: str) -> None:
        """End a standing approval: its key is deleted from this machine at once."""
        if request_id not in [approval.id for approval in self.standing()]:
            raise Refused(f"no standing approval {escape(request_id)!r}; 'dflash-ops guard standing' lists them")
        self._end(request_id, "drop", "dropped by the operator")

    def retire(self, request_id: str, why: str) -> None:
        """End an approval that the host no longer honours (budget empty, revoked), so that the next use asks anew."""
        self._end(request_id, "retire", why)

    def heads(self) -> list[str]:
        """The audit heads signed into all approvals there ever were; raises ``Refused`` when a certificate is gone."""
        approved = [request for request in self.requests() if request.decision and request.decision.approved]
        return [self._certificate(request).terms.head for request in approved]

    # --- deciding

    def _undecided(self, request_id: str, reason: str) -> Request:
        if not reason.strip():
            raise Refused("a decision needs a reason; give one with --reason")
        if not is_text(reason):
            raise Refused(f"the reason '{escape(reason)}' is not UTF-8 text; write it again")
        self._audit.check_clock()
        request = self.get(request_id)
        self._check_still_undecided(request)
        return request

    def _check_still_undecided(self, request: Request) -> None:
        status = self.get(request.id).status
        if status != "pending":
            raise Refused(f"request {request.id} is {status} already; run the command again to make a new request")

    def _record_decision(self, request: Request, decision: Decision, **terms: int) -> str:
        return self._audit.append(
            "decision",
            request=request.id,
            host=request.plan.host,
            digest=request.digest,
            approved=decision.approved,
            operator=decision.operator,
            reason=decision.reason,
            **terms,
        )

    def _sign(
        self, request: Request, decision: Decision, terms: Terms, seconds: int, ca_key: Path, *, encrypted: bool
    ) -> None:
        with self._usable(), tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            public = Path(shutil.copy(self._key(request.id).with_suffix(".pub"), scratch))
            # not under the lock: the operator may take a while to type the passphrase
            signed = certificates.sign(public, terms, seconds, ca_key, encrypted=encrypted)
            if certificates.read(signed, self._inventory.guard.ca_public_key).terms != terms:
                raise Refused("ssh-keygen signed something else than it was asked to; nothing was approved")
            with self._locked():
                self._check_still_undecided(request)
                signed.chmod(0o600)
                signed.rename(self._certificate_path(request.id))
                self._write(request.model_copy(update={"decision": decision}))

    def _end(self, request_id: str, event: str, why: str) -> None:
        with self._locked():
            request = self.get(request_id)
            self._delete_key(request_id)
            self._audit.append(event, request=request_id, host=request.plan.host, digest=request.digest, message=why)
            self._write(request.model_copy(update={"ended": why}))

    # --- believing

    def _check_host(self, plan: Plan) -> Host:
        host = self._inventory.host(plan.host)
        if host.name != plan.host or host.fingerprints != plan.grant.host_keys:
            raise Refused(f"hosts.yaml now pins other keys for {host.name} than the plan names; run the command again")
        return host

    def _in_force(self, request: Request) -> Approval | None:
        """The approval behind an approved request, None when it is over or its certificate is not what it says."""
        now = time.time()
        assert request.decision is not None
        if request.decision.time > now + CLOCK_TOLERANCE:
            raise Refused(
                f"request {request.id} was decided at {show_time(request.decision.time)}, and the clock says "
                f"{show_time(now)}; set the clock right, no approval is believed meanwhile"
            )
        if self._audit.last() is None:
            raise Refused(
                f"audit log {self._audit.file} is gone, but {request.id} was approved; restore it, or move "
                f"{self.folder} away and ask again"
            )
        try:
            approval = self._approval(request)
        except CertificateError:
            return None
        return approval if approval.not_after > now and approval.key_path.is_file() else None

    def _approval(self, request: Request) -> Approval:
        certificate = self._certificate(request)
        return Approval(
            id=request.id,
            grant=request.plan.grant,
            standing=request.standing,
            serial=certificate.terms.serial,
            not_after=certificate.not_after,
            key_path=self._key(request.id),
            certificate_path=self._certificate_path(request.id),
        )

    def _certificate(self, request: Request) -> Certificate:
        path = self._certificate_path(request.id)
        certificate = certificates.read(path, self._inventory.guard.ca_public_key)
        if (certificate.terms.request_id, certificate.terms.digest) != (request.id, request.digest):
            raise CertificateError(f"certificate {path} is for something else than request {request.id}; ask again")
        return certificate

    # --- files; writing is under the lock

    @property
    def _requests(self) -> Path:
        return self.folder / "requests"

    def _key(self, request_id: str) -> Path:
        return self.folder / "keys" / request_id

    def _certificate_path(self, request_id: str) -> Path:
        return self.folder / "keys" / f"{request_id}-cert.pub"

    def _new_id(self) -> str:
        while (request_id := secrets.token_hex(4)) and (self._requests / f"{request_id}.json").exists():
            pass
        return request_id

    def _make_key(self, request_id: str) -> None:
        key = self._key(request_id)
        comment = f"dflash request {request_id}"
        try:
            process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(key)])
        except process.ProcessError as error:
            raise Refused(f"no throw-away key could be made: {error}; nothing was requested") from None
        key.with_suffix(".pub").chmod(0o600)

    def _delete_key(self, request_id: str) -> None:
        self._key(request_id).unlink(missing_ok=True)
        self._key(request_id).with_suffix(".pub").unlink(missing_ok=True)

    def _read(self, file: Path) -> Request:
        try:
            request = Request.model_validate_json(file.read_bytes())
        except ValidationError:
            request = None
        if request is None or request.id != file.stem or request.digest != request.plan.digest():
            raise Refused(f"request file {file} is corrupt, so nothing is approved; move it away and ask again")
        return request

    def _write(self, request: Request) -> None:
        partial = self._requests / f".{request.id}.part"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(request.model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._requests / f"{request.id}.json")
        folder = os.open(self._requests, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._usable():
            for folder in (self.folder, self._requests, self.folder / "keys"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o700)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Refused(
                f"guard store {error.filename or self.folder}: {error.strerror}; nothing is approved without it: make "
                f"{self.folder} readable and writable for yourself, or move it away and ask again"
            ) from None
