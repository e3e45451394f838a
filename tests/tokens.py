"""A FIDO token in software, behind the protocol of an agent: OpenSSH signs with it as with a real one.

The signature is made as PROTOCOL.u2f of OpenSSH says; ssh-keygen writes the certificate around it, and reads it back.
"""

import base64
import hashlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

SK_ED25519, SK_ECDSA = "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"
REQUEST_IDENTITIES, IDENTITIES, SIGN, SIGNED, FAILURE = 11, 12, 13, 14, 5


@dataclass
class Token:
    """One key; ``touched`` says whether somebody touches it when it signs."""

    kind: str
    application: bytes = b"ssh:"
    touched: bool = True
    counter: int = 7
    signed: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ed25519 = Ed25519PrivateKey.generate()
        self._ecdsa = ec.generate_private_key(ec.SECP256R1())

    @property
    def blob(self) -> bytes:
        """The public key as the protocol carries it."""
        if self.kind == SK_ED25519:
            key = string(self._ed25519.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))
        else:
            point = self._ecdsa.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
            key = string(b"nistp256") + string(point)
        return string(self.kind.encode()) + key + string(self.application)

    @property
    def public_line(self) -> str:
        return f"{self.kind} {base64.b64encode(self.blob).decode()}"

    def sign(self, message: bytes) -> bytes:
        """The signature of ``message`` in OpenSSH's form."""
        self.signed.append(message)
        self.counter += 1
        tail = struct.pack(">BI", int(self.touched), self.counter)
        raw = hashlib.sha256(self.application).digest() + tail + hashlib.sha256(message).digest()
        if self.kind == SK_ED25519:
            signature = self._ed25519.sign(raw)
        else:
            numbers = decode_dss_signature(self._ecdsa.sign(raw, ec.ECDSA(SHA256())))
            signature = b"".join(string(_mpint(number)) for number in numbers)
        return string(self.kind.encode()) + string(signature) + tail

    @contextmanager
    def agent(self, folder: Path) -> Iterator[str]:
        """An agent that holds this key; yields its socket."""
        path = folder / f"agent-{os.urandom(4).hex()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            serving = threading.Thread(target=self._serve, args=(listener,), daemon=True)
            serving.start()
            yield str(path)
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()

    def _serve(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as incoming:
                    while header := incoming.read(4):
                        request = incoming.read(int.from_bytes(header, "big"))
                        connection.sendall(string(self._answer(request)))

    def _answer(self, request: bytes) -> bytes:
        if request[0] == REQUEST_IDENTITIES:
            return struct.pack(">BI", IDENTITIES, 1) + string(self.blob) + string(b"token")
        if request[0] == SIGN:
            length = int.from_bytes(request[1:5], "big")
            message = request[5 + length + 4 : -4]
            return bytes([SIGNED]) + string(self.sign(message))
        return bytes([FAILURE])


def string(content: bytes) -> bytes:
    """A field with its length in front."""
    return struct.pack(">I", len(content)) + content


def _mpint(number: int) -> bytes:
    return number.to_bytes(number.bit_length() // 8 + 1, "big")
