"""OpenSSH public keys as text and as bytes: what a host is known by and what the operator's CA is known by."""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SECURITY_KEY_TYPES = ("sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com")
"""Keys in a FIDO token, which asks for a touch before it signs."""
HOST_KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
CURVES = {"nistp256": 32, "nistp384": 48, "nistp521": 66}
SMALLEST_RSA = 2048


class PublicKeyError(ValueError):
    """A text that is not a whole OpenSSH public key."""


def normalise(line: str) -> str:
    """``"type base64 comment"`` → ``"type base64"``; raises :class:`PublicKeyError` unless the key is whole."""
    return _normalise(line, HOST_KEY_TYPES)


def normalise_signing(line: str) -> str:
    """As :func:`normalise`, for the key of a person, which may be in a FIDO token."""
    return _normalise(line, (*HOST_KEY_TYPES, *SECURITY_KEY_TYPES))


def _normalise(line: str, kinds: Sequence[str]) -> str:
    words = line.split()
    if len(words) < 2 or words[0] not in kinds:
        raise PublicKeyError(f"not a public key: {_short(line)}; expected one of {', '.join(kinds)} and base64")
    try:
        content = base64.b64decode(words[1], validate=True)
        parts = fields(content)
    except (binascii.Error, PublicKeyError):
        raise PublicKeyError(f"{_short(line)} is cut off or mistyped; copy the whole line of the .pub file") from None
    if parts[0] != words[0].encode():
        raise PublicKeyError(f"{_short(line)} says {words[0]} but holds another type; copy the whole line again")
    if not _sound(words[0], parts[1:]):
        raise PublicKeyError(f"{_short(line)} is no sound {words[0]} key; copy the whole line of the .pub file")
    return f"{words[0]} {base64.b64encode(content).decode()}"


def is_in_token(line: str) -> bool:
    """Whether a normalised line is a FIDO token's key: every signature needs a touch."""
    return line.split()[0] in SECURITY_KEY_TYPES


def blob(line: str) -> bytes:
    """The key of a normalised line as it travels in the protocol."""
    return base64.b64decode(line.split()[1])


def fingerprint(line: str) -> str:
    """``"SHA256:…"`` of a normalised line, as ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob(line)).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class PrivateKeyFile:
    """What an OpenSSH private key file says without its passphrase."""

    public: bytes
    """Key as in :func:`blob`."""
    encrypted: bool


def read_private_key_file(path: Path) -> PrivateKeyFile:
    """Read the open part of an ``openssh-key-v1`` file; raises OSError, or :class:`PublicKeyError` for another form."""
    body = path.read_text(encoding="ascii", errors="replace").split("-----")
    magic = b"openssh-key-v1\0"
    try:
        content = base64.b64decode(body[2])
        if body[1] != "BEGIN OPENSSH PRIVATE KEY" or not content.startswith(magic):
            raise PublicKeyError
        cipher, rest = take(content[len(magic) :])
        _, rest = take(rest)
        _, rest = take(rest)
        public, _ = take(rest[4:])
    except (IndexError, binascii.Error, PublicKeyError):
        raise PublicKeyError(
            f"{path} is not a private key in OpenSSH's own form; convert it with: ssh-keygen -p -f {path}"
        ) from None
    return PrivateKeyFile(public, encrypted=cipher != b"none")


def fields(content: bytes) -> list[bytes]:
    """Every length-prefixed field of ``content``; raises :class:`PublicKeyError` when cut off."""
    found = []
    while content:
        field, content = take(content)
        found.append(field)
    if not found:
        raise PublicKeyError("empty")
    return found


def take(content: bytes) -> tuple[bytes, bytes]:
    """The first length-prefixed field and the rest; raises as :func:`fields`."""
    end = 4 + int.from_bytes(content[:4], "big")
    if len(content) < max(4, end):
        raise PublicKeyError("cut off")
    return content[4:end], content[end:]


def _sound(kind: str, parts: list[bytes]) -> bool:
    if kind in SECURITY_KEY_TYPES:
        # the key in the token, then the application it was made for
        plain = kind.removeprefix("sk-").removesuffix("@openssh.com")
        return bool(parts and parts[-1].startswith(b"ssh:")) and _sound(plain, parts[:-1])
    if kind == "ssh-ed25519":
        return [len(field) for field in parts] == [32]
    if kind == "ssh-rsa":
        return len(parts) == 2 and int.from_bytes(parts[1], "big").bit_length() >= SMALLEST_RSA
    curve = kind.removeprefix("ecdsa-sha2-")
    return len(parts) == 2 and parts[0] == curve.encode() and len(parts[1]) == 1 + 2 * CURVES[curve]


def _short(line: str) -> str:
    return repr(line if len(line) <= 40 else line[:37] + "…")
