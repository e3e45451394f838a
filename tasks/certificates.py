"""Approvals as OpenSSH user certificates: what one says, and reading one back.

A certificate says: whoever holds this throw-away key may, from these addresses and until this time, have the gate do
exactly the action with this digest. Nothing else is in it: no shell, no forwarding, no other command.
"""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import SSHCertificate, SSHCertificateType, load_ssh_public_identity

from tasks import public_keys, security_keys
from tasks.audit import LATEST
from tasks.errors import Refused
from tasks.inventory import Host

PRINCIPAL = "dflash-gate"
HOME_GATE = ".dflash/dflash-gate"
"""Where the gate lies when only authorized_keys can be edited: in the login's home folder, where sshd starts it."""


Form = Literal["host", "authorized-keys"]


class CertificateError(Refused):
    """A certificate that is not what the operator's CA signs for the gate."""


@dataclass(frozen=True)
class Terms:
    """What is signed."""

    request_id: str
    head: str
    """Head of the audit chain at the decision."""
    digest: str
    serial: int
    source_addresses: tuple[str, ...]
    not_before: int
    """Seconds since the epoch, as :attr:`not_after`."""
    not_after: int
    enforcement: Form = "host"

    @property
    def key_id(self) -> str:
        return f"{self.request_id} {self.head}"

    @property
    def options(self) -> dict[str, str]:
        """The critical options. A gate that is started by authorized_keys does not see the certificate, so its forced
        command says serial and end as well."""
        command = f"{PRINCIPAL} {self.digest}"
        if self.enforcement == "authorized-keys":
            command = f"{HOME_GATE} {self.digest} {self.serial} {self.not_after}"
        return {"force-command": command, "source-address": ",".join(self.source_addresses)}


@dataclass(frozen=True)
class Certificate:
    """A certificate whose signature was checked."""

    terms: Terms

    @property
    def not_after(self) -> int:
        """Seconds since the epoch."""
        return self.terms.not_after


def form(host: Host) -> Form:
    """Which of the two forced commands ``host`` takes; where only this program enforces, it is that of a gate."""
    return "authorized-keys" if host.enforcement == "authorized-keys" else "host"


def read(path: Path, ca_public_key: str) -> Certificate:
    """The certificate in ``path``; raises :class:`CertificateError` unless the CA signed exactly our form."""
    try:
        identity = _verified(path.read_bytes(), ca_public_key)
        return _checked(identity)
    except (OSError, ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        reason = (error.strerror if isinstance(error, OSError) else str(error)) or "its signature is wrong"
        raise CertificateError(f"certificate {path} approves nothing: {reason}; ask again for a new one") from None


def _verified(content: bytes, ca_public_key: str) -> SSHCertificate:
    """The certificate in a line, once the CA's signature under it is found right."""
    kind, encoded, *_ = [*content.split(), b"", b""]
    if not kind.endswith(b"-cert-v01@openssh.com"):
        raise ValueError("it is a plain key or no key at all")
    signed = security_keys.split(base64.b64decode(encoded, validate=True))
    if signed.ca != public_keys.blob(ca_public_key):
        raise ValueError("another CA signed it")
    if public_keys.take(signed.signature)[0] == b"ssh-rsa":
        raise ValueError("it is signed over a SHA-1 digest, which sshd does not take either")
    if public_keys.is_in_token(ca_public_key):
        security_keys.verify(signed)
        content = kind + b" " + base64.b64encode(security_keys.without_touch(signed))
    identity = load_ssh_public_identity(content)
    assert isinstance(identity, SSHCertificate)
    if not public_keys.is_in_token(ca_public_key):
        identity.verify_cert_signature()
    return identity


def _checked(identity: SSHCertificate) -> Certificate:
    """Take a certificate apart; ValueError says what is not as the guard has it signed."""
    options = {name.decode(): value.decode() for name, value in identity.critical_options.items()}
    key_id = re.fullmatch(r"([0-9a-f]+) ([0-9a-f]{64})", identity.key_id.decode())
    command = re.fullmatch(r"(\S+) ([0-9a-f]{64})( [0-9]+ [0-9]+)?", options.get("force-command", ""))
    if identity.type is not SSHCertificateType.USER or identity.valid_principals != [PRINCIPAL.encode()]:
        raise ValueError(f"it is not for the user {PRINCIPAL}")
    if key_id is None or command is None:
        raise ValueError("its key id or forced command is not the guard's")
    if not identity.valid_after < identity.valid_before <= LATEST:
        raise ValueError("it has no end")
    sources = tuple(options.get("source-address", "").split(","))
    terms = Terms(
        request_id=key_id[1],
        head=key_id[2],
        digest=command[2],
        serial=identity.serial,
        source_addresses=sources,
        not_before=identity.valid_after,
        not_after=identity.valid_before,
        enforcement="authorized-keys" if command[3] else "host",
    )
    if options != terms.options or identity.extensions:
        raise ValueError("it carries options the guard does not give")
    return Certificate(terms)
