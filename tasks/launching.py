"""Launching a described run as a job of a host: once, whoever asks and however often, and never as anybody's child.

What there is to do is decided without the host (:func:`prepare`): the actions of one plan, approved together on a
protected host. The start itself is the gate's ``launch``, which makes the job's folder first, so that of two operators
who start the same run one starts it and the other finds it. ``deploy/host/start_job.py`` goes along and stays with the
job there.
"""

import errno
import io
import json
import os
import tempfile
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import DFlashError, UsageError
from tasks import changes
from tasks.actions import AnyChange, FileDigest, Launch, Put, escape, said
from tasks.actions import Run as Command
from tasks.approvals import Approval, Approved
from tasks.channel import GateError, RequestFailed
from tasks.inventory import Host, Inventory
from tasks.jobs import JobStatus, approval_in_force, job_folder, jobs_folder, plan_observation, status
from tasks.plans import Plan
from tasks.requests import sync_folder
from tasks.run_file import Described, Sent, fill
from tasks.ssh import ConnectionFailed, Connector
from tasks.state import state_dir

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PUT_SECONDS, START_SECONDS = 60, 120
THERE_ALREADY = "may not be replaced"
"""What the gate says of a file that it would have to replace; behind it stands the sha256 of what is there."""


class LaunchError(DFlashError):
    """The job was not started; the message says why and what to do."""

    state_name = "LaunchFailed"


class LaunchUnknownError(DFlashError):
    """The host went while the job was started: it cannot be told whether it runs."""

    state_name = "LaunchUnknown"


class DiskFullError(LaunchError):
    """No room is left, here or on the host; nothing was started."""

    state_name = "DiskFull"


@dataclass(frozen=True)
class Prepared:
    """A launch that is decided: its id, the files to put there and the command that starts it."""

    job: str
    host: Host
    described: Described
    puts: tuple[tuple[Put, bytes], ...]
    launch: Launch

    @property
    def changes(self) -> tuple[AnyChange, ...]:
        """What is done there, in this order."""
        return (*(put for put, _ in self.puts), self.launch)

    @property
    def plan(self) -> Plan | None:
        """What must be approved: the changes and looking at the job afterwards; None when nothing must be."""
        observation = plan_observation(self.host, self.job)
        if observation is None:
            return None
        effect = f"job {self.job} starts and goes on by itself, and may be looked at"
        return Plan(grant=observation.grant, changes=self.changes, effect=effect)


@dataclass(frozen=True)
class Launched:
    """A job that is there; ``found`` is whether it was there already, so that nothing was started."""

    host: str
    status: JobStatus
    found: bool

    @property
    def job(self) -> str:
        return self.status.job


