"""What a host's virtual environment has to be, and what is to be done there so that it is: facts in, actions out.

Pure, so that every platform can be tested as data. An environment is named after a digest of its wheels, its Python and
its platform: the same wish on the same host is the same environment, and nothing is ever changed within one.
``tasks/provisioning.py`` asks the host and performs the actions; ``deploy/host/environment.py`` is what runs there.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash.errors import UsageError
from tasks.actions import Put, Run, escape
from tasks.facts import SEARCH_PATH, Facts, GpuFacts, Python
from tasks.inventory import Host
from tasks.plans import Plan
from tasks.provision_errors import CurrentTakenError, GpuMissingError, HostDiskFullError, NoPythonError
from tasks.quantities import show_size
from tasks.resolving import Lock, Target, TargetError

ProfileName = Literal["slim", "eval", "train"]

OLDEST, NEWEST_TRIED = (3, 11), (3, 13)
"""Python releases: what this program needs, and up to where its dependencies are known to have wheels."""
MODULES = ("environment_files.py", "environment.py")
START = (
    "import sys, types; first, then = sys.argv[1:3]; del sys.argv[1:3]; "
    "module = sys.modules['environment_files'] = types.ModuleType('environment_files'); "
    "exec(first, module.__dict__); exec(then, {'__name__': '__main__'})"
)
GPU_EXTRA = "gpu"
KERNEL_TEST_MIB = 1536
"""What torch's context and two small kernels take of a GPU."""
BUILD_SECONDS, LOOK_SECONDS, FOLDER_SECONDS = 7200, 120, 60
SLOWEST_LINK = 1_000_000
"""Bytes a second that a parcel is given time for."""
ROOM_FACTOR = 1.25
"""What compiled files and the installer's own take beside the unpacked wheels."""


class NoEnvironmentsFolderError(UsageError):
    """A host whose entry in hosts.yaml names no folder for environments."""


@dataclass(frozen=True)
class Profile:
    """What an environment is for: the program's extras, what must import there, and what it takes of a disk."""

    extras: tuple[str, ...]
    imports: tuple[str, ...]
    room: int
    """Bytes, where the wheels come from an index and so are not known by size."""


BASE_IMPORTS = ("dflash.report", "dflash.prompts", "numpy", "pydantic", "rich", "safetensors.numpy", "typer", "yaml")
MODEL_IMPORTS = (*BASE_IMPORTS, "torch", "tokenizers", "transformers", "dflash.evaluate")
PROFILES: dict[ProfileName, Profile] = {
    "slim": Profile((), BASE_IMPORTS, 300_000_000),
    "eval": Profile(("model",), (*MODEL_IMPORTS, "matplotlib", "httpx"), 8_000_000_000),
    "train": Profile(("model", "datasets"), (*MODEL_IMPORTS, "datasets", "dflash.training.trainer"), 8_500_000_000),
}


class Found(BaseModel):
    """One complete environment of a host; ``used`` are the processes that use it."""

    model_config = ConfigDict(frozen=True, strict=True)

    name: str
    digest: str
    python: str
    built: float
    sound: bool
    """Whether its files are there in their sizes; looked at for the current one only."""
    used: tuple[int, ...] = Field(strict=False)


class Look(BaseModel):
    """What ``environment.py look`` has found."""

    model_config = ConfigDict(frozen=True, strict=True)

    exists: bool
    current: str | None
    """Where the symbolic link leads."""
    taken: bool
    """Something that is no symbolic link has its name."""
    previous: str | None
    environments: tuple[Found, ...] = Field(strict=False)
    wheels: dict[str, int]
    """Sizes by sha256."""
    parcels: tuple[str, ...] = Field(strict=False)
    free: int


@dataclass(frozen=True)
class Wish:
    """What is wanted on a host, as its facts allow it."""

    profile: ProfileName
    python: Python
    target: Target
    extras: tuple[str, ...]
    index: str
    """URL of the index that the host installs from; empty where it reaches none."""
    uv: str
    """Path of the uv that installs from it; empty: pip does."""
    kernels: Literal["", "load", "run"]
    gpu: str
    """uuid of the GPU that the kernels are tried on."""


