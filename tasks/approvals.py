"""What the operator approved: requests, certificates and their use, in files of this machine.

The files are a queue, not an authority: an approval counts only while its certificates, signed by the operator's CA,
say the same, and the host's own sshd checks those again. Everything fails closed: what is missing, corrupt or
unwritable approves nothing and raises ``Refused``.
"""

import getpass
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks import certificates, countersigning, signing
from tasks.actions import Action, Change, ReadGrant, escape, is_text
from tasks.audit import CLOCK_TOLERANCE, Audit, show_time
from tasks.certificates import Certificate, CertificateError, Terms
from tasks.errors import Refused
from tasks.inventory import Host, Inventory
from tasks.plans import Plan
from tasks.quantities import show_duration
from tasks.requests import Decision, Origin, Request, RequestFiles, revocation
from tasks.signing import SigningKey
from tasks.spending import Spending
from tasks.state import state_dir

GRANT_SECONDS = 3600
CHANGE_SECONDS = 600
"""Validity when the operator names none: of a plan that only reads, and of one that changes something."""
LONGEST_GRANT_SECONDS = 24 * 3600
"""Longest validity of an approval that is not standing."""
LONGEST_CHANGE_SECONDS = 3600
BREAK_GLASS_SECONDS = 300
CLOCK_SKEW_SECONDS = 60
"""A certificate begins this long before the decision, for a host whose clock is a little behind."""


@dataclass(frozen=True)
class Approval:
    """Of one action: a certificate in force and the key it is for."""

    id: str
    action: Action
    """What was approved: its canonical form goes to the gate. A grant may be wider than what was asked."""
    standing: bool
    serial: int
    not_after: int
    """Seconds since the epoch."""
    key_path: Path
    certificate_path: Path
    second_person: str | None = None
    second_signature: Path | None = None
    """Armoured signature of the second person, where two are asked for."""

    @property
    def host(self) -> str:
        return self.action.host

    @property
    def digest(self) -> str:
        return self.action.digest()

    @property
    def grant(self) -> ReadGrant:
        """The action, which must be a read grant."""
        assert isinstance(self.action, ReadGrant)
        return self.action


@dataclass(frozen=True)
class Approved:
    """Of a plan: one approval for each of its actions, in their order, all of one request."""

    id: str
    not_after: int
    """Seconds since the epoch."""
    approvals: tuple[Approval, ...]

    @property
    def read(self) -> Approval:
        """The approval of the plan's read grant, which must be there."""
        (found,) = [approval for approval in self.approvals if isinstance(approval.action, ReadGrant)]
        return found

    def of(self, action: Action) -> Approval:
        """The approval of one action of the plan."""
        for approval in self.approvals:
            if approval.digest == action.digest():
                return approval
        assert isinstance(action, ReadGrant)
        assert self.read.grant.covers(action)
        return self.read


def default_seconds(plan: Plan) -> int:
    """How long an approval of ``plan`` is valid when the operator does not say."""
    if _is_emergency(plan):
        return BREAK_GLASS_SECONDS
    return CHANGE_SECONDS if plan.changes else GRANT_SECONDS


