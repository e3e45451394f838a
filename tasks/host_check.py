"""``hosts check``: whether a host can do what hosts.yaml has it do, decided from its facts.

Each check says what was measured, against what limit, and what to do. What could not be looked at is ``skipped``, which
reads "not verified" and is never green.
"""

import time
from collections.abc import Callable, Iterator
from typing import Literal

from dflash.report import Check
from tasks.actions import said
from tasks.approvals import Approved
from tasks.channel import GateError
from tasks.facts import Facts, FactsError, GpuFacts, Questions, facts, questions
from tasks.inventory import Host
from tasks.quantities import show_size
from tasks.ssh import ConnectionFailed, Connector, HostKeyError

Status = Literal["pass", "warn", "fail", "skipped"]

PYTHON = (3, 11)
SKEW_WARN, SKEW_FAIL = 5.0, 60.0
"""Seconds. A certificate is valid by the clock of the host that it is shown to, and counts from the decision here."""
DISK_WARN, DISK_FAIL = 40 << 30, 5 << 30
"""Bytes. An evaluation's environment takes some 10 GiB, a checkpoint and the taps that are kept of it as much again."""
WRITTEN = ("environments", "jobs", "cache")
"""Folders of a host's entry that are written to."""


def check_questions(host: Host, *, kernel: bool = False) -> Questions:
    """What is asked for a check of ``host``; ``kernel`` also tries that fla's kernels load, which takes a while."""
    return questions(host, kernel=kernel)


def check_host(
    connector: Connector,
    host: Host,
    approved: Approved | None,
    asked: Questions,
    *,
    clock: Callable[[], float] = time.time,
) -> tuple[Check, ...]:
    """Ask ``host`` and judge what it says; ``approved`` is of :func:`tasks.facts.plan_facts` for ``asked``.

    A host that does not answer is a failed check and no error. Raises ``Refused`` when it is protected and this is not
    approved.
    """
    before = clock()
    try:
        found = facts(connector, host, approved, asked)
    except (ConnectionFailed, HostKeyError, GateError) as error:
        return (_check("reachable", "fail", None, None, f"{error}; nothing else is verified"),)
    except FactsError as error:
        return (
            _check("reachable", "pass", "yes", None, "it answers"),
            _check("python", "fail", None, None, str(error)),
        )
    after = clock()
    seconds = round(after - before, 1)
    reachable = _check("reachable", "pass", f"{seconds} s", None, "it answers, and told what it is in so long")
    return (reachable, *judge(host, found, before, after))


def judge(host: Host, found: Facts, before: float, after: float) -> tuple[Check, ...]:
    """What ``found`` means for ``host``; it was asked between ``before`` and ``after``, by this machine's clock."""
    return (
        _python(host, found),
        _launcher(found),
        _clock(host, found, before, after),
        *_disks(host, found),
        *_gpus(host, found),
        *_kernel(host, found),
        *_server(host, found),
    )


def failed(checks: tuple[Check, ...]) -> bool:
    """Whether the host cannot do what it is for."""
    return any(check.status == "fail" for check in checks)


def _python(host: Host, found: Facts) -> Check:
    limit = ".".join(map(str, PYTHON))
    fit = [one for one in found.pythons or () if one.venv and one.release >= PYTHON]
    if fit:
        return _check(
            "python", "pass", f"{fit[0].version} {said(fit[0].path)}", limit, "environments can be made of it"
        )
    newest = found.pythons[0].version if found.pythons else None
    if any(one.release >= PYTHON for one in found.pythons or ()):
        why = "its venv or ensurepip is missing: install python3-venv there"
    else:
        why = f"an environment needs {limit} or newer: install one there, or uv, which brings its own"
    return _check("python", "fail" if host.environments and found.uv is None else "warn", newest, limit, why)


def _launcher(found: Facts) -> Check:
    if found.user_manager:
        return _check(
            "launcher", "pass", "systemd-run", None, "jobs get a scope of their own, which outlives the login"
        )
    return _check("launcher", "pass", "setsid", None, "no user manager that stays: jobs get a session of their own")


def _clock(host: Host, found: Facts, before: float, after: float) -> Check:
    # its clock was read in between, at the very end: only what lies outside is surely wrong
    skew = found.now - after if found.now > after else min(0.0, found.now - before)
    status: Status = "pass" if abs(skew) <= SKEW_WARN else "warn" if abs(skew) <= SKEW_FAIL else "fail"
    means = "approvals are valid by it" if host.protected else "times of jobs and logs are by it"
    mend = "" if status == "pass" else "; set one of the two clocks right (chrony, systemd-timesyncd)"
    return _check("clock", status, f"{skew:+.1f} s", f"{SKEW_WARN:.0f} s", f"against this machine's; {means}{mend}")


