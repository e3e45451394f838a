"""What counts as an approval: certificates that are in force, unspent and for just what was asked."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks import certificates, countersigning
from tasks.actions import Action, Change, ReadGrant, escape
from tasks.audit import CLOCK_TOLERANCE, Audit, show_time
from tasks.certificates import Certificate, CertificateError, form
from tasks.errors import Refused
from tasks.inventory import Inventory
from tasks.plans import Plan
from tasks.requests import Request, RequestFiles
from tasks.spending import Spending


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


def matching(outer: Plan, inner: Plan) -> list[int] | None:
    """Indices in ``outer.actions`` of what approves the actions of ``inner``; None when something does not.

    A grant may be covered by a wider one; changes must be there exactly and in the same order.
    """
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


class Credentials:
    """Looks at what lies under a store's folder, and believes the certificates only."""

    def __init__(self, inventory: Inventory, audit: Audit, files: RequestFiles, spending: Spending) -> None:
        self._inventory, self._audit = inventory, audit
        self._files, self._spending = files, spending

    def in_force(self, request: Request, places: Sequence[int], *, alone: bool = False) -> Approved | None:
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

    def live(self, request: Request) -> Approved | None:
        """All of ``request`` that a host may still honour, whatever hosts.yaml says of that host by now."""
        approved = self._believed(request, range(len(request.plan.actions)), as_signed=True)
        return approved if approved is not None and self._has_second(approved) else None

    def _believed(self, request: Request, places: Sequence[int], *, as_signed: bool = False) -> Approved | None:
        """As :meth:`in_force`, spent or not and by however many persons; ``as_signed`` is for :meth:`of`."""
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
                f"{self._files.folder} away and ask again"
            )
        try:
            approved = self.of(request, places, as_signed=as_signed)
        except CertificateError:
            return None
        whole = all(approval.key_path.is_file() for approval in approved.approvals)
        return approved if whole and approved.not_after > now else None

    def of(self, request: Request, places: Sequence[int], *, as_signed: bool = False) -> Approved:
        """The approval of the actions at ``places``; raises :class:`CertificateError` for a wrong certificate.

        ``as_signed`` takes one that is not as hosts.yaml has its host now.
        """
        two_person = self._inventory.guard.two_person
        approvals = []
        for index in places:
            certificate = self.certificate(request, index)
            if not as_signed:
                self._check_taken(request, certificate)
            signature = self._files.signature(request.id, index)
            action = request.plan.actions[index]
            # a gate that asks for no second person does not expect a signature
            signed = two_person and not countersigning.is_exempt(action) and signature.is_file()
            approvals.append(
                Approval(
                    id=request.id,
                    action=action,
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

    def _check_taken(self, request: Request, certificate: Certificate) -> None:
        host, terms = self._inventory.host(request.plan.host), certificate.terms
        if (terms.source_addresses, terms.enforcement) != (host.source_addresses, form(host)):
            raise CertificateError(f"hosts.yaml changed what {host.name} takes since {request.id}; ask again")

    def certificate(self, request: Request, index: int) -> Certificate:
        """The certificate of one action; raises :class:`CertificateError` unless it is for just that."""
        path = self._files.certificate(request.id, index)
        certificate = certificates.read(path, self._inventory.guard.ca_public_key)
        assert request.decision is not None
        serials = request.decision.serials
        expected = (request.id, request.plan.actions[index].digest(), serials[index] if index < len(serials) else None)
        if (certificate.terms.request_id, certificate.terms.digest, certificate.terms.serial) != expected:
            raise CertificateError(f"certificate {path} is for something else than request {request.id}; ask again")
        return certificate

    def check(self, request: Request, approval: Approval) -> None:
        """Raise ``Refused`` unless ``approval`` is, spent or not, what ``request`` has for its action now."""
        digests = [action.digest() for action in request.plan.actions]
        if request.ended is not None or request.decision is None or not request.decision.approved:
            why = request.ended or request.status
            raise Refused(f"approval {approval.id} counts no longer ({escape(why)}); run the command again to ask anew")
        found = None
        if approval.digest in digests:
            found = self._believed(request, [digests.index(approval.digest)])
        if found is None or found.approvals[0].serial != approval.serial or not self._has_second(found):
            raise Refused(f"approval {approval.id} is no longer in force; run the command again to ask anew")

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
