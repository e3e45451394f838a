"""What is asked of a checkpoint, and the one command that asks it of an inference host.

The command is an argv list made from the host's entry in ``hosts.yaml``, every setting of it explicit, so that two
evaluations differ in nothing that is not written down. It runs there as a job (:mod:`tasks.evaluation_jobs`).
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath

from dflash.errors import DFlashError, UsageError
from dflash.prompts import read_prompts
from tasks.actions import FileDigest, Launch
from tasks.inventory import Host, Inventory, Location
from tasks.plans import Plan
from tasks.relay import Settings, plan_relay

ON_VARIABLE = "DFLASH_INFERENCE_HOST"
"""Which inference host the worker that runs this process serves."""


class EvaluationError(DFlashError):
    """The evaluation did not end with a report; the message carries the last line the host printed."""

    state_name = "EvaluationFailed"


class NotProvisionedError(EvaluationError):
    """The inference host has no environment yet."""

    state_name = "NotProvisioned"


def inference_host(inventory: Inventory, name: str | None, environment: Mapping[str, str] = os.environ) -> Host:
    """Return the inference host called ``name``, else the one of this worker, else the only one.

    Raises :class:`UsageError` when none of them says which.
    """
    known = [host for host in inventory.hosts.values() if host.role == "inference"]
    name = name or environment.get(ON_VARIABLE)
    if name is None and len(known) == 1:
        return known[0]
    if name is None:
        names = ", ".join(host.name for host in known) or "none"
        raise UsageError(f"hosts.yaml has {len(known)} inference hosts ({names}): name one with --on, or give --queue")
    host = inventory.host(name)
    if host not in known:
        raise UsageError(f"{host.name} is a {host.role} host; evaluations run on an inference host")
    return host


@dataclass(frozen=True)
class Suite:
    """What is asked of every checkpoint: the prompts and how far they are continued."""

    prompts: Path
    max_new_tokens: int = 256
    num_prompts: int | None = None
    ignore_eos: bool = False
    thinking: str | None = None  # "on" | "off"; needed when the prompts are chats

    def digest(self) -> str:
        """Return the sha256 of all that decides the number: the prompt file's content and every setting.

        Where the file lies does not count. Raises :class:`dflash.prompts.PromptFileError` when it cannot be read.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "prompts"}
        content = {"prompts_sha256": read_prompts(self.prompts).sha256, **settings}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Workspace:
    """The folder of one evaluation on the inference host: that of its job."""

    path: PurePosixPath

    @property
    def output(self) -> PurePosixPath:
        """Where ``dflash evaluate`` writes its report."""
        return self.path / "report"

    @property
    def failure(self) -> PurePosixPath:
        """Where it says why there is none."""
        return self.path / "failure.json"


DRAFTER = Settings(what="drafter", by_identity=True)
"""How a checkpoint is relayed to be evaluated: what the evaluation needs of it, each state in a folder of its own."""


def plan_evaluation(sources: Sequence[Location], host: Host) -> Plan | None:
    """Return what must be approved before ``sources`` may be evaluated on ``host``; None when nothing must be."""
    return plan_relay(sources, f"the drafter is read out of it and evaluated on {host.name}")


def checkpoint_place(host: Host, source: Location) -> Location:
    """Return the folder of what is relayed of a checkpoint: in the cache of ``host``, by the source's host and path."""
    folder = folder_of(host, "cache") / "checkpoints" / (source.host.name if source.host else "local")
    return Location(host, str(folder / PurePosixPath(source.path).relative_to("/")))


def job_id(name: str, identity: str, suite: str, attempt: int) -> str:
    """Return the job's id: the same for the same attempt at the same content in the same suite, wherever it is made.

    Whoever evaluates it finds by this name what an earlier process started, and no host starts it twice. ``name`` is
    the checkpoint's, for people; ``suite`` is :meth:`Suite.digest`.
    """
    digest = hashlib.sha256(json.dumps([identity, suite, attempt]).encode()).hexdigest()
    plain = re.sub("[^A-Za-z0-9._-]+", "-", name).strip(".-")[:48] or "checkpoint"
    return f"evaluate-{plain}-{digest[:16]}"


