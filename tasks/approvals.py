"""What the operator approved: requests, certificates and their use, in files of this machine.

The files are a queue, not an authority: an approval counts only while its certificates, signed by the operator's CA,
say the same, and the host's own sshd checks those again. Everything fails closed: what is missing, corrupt or
unwritable approves nothing and raises ``Refused``.
"""

import shutil
import tempfile
import time
from pathlib import Path

from dflash.errors import DFlashError
from tasks import countersigning, signing
from tasks.actions import Change, escape
from tasks.audit import Audit
from tasks.certificates import CertificateError
from tasks.credentials import Approval, Approved, Credentials, matching
from tasks.deciding import certify, check_reason, check_validity, decide, default_seconds, is_emergency
from tasks.errors import Refused
from tasks.inventory import Host, Inventory
from tasks.plans import Plan
from tasks.requests import Decision, Origin, Request, RequestFiles, revocation
from tasks.signing import SigningKey
from tasks.spending import Spending
from tasks.state import state_dir

__all__ = ["Approval", "ApprovalStore", "Approved", "default_seconds"]


class ApprovalStore:
    """Requests, throw-away keys and certificates under one folder; safe for several processes at once."""

    def __init__(self, inventory: Inventory, audit: Audit, folder: Path | None = None) -> None:
        self.folder = folder or state_dir() / "guard"
        self._inventory = inventory
        self._audit = audit
        self._files = RequestFiles(self.folder)
        self._spending = Spending(self.folder, audit)
        self._credentials = Credentials(inventory, audit, self._files, self._spending)

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
                f"there. {names} may sign request {request.id}: {countersigning.command(request.id)}",
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
            if (places := matching(request.plan, plan)) is not None
            and (approved := self._credentials.in_force(request, places)) is not None
        ]
        return max(found, key=lambda one: one[:2])[2] if found else None

    def request(self, plan: Plan, *, standing: bool = False, origin: Origin | None = None) -> Request:
        """The pending request for ``plan``: the one there is, else a new one with throw-away keys of its own.

        ``origin`` is who asks; it is kept with a request that no Prefect run has asked for yet.
        """
        self._check_host(plan)
        if standing and plan.changes:
            raise Refused("a standing approval is for reading only; ask for each change when it is due")
        if is_emergency(plan) and len(plan.actions) > 1:
            raise Refused("an emergency command stands alone; ask for the rest in a plan of its own")
        digest = plan.digest()
        with self._files.locked():
            for waiting in self._files.read_all():
                # the effect is not in the digest, but it is what the operator reads
                if (waiting.status, waiting.plan, waiting.standing) == ("pending", plan, standing):
                    # a deployment can start again by itself, so it stands before a command
                    if origin is not None and (waiting.origin is None or waiting.origin.deployment is None):
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
        return self._with_outcomes(self._files.read_all())

    def get(self, request_id: str) -> Request:
        """One request by its id, with its outcome; raises ``Refused`` when there is none."""
        return self._with_outcomes([self._get(request_id)])[0]

    def _get(self, request_id: str) -> Request:
        request = self._files.read(request_id)
        if request is not None:
            return request
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
        check_validity(request, seconds)
        host = self._check_host(request.plan)
        key = signing.signing_key(self._inventory.guard, host, ca_key, agent=agent)
        decision = decide(request, reason, operator, approved=True)
        if is_emergency(request.plan):
            self._audit.append(
                "BREAK-GLASS",
                request=request.id,
                host=host.name,
                digest=request.digest,
                operator=decision.operator,
                reason=reason,
            )
        head = self._record(request, decision, seconds=seconds)
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
        check_reason(reason)
        if not is_emergency(plan):
            raise Refused("only a command that is marked as an emergency can be approved as one")
        request = self.request(plan)
        return self.approve(request.id, reason=reason, ca_key=ca_key, agent=agent, operator=operator, shown=request)

    def deny(self, request_id: str, *, reason: str, operator: str | None = None) -> None:
        """Answer no; the throw-away keys are deleted."""
        request = self._undecided(request_id, reason)
        decision = decide(request, reason, operator, approved=False)
        with self._files.locked():
            self._check_still_undecided(request)
            self._record(request, decision)
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
        """The standing approvals in force: each is a live credential on this machine.

        So is one whose host has changed in hosts.yaml since, or is gone from it: the host itself may still honour it.
        """
        found = [self._credentials.live(request) for request in self._approved() if request.standing]
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
        check_reason(reason)
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
            self._check(approval)
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
                self._check(approval)
                self._spending.debit(approval.serial, approval.grant, count)

    def heads(self, problems: list[str] | None = None) -> list[str]:
        """The audit heads signed into all approvals there ever were.

        Raises ``Refused`` when a certificate is gone or not this CA's; with ``problems`` that is added to them.
        """
        heads = []
        for request in self._files.read_all():
            if request.decision is None or not request.decision.approved:
                continue
            for index in range(len(request.plan.actions)):
                try:
                    heads.append(self._credentials.certificate(request, index).terms.head)
                except CertificateError as error:
                    if problems is None:
                        raise
                    problems.append(str(error))
        return heads

    # --- deciding

    def _undecided(self, request_id: str, reason: str) -> Request:
        check_reason(reason)
        self._audit.check_clock()
        request = self._get(request_id)
        self._check_still_undecided(request)
        return request

    def _check_still_undecided(self, request: Request) -> None:
        status = self._get(request.id).status
        if status != "pending":
            raise Refused(f"request {request.id} is {status} already; run the command again to make a new request")

    def _record(self, request: Request, decision: Decision, **more: int) -> str:
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
                keys = [self._files.key(request.id, index) for index in range(len(request.plan.actions))]
                public = [Path(shutil.copy(key.with_suffix(".pub"), scratch)) for key in keys]
                # not under the lock: the operator may take a while to type the passphrase
                signed = list(certify(request, decision, head, seconds, key, host, public))
                with self._files.locked():
                    self._check_still_undecided(request)
                    for index, certificate in enumerate(signed):
                        certificate.chmod(0o600)
                        certificate.rename(self._files.certificate(request.id, index))
                    # read again: a second person may have signed meanwhile
                    self._files.write(self._get(request.id).model_copy(update={"decision": decision}))
        except (DFlashError, KeyboardInterrupt) as error:
            message = str(error) or "interrupted"
            self._audit.append("unsigned", request=request.id, host=host.name, message=message)
            raise
        request = self._get(request.id)
        return self._credentials.of(request, range(len(request.plan.actions)))

    def _end(self, request_id: str, event: str, why: str) -> Request:
        with self._files.locked():
            request = self._get(request_id)
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

    def _with_outcomes(self, requests: list[Request]) -> list[Request]:
        if not any(request.changes for request in requests):
            return requests
        with self._files.usable():
            outcomes = self._spending.outcomes()
        spent = [[outcomes[serial] for serial in request.changes if serial in outcomes] for request in requests]
        return [
            request.model_copy(update={"outcome": of_it[-1]}) if of_it else request
            for request, of_it in zip(requests, spent, strict=True)
        ]

    def _check(self, approval: Approval) -> None:
        """Raise ``Refused`` unless ``approval`` is what the store would give for its action now, spent or not."""
        request = self._get(approval.id)
        self._check_host(request.plan)
        self._credentials.check(request, approval)

    def _enforced_here(self, approval: Approval) -> bool:
        return self._inventory.host(approval.host).enforcement == "client"

    def _waiting_for_second(self, plan: Plan) -> Request | None:
        """The request for ``plan`` that the operator approved and nobody else signed yet."""
        if not self._inventory.guard.two_person:
            return None
        for request in reversed(self._approved()):
            if request.second is not None:
                continue
            places = matching(request.plan, plan)
            if places is not None and self._credentials.in_force(request, places, alone=True) is not None:
                return request
        return None
