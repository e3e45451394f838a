"""Changes: an approval of one used for another, used twice, or lacking the second person."""

import hashlib
import json

from tasks import changes
from tasks.actions import Launch, Part, Put, Run, Signal, Upload
from tasks.plans import Plan
from tests.bypass.stage import Stage, attempt
from tests.changing import with_second_person
from tests.guard_state import make_key
from tests.sshds import write_gate_configuration

NOT_APPROVED = "not the approved one"
USED = "used already|sessions are used"


def _harmless(stage: Stage) -> Run:
    return stage.run(argv=("/usr/bin/true",))


def _put(stage: Stage, content: bytes) -> Put:
    return Put(
        host="train",
        host_keys=stage.train.fingerprints,
        path=str(stage.effect),
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        seconds=20,
    )


def _launch(stage: Stage, job: str) -> Launch:
    argv = ("/usr/bin/touch", str(stage.effect))
    return Launch(host="train", host_keys=stage.train.fingerprints, jobs=str(stage.folder), job=job, argv=argv)


def _signal(stage: Stage, job: str) -> Signal:
    return Signal(host="train", host_keys=stage.train.fingerprints, jobs=str(stage.folder), job=job, signal="KILL")


@attempt("a command twice", USED)
def _(stage: Stage) -> object:
    action = _harmless(stage)
    approval = stage.approved(action).of(action)
    changes.run(stage.connector, stage.train, approval, action, lambda *_: None)
    return changes.run(stage.connector, stage.train, approval, action, lambda *_: None)


@attempt("a command again with a copied key", USED)
def _(stage: Stage) -> object:
    action = _harmless(stage)
    approval = stage.approved(action).of(action)
    copy = stage.own(approval)
    changes.run(stage.connector, stage.train, approval, action, lambda *_: None)
    return stage.past(copy)


@attempt("a command with another argument", NOT_APPROVED)
def _(stage: Stage) -> object:
    action = _harmless(stage)
    return stage.past(stage.approved(action).of(action), stage.run().canonical())


@attempt("reading under the certificate of a command", NOT_APPROVED)
def _(stage: Stage) -> object:
    action = _harmless(stage)
    return stage.past(stage.approved(action).of(action), stage.operator.grant(root="/").canonical())


@attempt("a file of other content", NOT_APPROVED)
def _(stage: Stage) -> object:
    action = _put(stage, b"good")
    return stage.past(stage.approved(action).of(action), _put(stage, b"evil").canonical())


@attempt("a job under another name", NOT_APPROVED)
def _(stage: Stage) -> object:
    action = _launch(stage, "one")
    return stage.past(stage.approved(action).of(action), _launch(stage, "other").canonical())


@attempt("a signal to another job", NOT_APPROVED)
def _(stage: Stage) -> object:
    action = _signal(stage, "one")
    return stage.past(stage.approved(action).of(action), _signal(stage, "other").canonical())


@attempt("an upload to somewhere else", "at the approved endpoint, bucket and keys")
def _(stage: Stage) -> object:
    found = stage.step.stat()
    action = Upload(
        host="train",
        host_keys=stage.train.fingerprints,
        path=str(stage.step),
        identity=(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns),
        endpoint="http://127.0.0.1:9",
        bucket="dflash",
        parts=(Part(offset=0, length=10, key="part"),),
        seconds=20,
    )
    elsewhere = ["http://127.0.0.1:9/elsewhere/part?X-Amz-Signature=0"]
    return changes.upload(stage.connector, stage.train, stage.approved(action).of(action), action, elsewhere)


@attempt("an emergency that is valid for an hour", "break-glass is for a certificate of minutes")
def _(stage: Stage) -> object:
    action = stage.run(break_glass=True)
    approval = stage.approved(action).of(action)
    command = ("-O", f"force-command=dflash-gate {action.digest()}")
    options = ("-V", "-1m:+60m", "-O", "clear", *command, "-O", "source-address=127.0.0.0/8")
    return stage.past(stage.operator.forge(approval, *options))


@attempt("one person where two are asked for", "only one person approved this")
def _(stage: Stage) -> object:
    two = with_second_person(stage.operator, stage.folder / "second")
    stage.approved(stage.run())
    return two.store.require(Plan(changes=(stage.run(),), effect="a test"))


@attempt("one person past the program where the host asks for two", "a second person has to sign this as well")
def _(stage: Stage) -> object:
    _two_persons(stage)
    action = stage.run()
    return stage.past(stage.approved(action).of(action), action.canonical() + b"\n{}")


@attempt("a second person who signed nothing", "no approval of it by second")
def _(stage: Stage) -> object:
    _two_persons(stage)
    action = stage.run()
    approval = stage.approved(action).of(action)
    signature = {"second": "second", "signature": "-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"}
    return stage.past(approval, action.canonical() + b"\n" + json.dumps(signature).encode())


def _two_persons(stage: Stage) -> None:
    """The host's gate asks for a second person until the test is over."""
    before = (stage.site.folder / "gate.json").read_text()
    stage.open.callback((stage.site.folder / "gate.json").write_text, before)
    persons = {"second_persons": {"second": make_key(stage.folder / "second")}}
    write_gate_configuration(stage.site.folder, **json.loads(before) | persons)
