"""The public halves of every key on this machine that could log in somewhere: what the guard's doctor offers a host.

Nothing here needs a passphrase and no private key is used: whether a host would take a key can be asked with its public
half.
"""

import base64
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks import process, public_keys
from tasks.process import ProcessError

PUBLIC_LINE = re.compile(r"((?:ssh|ecdsa|sk)-[a-z0-9@.-]+) ([A-Za-z0-9+/]+=*)(?:\s.*)?")


@dataclass(frozen=True)
class Identity:
    """A public key or certificate and where it was found."""

    line: str
    """``type base64``."""
    where: str

    @property
    def certified(self) -> bool:
        return "-cert-" in self.line.partition(" ")[0]


@dataclass(frozen=True)
class Identities:
    """What was found, each key once, and the private key files of which the public half could not be read."""

    found: tuple[Identity, ...]
    unread: tuple[Path, ...]


def identities_here(files: Iterable[Path] = (), folder: Path | None = None) -> Identities:
    """The keys of the ssh agent, of ``folder`` (by default ``~/.ssh``) and of ``files``."""
    inside = _files(folder)
    found, unread = agent_identities(), []
    for file in dict.fromkeys([*inside, *files]):
        try:
            text = file.read_text("ascii", "replace")
        except OSError:
            unread.append(file)
            continue
        if file.suffix == ".pub":
            found += _lines(text, str(file))
        elif "PRIVATE KEY-----" in text:
            line = _public_half(file)
            found += _lines(line, str(file))
            unread += [] if line else [file]
    once = {identity.line: identity for identity in reversed(found)}
    return Identities(tuple(reversed(once.values())), tuple(unread))


def private_keys_here(folder: Path | None = None) -> dict[Path, public_keys.PrivateKeyFile]:
    """The private keys in OpenSSH's own form in ``folder`` (by default ``~/.ssh``)."""
    found = {}
    for file in _files(folder):
        with suppress(OSError, public_keys.PublicKeyError):
            found[file] = public_keys.read_private_key_file(file)
    return found


def agent_identities() -> list[Identity]:
    """The keys that the ssh agent holds; none without an agent."""
    try:
        # exits with 1 where there is no agent, or an empty one
        listed = process.run(["ssh-add", "-L"], check=False, timeout=10)
    except ProcessError:
        return []
    return _lines(listed.stdout, "agent")


def _files(folder: Path | None) -> list[Path]:
    try:
        folder = Path.home() / ".ssh" if folder is None else folder
    except RuntimeError:
        # this user has no home
        return []
    return sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []


def _lines(text: str, where: str) -> list[Identity]:
    matches = (PUBLIC_LINE.fullmatch(line.strip()) for line in text.splitlines())
    return [Identity(f"{match[1]} {match[2]}", where) for match in matches if match]


def _public_half(file: Path) -> str:
    """The public line of a private key file, encrypted or not; empty when the form hides it."""
    try:
        blob = public_keys.read_private_key_file(file).public
        (length,) = struct.unpack_from(">I", blob)
        return f"{blob[4 : 4 + length].decode('ascii')} {base64.b64encode(blob).decode()}"
    except (OSError, ValueError, struct.error):
        pass
    try:
        # the older forms, when they have no passphrase
        return process.run(["ssh-keygen", "-y", "-P", "", "-f", str(file)], timeout=10).stdout
    except ProcessError:
        return ""
