"""With an approval of something else, with one that is over, and with files of the store changed."""

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks import process
from tasks.actions import ReadGrant, Run
from tasks.approvals import Approval
from tasks.gate import open_session
from tasks.plans import Plan
from tasks.ssh import Connector
from tests.bypass.stage import Stage, attempt
from tests.guard_state import make_key

ASK = "is not approved"


def _asks(
    name: str, approved: Callable[[Stage], Any], wanted: Callable[[Stage], ReadGrant | Run], says: str = ASK
) -> None:
    def ask(stage: Stage) -> object:
        approved(stage)
        action = wanted(stage)
        if isinstance(action, ReadGrant):
            plan = Plan(grant=action, effect="a test")
        else:
            plan = Plan(changes=(action,), effect="a test")
        return stage.operator.store.require(plan)

    attempt(name, says)(ask)


_asks("nothing was approved", lambda _: None, lambda stage: stage.operator.grant(path=str(stage.step)))
_asks("another file", lambda stage: stage.may_read(), lambda stage: stage.operator.grant(path=str(stage.secret)))
_asks(
    "a sibling that begins like the root",
    lambda stage: stage.may_read(root=str(stage.tree)),
    lambda stage: stage.operator.grant(path=f"{stage.tree}-private/key"),
)
_asks(
    "the folder above the root",
    lambda stage: stage.may_read(root=str(stage.tree)),
    lambda stage: stage.operator.grant(root=str(stage.folder)),
)
_asks(
    "one more verb",
    lambda stage: stage.may_read(verbs=("stat",)),
    lambda stage: stage.operator.grant(path=str(stage.step), verbs=("stat", "read")),
)
_asks(
    "one more byte",
    lambda stage: stage.may_read(bytes=1000),
    lambda stage: stage.operator.grant(path=str(stage.step), bytes=1001),
)
_asks(
    "one more session",
    lambda stage: stage.may_read(sessions=1),
    lambda stage: stage.operator.grant(path=str(stage.step), sessions=2),
)
_asks("a command under an approval of reading", lambda stage: stage.may_read(), lambda stage: stage.run())
_asks(
    "the command with one more argument",
    lambda stage: stage.approved(stage.run()),
    lambda stage: stage.run(argv=("/usr/bin/touch", str(stage.effect), "--")),
)
_asks("a command for longer", lambda stage: stage.approved(stage.run()), lambda stage: stage.run(seconds=21))


def _denied(stage: Stage) -> None:
    request = stage.operator.store.request(Plan(grant=stage.operator.grant(path=str(stage.step)), effect="a test"))
    stage.operator.store.deny(request.id, reason="no")


def _revoked(stage: Stage) -> None:
    stage.operator.store.revoke(stage.may_read().id, reason="no longer")


def _expired(stage: Stage) -> None:
    stage.may_read(seconds=60)
    later = time.time() + 3600
    stage.monkeypatch.setattr(time, "time", lambda: later)


def _widened_on_disk(stage: Stage) -> None:
    """The approved request's file says more than what was signed."""
    approval = stage.may_read(bytes=10)
    request = stage.operator.store.get(approval.id)
    plan = Plan(grant=stage.operator.grant(path=str(stage.step)), effect=request.plan.effect)
    wider = request.model_copy(update={"plan": plan, "digest": plan.digest()})
    _file_of(stage, approval.id).write_text(wider.model_dump_json())


def _decided_on_disk(stage: Stage) -> None:
    """A pending request's file says that it was approved."""
    store = stage.operator.store
    request = store.request(Plan(grant=stage.operator.grant(path=str(stage.step)), effect="a test"))
    decision = store.get(stage.may_read(bytes=10).id).decision
    _file_of(stage, request.id).write_text(request.model_copy(update={"decision": decision}).model_dump_json())


def _certificate_of_another_request(stage: Stage) -> None:
    mine, other = stage.may_read(), stage.may_read(bytes=10)
    for one, from_ in ((mine.key_path, other.key_path), (mine.certificate_path, other.certificate_path)):
        shutil.copy(from_, one)
    stage.operator.store.revoke(other.id, reason="only the first")


def _certificate_of_another_ca(stage: Stage) -> None:
    sign_with_another_ca(stage, stage.may_read())


def sign_with_another_ca(stage: Stage, approval: Approval) -> None:
    make_key(stage.folder / "ca")
    options = ["-O", f"force-command=dflash-gate {approval.digest}", "-O", "source-address=127.0.0.0/8"]
    argv = ["ssh-keygen", "-q", "-s", str(stage.folder / "ca"), "-I", f"{approval.id} {'0' * 64}", "-n", "dflash-gate"]
    argv += ["-z", str(approval.serial), "-V", "-1m:+10m", "-O", "clear", *options]
    process.run([*argv, f"{approval.key_path}.pub"])


def _file_of(stage: Stage, request_id: str) -> Path:
    (file,) = stage.operator.store.folder.rglob(f"{request_id}.json")
    return file


for _name, _approved in {
    "what was denied": _denied,
    "what was revoked": _revoked,
    "what has expired": _expired,
    "a request file that was widened": _widened_on_disk,
    "a request file that says approved": _decided_on_disk,
    "the certificate of another request": _certificate_of_another_request,
    "a certificate of another CA": _certificate_of_another_ca,
}.items():
    _asks(_name, _approved, lambda stage: stage.operator.grant(path=str(stage.step)))


@attempt("an approval after hosts.yaml names other keys", "pins other keys")
def _(stage: Stage) -> object:
    approval = stage.may_read()
    keys = [stage.site.protected.host_keys[0]]
    other = stage.site.operator(stage.operator.store.folder, train={"host_keys": keys})
    return open_session(Connector(other.inventory, other.store, stage.operator.audit), other.train, approval)


@attempt("an approval on another host", "is for train, not for infer")
def _(stage: Stage) -> object:
    return open_session(stage.connector, stage.operator.infer, stage.may_read())


@attempt("an approval whose action was widened in memory", "is no longer in force|is approved; run")
def _(stage: Stage) -> object:
    approval = stage.may_read(bytes=10)
    wider = dataclasses.replace(approval, action=stage.operator.grant(path=str(stage.secret)))
    with open_session(stage.connector, stage.train, wider) as session:
        return session.stat(str(stage.secret))
