"""What a host is and has: asked once, in one session, by a program that is sent along and changes nothing.

The program is ``deploy/host/facts.py``; what it prints is read here into :class:`Facts`. Decisions about a host
(provisioning, launching, ``hosts check``) are made of these, so that they can be tested without the host.
"""

import json
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dflash.errors import DFlashError
from tasks import changes
from tasks.actions import Run, said
from tasks.approvals import Approved
from tasks.inventory import Host
from tasks.plans import Plan
from tasks.ssh import Connector

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin:/opt/conda/bin"
SECONDS, KERNEL_SECONDS = 90, 240
OUTPUT_BYTES = 1 << 20


class FactsError(DFlashError):
    """The program that asks a host what it is could not run there, or what it said cannot be read."""

    state_name = "FactsUnknown"


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


def _number(value: Any) -> Any:
    # nvidia-smi says [N/A] where a GPU tells nothing
    return None if isinstance(value, str) else value


Mebibytes = Annotated[int | None, BeforeValidator(_number)]


class Python(_Told):
    """One Python of the host; ``venv`` is whether it can make environments with pip in them."""

    path: str
    version: Annotated[str, Field(pattern=r"\A\d+\.\d+\.\d+\z")]
    prefix: str
    venv: bool

    @property
    def release(self) -> tuple[int, ...]:
        """``(3, 11, 7)``"""
        return tuple(map(int, self.version.split(".")))


class Platform(_Told):
    """``libc`` is as in ``["glibc", "2.36"]``."""

    system: str
    machine: str
    libc: Annotated[tuple[str, str], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class Memory(_Told):
    """Bytes."""

    total: int
    available: int


class Disk(_Told):
    """Bytes where a path is, or would be when it does not exist yet."""

    exists: bool
    writable: bool
    free: int
    total: int


class GpuFacts(_Told):
    """One GPU; ``total`` and ``free`` in MiB."""

    index: int
    uuid: str
    name: str
    total: Mebibytes
    free: Mebibytes
    driver: str


class Tool(_Told):
    """A program of the host and what it says its version is."""

    path: str
    version: str


class ServerFacts(_Told):
    """The inference server: the HTTP status of its health, None when nothing answers, and the models it serves."""

    url: str
    status: int | None
    models: tuple[str, ...] = Field(strict=False)


class Index(_Told):
    """A package index and whether the host reaches it."""

    url: str
    reachable: bool


class InstalledEnvironment(_Told):
    """The current venv: where it really is, versions of what matters, and whether fla's kernels load."""

    path: str
    packages: dict[str, str]
    kernel: bool | None
    """None: not tried, or flash-linear-attention is not installed."""


class Facts(_Told):
    """What was found out; None and what is missing from a mapping could not be, and ``problems`` say why."""

    now: float
    """The host's clock, seconds since the epoch, at the end of the asking."""
    boot: str | None
    user: str
    platform: Platform
    cpus: int
    memory: Memory | None
    disks: dict[str, Disk | None]
    pythons: tuple[Python, ...] | None = Field(strict=False)
    """The newest first."""
    gpus: tuple[GpuFacts, ...] | None = Field(strict=False)
    user_manager: bool | None
    """Whether systemd's user manager keeps what outlives the login."""
    uv: Tool | None = None
    nvcc: Tool | None = None
    server: ServerFacts | None = None
    index: Index | None = None
    environment: InstalledEnvironment | None = None
    problems: tuple[str, ...] = Field(strict=False)

    def free(self, path: str) -> int | None:
        """Bytes free where ``path`` is; None when that was not asked or could not be told."""
        disk = self.disks.get(path)
        return None if disk is None else disk.free


class Questions(_Told):
    """What is asked beyond what is always asked."""

    disks: tuple[str, ...] = ()
    server: str | None = None
    index: str | None = None
    environment: str | None = None
    """A venv whose packages are looked at."""
    kernel: bool = False
    """Try in :attr:`environment` that fla's kernels load; takes half a minute."""


def questions(host: Host, *, index: str | None = None, kernel: bool = False) -> Questions:
    """What there is to ask about ``host``, by its entry in hosts.yaml; ``index`` is the URL of a package index."""
    folders = (host.checkpoints, host.environments, host.jobs, host.cache, host.target)
    return Questions(
        disks=tuple(dict.fromkeys(folder for folder in folders if folder)),
        server=None if host.server is None else host.server.url,
        index=index,
        environment=None if host.environments is None else f"{host.environments.rstrip('/')}/current",
        kernel=kernel,
    )


def facts_action(host: Host, asked: Questions | None = None) -> Run:
    """The command that asks; without ``asked`` what :func:`questions` says."""
    asked = asked or questions(host)
    return Run(
        host=host.name,
        host_keys=host.fingerprints,
        argv=("/usr/bin/env", "python3", "-I", "-c", program(), json.dumps(asked.model_dump(), sort_keys=True)),
        env=(("PATH", SEARCH_PATH),),
        seconds=KERNEL_SECONDS if asked.kernel else SECONDS,
        bytes=OUTPUT_BYTES,
    )


def plan_facts(host: Host, asked: Questions | None = None) -> Plan | None:
    """What must be approved before ``host`` may be asked; None when nothing must be."""
    if not host.protected:
        return None
    return Plan(changes=(facts_action(host, asked),), effect="it is asked what it is and has; nothing changes there")


def facts(connector: Connector, host: Host, approved: Approved | None, asked: Questions | None = None) -> Facts:
    """Ask ``host``; ``approved`` is of :func:`plan_facts` for the same questions, None on an unprotected host.

    :raises Refused: the host is protected and this is not approved.
    :raises ConnectionFailed: it does not answer.
    :raises FactsError: it has no Python 3.9, or what came back is not what the program says.
    """
    action = facts_action(host, asked)
    output: dict[Literal["stdout", "stderr"], bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    status = changes.run(
        connector,
        host,
        None if approved is None else approved.of(action),
        action,
        lambda stream, data: output[stream].extend(data),
    )
    if status:
        last = (bytes(output["stderr"]).decode("utf-8", "replace").strip().splitlines() or ["no word"])[-1]
        raise FactsError(
            f"{host.name} could not be asked what it is (exit status {status}: {said(last)}); it needs a python3 of "
            "3.9 or newer in the usual places"
        )
    return read_facts(host.name, bytes(output["stdout"]))


def read_facts(name: str, told: bytes) -> Facts:
    """The facts in what the program printed on the host ``name``; raises :class:`FactsError` when it is none."""
    try:
        return Facts.model_validate_json(told)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "what it printed"
        raise FactsError(
            f"{name} told {said(where)} in a way that cannot be read ({said(problem['msg'].lower())}); "
            "something there prints into the program's output"
        ) from None


def program() -> str:
    """The text that is sent along."""
    return files("deploy").joinpath("host", "facts.py").read_text("utf-8")