class Known(BaseModel):
    """What this machine keeps of a launch that was asked for here."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: str
    job: str
    name: str
    asked: float
    config_sha256: str | None
    script_sha256: str | None


def run_host(inventory: Inventory, described: Described, on: str | None) -> Host:
    """The host to launch on: ``on``, else the one in the run; raises ``UsageError`` when neither says."""
    name = on or described.run.host
    if name is None:
        raise UsageError("neither run.yaml nor --on names a host; name one")
    host = inventory.host(name)
    if on is not None and described.run.host is not None and inventory.host(described.run.host) != host:
        raise UsageError(f"run.yaml is for {described.run.host}, and --on says {host.name}; correct one of them")
    return host


def prepare(described: Described, host: Host) -> Prepared:
    """Decide all that launching ``described`` on ``host`` does there; pure.

    :raises UsageError: the host's entry names no jobs folder, or no environment where the command needs one.
    """
    run, jobs = described.run, jobs_folder(host).rstrip("/")
    job = described.launch_id(host.name)
    start = Sent(".py", files("deploy").joinpath("host", "start_job.py").read_bytes())
    # content stands in the name: what is there under it is either this or an error
    start_path = f"{jobs}/start-{start.sha256[:12]}.py"
    folder = job_folder(host, job)
    words = {"folder": folder}
    sent = [(start_path, start)]
    for word, file in (("config", described.config), ("script", described.script)):
        if file is not None:
            words[word] = f"{folder}.{word}{file.suffix}"
            sent.append((words[word], file))
    environment = run.environment or (host.environments and f"{host.environments.rstrip('/')}/current")
    if environment:
        words |= {"environment": environment, "python": f"{environment}/bin/python"}
    used = [part for part in (*run.command, *run.env.values()) if "{environment}" in part or "{python}" in part]
    if used and not environment:
        raise UsageError(f"hosts.{host.name}.environments is missing in hosts.yaml, and the run uses {used[0]}: add it")
    settings = {
        "folder": folder,
        "job": job,
        "name": run.name,
        "attempt": run.attempt,
        "config": None if described.config is None else described.config.sha256,
        "script": None if described.script is None else described.script.sha256,
        "code": list(run.code),
    }
    path = f"{environment}/bin:{SYSTEM_PATH}" if environment else SYSTEM_PATH
    env = {"PATH": path, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
    env |= {name: fill(value, words) for name, value in run.env.items()}
    command = tuple(fill(part, words) for part in run.command)
    try:
        launch = Launch(
            host=host.name,
            host_keys=host.fingerprints,
            argv=("/usr/bin/env", "python3", "-I", start_path, json.dumps(settings, sort_keys=True), *command),
            cwd=run.cwd or folder,
            env=tuple(env.items()),
            requires=tuple(FileDigest(path=where, sha256=file.sha256) for where, file in sent),
            jobs=jobs,
            job=job,
            seconds=START_SECONDS,
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise UsageError(f"the run cannot be started as it is: {escape(problem['msg'])}") from None
    puts = tuple((_put(host, where, file), file.content) for where, file in sent)
    return Prepared(job, host, described, puts, launch)


def find(connector: Connector, prepared: Prepared) -> Launched | None:
    """The job, when it is there already; None when it is not, or when looking is not approved.

    :raises ConnectionFailed: the host does not answer.
    """
    approval = approval_in_force(connector.store, prepared.host, prepared.job)
    if prepared.host.protected and approval is None:
        return None
    return _found(connector, prepared, approval)


def launch(connector: Connector, prepared: Prepared, approved: Approved | None) -> Launched:
    """Start the job, or find it started; ``approved`` is of :attr:`Prepared.plan`.

    :raises Refused: the host is protected and this is not approved.
    :raises ConnectionFailed: the host does not answer; nothing was started.
    :raises LaunchUnknownError: it went in the middle of the start.
    :raises LaunchError: it was not started; :class:`DiskFullError` where no room was left.
    """
    host = prepared.host
    reading = None if approved is None else approved.read
    remember(prepared)
    for put, content in prepared.puts:
        approval = None if approved is None else approved.of(put)
        try:
            _put_there(connector, host, approval, put, content)
        except RequestFailed as error:
            raise _failed(host, f"{escape(put.path)} was not written", error) from None
    try:
        approval = None if approved is None else approved.of(prepared.launch)
        pid = changes.launch(connector, host, approval, prepared.launch)
    except RequestFailed as error:
        found = _found(connector, prepared, reading) if "File exists" in error.reason else None
        if found is not None:
            return found
        raise _failed(host, f"job {prepared.job} was not started", error) from None
    except (GateError, ConnectionFailed) as error:
        raise LaunchUnknownError(
            f"{host.name} went while job {prepared.job} was started, so it may run or not ({error}); launch it again: "
            "it is found if it is there, and never started twice"
        ) from error
    return Launched(host.name, JobStatus(prepared.job, "running", pid=pid), found=False)


def remember(prepared: Prepared, folder: Path | None = None) -> None:
    """Keep in the state folder, before anything happens, that this launch was asked for here.

    :raises DiskFullError, LaunchError: it cannot be written; nothing was started.
    """
    described, file = prepared.described, _records(folder) / f"{prepared.host.name}-{prepared.job}.json"
    known = Known(
        host=prepared.host.name,
        job=prepared.job,
        name=described.run.name,
        asked=time.time(),
        config_sha256=None if described.config is None else described.config.sha256,
        script_sha256=None if described.script is None else described.script.sha256,
    )
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            _write(file, known.model_dump_json().encode())
    except OSError as error:
        kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else LaunchError
        raise kind(f"{file}: {os.strerror(error.errno or 0)}; nothing was started: make room and try again") from None


def _write(file: Path, content: bytes) -> None:
    """Write ``file`` whole or not at all; two commands may do so at once."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", delete=False) as partial:
        try:
            partial.write(content)
            partial.flush()
            os.fsync(partial.fileno())
            os.replace(partial.name, file)
        except BaseException:
            os.unlink(partial.name)
            raise
    sync_folder(file.parent)


