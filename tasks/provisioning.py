"""Having a host get its environment: it is asked, the wheels are gathered, what travels is sent, and it is built there.

Every step can be broken off and done again: wheels are kept here, a parcel goes on where it stopped, and what a builder
left half done the next one clears away. Nothing is ever changed in an environment that is complete.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import DFlashError
from tasks import changes, process
from tasks.actions import Put, Run, escape, said
from tasks.approvals import Approved
from tasks.channel import GateError
from tasks.environments import (
    Look,
    Parcel,
    ProfileName,
    Provision,
    actions,
    change_plan,
    environments_folder,
    look_action,
    parcel_name,
    plan_provision,
    wish,
)
from tasks.errors import Refused
from tasks.facts import Facts, Questions, facts, facts_action
from tasks.inventory import Host, Location
from tasks.own_wheel import own_wheel
from tasks.plans import Plan
from tasks.process import last_line
from tasks.provision_errors import (
    PROBLEMS,
    BuildFailedError,
    CurrentTakenError,
    GpuMissingError,
    HostChangedError,
    HostDiskFullError,
    InterruptedProvisionError,
    NoPythonError,
    ProvisionError,
)
from tasks.relay import relay
from tasks.ssh import ConnectionFailed, Connector
from tasks.state import state_dir
from tasks.transfer import Progress
from tasks.wheelhouse import FULL, Wheelhouse, pack, sha256_of, unpacked_bytes

REMEMBERED_SECONDS = 24 * 3600.0
MOST_TRIES = 3
MENDED_THERE = (HostDiskFullError, CurrentTakenError, NoPythonError, GpuMissingError)
"""What is wrong with a host that was seen, and not with what is asked of it."""
PROBED = "pip/"
"""The project whose page tells whether an index is there."""
INDEX_OF_PIP = (
    "from pip._internal.commands import create_command as c; print(c('download').parse_args([])[0].index_url)"
)

Notice = Callable[[str], None]


class Observation(BaseModel):
    """What a host is and has in environments, and the index that it was asked about."""

    model_config = ConfigDict(frozen=True)

    facts: Facts
    look: Look
    index: str | None
    at: float
    """Seconds since the epoch, here."""


@dataclass(frozen=True)
class Environment:
    """An environment that is complete and current."""

    host: str
    path: str
    digest: str
    packages: int
    python: str
    changed: bool
    """Whether anything on the host was."""
    removed: tuple[str, ...] = ()
    """Old ones that nothing used."""


@dataclass(frozen=True)
class Prepared:
    """What is to be done, decided and gathered; the actions are empty when nothing is."""

    provision: Provision
    actions: tuple[Run | Put, ...]
    parcel: Path | None

    @property
    def plan(self) -> Plan | None:
        """What has to be approved; None where nothing has to."""
        if not self.actions or not self.provision.host.protected:
            return None
        return change_plan(self.provision, self.actions)

    def environment(self, *, changed: bool, removed: tuple[str, ...] = ()) -> Environment:
        made = self.provision
        count = len(made.lock.packages)
        return Environment(made.host.name, made.path, made.digest, count, made.wish.target.version, changed, removed)


def questions(host: Host) -> Questions:
    """What is asked of ``host``: its folder's disk, and whether it reaches an index."""
    index = index_for(host)
    return Questions(disks=(environments_folder(host),), index=None if index is None else f"{index}/{PROBED}")


def index_for(host: Host) -> str | None:
    """The index that ``host`` may install from: that of its entry, else the one that this machine's pip uses.

    None where that has a password in it, which is not for a host to see.
    """
    if host.index is not None:
        return host.index.rstrip("/")
    told = process.run([sys.executable, "-c", INDEX_OF_PIP], check=False)
    url = last_line(told.stdout)
    if told.returncode or urlsplit(url).scheme not in ("http", "https") or "@" in urlsplit(url).netloc:
        return None
    return url.rstrip("/")


def plan_observation(host: Host, asked: Questions) -> Plan | None:
    """What must be approved before ``host`` may be looked at; None when nothing must be."""
    if not host.protected:
        return None
    effect = "it is asked what it is, and its environments are looked at; nothing changes there"
    return Plan(changes=(facts_action(host, asked), look_action(host)), effect=effect)


def observe(connector: Connector, host: Host, approved: Approved | None, asked: Questions) -> Observation:
    """Ask ``host``; ``approved`` is of :func:`plan_observation`. A protected host's answer is remembered.

    Raises as :func:`tasks.facts.facts`.
    """
    told = facts(connector, host, approved, asked)
    done = _perform(connector, host, approved, look_action(host), lambda _: None)
    try:
        look = Look.model_validate_json(json.dumps(done))
    except ValidationError as error:
        raise HostChangedError(
            f"{host.name} told its environments in a way that cannot be read: {said(str(error))}"
        ) from None
    index = None if asked.index is None else asked.index.removesuffix(f"/{PROBED}")
    seen = Observation(facts=told, look=look, index=index, at=time.time())
    if host.protected:
        _memory(host).parent.mkdir(parents=True, exist_ok=True)
        temporary = _memory(host).with_suffix(".new")
        temporary.write_text(seen.model_dump_json(), encoding="utf-8")
        os.replace(temporary, _memory(host))
    return seen