@dataclass(frozen=True)
class Parcel:
    """The wheels that travel, in one file: ``name`` in the host's folder."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Provision:
    """What is to be done: nothing, when the environment is there and current."""

    host: Host
    wish: Wish
    lock: Lock
    name: str
    digest: str
    carried: tuple[str, ...]
    """sha256 of the wheels that have to travel."""
    satisfied: bool

    @property
    def folder(self) -> str:
        return environments_folder(self.host)

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"


def wish(
    facts: Facts, profile: ProfileName, host: Host, *, index: str | None = None, python: str | None = None
) -> Wish:
    """What ``profile`` means on ``host``, of which ``facts`` were told.

    ``index`` is the URL that was asked for in the facts; ``python`` a path or a release there, by default the newest
    that is known to do. Raises :class:`NoPythonError`, :class:`~tasks.resolving.TargetError` and
    :class:`GpuMissingError`.
    """
    if facts.platform.system != "linux":
        raise TargetError(f"{host.name} runs {escape(facts.platform.system)}; environments are made for Linux")
    chosen = _choose_python(facts.pythons or (), host, python)
    target = Target(version=chosen.version, machine=facts.platform.machine, libc=facts.platform.libc)
    target.platforms()  # of a libc that no wheel is made for nothing else matters
    gpu = _gpu(facts, profile, host)
    extras = PROFILES[profile].extras
    reached = index if index and facts.index is not None and facts.index.reachable else ""
    uv = facts.uv.path if reached and facts.uv is not None else ""
    if gpu is None:
        return Wish(profile, chosen, target, extras, reached, uv, "", "")
    # what trains there needs its memory more than a proof does
    runs = not host.protected and (gpu.free or 0) >= KERNEL_TEST_MIB
    return Wish(profile, chosen, target, (*extras, GPU_EXTRA), reached, uv, "run" if runs else "load", gpu.uuid)


def plan_provision(wish: Wish, host: Host, look: Look, lock: Lock) -> Provision:
    """What has to be done on ``host``, where ``look`` was found, for the environment of ``wish`` with ``lock``."""
    digest = environment_digest(lock, wish.target)
    name = f"{wish.profile}-py{'.'.join(wish.target.version.split('.')[:2])}-{digest[:16]}"
    there = next((one for one in look.environments if (one.name, one.digest) == (name, digest)), None)
    wheels = [one.sha256 for one in (*lock.packages, lock.pip)]
    if wish.index:
        # what no index has: this program, and the pip that needs none on the host
        wheels = [one.sha256 for one in (*lock.packages, lock.pip) if one.name in ("dflash-pipeline", "pip")]
    missing = tuple(sorted(sha256 for sha256 in wheels if sha256 not in look.wheels))
    return Provision(
        host=host,
        wish=wish,
        lock=lock,
        name=name,
        digest=digest,
        carried=() if there is not None and there.sound else missing,
        satisfied=there is not None and there.sound and look.current == name,
    )


def environment_digest(lock: Lock, target: Target) -> str:
    """sha256 of the wheels, the Python and the platform."""
    key = {"lock": lock.digest(), "python": target.version, "machine": target.machine, "libc": target.libc}
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def parcel_name(carried: Sequence[str]) -> str:
    """The name of the parcel of the wheels with these sha256: the same wheels, the same name."""
    return f".parcel-{hashlib.sha256(' '.join(carried).encode()).hexdigest()[:16]}.tar"


def look_action(host: Host) -> Run:
    """The command that looks at the environments of ``host``; it changes nothing."""
    return _run(host, ("/usr/bin/env", "python3", *program(), "look", environments_folder(host)), LOOK_SECONDS)


def actions(provision: Provision, look: Look, parcel: Parcel | None, unpacked: int | None) -> tuple[Run | Put, ...]:
    """What is to be done, in its order: the folder, the parcel, the build, each where it is needed.

    ``unpacked`` is what the wheels take when they are installed, None where that is not known. Raises
    :class:`HostDiskFullError` and :class:`CurrentTakenError` when that cannot end well.
    """
    if provision.satisfied:
        return ()
    host, folder = provision.host, provision.folder
    if look.taken:
        raise CurrentTakenError(f"{host.name}: {folder}/current is no symbolic link; {CurrentTakenError.mend}")
    room = _room(provision, unpacked)
    check_room(provision, look, parcel, room)
    planned: list[Run | Put] = []
    if parcel is not None and parcel.name not in look.parcels:
        if not look.exists:
            planned.append(_run(host, ("/usr/bin/env", "mkdir", "-p", "--", folder), FOLDER_SECONDS))
        planned.append(
            Put(
                host=host.name,
                host_keys=host.fingerprints,
                path=f"{folder}/{parcel.name}",
                size=parcel.size,
                sha256=parcel.sha256,
                seconds=600 + parcel.size // SLOWEST_LINK,
            )
        )
    spec = json.dumps(_spec(provision, parcel, room), sort_keys=True, separators=(",", ":"))
    argv = (provision.wish.python.path, *program(), "build", folder, spec)
    return (*planned, _run(host, argv, BUILD_SECONDS))


def check_room(provision: Provision, look: Look, parcel: Parcel | None, room: int) -> None:
    """Raise :class:`HostDiskFullError` when parcel, wheels and environment do not fit where they are to be."""
    # the parcel is there until its wheels are
    needed = room + (2 * parcel.size if parcel is not None else 0)
    if needed > look.free:
        raise HostDiskFullError(
            f"{provision.host.name}: {show_size(look.free)} are free for {escape(provision.folder)}, and "
            f"{show_size(needed)} are needed; nothing was sent: make room there, or name another folder in hosts.yaml"
        )


def change_plan(provision: Provision, changes: Sequence[Run | Put]) -> Plan:
    """The plan of ``changes`` for the operator's approval."""
    count, wish = len(provision.lock.packages), provision.wish
    how = f"from the index {wish.index}" if wish.index else "from the wheels that are sent"
    effect = (
        f"{count} packages are installed {how} into {provision.path}, with Python {wish.target.version}, and "
        f"{provision.folder}/current leads there; environments that no process uses are removed, but for the one before"
    )
    return Plan(changes=tuple(changes), effect=effect)


