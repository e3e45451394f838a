"""Signing with the operator's CA key: ssh-keygen does it, and somebody has to be there.

A key with a passphrase is asked for at the terminal, one in a FIDO token for a touch, one in an agent by what the agent
does to confirm. A key that would sign unattended is refused, but for the lab's, which may for the lab's addresses only.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tasks import process, public_keys
from tasks.certificates import PRINCIPAL, Terms
from tasks.errors import Refused
from tasks.inventory import Guard, Host

LAB_ADDRESSES = frozenset({"10.1.2.6", "10.1.230.172", "127.1.2.6", "127.1.230.172"})
UNATTENDED_SECONDS = 60.0
AGENT_SECONDS = 60
"""How long an agent of our own remembers the CA key, should this process be killed."""


@dataclass(frozen=True)
class SigningKey:
    """A CA key that was looked at and may be used."""

    public_key: str
    """Line of the public key."""
    file: Path | None
    """The private key; None: an agent holds it."""
    attended: bool
    """Somebody is at the terminal and has to do something before it signs."""
    agent_socket: str | None = None


def signing_key(guard: Guard, host: Host, ca_key: Path | None, *, agent: bool = False) -> SigningKey:
    """The CA key in ``ca_key`` or, with ``agent``, in the agent of ``$SSH_AUTH_SOCK``, to approve things on ``host``.

    Raises ``Refused`` unless it is the CA of ``hosts.yaml`` and signs only with the operator there.
    """
    if agent:
        check_terminal("an agent signs only for somebody at a terminal")
        socket = os.environ.get("SSH_AUTH_SOCK")
        if not socket:
            raise Refused(
                "there is no agent: SSH_AUTH_SOCK is not set; start one and give it the CA key with ssh-add -c"
            )
        return SigningKey(guard.ca_public_key, None, attended=True, agent_socket=socket)
    if ca_key is None:
        raise Refused("no CA key to sign with; name it with --ca-key, or as guard.ca_key in hosts.yaml")
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
    token = public_keys.is_in_token(guard.ca_public_key)
    if key.encrypted:
        check_terminal("the CA key has a passphrase and there is no terminal to ask for it")
    elif token:
        check_terminal("the CA key is in a token that asks for a touch, and there is no terminal to say so")
    else:
        _check_unattended(ca_key, guard, host)
    return SigningKey(guard.ca_public_key, ca_key, attended=key.encrypted or token)


@contextmanager
def ready_for(key: SigningKey, signatures: int) -> Iterator[SigningKey]:
    """``key``, so that its passphrase is asked for once however many ``signatures`` are due.

    For several, an agent of this moment's own holds it meanwhile: it forgets the key after a minute and ends with this
    process. A token is touched for each.
    """
    if key.file is None or not key.attended or signatures < 2 or public_keys.is_in_token(key.public_key):
        yield key
        return
    with _own_agent() as socket:
        env = environment() | {"SSH_AUTH_SOCK": socket}
        if process.start(["ssh-add", "-q", "-t", str(AGENT_SECONDS), str(key.file)], env=env).wait():
            raise Refused("not signed: the CA key was not unlocked; nothing was approved, try again")
        yield replace(key, file=None, agent_socket=socket)


@contextmanager
def _own_agent() -> Iterator[str]:
    """Start an agent and yield its socket; it ends with the block, or else with this process."""
    # not below the state folder: the path of a socket has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="dflash-agent-") as folder:
        socket = os.path.join(folder, "agent")
        # an agent goes when its child does, and cat goes with this process, whatever ends it
        argv = ["ssh-agent", "-a", socket, "sh", "-c", "echo $SSH_AGENT_PID; exec cat"]
        with process.start(argv, stdin=process.PIPE, stdout=process.PIPE, env=environment()) as child:
            assert child.stdout is not None
            agent = child.stdout.readline().strip()
            if not agent:
                raise Refused("not signed: ssh-agent did not start; nothing was approved, try again")
            try:
                yield socket
            finally:
                os.kill(int(agent), signal.SIGTERM)


def check_terminal(otherwise: str) -> None:
    """Raise ``Refused``, with ``otherwise`` as the reason, unless somebody is at a terminal."""
    if not sys.stdin.isatty():
        raise Refused(f"{otherwise}; approve at a terminal")


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


def sign(public_key: Path, terms: Terms, key: SigningKey) -> Path:
    """Sign ``public_key`` and return the certificate's path beside it.

    ssh-keygen asks for the passphrase or the touch at the terminal itself. Raises ``Refused`` when it does not sign.
    """
    argv = ["ssh-keygen", "-q", "-I", terms.key_id, "-z", str(terms.serial), "-n", PRINCIPAL]
    argv += ["-V", f"{terms.not_before:#x}:{terms.not_after:#x}", "-O", "clear"]
    for name, value in terms.options.items():
        argv += ["-O", f"{name}={value}"]
    env = environment()
    if key.agent_socket is not None:
        ca = public_key.with_name("ca.pub")
        ca.write_text(key.public_key + "\n")
        argv += ["-U", "-s", str(ca)]
        env["SSH_AUTH_SOCK"] = key.agent_socket
    else:
        argv += ["-s", str(key.file)]
    argv.append(str(public_key))
    try:
        if key.attended:
            code = process.start(argv, env=env).wait()
            if code:
                why = "wrong passphrase?" if key.file else "did the agent say no, or does it not hold the CA key?"
                raise process.ProcessError(f"ssh-keygen failed with exit code {code}: {why}")
        else:
            process.run(argv, env=env, timeout=UNATTENDED_SECONDS)
    except process.ProcessError as error:
        raise Refused(f"not signed: {error}; nothing was approved, try again") from None
    return public_key.with_name(public_key.name.removesuffix(".pub") + "-cert.pub")


def environment() -> dict[str, str]:
    """This process's environment without an agent and without a program that would answer for the operator."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_ASKPASS", "SSH_AUTH_SOCK"))}
    env["SSH_ASKPASS_REQUIRE"] = "never"
    return env
