"""Past the program's own checks: what the host's sshd is shown and what its gate is sent."""

import base64
import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks import process
from tasks.approvals import Approval
from tasks.gate import GateSession, open_session
from tests.bypass.stage import Stage, attempt
from tests.bypass.store import sign_with_another_ca
from tests.guard_state import make_key

DENIED = "sshd did not accept the certificate"
VALID = ("-V", "-1m:+10m")
CLEAR = ("-O", "clear")
SOURCE = ("-O", "source-address=127.0.0.0/8")


def _command(approval: Approval) -> tuple[str, str]:
    return "-O", f"force-command=dflash-gate {approval.digest}"


def _bare(name: str, key: Callable[[Stage], Path]) -> None:
    def log_in(stage: Stage) -> object:
        bare = dataclasses.replace(stage.may_read(), key_path=key(stage), certificate_path=Path("/dev/null"))
        return stage.past(bare)

    attempt(name, DENIED)(log_in)


_bare("the throw-away key without its certificate", lambda stage: stage.may_read(bytes=1).key_path)
_bare("the operator's ordinary key", lambda stage: stage.site.login_key)
_bare("the CA's own key", lambda stage: stage.site.ca_key)


def _signed(
    name: str, says: str, options: Callable[[Approval], tuple[str, ...]], *, principal: str = "dflash-gate"
) -> None:
    """The right key with a certificate that the operator's own CA signed, but otherwise than the guard does."""

    def log_in(stage: Stage) -> object:
        approval = stage.may_read()
        return stage.forged(*options(approval), approval=approval, principal=principal)

    attempt(name, says)(log_in)


_signed("expired", DENIED, lambda one: ("-V", "-10m:-1m", *CLEAR, *_command(one), *SOURCE))
_signed("not yet valid", DENIED, lambda one: ("-V", "+10m:+20m", *CLEAR, *_command(one), *SOURCE))
_signed("from another address", DENIED, lambda one: (*VALID, *CLEAR, *_command(one), "-O", "source-address=10.9.9.9"))
_signed("for the user root", DENIED, lambda one: (*VALID, *CLEAR, *_command(one), *SOURCE), principal="root")
_signed("a host's certificate", DENIED, lambda one: ("-h", *VALID))
_signed("without a forced command", "no force-command", lambda one: (*VALID, *CLEAR, *SOURCE))
_signed("with everything permitted", "no force-command", lambda one: VALID)
_signed("that forces a shell", "no force-command", lambda one: (*VALID, *CLEAR, "-O", "force-command=/bin/sh", *SOURCE))
_signed(
    "that forces a gate of the sender's",
    "no force-command",
    lambda one: (*VALID, *CLEAR, "-O", f"force-command=/tmp/dflash-gate {one.digest}", *SOURCE),
)
_signed(
    "that forces more behind the digest",
    "no force-command",
    lambda one: (*VALID, *CLEAR, "-O", f"force-command=dflash-gate {one.digest}; /bin/sh", *SOURCE),
)
_signed("without a source address", "options", lambda one: (*VALID, *CLEAR, *_command(one)))
_signed(
    "for another digest",
    "not the approved one",
    lambda one: (*VALID, *CLEAR, "-O", f"force-command=dflash-gate {'0' * 64}", *SOURCE),
)


@attempt("a certificate with its last byte changed", DENIED)
def _(stage: Stage) -> object:
    approval = stage.own(stage.may_read())
    kind, blob, *_ = approval.certificate_path.read_text().split()
    content = bytearray(base64.b64decode(blob))
    content[-1] ^= 1
    approval.certificate_path.write_text(f"{kind} {base64.b64encode(content).decode()}\n")
    return stage.past(approval)


@attempt("a certificate of a CA that nobody knows", DENIED)
def _(stage: Stage) -> object:
    approval = stage.may_read()
    sign_with_another_ca(stage, approval)
    return stage.past(approval)


@attempt("a revoked serial", DENIED)
def _(stage: Stage) -> object:
    approval, krl = stage.may_read(), stage.site.folder / "revoked"
    (stage.folder / "serials").write_text(f"serial: {approval.serial}\n")
    ca = stage.site.ca_key.with_suffix(".pub")
    process.run(["ssh-keygen", "-q", "-k", "-u", "-f", str(krl), "-s", str(ca), str(stage.folder / "serials")])
    return stage.past(approval)


@attempt("a certificate for an ECDSA key", "no certificate of the guard")
def _(stage: Stage) -> object:
    approval = stage.own(stage.may_read())
    for file in (approval.key_path, approval.certificate_path):
        file.unlink()
    make_key(approval.key_path, kind="ecdsa")
    return stage.forged(*VALID, *CLEAR, *_command(approval), *SOURCE, approval=approval)


# --- past the program: what the gate is sent


def _line(name: str, says: str, line: Callable[[Approval], bytes]) -> None:
    def send(stage: Stage) -> object:
        approval = stage.may_read(sessions=1)
        return stage.past(approval, line(approval))

    attempt(name, says)(send)


