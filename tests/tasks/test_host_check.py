"""Whether a host can do what hosts.yaml has it do, decided from facts that are written down here."""

from collections.abc import Mapping
from typing import Any

import pytest

from dflash.report import Check
from tasks import host_check
from tasks.channel import GateError
from tasks.facts import Facts, FactsError
from tasks.host_check import check_host, failed, judge
from tasks.inventory import Host
from tasks.ssh import ConnectionFailed

GIB = 1 << 30
NOW = 1_800_000_000.0
GPU = {"index": 0, "uuid": "GPU-a", "name": "RTX A6000", "total": 49140, "free": 9000, "driver": "570"}
FACTS: dict[str, Any] = {
    "now": NOW,
    "boot": "b",
    "user": "root",
    "platform": {"system": "linux", "machine": "x86_64", "libc": ["glibc", "2.36"]},
    "cpus": 64,
    "memory": {"total": 280 * GIB, "available": 200 * GIB},
    "disks": {
        "/e": {"exists": True, "writable": True, "free": 900 * GIB, "total": 1000 * GIB},
        "/t": {"exists": True, "writable": False, "free": GIB, "total": GIB},
    },
    "pythons": [{"path": "/usr/bin/python3", "version": "3.12.3", "prefix": "/usr", "venv": True}],
    "gpus": [GPU],
    "user_manager": True,
    "uv": None,
    "nvcc": None,
    "server": {"url": "http://localhost:30000", "status": 200, "models": ["Qwen3.6-27B"]},
    "environment": {"path": "/e/abc", "packages": {"flash-linear-attention": "0.5.1"}, "kernel": True},
    "problems": [],
}


def host(**changes: Any) -> Host:
    entry: dict[str, Any] = {"name": "ct129", "role": "inference", "address": "10.1.230.172", "user": "root"}
    entry |= {"environments": "/e", "target": "/t", "server": {"kind": "sglang", "url": "http://localhost:30000"}}
    gpu = {"reserve_gib": 2, "kernel": "fla"}
    return Host.model_validate(entry | {"gpu": gpu} | changes, strict=False)


def facts(**changes: Any) -> Facts:
    return Facts.model_validate(FACTS | changes, strict=False)


def judged(found: Facts, entry: Host | None = None) -> dict[str, Check]:
    return {check.name: check for check in judge(entry or host(), found, NOW - 3, NOW + 0.1)}


def test_a_host_that_is_as_it_should_be_passes_everything() -> None:
    checks = judged(facts())
    assert {check.status for check in checks.values()} == {"pass"}
    assert list(checks) == [
        "python", "launcher", "clock", "disk /e", "disk /t", "gpu 0", "linear-attention kernel", "server",
    ]  # fmt: skip
    assert checks["gpu 0"].measured == "8.8 of 48.0 GiB free"
    assert checks["server"].explanation == "sglang serves Qwen3.6-27B"


def python(version: str, venv: bool) -> dict[str, Any]:
    return {"path": "/usr/bin/python3", "version": version, "prefix": "/usr", "venv": venv}


def disk(**changes: Any) -> dict[str, Any]:
    return {"/e": FACTS["disks"]["/e"] | changes}


@pytest.mark.parametrize(
    ("changes", "name", "status", "says"),
    [
        ({"pythons": [python("3.9.2", True)]}, "python", "fail", "needs 3.11 or newer"),
        ({"pythons": [python("3.12.3", False)]}, "python", "fail", "install python3-venv"),
        ({"pythons": []}, "python", "fail", "needs 3.11"),
        ({"pythons": None, "uv": {"path": "/uv", "version": "uv 1"}}, "python", "warn", "needs 3.11"),
        ({"user_manager": False}, "launcher", "pass", "no user manager"),
        ({"user_manager": None}, "launcher", "pass", "no user manager"),
        ({"now": NOW + 9}, "clock", "warn", "set one of the two clocks right"),
        ({"now": NOW - 90}, "clock", "fail", "set one of the two clocks right"),
        ({"now": NOW - 2.5}, "clock", "pass", "against this machine's"),
        ({"disks": disk(free=GIB)}, "disk /e", "fail", "make room"),
        ({"disks": disk(free=20 * GIB)}, "disk /e", "warn", "make room"),
        ({"disks": disk(writable=False)}, "disk /e", "fail", "root cannot write there"),
        ({"disks": {"/e": None}}, "disk /e", "skipped", "could not be told"),
        ({"disks": {"/t": disk(exists=False)["/e"]}}, "disk /t", "warn", "it is not there"),
        ({"gpus": []}, "gpus", "fail", "none is seen"),
        ({"gpus": None}, "gpus", "skipped", "did not answer"),
        ({"gpus": [GPU | {"free": 1000}]}, "gpu 0", "warn", "less than what is to be left"),
        ({"gpus": [GPU | {"free": None}]}, "gpu 0", "skipped", "does not tell"),
        ({"environment": None}, "linear-attention kernel", "skipped", "dflash-ops provision ct129"),
        ({"environment": {"path": "/e/a", "packages": {}, "kernel": None}}, "linear-attention kernel", "fail", "torch"),
        ({"server": None}, "server", "fail", "nothing answers there"),
        ({"server": FACTS["server"] | {"status": 503}}, "server", "fail", "is not well"),
    ],
)
def test_what_is_wrong_is_named_with_the_mend(changes: Mapping[str, Any], name: str, status: str, says: str) -> None:
    check = judged(facts(**changes))[name]
    assert check.status == status
    assert says in check.explanation


@pytest.mark.parametrize(
    ("loads", "wanted", "status", "says"),
    [
        (True, "fla", "pass", "load on the GPU"),
        (None, "fla", "skipped", "--kernel"),
        (False, "fla", "fail", r"do not load: /e/abc/bin/python ended with 1: \x1b[31mno CUDA"),
        (False, "torch", "warn", "do not load"),
    ],
)
def test_a_kernel_that_was_not_tried_is_never_green(loads: bool | None, wanted: str, status: str, says: str) -> None:
    environment = FACTS["environment"] | {"kernel": loads}
    found = facts(environment=environment, problems=["/e/abc/bin/python ended with 1: \x1b[31mno CUDA"])
    check = judged(found, host(gpu={"kernel": wanted}))["linear-attention kernel"]
    assert check.status == status
    assert says in check.explanation


def test_a_training_host_needs_neither_free_gpu_memory_nor_an_environment() -> None:
    entry = host(role="training", environments=None, server=None, gpu={})
    checks = judged(facts(gpus=[GPU | {"free": 10}], pythons=[python("3.9.2", True)]), entry)
    assert {name: one.status for name, one in checks.items() if one.status != "pass"} == {"python": "warn"}
    assert checks["clock"].explanation == "against this machine's; approvals are valid by it"


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (ConnectionFailed("ct129: no route to host"), ["reachable"]),
        (GateError("the session broke"), ["reachable"]),
        (FactsError("ct129 could not be asked"), ["reachable", "python"]),
    ],
)
def test_a_host_that_does_not_answer_fails_and_says_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, names: list[str]
) -> None:
    def asked(*_: Any) -> Facts:
        raise error

    monkeypatch.setattr(host_check, "facts", asked)
    checks = check_host(None, host(), None, host_check.check_questions(host()))  # type: ignore[arg-type]
    assert [check.name for check in checks] == names
    assert failed(checks)
    assert str(error) in checks[-1].explanation
