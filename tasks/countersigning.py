"""The second person's signature, where two are asked for: an SSH signature over each action of a request.

Signed is what both sides know: the digest of the action and the id of the request.
"""

import tempfile
from pathlib import Path

from tasks import process, public_keys
from tasks.actions import Action, Run, escape
from tasks.errors import Refused
from tasks.inventory import Guard
from tasks.requests import Request
from tasks.signing import check_terminal, environment

NAMESPACE = "dflash-approval"


def message(action: Action, request_id: str) -> str:
    """What is signed."""
    return f"{action.digest()} {request_id}"


def command(request_id: str) -> str:
    """What the second person types."""
    return f"dflash-ops guard countersign {request_id} --name NAME --key KEY"


def is_exempt(action: Action) -> bool:
    """Whether one person is enough: in an emergency there may be no second."""
    return isinstance(action, Run) and action.break_glass


def person(guard: Guard, name: str, key: Path) -> str:
    """``name``, once it is one of ``hosts.yaml`` and ``key`` is that person's private key; else ``Refused``."""
    expected = guard.second_persons.get(name)
    if expected is None:
        known = ", ".join(guard.second_persons) or "nobody"
        raise Refused(f"{escape(name)!r} is not among guard.second_persons of hosts.yaml, which names {known}")
    try:
        held = public_keys.read_private_key_file(key)
    except OSError as error:
        raise Refused(f"key {key}: {error.strerror}; name your private key with --key") from None
    except public_keys.PublicKeyError as error:
        raise Refused(f"key {error}") from None
    if held.public != public_keys.blob(expected):
        raise Refused(
            f"key {key} is not that of {name} in hosts.yaml ({public_keys.fingerprint(expected)}); name your own"
        )
    if held.encrypted or public_keys.is_in_token(expected):
        check_terminal("the key asks for its passphrase or for a touch, and there is no terminal to say so")
    elif not guard.lab:
        raise Refused(
            f"key {key} has no passphrase, so anything on this machine could sign as {name}; "
            f"give it one: ssh-keygen -p -f {key}"
        )
    return name


def sign(request: Request, name: str, key: Path, scratch: Path) -> list[Path]:
    """Sign each action of ``request`` and return the signatures' files in ``scratch``.

    ssh-keygen asks for the passphrase at the terminal itself. Raises ``Refused`` when it does not sign.
    """
    files = [scratch / str(index) for index in range(len(request.plan.actions))]
    for file, action in zip(files, request.plan.actions, strict=True):
        file.write_text(message(action, request.id))
    argv = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, *map(str, files)]
    if code := process.start(argv, env=environment()).wait():
        raise Refused(f"not signed: ssh-keygen failed with exit code {code}: wrong passphrase? Try again, {name}")
    signatures = [file.with_name(f"{file.name}.sig") for file in files]
    for signature in signatures:
        signature.chmod(0o600)
    return signatures


def verify(guard: Guard, request_id: str, action: Action, name: str | None, signature: Path | None) -> bool:
    """Whether ``signature`` is that of the second person ``name`` over ``action``."""
    if name is None or signature is None or name not in guard.second_persons:
        return False
    with tempfile.NamedTemporaryFile("w", prefix="dflash-signers-") as signers:
        signers.write(f'{name} namespaces="{NAMESPACE}" {guard.second_persons[name]}\n')
        signers.flush()
        argv = ["ssh-keygen", "-Y", "verify", "-q", "-f", signers.name, "-I", name, "-n", NAMESPACE]
        checked = process.run([*argv, "-s", signature], input=message(action, request_id), check=False)
    return checked.returncode == 0