NOT_APPROVED = "not the approved one"
_line("one more session in the action", NOT_APPROVED, lambda one: _raw(one).replace(b'"sessions":1', b'"sessions":9'))
_line("a key twice in the action", NOT_APPROVED, lambda one: _raw(one)[:-1] + b',"root":"/"}')
_line("an empty action", NOT_APPROVED, lambda one: b"")
_line("an action that never ends", "longer than", lambda one: b"x" * (1 << 17))


def _raw(approval: Approval) -> bytes:
    return approval.action.canonical()


@attempt("another approved action under this certificate", NOT_APPROVED)
def _(stage: Stage) -> object:
    return stage.past(stage.may_read(), stage.may_read(bytes=10**10).action.canonical())


@attempt("a command under the certificate of reading", NOT_APPROVED)
def _(stage: Stage) -> object:
    return stage.past(stage.may_read(), stage.run().canonical())


@attempt("a certificate whose digest is of no action", "cannot be used")
def _(stage: Stage) -> object:
    line = b'{"kind":"shell"}'
    approval = stage.may_read()
    command = f"force-command=dflash-gate {hashlib.sha256(line).hexdigest()}"
    forged = stage.operator.forge(approval, *VALID, *CLEAR, "-O", command, *SOURCE)
    return stage.past(forged, line)


@attempt("an approval for another host", "host keys are not those")
def _(stage: Stage) -> object:
    line = stage.operator.grant(path=str(stage.step), host_keys=stage.operator.infer.fingerprints).canonical()
    command = f"force-command=dflash-gate {hashlib.sha256(line).hexdigest()}"
    forged = stage.operator.forge(stage.may_read(), *VALID, *CLEAR, "-O", command, *SOURCE)
    return stage.past(forged, line)


def _request(name: str, says: str, request: Callable[[Stage], dict[str, Any]], **terms: Any) -> None:
    def ask(stage: Stage) -> object:
        approval = stage.may_read(root=str(stage.tree), **terms)
        return stage.past_with(approval, **request(stage))

    attempt(name, says)(ask)


NOT_A_REQUEST = "not a request of this gate"
_request("a file outside the root", "was not approved", lambda stage: {"verb": "stat", "path": str(stage.secret)})
_request("the way up", NOT_A_REQUEST, lambda stage: {"verb": "stat", "path": f"{stage.tree}/../secret"})
_request("a path with a NUL", NOT_A_REQUEST, lambda stage: {"verb": "stat", "path": f"{stage.step}\0/etc"})
_request("a link out of the root", "was not approved", lambda stage: {"verb": "stat", "path": f"{stage.tree}/link"})
_request("a proc link", "was not approved", lambda stage: {"verb": "stat", "path": "/proc/self/root/etc/shadow"})
_request(
    "a verb that was not approved",
    "not among the approved verbs",
    lambda stage: {"verb": "hash", "path": str(stage.step)},
    verbs=("stat",),
)
_request(
    "a negative offset",
    NOT_A_REQUEST,
    lambda stage: {"verb": "read", "path": str(stage.step), "offset": -1, "length": 1},
)
_request(
    "a name that looks alike",
    "was not approved",
    lambda stage: {"verb": "stat", "path": str(stage.step).replace("tree", "tr\u0435e")},
)


@attempt("a file of 1 GiB hashed along", "an approval of its own")
def _(stage: Stage) -> object:
    with stage.step.open("wb") as file:
        file.truncate((1 << 30) + 1)
    return stage.past_with(stage.may_read(bytes=1 << 40), verb="hash", path=str(stage.step))


@attempt("a file that is swapped between stat and read", "changed while read")
def _(stage: Stage) -> object:
    with open_session(stage.connector, stage.train, stage.may_read()) as session:
        session.stat(str(stage.step))
        stage.step.unlink()
        shutil.copy(stage.secret, stage.step)
        return _all_of(session, stage.step)


@attempt("a file that becomes a link between stat and read", "was not approved")
def _(stage: Stage) -> object:
    with open_session(stage.connector, stage.train, stage.may_read()) as session:
        session.stat(str(stage.step))
        stage.step.unlink()
        stage.step.symlink_to(stage.secret)
        return _all_of(session, stage.step)


@attempt("one byte more than the budget", "approved ones left")
def _(stage: Stage) -> object:
    with open_session(stage.connector, stage.train, stage.may_read(bytes=1000)) as session:
        return _all_of(session, stage.step, 1001)


def _all_of(session: GateSession, path: Path, length: int = 7) -> bytes:
    with session.read(str(path), 0, length) as stream:
        if (content := os.read(stream.fileno(), length)) == b"":
            raise EOFError
        return content


@attempt("one session more than approved", "sessions are used")
def _(stage: Stage) -> object:
    approval = stage.own(stage.may_read(sessions=1))
    stage.past(approval).close()
    return stage.past(approval)


@attempt("a third session at a time", "sessions are open")
def _(stage: Stage) -> object:
    approval = stage.may_read()
    return [stage.past(approval) for _ in range(3)]