class ApprovalStore:
    """Requests, throw-away keys and certificates under one folder; safe for several processes at once."""

    def __init__(self, inventory: Inventory, audit: Audit, folder: Path | None = None) -> None:
        self.folder = folder or state_dir() / "guard"
        self._inventory = inventory
        self._audit = audit
        self._files = RequestFiles(self.folder)
        self._spending = Spending(self.folder, audit)

    def require(self, plan: Plan, origin: Origin | None = None) -> Approved:
        """The approval for ``plan``; without one ``Refused``, naming the request and the command that approves it.

        ``origin`` is as for :meth:`request`.
        """
        approved = self.find(plan)
        if approved is not None:
            return approved
        waiting = self._waiting_for_second(plan)
        request = waiting or self.request(plan, origin=origin)
        self._audit.append("refusal", request=request.id, host=plan.host, digest=request.digest)
        if waiting is not None:
            names = " or ".join(self._inventory.guard.second_persons)
            raise Refused(
                f"{plan.host} is protected and only one person approved this: {escape(plan.effect)}; nothing was done "
                f"there. {names} may sign request {request.id}: dflash-ops guard countersign {request.id}",
                request_id=request.id,
            )
        raise Refused(
            f"{plan.host} is protected and this is not approved: {escape(plan.effect)}; nothing was done there. "
            f"Request {request.id} waits; to approve it: dflash-ops guard approve {request.id}",
            request_id=request.id,
        )

    def find(self, plan: Plan) -> Approved | None:
        """An unexpired approval of exactly ``plan``, else one that covers it, else None.

        Changes must be approved exactly, be unspent and stand in the same order; a read grant may be covered by a
        wider one; all of one request.
        """
        self._check_host(plan)
        self._audit.check_clock()
        digest = plan.digest()
        found = [
            (request.digest == digest, approved.not_after, approved)
            for request in self._approved()
            if (places := _matching(request.plan, plan)) is not None
            and (approved := self._in_force(request, places)) is not None
        ]
        return max(found, key=lambda one: one[:2])[2] if found else None

    def request(self, plan: Plan, *, standing: bool = False, origin: Origin | None = None) -> Request:
        """The pending request for ``plan``: the one there is, else a new one with throw-away keys of its own.

        ``origin`` is the Prefect run that asks; it is kept with a request that has none yet.
        """
        self._check_host(plan)
        if standing and plan.changes:
            raise Refused("a standing approval is for reading only; ask for each change when it is due")
        if _is_emergency(plan) and len(plan.actions) > 1:
            raise Refused("an emergency command stands alone; ask for the rest in a plan of its own")
        digest = plan.digest()
        with self._files.locked():
            for waiting in self._files.read_all():
                if (waiting.status, waiting.digest, waiting.standing) == ("pending", digest, standing):
                    if origin is not None and waiting.origin is None:
                        waiting = waiting.model_copy(update={"origin": origin})
                        self._files.write(waiting)
                    return waiting
            request = Request(
                id=self._files.new_id(), created=time.time(), standing=standing, plan=plan, digest=digest, origin=origin
            )
            self._files.make_keys(request)
            self._audit.append("request", request=request.id, host=plan.host, digest=digest, standing=standing)
            self._files.write(request)
            return request

    def requests(self) -> list[Request]:
        """Every request, the oldest first, with the outcome of those that were used."""
        return [self._with_outcome(request) for request in self._files.read_all()]

    def get(self, request_id: str) -> Request:
        """One request by its id; raises ``Refused`` when there is none."""
        for request in self._files.read_all():
            if request.id == request_id:
                return self._with_outcome(request)
        raise Refused(f"no request {escape(request_id)!r}; 'dflash-ops guard requests' lists those that wait")

    def approve(
        self,
        request_id: str,
        *,
        reason: str,
        ca_key: Path | None = None,
        agent: bool = False,
        seconds: int | None = None,
        operator: str | None = None,
        shown: Request | None = None,
    ) -> Approved:
        """Sign the request's keys for ``seconds`` from now, with ``ca_key`` or the ``agent`` that holds the CA key.

        ssh-keygen may ask for the passphrase at the terminal. ``seconds`` is by default that of
        :func:`default_seconds`. ``shown`` is the request as the operator read it: one whose file was changed meanwhile
        is refused.

        The decision enters the audit chain first and its head is signed into the certificates, so that the log cannot
        lose the decision later. Raises ``Refused`` for a request that is decided, no reason, a host that changed since,
        the wrong CA key or passphrase, and a validity that is too long.
        """
        request = self._undecided(request_id, reason)
        if shown is not None and request != shown:
            raise Refused(f"request {request.id} was changed while it was shown; look at it again")
        seconds = default_seconds(request.plan) if seconds is None else seconds
        _check_validity(request, seconds)
        host = self._check_host(request.plan)
        key = signing.signing_key(self._inventory.guard, host, ca_key, agent=agent)
        decision = _decision(request, reason, operator, approved=True)
        if _is_emergency(request.plan):
            self._audit.append(
                "BREAK-GLASS",
                request=request.id,
                host=host.name,
                digest=request.digest,
                operator=decision.operator,
                reason=reason,
            )
        head = self._record_decision(request, decision, seconds=seconds)
        return self._sign(request, decision, head, seconds, key, host)

    def break_glass(
        self,
        plan: Plan,
        *,
        reason: str,
        ca_key: Path | None = None,
        agent: bool = False,
        operator: str | None = None,
    ) -> Approved:
        """Ask for an emergency command and approve it at once, for five minutes, by one person, loud in the audit log.

        Raises ``Refused`` as :meth:`approve` does, and for a plan that is anything but one such command.
        """
        _check_reason(reason)
        if not _is_emergency(plan):
            raise Refused("only a command that is marked as an emergency can be approved as one")
        request = self.request(plan)
        return self.approve(request.id, reason=reason, ca_key=ca_key, agent=agent, operator=operator, shown=request)

    def deny(self, request_id: str, *, reason: str, operator: str | None = None) -> None:
        """Answer no; the throw-away keys are deleted."""
        request = self._undecided(request_id, reason)
        decision = _decision(request, reason, operator, approved=False)
        self._record_decision(request, decision)
        with self._files.locked():
            self._check_still_undecided(request)
            self._files.write(request.model_copy(update={"decision": decision}))
            self._files.delete_keys(request)

    def countersign(self, request_id: str, *, name: str, key: Path) -> None:
        """Sign every action of the request as the second person ``name``, whose private key is in ``key``.

        ssh-keygen may ask for a passphrase or a touch. Raises ``Refused`` for a name that ``hosts.yaml`` does not know,
        a key that is not that person's, and a request that is denied, ended or signed already.
        """
        self._audit.check_clock()
        request = self.get(request_id)
        self._check_host(request.plan)
        if request.status not in ("pending", "approved") or request.second is not None:
            state = request.status if request.second is None else f"signed by {request.second}"
            raise Refused(f"request {request.id} is {state} already; run the command again to make a new request")
        person = countersigning.person(self._inventory.guard, name, key)
        with self._files.usable(), tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            signatures = countersigning.sign(request, person, key, Path(scratch))
            with self._files.locked():
                if self.get(request.id) != request:
                    raise Refused(f"request {request.id} was changed while it was signed; look at it again")
                self._audit.append("countersignature", request=request.id, digest=request.digest, person=name)
                for index, signature in enumerate(signatures):
                    signature.rename(self._files.signature(request.id, index))
                self._files.write(request.model_copy(update={"second": name}))

    def standing(self) -> list[Approval]:
        """The standing approvals in force: each is a live credential on this machine."""
        live = [request for request in self._approved() if request.standing]
        found = [self._in_force(request, range(len(request.plan.actions))) for request in live]
        return [approved.read for approved in found if approved is not None]

    def drop(self, request_id: str) -> None:
        """End a standing approval: its key is deleted from this machine at once."""
        if request_id not in [approval.id for approval in self.standing()]:
            raise Refused(f"no standing approval {escape(request_id)!r}; 'dflash-ops guard standing' lists them")
        self._end(request_id, "drop", "dropped by the operator")

    def retire(self, request_id: str, why: str) -> None:
        """End an approval that the host no longer honours (budget empty, revoked), so that the next use asks anew."""
        self._end(request_id, "retire", why)

    def revoke(self, request_id: str, *, reason: str) -> Request:
        """End an approval on this machine: its keys are deleted at once. :meth:`revocation` is for the host.

        Raises ``Refused`` without a reason and for a request that is not approved.
        """
        _check_reason(reason)
        request = self.get(request_id)
        if request.decision is None or not request.decision.approved:
            raise Refused(f"request {request.id} is {request.status}, so there is nothing to revoke; deny it instead")
        return self._end(request_id, "revoke", f"revoked: {reason}")

    def revocation(self, request: Request) -> Plan:
        """The plan that makes the host refuse every certificate of ``request``, see :func:`requests.revocation`."""
        return revocation(request)

    def consume(self, approval: Approval) -> None:
        """Record the use of ``approval``, before its effect. A change is spent by it; a crash leaves it spent.

        Whether it is in force is looked at again. Where only this program enforces grants, a session is debited.
        Raises ``Refused`` when it is spent or no longer in force; nothing may be done then.
        """
        self._audit.check_clock()
        with self._files.locked():
            self._check_in_force(approval)
            if isinstance(approval.action, Change):
                self._spending.spend(approval.serial, request=approval.id, digest=approval.digest)
            elif self._enforced_here(approval):
                self._spending.open_session(approval.serial, approval.grant)
            self._audit.append(
                "consumption",
                request=approval.id,
                host=approval.host,
                digest=approval.digest,
                serial=approval.serial,
            )

    def debit(self, approval: Approval, count: int) -> None:
        """Where only this program enforces grants: debit ``count`` bytes before they are asked for.

        Raises ``Refused`` when fewer are left or the approval is no longer in force.
        """
        if self._enforced_here(approval):
            with self._files.locked():
                self._check_in_force(approval)
                self._spending.debit(approval.serial, approval.grant, count)

    def heads(self) -> list[str]:
        """The audit heads signed into all approvals there ever were; raises ``Refused`` when a certificate is gone."""
        return [
            self._certificate(request, index).terms.head
            for request in self._files.read_all()
            if request.decision is not None and request.decision.approved
            for index in range(len(request.plan.actions))
        ]

    # --- deciding

    def _undecided(self, request_id: str, reason: str) -> Request:
        _check_reason(reason)
        self._audit.check_clock()
        request = self.get(request_id)
        self._check_still_undecided(request)
        return request

    def _check_still_undecided(self, request: Request) -> None:
        status = self.get(request.id).status
        if status != "pending":
            raise Refused(f"request {request.id} is {status} already; run the command again to make a new request")

    def _record_decision(self, request: Request, decision: Decision, **more: int) -> str:
        return self._audit.append(
            "decision",
            request=request.id,
            host=request.plan.host,
            digest=request.digest,
            approved=decision.approved,
            operator=decision.operator,
            reason=decision.reason,
            serials=decision.serials,
            **more,
        )

    def _sign(
        self, request: Request, decision: Decision, head: str, seconds: int, key: SigningKey, host: Host
    ) -> Approved:
        """Have every key of the request signed, and only when all are, approve it."""
        try:
            with self._files.usable(), tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                # not under the lock: the operator may take a while to type the passphrase
                with signing.ready_for(key, len(request.plan.actions)) as ready:
                    signed = self._signed(request, decision, head, seconds, ready, host, Path(scratch))
                if decision.time + seconds <= time.time():
                    raise Refused("signing took longer than the approval was to be valid; approve it again")
                with self._files.locked():
                    self._check_still_undecided(request)
                    for index, certificate in enumerate(signed):
                        certificate.chmod(0o600)
                        certificate.rename(self._files.certificate(request.id, index))
                    # read again: a second person may have signed meanwhile
                    self._files.write(self.get(request.id).model_copy(update={"decision": decision}))
        except (Refused, KeyboardInterrupt) as error:
            message = str(error) or "interrupted"
            self._audit.append("unsigned", request=request.id, host=host.name, message=message)
            raise
        request = self.get(request.id)
        return self._approval(request, range(len(request.plan.actions)))

    def _signed(
        self,
        request: Request,
        decision: Decision,
        head: str,
        seconds: int,
        key: SigningKey,
        host: Host,
        scratch: Path,
    ) -> list[Path]:
        signed = []
        for index, action in enumerate(request.plan.actions):
            terms = Terms(
                request_id=request.id,
                head=head,
                digest=action.digest(),
                serial=decision.serials[index],
                source_addresses=host.source_addresses,
                not_before=int(decision.time) - CLOCK_SKEW_SECONDS,
                not_after=int(decision.time) + seconds,
                enforcement="authorized-keys" if host.enforcement == "authorized-keys" else "host",
            )
            public = Path(shutil.copy(self._files.key(request.id, index).with_suffix(".pub"), scratch))
            certificate = signing.sign(public, terms, key)
            if certificates.read(certificate, self._inventory.guard.ca_public_key).terms != terms:
                raise Refused("ssh-keygen signed something else than it was asked to; nothing was approved")
            signed.append(certificate)
        return signed

    def _end(self, request_id: str, event: str, why: str) -> Request:
        with self._files.locked():
            request = self.get(request_id)
            self._files.delete_keys(request)
            self._audit.append(event, request=request_id, host=request.plan.host, digest=request.digest, message=why)
            ended = request.model_copy(update={"ended": why})
            self._files.write(ended)
            return ended

    # --- believing

    def _check_host(self, plan: Plan) -> Host:
        host = self._inventory.host(plan.host)
        if host.name != plan.host or host.fingerprints != plan.host_keys:
            raise Refused(f"hosts.yaml now pins other keys for {host.name} than the plan names; run the command again")
        return host

    def _approved(self) -> list[Request]:
        return [
            request
            for request in self._files.read_all()
            if request.decision is not None and request.decision.approved and request.ended is None
        ]

    def _in_force(self, request: Request, places: Sequence[int], *, alone: bool = False) -> Approved | None:
        """The approval of the actions at ``places``; None when it is spent, over, or a certificate is not what it says.

        ``alone`` leaves out whether a second person signed.
        """
        approved = self._believed(request, places)
        if approved is None or any(
            isinstance(approval.action, Change) and self._spending.is_spent(approval.serial)
            for approval in approved.approvals
        ):
            return None
        return approved if alone or self._has_second(approved) else None

    def _believed(self, request: Request, places: Sequence[int]) -> Approved | None:
        """As :meth:`_in_force`, spent or not and by however many persons."""
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
            approved = self._approval(request, places)
        except CertificateError:
            return None
        whole = all(approval.key_path.is_file() for approval in approved.approvals)
        return approved if whole and approved.not_after > now else None

    def _approval(self, request: Request, places: Sequence[int]) -> Approved:
        host = self._inventory.host(request.plan.host)
        form = "authorized-keys" if host.enforcement == "authorized-keys" else "host"
        approvals = []
        for index in places:
            certificate = self._certificate(request, index)
            if (certificate.terms.source_addresses, certificate.terms.enforcement) != (host.source_addresses, form):
                raise CertificateError(f"hosts.yaml changed what {host.name} takes since {request.id}; ask again")
            signature = self._files.signature(request.id, index)
            signed = request.second is not None and signature.is_file()
            approvals.append(
                Approval(
                    id=request.id,
                    action=request.plan.actions[index],
                    standing=request.standing,
                    serial=certificate.terms.serial,
                    not_after=certificate.not_after,
                    key_path=self._files.key(request.id, index),
                    certificate_path=self._files.certificate(request.id, index),
                    second_person=request.second if signed else None,
                    second_signature=signature if signed else None,
                )
            )
        return Approved(request.id, min(approval.not_after for approval in approvals), tuple(approvals))

    def _certificate(self, request: Request, index: int) -> Certificate:
        path = self._files.certificate(request.id, index)
        certificate = certificates.read(path, self._inventory.guard.ca_public_key)
        assert request.decision is not None
        serials = request.decision.serials
        expected = (request.id, request.plan.actions[index].digest(), serials[index] if index < len(serials) else None)
        if (certificate.terms.request_id, certificate.terms.digest, certificate.terms.serial) != expected:
            raise CertificateError(f"certificate {path} is for something else than request {request.id}; ask again")
        return certificate

    def _check_in_force(self, approval: Approval) -> None:
        """Raise ``Refused`` unless ``approval`` is what the store would give for its action now."""
        request = self.get(approval.id)
        self._check_host(request.plan)
        digests = [action.digest() for action in request.plan.actions]
        if request.ended is not None or request.decision is None or not request.decision.approved:
            why = request.ended or request.status
            raise Refused(f"approval {approval.id} counts no longer ({escape(why)}); run the command again to ask anew")
        found = None
        if approval.digest in digests:
            found = self._believed(request, [digests.index(approval.digest)])
        if found is None or found.approvals[0].serial != approval.serial or not self._has_second(found):
            raise Refused(f"approval {approval.id} is no longer in force; run the command again to ask anew")

    def _with_outcome(self, request: Request) -> Request:
        with self._files.usable():
            outcomes = [self._spending.outcome(serial) for serial in request.changes.values()]
        spent = [outcome for outcome in outcomes if outcome is not None]
        return request.model_copy(update={"outcome": spent[-1]}) if spent else request

    def _enforced_here(self, approval: Approval) -> bool:
        return self._inventory.host(approval.host).enforcement == "client"

    # --- two persons

    def _has_second(self, approved: Approved) -> bool:
        """Whether a second person signed every action that needs it, or none is needed."""
        guard = self._inventory.guard
        return not guard.two_person or all(
            countersigning.is_exempt(approval.action)
            or countersigning.verify(
                guard, approved.id, approval.action, approval.second_person, approval.second_signature
            )
            for approval in approved.approvals
        )

    def _waiting_for_second(self, plan: Plan) -> Request | None:
        """The request for ``plan`` that the operator approved and nobody else signed yet."""
        if not self._inventory.guard.two_person:
            return None
        for request in reversed(self._approved()):
            places = _matching(request.plan, plan)
            if places is not None and self._in_force(request, places, alone=True) is not None:
                return request
        return None


