"""``enforcement: client``: what sshd and the gate check and keep on other hosts, checked and kept by this program.

Nothing is installed on such a host, so whoever has its login can go past all of this; :data:`CLIENT_WARNING` says so
at every use. It keeps a mistake from happening, not an attack.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tasks import certificates, countersigning
from tasks.actions import escape
from tasks.approvals import Approval, ApprovalStore
from tasks.certificates import Certificate
from tasks.deciding import BREAK_GLASS_SECONDS, CLOCK_SKEW_SECONDS
from tasks.errors import FileChanged, HostBusy, Refused
from tasks.inventory import Host, Inventory

CLIENT_WARNING = (
    "{host} has 'enforcement: client': only this program checks what was approved there, and whatever can use the "
    "login's key goes past it; 'dflash-ops guard setup {host}' prints what makes the host check it itself"
)
CONCURRENT_SESSIONS = 2
"""As many as a gate lets in."""
EMERGENCY_SECONDS = BREAK_GLASS_SECONDS + CLOCK_SKEW_SECONDS


def check_certificate(inventory: Inventory, approval: Approval, host: Host) -> Certificate:
    """The certificate of ``approval``, checked as the host's sshd and gate would check it.

    :raises Refused: another CA signed it, it is not valid now, it is for something else than ``approval`` says, or a
        second person has to sign and did not.
    """
    certificate = certificates.read(approval.certificate_path, inventory.guard.ca_public_key)
    terms, now = certificate.terms, time.time()
    if (terms.request_id, terms.digest, terms.serial) != (approval.id, approval.digest, approval.serial):
        raise Refused(f"the certificate of approval {approval.id} is for something else than that says; ask again")
    if not terms.not_before <= now < terms.not_after:
        raise Refused(f"the certificate of approval {approval.id} is not valid now by this machine's clock; ask again")
    if terms.source_addresses != host.source_addresses:
        raise Refused(
            f"the certificate of approval {approval.id} is for {','.join(terms.source_addresses)}, and hosts.yaml has "
            f"{','.join(host.source_addresses)} as source_addresses of {host.name}; ask again"
        )
    if countersigning.is_exempt(approval.action) and terms.not_after - terms.not_before > EMERGENCY_SECONDS:
        raise Refused(f"break-glass is for a certificate of minutes, and that of approval {approval.id} is for longer")
    if inventory.guard.two_person and not _has_second(inventory, approval):
        raise Refused(f"no second person signed approval {approval.id}: {countersigning.command(approval.id)}")
    return certificate


def _has_second(inventory: Inventory, approval: Approval) -> bool:
    action, person, signature = approval.action, approval.second_person, approval.second_signature
    return countersigning.is_exempt(action) or countersigning.verify(
        inventory.guard, approval.id, action, person, signature
    )


class LocalBudget:
    """What a gate would keep of one read grant: a session slot of the host, its bytes, and which files it was about.

    The sessions themselves are counted by :meth:`ApprovalStore.consume`.
    """

    def __init__(self, store: ApprovalStore, approval: Approval) -> None:
        self._store, self._approval = store, approval
        self._folder = store.folder / "client" / approval.host
        self._seen: dict[str, tuple[int, ...]] = {}
        self._slot = _take_slot(self._folder, approval.host)

    def debit(self, count: int) -> None:
        """Take ``count`` bytes, before they are asked for; raises ``Refused`` when fewer are left."""
        self._store.debit(self._approval, count)

    def check_same(self, path: str, identity: Sequence[int], *, renew: bool) -> None:
        """Refuse a file that is not what was first found under ``path``, over all sessions of this grant.

        Below a ``root`` files come and grow while they are watched: there each stat of the caller (``renew``) says anew
        what the file has to stay, for as long as the session lasts. A job's log grows also while it is read, as in the
        gate.
        """
        if path.endswith("/output.log"):
            identity = (*identity[:2], 0, 0)
        if self._approval.grant.root is not None:
            if renew or path not in self._seen:
                self._seen[path] = tuple(identity)
            if self._seen[path] != tuple(identity):
                raise FileChanged(f"'{escape(path)}' changed while read: it is not the file that was first seen")
            return
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        file = self._folder / f"{self._approval.serial}-{name}"
        found = json.dumps(list(identity))
        try:
            seen = _first_written(file, found)
        except OSError as error:
            raise _unusable(file, error) from None
        if seen != found:
            raise FileChanged(
                f"'{escape(path)}' is not the file that was first seen under this approval; ask for a new one"
            )

    def close(self) -> None:
        """Give the slot back; a second call does nothing."""
        with suppress(OSError):
            os.close(self._slot)
        self._slot = -1


def _take_slot(folder: Path, host: str) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(CONCURRENT_SESSIONS):
            slot = os.open(folder / f"slot-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(slot)
            else:
                return slot
    except OSError as error:
        raise _unusable(folder, error) from None
    raise HostBusy(
        f"{host}: {CONCURRENT_SESSIONS} sessions are open on this host already; try again when one has ended"
    )


def _first_written(file: Path, content: str) -> str:
    """What ``file`` holds: ``content``, durably, unless something was written there before."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.{time.monotonic_ns()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as written:
            written.write(content)
            written.flush()
            os.fsync(written.fileno())
        with suppress(FileExistsError):
            os.link(partial, file)
    finally:
        partial.unlink()
    return file.read_text()


def _unusable(file: Path, error: OSError) -> Refused:
    return Refused(f"{file}: {error.strerror}; nothing is read without it: make it readable and writable for yourself")
