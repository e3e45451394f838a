"""Certificates that a CA key in a FIDO token signed, which cryptography does not verify.

A token signs sha256(application) ‖ flags ‖ counter ‖ sha256(message), and OpenSSH writes flags and counter behind the
signature (PROTOCOL.u2f). The flags say whether somebody touched the token.
"""

import hashlib
import struct
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from tasks.public_keys import PublicKeyError, fields, take

ED25519, ECDSA = b"sk-ssh-ed25519@openssh.com", b"sk-ecdsa-sha2-nistp256@openssh.com"
USER_PRESENT = 0x01


@dataclass(frozen=True)
class Signed:
    """A certificate of an Ed25519 key as it is signed."""

    content: bytes
    """Everything before the signature."""
    ca: bytes
    """The CA's public key."""
    signature: bytes


def split(body: bytes) -> Signed:
    """Find the CA key and the signature in a certificate's bytes; ValueError when they do not lie as they must."""
    try:
        kind, rest = take(body)
        if kind != b"ssh-ed25519-cert-v01@openssh.com":
            raise PublicKeyError
        for size in (None, None, 8 + 4, None, None, 8 + 8, None, None, None):
            # nonce, key, serial and type, key id, principals, validity, critical options, extensions, reserved
            rest = take(rest)[1] if size is None else rest[size:]
        ca, rest = take(rest)
        signature, end = take(rest)
        if end:
            raise PublicKeyError
    except PublicKeyError:
        raise ValueError("it is no whole certificate of an Ed25519 key") from None
    return Signed(body[: -len(rest)], ca, signature)


def verify(signed: Signed) -> None:
    """Check a token's signature; raises ValueError or InvalidSignature unless it is right and somebody touched it."""
    try:
        kind, rest = take(signed.ca)
        *key, application = fields(rest)
        signed_as, rest = take(signed.signature)
        signature, rest = take(rest)
        flags, counter = struct.unpack(">BI", rest)
    except (struct.error, ValueError):
        raise ValueError("the CA's key or its signature is not whole") from None
    if signed_as != kind or kind not in (ED25519, ECDSA):
        raise ValueError("its signature is of another kind than the CA's key")
    if not flags & USER_PRESENT:
        raise ValueError("the CA's token signed without a touch")
    digests = hashlib.sha256(application).digest(), hashlib.sha256(signed.content).digest()
    message = digests[0] + struct.pack(">BI", flags, counter) + digests[1]
    if kind == ED25519:
        Ed25519PublicKey.from_public_bytes(key[0]).verify(signature, message)
        return
    r, s = (int.from_bytes(number, "big") for number in fields(signature))
    point = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), key[1])
    point.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))


def without_touch(signed: Signed) -> bytes:
    """The certificate's bytes with flags and counter left out, so that cryptography can take it apart."""
    kind, rest = take(signed.signature)
    signature, _ = take(rest)
    return signed.content + _string(_string(kind) + _string(signature))


def _string(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content