def environments_folder(host: Host) -> str:
    """Where the environments of ``host`` are. Raises :class:`NoEnvironmentsFolderError`."""
    if host.environments is None:
        raise NoEnvironmentsFolderError(f"hosts.{host.name}.environments is missing in hosts.yaml: name a folder there")
    return host.environments.rstrip("/")


def program() -> tuple[str, ...]:
    """The arguments that have a Python run what is sent along: a line that starts it, and its two modules' texts."""
    place = files("deploy").joinpath("host")
    return ("-I", "-c", START, *(place.joinpath(name).read_text("utf-8") for name in MODULES))


def _choose_python(found: Sequence[Python], host: Host, asked: str | None) -> Python:
    usable = [one for one in found if one.release[:2] >= OLDEST]
    if asked is not None:
        usable = [one for one in usable if one.path == asked or f"{one.version}.".startswith(f"{asked}.")]
    tried = [one for one in usable if one.release[:2] <= NEWEST_TRIED]
    if usable:
        return max(tried, key=lambda one: one.release) if tried else min(usable, key=lambda one: one.release)
    known = ", ".join(f"{escape(one.path)} ({one.version})" for one in found) or "none at all"
    wanted = "a Python of 3.11 or newer" if asked is None else f"Python {escape(asked)}"
    raise NoPythonError(
        f"{host.name} has no {wanted.removeprefix('a ')} in the usual places; found were {known}: install {wanted} "
        "there, or name another with --python"
    )


def _gpu(facts: Facts, profile: ProfileName, host: Host) -> GpuFacts | None:
    """The GPU that fla's kernels are for, that with the most free memory; None where they are not wanted."""
    wanted, found = host.gpu.kernel, facts.gpus or ()
    if profile == "slim" or wanted == "torch" or host.gpu.device == "cpu":
        return None
    if found:
        return max(found, key=lambda one: one.free or 0)
    if wanted == "fla":
        raise GpuMissingError(
            f"hosts.{host.name}.gpu.kernel is fla, and nvidia-smi shows no GPU there: mend the driver, or "
            "say kernel: torch"
        )
    return None


def _room(provision: Provision, unpacked: int | None) -> int:
    if unpacked is None:
        return PROFILES[provision.wish.profile].room
    return round(unpacked * ROOM_FACTOR)


def _spec(provision: Provision, parcel: Parcel | None, room: int) -> dict[str, object]:
    wish, lock = provision.wish, provision.lock
    return {
        "name": provision.name,
        "digest": provision.digest,
        "version": wish.target.version,
        "wheels": [[one.file_name, one.sha256] for one in lock.packages],
        "pip": [lock.pip.file_name, lock.pip.sha256],
        "carried": list(provision.carried),
        "index": wish.index,
        "uv": wish.uv,
        "parcel": "" if parcel is None else parcel.name,
        "imports": list(PROFILES[wish.profile].imports),
        "kernels": wish.kernels,
        "gpu": wish.gpu,
        "room": room,
    }


def _run(host: Host, argv: tuple[str, ...], seconds: int) -> Run:
    return Run(host=host.name, host_keys=host.fingerprints, argv=argv, env=(("PATH", SEARCH_PATH),), seconds=seconds)