def remembered(host: Host) -> Observation | None:
    """What a protected host was seen to be within the last day and not changed since, so that it is asked for once."""
    with suppress(OSError, ValidationError):
        seen = Observation.model_validate_json(_memory(host).read_bytes())
        if 0 <= time.time() - seen.at < REMEMBERED_SECONDS:
            return seen
    return None


def forget(host: Host) -> None:
    """Have :func:`remembered` know nothing: the host is about to change, or has."""
    _memory(host).unlink(missing_ok=True)


def decide(
    host: Host,
    seen: Observation,
    profile: ProfileName,
    *,
    python: str | None = None,
    refresh: bool = False,
    notice: Notice | None = None,
) -> Provision:
    """What has to be done on ``host``, which was ``seen``, for ``profile``.

    ``python`` is as for :func:`tasks.environments.wish`; ``refresh`` asks the index anew. Raises as that and as
    :meth:`tasks.wheelhouse.Wheelhouse.lock`.
    """
    wanted = wish(seen.facts, profile, host, index=seen.index, python=python)
    if notice is not None:
        notice(f"choosing the wheels for Python {wanted.target.version} on {escape(wanted.target.machine)}")
    lock = Wheelhouse().lock(own_wheel(), wanted.extras, wanted.target, constraints(), refresh=refresh)
    return plan_provision(wanted, host, seen.look, lock)


def prepare(decided: Provision, seen: Observation, notice: Notice | None = None) -> Prepared:
    """Gather here what has to travel for what was ``decided``, and say what is to be done with it.

    Raises as :meth:`tasks.wheelhouse.Wheelhouse.gather` and :func:`tasks.environments.actions`.
    """
    if decided.satisfied:
        return Prepared(decided, (), None)
    house, wanted, lock = Wheelhouse(), decided.wish, decided.lock
    wheels = list(decided.carried) if wanted.index else [one.sha256 for one in (*lock.packages, lock.pip)]
    gathered = house.gather(lock, wheels, wanted.target, notice)
    unpacked = None if wanted.index else unpacked_bytes(gathered.values())
    file, parcel = None, None
    if decided.carried:
        file = house.folder / "parcels" / parcel_name(decided.carried)
        with house.alone():
            pack({sha256: gathered[sha256] for sha256 in decided.carried}, file)
        parcel = Parcel(file.name, file.stat().st_size, sha256_of(file))
    return Prepared(decided, actions(decided, seen.look, parcel, unpacked), file)


def next_plan(host: Host, profile: ProfileName, *, python: str | None = None, refresh: bool = False) -> Plan | None:
    """What has to be approved next: to look at ``host`` or, where it was seen, to change it; None when nothing has to.

    Raises as :func:`decide` and :func:`prepare`.
    """
    prepared = recalled(host, profile, python=python, refresh=refresh)
    return plan_observation(host, questions(host)) if prepared is None else prepared.plan


def recalled(
    host: Host,
    profile: ProfileName,
    *,
    python: str | None = None,
    refresh: bool = False,
    notice: Notice | None = None,
) -> Prepared | None:
    """What is to be done on a protected ``host`` as it was seen to be; None where it has to be looked at (again).

    That it needed nothing then says nothing about now, nor does it that it had no room. Raises as :func:`decide` and
    :func:`prepare`.
    """
    seen = remembered(host) if host.protected else None
    if seen is None:
        return None
    try:
        prepared = prepare(decide(host, seen, profile, python=python, refresh=refresh, notice=notice), seen, notice)
    except MENDED_THERE:
        # by now it may have been
        forget(host)
        return None
    return prepared if prepared.actions else None