def workspace(host: Host, job: str) -> Workspace:
    """Return the folder of the evaluation ``job`` on ``host``. Raises :class:`EvaluationError` where none can be."""
    return Workspace(folder_of(host, "jobs") / job)


def prompts_place(host: Host, sha256: str) -> PurePosixPath:
    """Return where the prompt file of that content lies on ``host``, for every evaluation that asks it."""
    return folder_of(host, "cache") / "prompts" / f"{sha256}.jsonl"


def evaluation_launch(host: Host, checkpoint: PurePosixPath, suite: Suite, job: str) -> Launch:
    """Return the job that evaluates ``checkpoint`` on ``host``: it starts only with the very prompts of ``suite``.

    Raises :class:`EvaluationError` when the host's entry lacks what it needs.
    """
    sha256 = read_prompts(suite.prompts).sha256
    prompts = prompts_place(host, sha256)
    cache = folder_of(host, "cache")
    return Launch(
        host=host.name,
        host_keys=host.fingerprints,
        jobs=str(folder_of(host, "jobs")),
        job=job,
        argv=tuple(evaluation_argv(host, checkpoint, prompts, workspace(host, job), suite)),
        # a job begins with no environment at all; what compiles kernels looks for its cache and for a compiler
        env=(
            ("HF_HUB_OFFLINE", "1"),
            ("LANG", "C.UTF-8"),
            ("PATH", "/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin"),
            ("PYTHONUNBUFFERED", "1"),
            ("TRITON_CACHE_DIR", str(cache / "triton")),
        ),
        requires=(FileDigest(path=str(prompts), sha256=sha256),),
    )


def evaluation_argv(
    host: Host, checkpoint: PurePosixPath, prompts: PurePosixPath, place: Workspace, suite: Suite
) -> list[str]:
    """Return the command that evaluates ``checkpoint`` on ``host``; every setting of the host is passed explicitly.

    Raises :class:`EvaluationError` when the host's entry names no environment or no target.
    """
    gpu, cache = host.gpu, folder_of(host, "cache")
    argv = [str(program(host)), "evaluate", "--target", str(folder_of(host, "target")), "--checkpoint", str(checkpoint)]
    argv += ["--prompts", str(prompts), "--output", str(place.output), "--failure", str(place.failure)]
    argv += ["--mode", "replay", "--max-new-tokens", str(suite.max_new_tokens)]
    if host.reference:
        argv += ["--reference", str(host.reference)]
    if host.server:
        argv += ["--server", str(host.server.url)]
    if suite.num_prompts is not None:
        argv += ["--num-prompts", str(suite.num_prompts)]
    if suite.ignore_eos:
        argv.append("--ignore-eos")
    if suite.thinking:
        argv += ["--thinking", suite.thinking]
    argv += ["--device", gpu.device, "--dtype", gpu.dtype, "--kernel", gpu.kernel]
    argv += ["--reserve-gib", f"{gpu.reserve_gib:g}", "--gpu-locks", str(cache / "gpu-locks")]
    argv += ["--cache", str(cache / "evaluations")]
    if gpu.offload:
        argv.append("--offload-if-needed" if gpu.offload == "auto" else "--offload")
    return argv


def program(host: Host) -> PurePosixPath:
    """The ``dflash`` of the host's current environment. Raises :class:`EvaluationError` where it has no place."""
    return folder_of(host, "environments") / "current" / "bin" / "dflash"


def not_provisioned(host: Host) -> NotProvisionedError:
    """The error of a host without :func:`program`."""
    return NotProvisionedError(
        f"{host.name} has no environment to run in ({program(host)} is not there): dflash-ops provision {host.name}"
    )


def folder_of(host: Host, field: str) -> PurePosixPath:
    """Return the folder that the entry of ``host`` names as ``field``. Raises :class:`EvaluationError` without one."""
    value = getattr(host, field)
    if value is None:
        raise EvaluationError(f"hosts.{host.name}.{field} is missing in hosts.yaml: an evaluation needs it")
    return PurePosixPath(value)
