"""Without an approval, and the protected host under another name than its own."""

import os
import shutil
from collections.abc import Callable
from typing import Any, Literal

from tasks import changes, ssh
from tasks.gate import open_session
from tasks.inventory import Host, Location
from tasks.process import DEVNULL, PIPE
from tasks.relay import relay
from tasks.routes import Settings
from tasks.ssh import Connector
from tests.bypass.stage import DISGUISED, Stage, attempt
from tests.guard_state import make_key

PROTECTED = "is protected"
IS_TRAIN = "is train, which is protected"


@attempt("control connection without an approval", PROTECTED)
def _(stage: Stage) -> object:
    return stage.connector.connect(stage.train)


@attempt("ssh process without an approval", PROTECTED)
def _(stage: Stage) -> object:
    return _ssh(stage.connector, stage.train, stage)


@attempt("session without an approval", PROTECTED)
def _(stage: Stage) -> object:
    return open_session(stage.connector, stage.train, None)


@attempt("command without an approval", PROTECTED)
def _(stage: Stage) -> object:
    return changes.run(stage.connector, stage.train, None, stage.run(), lambda *_: None)


@attempt("relay without an approval", PROTECTED)
def _(stage: Stage) -> object:
    source = Location(stage.train, str(stage.step))
    return relay(stage.connector, None, source, Location(stage.operator.infer, str(stage.effect)))


def _ssh(connector: Connector, host: Host, stage: Stage) -> object:
    running = connector.start(host, ["touch", str(stage.effect)], stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
    _, said = running.communicate(timeout=60)
    if running.returncode == 255:
        raise connector.failure(host, said.decode())
    return running.returncode


Prepare = Callable[[Stage], dict[str, dict[str, Any]]]
Ways = Literal["both", "control connection", "ssh process"]


def _disguise(name: str, prepare: Prepare, says: str, *, host: str = "infer", by: Ways = "both") -> None:
    """One disguise of the protected host, for one or both ways to a host that the program has."""

    def connect(stage: Stage) -> object:
        connector = stage.elsewhere(**prepare(stage))
        return connector.connect(connector.inventory.host(host))

    def start(stage: Stage) -> object:
        connector = stage.elsewhere(**prepare(stage))
        return _ssh(connector, connector.inventory.host(host), stage)

    for way, function in (("control connection", connect), ("ssh process", start)):
        if by in ("both", way):
            attempt(f"{name}, {way}", says)(function)


def _ecdsa_only(stage: Stage) -> list[str]:
    return [key for key in stage.site.ordinary.host_keys if key.startswith("ecdsa")]


def _at(stage: Stage, address: str, port: int | None = None, **more: Any) -> dict[str, Any]:
    return {"address": address, "port": port or stage.site.protected.port, **more}


def _by_config(stage: Stage) -> dict[str, dict[str, Any]]:
    """The operator's ~/.ssh/config has an Include, and in that the name leads to the protected host."""
    inner, outer, wrapper = stage.folder / "inner", stage.folder / "outer", stage.folder / "bin" / "ssh"
    inner.write_text(f"Host *.example\n  HostName {stage.site.protected.address}\n")
    outer.write_text(f"Include {inner}\n")
    wrapper.parent.mkdir()
    real = shutil.which("ssh")
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = -G ] && exec {real} -F {outer} "$@"\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    stage.monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    stage.monkeypatch.setattr(ssh, "effective_settings", REAL_SETTINGS)
    return {"infer": _at(stage, "gpu.example")}


REAL_SETTINGS = ssh.effective_settings


def _through_a_jump(stage: Stage) -> dict[str, dict[str, Any]]:
    stage.settings[DISGUISED] = Settings(DISGUISED, proxy_jump=("infer",))
    return {"spare": _spare(stage)}


def _as_a_jump(hop: str) -> Callable[[Stage], dict[str, dict[str, Any]]]:
    def prepare(stage: Stage) -> dict[str, dict[str, Any]]:
        stage.settings[stage.site.ordinary.address] = Settings(stage.site.ordinary.address, proxy_jump=(hop,))
        return {}

    return prepare


def _as_a_disguised_jump(stage: Stage) -> dict[str, dict[str, Any]]:
    stage.settings[stage.site.ordinary.address] = Settings(stage.site.ordinary.address, proxy_jump=("spare",))
    return {"spare": _spare(stage)}


def _spare(stage: Stage) -> dict[str, Any]:
    """An entry for the protected host as one more inference host, with a key pinned that it does not have."""
    return stage.site.ordinary_entry(**_at(stage, DISGUISED), host_keys=[make_key(stage.folder / "stranger")])


def _alias(stage: Stage) -> dict[str, dict[str, Any]]:
    """A container on the protected host that has an sshd of its own, which hosts.yaml names as an alias."""
    own = stage.more.alias
    alias = {"name": "box", "address": own.address, "port": own.port, "host_keys": list(own.host_keys)}
    return {"train": {"aliases": [alias]}, "infer": _at(stage, DISGUISED, own.port)}


_disguise("its address, spelled otherwise", lambda stage: {"infer": _at(stage, DISGUISED)}, IS_TRAIN)
_disguise("another port", lambda stage: {"infer": _at(stage, DISGUISED, stage.site.protected.second_port)}, IS_TRAIN)
_disguise("another key type", lambda stage: {"infer": _at(stage, DISGUISED, host_keys=_ecdsa_only(stage))}, IS_TRAIN)
_disguise(
    "its IPv6 address",
    lambda stage: {"infer": _at(stage, "::1", stage.more.ipv6_port)},
    IS_TRAIN,
    by="control connection",
)
_disguise("the alias with its own sshd", _alias, IS_TRAIN, by="ssh process")
_disguise(
    "a port forward",
    lambda stage: {"infer": _at(stage, "127.0.0.1", stage.more.forwarded_port)},
    IS_TRAIN,
    by="ssh process",
)
_disguise("a name that the ssh configuration includes", _by_config, IS_TRAIN)
_disguise(
    "an entry added under another name",
    lambda stage: {"spare": _spare(stage)},
    IS_TRAIN,
    host="spare",
    by="control connection",
)
_disguise("through a jump host", _through_a_jump, IS_TRAIN, host="spare")
_disguise("as the jump host of another, by name", _as_a_jump("train"), "no jump goes over it", by="ssh process")
_disguise(
    "as the jump host of another, by address", _as_a_jump("127.1.2.6"), "no jump goes over it", by="control connection"
)
_disguise("as the jump host of another, disguised", _as_a_disguised_jump, IS_TRAIN)
