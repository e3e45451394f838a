"""Approvals as OpenSSH user certificates: signing one with the operator's CA, and reading one back.

A certificate says: whoever holds this throw-away key may, from these addresses and until this time, have the gate do
exactly the action with this digest. Nothing else is in it: no shell, no forwarding, no other command.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)

from tasks import process, public_keys
from tasks.errors import Refused
from tasks.inventory import Guard, Host

PRINCIPAL = "dflash-gate"
LAB_ADDRESSES = frozenset({"10.1.2.6", "10.1.230.172", "127.1.2.6", "127.1.230.172"})


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

    @property
    def key_id(self) -> str:
        return f"{self.request_id} {self.head}"

    @property
    def options(self) -> dict[str, str]:
        return {
            "force-command": f"{PRINCIPAL} {self.digest}",
            "source-address": ",".join(self.source_addresses),
        }


@dataclass(frozen=True)
class Certificate:
    """A certificate whose signature was checked."""

    terms: Terms
    not_after: int
    """Seconds since the epoch."""


def check_ca_key(ca_key: Path, guard: Guard, host: Host) -> public_keys.PrivateKeyFile:
    """Refuse ``ca_key`` unless it is the CA of ``hosts.yaml`` and signs only with the operator there.

    A key without a passphrase would sign unattended: only the lab's may, and only for the lab's addresses.
    """
    try:
        key = public_keys.read_private_key_file(ca_key)
    except OSError as error:
        raise Refused(f"CA key {ca_key}: {error.strerror}; name the operator's private key with --ca-key") from None
    except public_keys.PublicKeyError as error:
        raise Refused(f"CA key {error}") from None
    if key.public != public_keys.blob(guard.ca_public_key):
        raise Refused(
            f"CA key {ca_key} is not the one in hosts.yaml (guard.ca_public_key is "
            f"{public_keys.fingerprint(guard.ca_public_key)}); name the right one with --ca-key"
        )
    if key.encrypted and not sys.stdin.isatty():
        raise Refused("the CA key has a passphrase and there is no terminal to ask for it; approve at a terminal")
    if not key.encrypted:
        _check_unattended(ca_key, guard, host)
    return key


def _check_unattended(ca_key: Path, guard: Guard, host: Host) -> None:
    if not guard.lab:
        raise Refused(
            f"CA key {ca_key} has no passphrase, so anything on this machine could approve; "
            f"give it one: ssh-keygen -p -f {ca_key}"
        )
    foreign = sorted({address for address, _ in host.endpoints} - LAB_ADDRESSES)
    if foreign:
        raise Refused(
            f"a lab CA approves for the lab's addresses only, and {host.name} has {', '.join(foreign)}; "
            "use a CA key with a passphrase and set guard.lab to false"
        )


def sign(public_key: Path, terms: Terms, seconds: int, ca_key: Path, *, encrypted: bool) -> Path:
    """Sign ``public_key`` for ``seconds`` from now and return the certificate's path beside it.

    ssh-keygen asks for the passphrase at the terminal itself. Raises ``Refused`` when it does not sign.
    """
    argv = ["ssh-keygen", "-q", "-s", str(ca_key), "-I", terms.key_id, "-z", str(terms.serial), "-n", PRINCIPAL]
    # a minute back, for a host whose clock is a little behind
    argv += ["-V", f"-1m:+{seconds}s", "-O", "clear"]
    for name, value in terms.options.items():
        argv += ["-O", f"{name}={value}"]
    argv.append(str(public_key))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_ASKPASS", "SSH_AUTH_SOCK"))}
    env["SSH_ASKPASS_REQUIRE"] = "never"
    try:
        if encrypted:
            code = process.start(argv, env=env).wait()
            if code:
                raise process.ProcessError(f"ssh-keygen failed with exit code {code}: wrong passphrase?")
        else:
            process.run(argv, env=env)
    except process.ProcessError as error:
        raise Refused(f"not signed: {error}; nothing was approved, try again") from None
    return public_key.with_name(public_key.name.removesuffix(".pub") + "-cert.pub")


def read(path: Path, ca_public_key: str) -> Certificate:
    """The certificate in ``path``; raises :class:`CertificateError` unless the CA signed exactly our form."""
    try:
        identity = load_ssh_public_identity(path.read_bytes())
        if not isinstance(identity, SSHCertificate):
            raise ValueError("a plain key")
        identity.verify_cert_signature()
        signer = identity.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        return _checked(identity, signer, ca_public_key)
    except (OSError, ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        reason = (error.strerror if isinstance(error, OSError) else str(error)) or "its signature is wrong"
        raise CertificateError(f"certificate {path} approves nothing: {reason}; ask again for a new one") from None


def _checked(identity: SSHCertificate, signer: str, ca_public_key: str) -> Certificate:
    """Take a certificate with the given ``signer`` apart; ValueError says what is not as :func:`sign` writes it."""
    options = {name.decode(): value.decode() for name, value in identity.critical_options.items()}
    key_id = re.fullmatch(r"([0-9a-f]+) ([0-9a-f]{64})", identity.key_id.decode())
    command = re.fullmatch(rf"{PRINCIPAL} ([0-9a-f]{{64}})", options.get("force-command", ""))
    if signer != ca_public_key:
        raise ValueError("another CA signed it")
    if identity.type is not SSHCertificateType.USER or identity.valid_principals != [PRINCIPAL.encode()]:
        raise ValueError(f"it is not for the user {PRINCIPAL}")
    if key_id is None or command is None:
        raise ValueError("its key id or forced command is not the guard's")
    sources = tuple(options.get("source-address", "").split(","))
    terms = Terms(key_id[1], key_id[2], command[1], identity.serial, sources)
    if options != terms.options or identity.extensions:
        raise ValueError("it carries options the guard does not give")
    return Certificate(terms, identity.valid_before)
