"""Offering public keys to the sshds of one host: whether they would be taken, without the means to log in.

sshd says of a public key whether it would do before anything is signed, and here nothing could be signed.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks import process
from tasks.certificates import PRINCIPAL
from tasks.identities import Identity
from tasks.inventory import Host
from tasks.ssh import Connector

AT_ONCE = 5
"""Keys offered in one connection; sshd ends it at the sixth."""


@dataclass(frozen=True)
class Answer:
    """What sshd said to one key."""

    identity: Identity
    user: str
    endpoint: str
    taken: bool | None
    """None: it could not even be offered."""
    methods: tuple[str, ...]
    """Ways to log in that sshd names."""


class Offers:
    """Offers to the sshds of ``host``, ``pause`` seconds apart; files are made in ``folder``."""

    def __init__(self, connector: Connector, host: Host, folder: Path, pause: float) -> None:
        self.connector, self.host, self.folder = connector, host, folder
        self._pause = pause
        self._last: float | None = None
        self._made = 0

    @property
    def endpoints(self) -> list[Host]:
        """The host once for each address that it has, those of its aliases included."""
        return [
            self.host.model_copy(update={"address": address, "port": port}) for address, port in self.host.endpoints
        ]

    def ask(self, at: Host, keys: Sequence[Path] = (), options: Sequence[str] = ()) -> str:
        """One connection: what ``ssh`` said of it."""
        if self._last is not None:
            time.sleep(max(0.0, self._last + self._pause - time.monotonic()))
        try:
            return self.connector.offer(at, keys, options)
        finally:
            self._last = time.monotonic()

    def offer(self, at: Host, identities: Sequence[Identity]) -> Iterator[Answer]:
        """Offer ``identities`` to the login ``at.user``: what sshd says to each.

        :raises HostKeyError: another machine answers.
        :raises ConnectionFailed: it cannot be reached.
        """
        waiting = dict(enumerate(identities))
        at_once = AT_ONCE
        while waiting:
            batch = dict(list(waiting.items())[:at_once])
            files = {self._file(identity): number for number, identity in batch.items()}
            heard = hear(self.ask(at, list(files)))
            if not heard.methods and not heard.let_in:
                raise self.connector.failure(at, heard.complaint)
            answered = {files[file] for file in map(Path, heard.offered) if file in files}
            if not answered:
                # one that ssh does not speak keeps none of the others from being offered
                answered, at_once = (set(batch), AT_ONCE) if at_once == 1 else (set(), 1)
                yield from (Answer(waiting[number], at.user, place(at), None, heard.methods) for number in answered)
            else:
                taken = {files[file] for file in map(Path, heard.accepted) if file in files}
                for number in sorted(answered):
                    let_in = heard.let_in or number in taken
                    yield Answer(waiting[number], at.user, place(at), let_in, heard.methods)
            waiting = {number: identity for number, identity in waiting.items() if number not in answered}

    def key_pair(self, name: str) -> Path:
        """A new key pair in the folder; its private half is never offered."""
        file = self.folder / name
        process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "dflash guard doctor", "-f", str(file)])
        return file

    def foreign_certificate(self, name: str, *options: str) -> Identity:
        """A certificate like the guard's, with ``options`` of ssh-keygen, signed by a CA that nobody knows."""
        ca, key = self.key_pair(f"{name}-ca"), self.key_pair(name)
        argv = ["ssh-keygen", "-q", "-s", str(ca), "-I", "doctor", "-n", PRINCIPAL, "-V", "-1m:+5m", "-O", "clear"]
        process.run([*argv, *(word for option in options for word in ("-O", option)), f"{key}.pub"])
        return identity_in(key.with_name(f"{name}-cert.pub"))

    def _file(self, identity: Identity) -> Path:
        """The public key in a file with nothing beside it, so that there is no private half to be found."""
        self._made += 1
        folder = self.folder / f"offered-{self._made}"
        folder.mkdir()
        file = folder / ("key-cert.pub" if identity.certified else "key.pub")
        file.write_text(identity.line + "\n")
        return file


@dataclass(frozen=True)
class Heard:
    """What an attempt was answered, as ``ssh`` tells it."""

    offered: tuple[str, ...]
    """Files of the keys that sshd was asked about and gave an answer to, in their order."""
    accepted: tuple[str, ...]
    """Files of those that it would take."""
    methods: tuple[str, ...]
    """Ways to log in that it names."""
    let_in: bool
    """Whether it let somebody in without any key."""
    host_key: str | None
    """Fingerprint of the key it showed."""
    algorithms: tuple[str, ...]
    """Host key algorithms that it has keys for."""
    complaint: str
    """What ssh said without its debugging."""


ANSWERS = ("Authentications that can continue", "Server accepts key", "Authenticated to", "Too many authentication")


def hear(text: str) -> Heard:
    """Take apart what ``ssh`` said at its second level of debugging."""
    methods = re.findall(r"^debug1: Authentications that can continue: (\S+)", text, re.MULTILINE)
    shown = re.findall(r"^debug1: Server host key: \S+ (SHA256:\S+)", text, re.MULTILINE)
    # ssh names its own first, then the server's
    algorithms = re.findall(r"^debug2: host key algorithms: (\S+)", text, re.MULTILINE)
    key = r"(.+?) [A-Z0-9-]+ SHA256:"
    _, *offers = re.split(r"^debug1: Offering public key: ", text, flags=re.MULTILINE)
    # a connection that breaks is no answer
    answered = [offer for offer in offers if any(answer in offer for answer in ANSWERS)]
    return Heard(
        offered=tuple(match[1] for offer in answered if (match := re.match(key, offer))),
        accepted=tuple(re.findall(rf"^debug1: Server accepts key: {key}", text, re.MULTILINE)),
        methods=tuple(methods[-1].split(",")) if methods else (),
        let_in=re.search(r"^(debug1: )?Authenticated to ", text, re.MULTILINE) is not None,
        host_key=shown[-1] if shown else None,
        algorithms=tuple(algorithms[1].split(",")) if len(algorithms) > 1 else (),
        complaint="\n".join(line for line in text.splitlines() if not line.startswith(("debug1: ", "debug2: "))),
    )


def identity_in(file: Path) -> Identity:
    """The public key or certificate in ``file``."""
    return Identity(" ".join(file.read_text("ascii").split()[:2]), str(file))


def place(at: Host) -> str:
    """The address in words."""
    return f"{at.address} port {at.port}"
