"""Where only this program enforces anything: certificates that the operator's CA did not sign so."""

import dataclasses
from typing import Any

from tasks.gate import open_session
from tests.bypass.stage import Stage, attempt
from tests.bypass.store import sign_with_another_ca
from tests.sshds import Operator


def _client(stage: Stage) -> Operator:
    """The operator, for whom the protected host is an ordinary sshd with nothing installed."""
    train = stage.site.ordinary_entry(role="training", enforcement="client", source_addresses=["127.0.0.0/8"])
    other = {"address": "127.1.9.9", "host_keys": list(stage.site.protected.host_keys)}
    client = stage.site.operator(stage.operator.store.folder, train=train, infer=other)
    client.connector.warn = lambda _: None
    return client


def _ask(client: Operator, approval: Any, verb: str, path: str, **span: int) -> object:
    with open_session(client.connector, client.train, approval) as session:
        if verb == "read":
            with session.read(path, **span) as stream:
                return stream.length
        return getattr(session, verb)(path)


@attempt("client enforcement, a file that was not approved", "not approved")
def _(stage: Stage) -> object:
    client = _client(stage)
    return _ask(client, client.approve(path=str(stage.step)), "stat", str(stage.secret))


@attempt("client enforcement, a link out of the root", "not approved")
def _(stage: Stage) -> object:
    client = _client(stage)
    return _ask(client, client.approve(root=str(stage.tree)), "stat", f"{stage.tree}/link")


@attempt("client enforcement, one byte more than the budget", "bytes")
def _(stage: Stage) -> object:
    client = _client(stage)
    approval = client.approve(path=str(stage.step), bytes=1000)
    return _ask(client, approval, "read", str(stage.step), offset=0, length=1001)


@attempt("client enforcement, one session more than approved", "sessions")
def _(stage: Stage) -> object:
    client = _client(stage)
    approval = client.approve(path=str(stage.step), sessions=1)
    _ask(client, approval, "stat", str(stage.step))
    return _ask(client, approval, "stat", str(stage.step))


@attempt("client enforcement, a certificate of another CA", "another CA")
def _(stage: Stage) -> object:
    client = _client(stage)
    approval = client.approve(path=str(stage.step))
    sign_with_another_ca(stage, approval)
    return _ask(client, approval, "stat", str(stage.step))


@attempt("client enforcement, the certificate of another approval", "something else")
def _(stage: Stage) -> object:
    client = _client(stage)
    approval, other = client.approve(path=str(stage.step)), client.approve(path=str(stage.secret))
    mixed = dataclasses.replace(approval, certificate_path=other.certificate_path)
    return _ask(client, mixed, "stat", str(stage.step))