def provision(
    connector: Connector,
    approved: Approved | None,
    prepared: Prepared,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> Environment:
    """Do what was prepared; ``approved`` is of its plan.

    ``progress`` gets (bytes sent, bytes in all) of the parcel, ``notice`` a line for each step. Raises
    :class:`~tasks.errors.Refused`, :class:`~tasks.ssh.ConnectionFailed` and one of the errors of this module; what was
    current on the host still is, then.
    """
    host = prepared.provision.host
    if not prepared.actions:
        return prepared.environment(changed=False)
    forget(host)
    done: dict[str, Any] = {}
    for action in prepared.actions:
        if isinstance(action, Put):
            assert prepared.parcel is not None
            with _room_there(host):
                _send(connector, host, approved, action, prepared.parcel, progress, notice)
        elif action is prepared.actions[-1]:
            done = _perform(connector, host, approved, action, notice or (lambda _: None))
        else:
            _run(connector, host, approved, action)
    if prepared.parcel is not None:
        prepared.parcel.unlink(missing_ok=True)
    return prepared.environment(changed=bool(done["built"] or done["switched"]), removed=tuple(done["removed"]))


def constraints() -> str:
    """The versions that the tests ran with, where this program has them beside it, and those of the GPU's kernels."""
    root = Path(__file__).resolve().parent.parent
    places = (root / "deploy" / "constraints.txt", root / "constraints.txt")
    shipped = next((place.read_text("utf-8") for place in places if place.is_file()), "")
    return shipped + "\n" + files("deploy").joinpath("host", "gpu-constraints.txt").read_text("utf-8")


@contextmanager
def one_at_a_time(host: Host, notice: Notice | None = None) -> Iterator[None]:
    """Have no other command of this machine provision ``host`` in the block."""
    place = state_dir() / "provision"
    place.mkdir(parents=True, exist_ok=True)
    with (place / f"{host.name}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if notice is not None:
                notice(f"another command provisions {host.name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _memory(host: Host) -> Path:
    return state_dir() / "provision" / f"{host.name}.json"


def _send(
    connector: Connector,
    host: Host,
    approved: Approved | None,
    action: Put,
    parcel: Path,
    progress: Progress | None,
    notice: Notice | None,
) -> None:
    """The parcel, by a relay that goes on where it stopped; a protected host takes it as the file that was approved."""
    if host.protected:
        approval = None if approved is None else approved.of(action)
        with parcel.open("rb") as content:
            changes.put(connector, host, approval, action, content, progress)
    else:
        source, destination = Location(None, str(parcel)), Location(host, action.path)
        relay(connector, None, source, destination, progress=progress, notice=notice)


def _run(connector: Connector, host: Host, approved: Approved | None, action: Run) -> None:
    output = bytearray()
    approval = None if approved is None else approved.of(action)
    status = changes.run(connector, host, approval, action, lambda _, data: output.extend(data))
    if status:
        last = last_line(output.decode("utf-8", "replace"))
        raise BuildFailedError(f"{host.name}: {said(last) or f'exit status {status}'}; {BuildFailedError.mend}")


def _perform(
    connector: Connector, host: Host, approved: Approved | None, action: Run, notice: Notice
) -> dict[str, Any]:
    """Run the program of ``deploy/host/environment.py``; what it says was done."""
    told = _Told(host, notice)
    approval = None if approved is None else approved.of(action)
    try:
        status = changes.run(connector, host, approval, action, told.take)
    except (Refused, ConnectionFailed):
        raise
    except GateError as error:
        raise InterruptedProvisionError(f"{error}; {InterruptedProvisionError.mend}") from error
    return told.done(status)


class _Told:
    """What the program prints, line by line."""

    def __init__(self, host: Host, notice: Notice) -> None:
        self._host, self._notice = host, notice
        self._rest = b""
        self._stderr = bytearray()
        self._last: dict[str, Any] = {}

    def take(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if stream == "stderr":
            self._stderr.extend(data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with suppress(ValueError, AttributeError, TypeError):
                self._last = dict(json.loads(line))
                if "step" in self._last:
                    self._notice(f"{self._host.name}: {step_in_words(self._last)}")

    def done(self, status: int) -> dict[str, Any]:
        """What was done; raises the error of the problem that was told."""
        if status == 0 and isinstance(self._last.get("done"), dict):
            return dict(self._last["done"])
        message = said(str(self._last.get("message") or last_line(self._stderr.decode("utf-8", "replace"))))
        message = f"{self._host.name}: {message or f'the builder ended with exit status {status}'}"
        kind = str(self._last.get("problem"))
        if kind == "disk-full":
            raise HostDiskFullError(f"{message}; nothing half-made is left: make room there and run it again")
        error = PROBLEMS.get(kind, ProvisionError)
        raise error(f"{message}; {error.mend}")


def step_in_words(step: dict[str, Any]) -> str:
    """What the builder is about, for people."""
    match step.get("step"):
        case "wait":
            return f"{said(str(step.get('why')))}; waiting for it"
        case "unpack":
            return "unpacking the wheels"
        case "venv":
            return f"making a venv of Python {said(str(step.get('python')))}"
        case "install":
            return f"installed {said(str(step.get('done')))} of {said(str(step.get('of')))} packages"
        case "verify":
            return f"verifying {said(str(step.get('what')))}"
        case "mark":
            return "marking it complete"
        case "switch":
            return f"current leads to {said(str(step.get('to')))} now"
        case "prune":
            return f"removing {said(str(step.get('name')))}, which nothing uses"
    return said(str(step.get("step")))


@contextmanager
def _room_there(host: Host) -> Iterator[None]:
    """A transfer that fails because the host's disk is full says so by its name."""
    try:
        yield
    except (Refused, ConnectionFailed):
        raise
    except DFlashError as error:
        if any(os.strerror(code) in str(error) for code in FULL):
            raise HostDiskFullError(f"{error}; make room on {host.name} and run it again") from error
        raise