def known_launches(folder: Path | None = None) -> tuple[Known, ...]:
    """The launches that were asked for on this machine, the newest first; a damaged record is left out."""
    found = []
    for file in _records(folder).glob("*.json"):
        try:
            found.append(Known.model_validate_json(file.read_bytes()))
        except (ValidationError, OSError):
            continue
    return tuple(sorted(found, key=lambda known: -known.asked))


def _records(folder: Path | None) -> Path:
    return folder or state_dir() / "launches"


def _put(host: Host, path: str, file: Sent) -> Put:
    return Put(
        host=host.name,
        host_keys=host.fingerprints,
        path=path,
        size=len(file.content),
        sha256=file.sha256,
        seconds=PUT_SECONDS,
    )


def _put_there(connector: Connector, host: Host, approval: Approval | None, put: Put, content: bytes) -> None:
    """Write one file; the same content that is there already is as good. Raises :class:`RequestFailed`."""
    try:
        changes.put(connector, host, approval, put, io.BytesIO(content))
    except RequestFailed as error:
        if THERE_ALREADY in error.reason and put.sha256 in error.reason:
            return
        # somebody else wrote it in the same moment, which the start, that requires just these bytes, will tell
        if "File exists" in error.reason:
            return
        if host.protected or "No such file" not in error.reason:
            raise
        _make_folder(connector, host)
        changes.put(connector, host, None, put, io.BytesIO(content))


def _found(connector: Connector, prepared: Prepared, reading: Approval | None) -> Launched | None:
    found = status(connector, prepared.host, reading, prepared.job)
    if found.state == "unreachable":
        raise ConnectionFailed(found.message)
    return None if found.state == "unknown job" else Launched(prepared.host.name, found, found=True)


def _make_folder(connector: Connector, host: Host) -> None:
    """The folder of all jobs of an unprotected host; on a protected one the operator makes it, see ``guard setup``."""
    action = Command(
        host=host.name,
        host_keys=host.fingerprints,
        argv=("/usr/bin/env", "mkdir", "-p", jobs_folder(host)),
        env=(("PATH", SYSTEM_PATH),),
        seconds=PUT_SECONDS,
    )
    output = bytearray()
    if changes.run(connector, host, None, action, lambda _, data: output.extend(data)):
        raise LaunchError(f"{host.name}: the folder of jobs was not made: {said(output.decode('utf-8', 'replace'))}")


def _failed(host: Host, what: str, error: RequestFailed) -> LaunchError:
    if "No space left" in error.reason or "Disk quota" in error.reason:
        return DiskFullError(f"{host.name}: {what}, its disk is full; make room there and launch it again")
    mend = "launch it again when that is mended"
    if "No such file" in error.reason:
        mend = f"make the folder {jobs_folder(host)} there, or correct what is missing, and launch it again"
    return LaunchError(f"{host.name}: {what} ({said(error.reason)}); {mend}")