def _disks(host: Host, found: Facts) -> Iterator[Check]:
    for path, disk in found.disks.items():
        name = f"disk {said(path)}"
        if disk is None:
            yield _check(name, "skipped", None, show_size(DISK_WARN), "how much is free could not be told")
            continue
        written = any(getattr(host, field) == path for field in WRITTEN)
        if not written:
            status: Status = "pass" if disk.exists else "warn"
            why = "only read" if disk.exists else "it is not there; correct hosts.yaml or make it"
            yield _check(name, status, show_size(disk.free), None, why)
        elif not disk.writable:
            yield _check(name, "fail", "not writable", None, f"{said(found.user)} cannot write there; change its owner")
        else:
            status = "fail" if disk.free < DISK_FAIL else "warn" if disk.free < DISK_WARN else "pass"
            why = "room for what is written there" if status == "pass" else "make room before something fails halfway"
            yield _check(name, status, show_size(disk.free), show_size(DISK_WARN), why)


def _gpus(host: Host, found: Facts) -> Iterator[Check]:
    if found.gpus is None:
        yield _check("gpus", "skipped", None, None, "nvidia-smi did not answer")
    elif not found.gpus:
        wanted = host.gpu.device != "cpu"
        status: Status = "fail" if wanted and host.role == "inference" else "warn" if wanted else "pass"
        yield _check("gpus", status, 0, None, "none is seen: look at the driver with nvidia-smi" if wanted else "none")
    for gpu in found.gpus or ():
        yield _gpu(host, gpu)


def _gpu(host: Host, gpu: GpuFacts) -> Check:
    name, limit = f"gpu {gpu.index}", f"{host.gpu.reserve_gib:g} GiB"
    if gpu.free is None or gpu.total is None:
        return _check(name, "skipped", None, limit, f"{said(gpu.name)} does not tell its memory")
    measured = f"{gpu.free / 1024:.1f} of {gpu.total / 1024:.1f} GiB free"
    if host.protected or gpu.free / 1024 > host.gpu.reserve_gib:
        return _check(name, "pass", measured, limit, f"{said(gpu.name)}, driver {said(gpu.driver)}")
    why = "less than what is to be left to others, so an evaluation would be refused there"
    return _check(name, "warn", measured, limit, f"{said(gpu.name)}: {why}")


def _kernel(host: Host, found: Facts) -> Iterator[Check]:
    if host.environments is None:
        return
    wanted, limit = host.gpu.kernel, f"kernel: {host.gpu.kernel}"
    if found.environment is None:
        why = f"nothing is provisioned yet: dflash-ops provision {host.name}"
        yield _check("linear-attention kernel", "skipped", None, limit, why)
        return
    version = found.environment.packages.get("flash-linear-attention")
    loads = found.environment.kernel
    if version is None:
        status: Status = "fail" if wanted == "fla" else "warn" if wanted == "auto" else "pass"
        why = "fla is not installed, so torch computes linear attention"
        mend = "" if status == "pass" else f"; dflash-ops provision {host.name} brings it where there is a GPU"
        yield _check("linear-attention kernel", status, "torch", limit, why + mend)
    elif loads is None:
        why = "installed; whether its kernels load was not tried: --kernel"
        yield _check("linear-attention kernel", "skipped", f"fla {said(version)}", limit, why)
    elif loads:
        yield _check("linear-attention kernel", "pass", f"fla {said(version)}", limit, "its kernels load on the GPU")
    else:
        tried = next((said(one) for one in found.problems if found.environment.path in one), "no word")
        status = "warn" if wanted == "torch" else "fail"
        yield _check(
            "linear-attention kernel", status, f"fla {said(version)}", limit, f"its kernels do not load: {tried}"
        )


def _server(host: Host, found: Facts) -> Iterator[Check]:
    if host.server is None:
        return
    server = found.server
    if server is None or server.status is None:
        why = next((said(one) for one in found.problems if one.startswith(host.server.url)), "nothing answers there")
        yield _check("server", "fail", None, 200, f"{host.server.kind}: {why}; nothing here ever starts it again")
    elif server.status != 200:
        yield _check("server", "fail", server.status, 200, f"{host.server.kind} is not well; look at its log")
    else:
        models = ", ".join(map(said, server.models)) or "no model named"
        yield _check("server", "pass", 200, 200, f"{host.server.kind} serves {models}")


def _check(name: str, status: Status, measured: float | int | str | None, limit: int | str | None, why: str) -> Check:
    return Check(name=name, status=status, measured=measured, limit=limit, explanation=why)