def _matching(outer: Plan, inner: Plan) -> list[int] | None:
    """Indices in ``outer.actions`` of what approves the actions of ``inner``, in their order; None when something does
    not."""
    places: list[int] = []
    if inner.grant is not None:
        if outer.grant is None or not outer.grant.covers(inner.grant):
            return None
        places.append(0)
    digests = [action.digest() for action in outer.actions]
    for change in inner.changes:
        try:
            places.append(digests.index(change.digest(), places[-1] + 1 if places else 0))
        except ValueError:
            return None
    return places


def _is_emergency(plan: Plan) -> bool:
    return any(countersigning.is_exempt(action) for action in plan.changes)


def _decision(request: Request, reason: str, operator: str | None, *, approved: bool) -> Decision:
    serials = tuple(secrets.randbelow(2**63 - 1) + 1 for _ in request.plan.actions) if approved else ()
    return Decision(
        approved=approved, operator=operator or getpass.getuser(), reason=reason, time=time.time(), serials=serials
    )


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise Refused("a decision needs a reason; give one with --reason")
    if not is_text(reason):
        raise Refused(f"the reason '{escape(reason)}' is not UTF-8 text; write it again")


def _check_validity(request: Request, seconds: int) -> None:
    if seconds < 1:
        raise Refused("an approval is valid for at least a second; give one with --valid")
    if _is_emergency(request.plan) and seconds > BREAK_GLASS_SECONDS:
        raise Refused(f"an emergency command is approved for {show_duration(BREAK_GLASS_SECONDS)} at most")
    if request.plan.changes and seconds > LONGEST_CHANGE_SECONDS:
        raise Refused(
            f"{show_duration(seconds)} is too long for a change (at most {show_duration(LONGEST_CHANGE_SECONDS)}); "
            "approve it when it is due"
        )
    if seconds > LONGEST_GRANT_SECONDS and not request.standing:
        raise Refused(
            f"{show_duration(seconds)} is too long for one request (at most {show_duration(LONGEST_GRANT_SECONDS)}); "
            "for more, ask for a standing approval: dflash-ops guard standing request"
        )
