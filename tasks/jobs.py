"""Jobs that were launched on a host: how they are, what they write, and their end.

A job goes on by itself (see :func:`tasks.changes.launch` and the gate's ``do_launch``), so all that is known of it is
what it left in ``<jobs>/<job>/``: ``job.json``, ``heartbeat``, ``output.log`` and at last ``exit``. One short reading
session tells its state. That a host does not answer says nothing about its jobs: ``unreachable`` is a state of
knowledge and never means that a job has failed.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import DFlashError, UsageError
from tasks import changes
from tasks.actions import ReadGrant, Signal, escape, said
from tasks.approvals import Approval, ApprovalStore
from tasks.channel import GateError, RequestFailed
from tasks.errors import HostBusy
from tasks.gate import Entry, GateSession, open_session
from tasks.inventory import Host
from tasks.job_status import JobStatus, judge, unreachable
from tasks.plans import Plan
from tasks.requests import Origin
from tasks.ssh import ConnectionFailed, Connector

__all__ = ["JobStatus"]

SignalName = Literal["TERM", "INT", "KILL", "HUP", "USR1", "USR2"]

START_SECONDS = 600.0
"""How long a job may take from its folder to its record: the files that it requires are hashed in between."""
PROTECTED_POLL_SECONDS = 10.0
"""A protected host serves two sessions at once; whoever follows a job there takes one for a moment only."""
PIECE = 1 << 20
LONGEST_RECORD = 1 << 20
MOST_JOBS = 200
GRANT_SESSIONS, GRANT_BYTES = 2_000, 1 << 28
LEAST_BYTES = 1 << 20
"""What one look may read; an approval with that much left is enough for it."""

Model = TypeVar("Model", bound=BaseModel)
Answer = TypeVar("Answer")


class NoJobsFolderError(UsageError):
    """A host whose entry in hosts.yaml names no folder for jobs."""


class JobError(DFlashError):
    """A job cannot be looked at or stopped as it was asked for."""

    state_name = "JobFailed"


def plan_observation(
    host: Host, job: str | None = None, *, sessions: int = GRANT_SESSIONS, bytes: int = GRANT_BYTES
) -> Plan | None:
    """What must be approved to look at ``job``, or at all jobs, of ``host``: one read grant; None when nothing must be.

    :raises UsageError: no job can be called so.
    :raises NoJobsFolderError: the host's entry names no ``jobs``.
    """
    folder = jobs_folder(host) if job is None else job_folder(host, job)
    if not host.protected:
        return None
    grant = ReadGrant(
        host=host.name,
        host_keys=host.fingerprints,
        root=folder,
        verbs=("stat", "list", "read"),
        sessions=sessions,
        bytes=bytes,
    )
    what = "all jobs are" if job is None else f"job {job} is"
    return Plan(grant=grant, effect=f"{what} looked at, with all they write; nothing changes")


def approval_in_force(store: ApprovalStore, host: Host, job: str | None = None) -> Approval | None:
    """An approval under which ``job``, or all jobs, of a protected host may be looked at now; None without one."""
    least = plan_observation(host, job, sessions=1, bytes=LEAST_BYTES)
    approved = None if least is None else store.find(least)
    return None if approved is None else approved.read


def require_observation(
    store: ApprovalStore, host: Host, job: str | None = None, origin: Origin | None = None
) -> Approval | None:
    """The approval under which ``job``, or all jobs, may be looked at; None on an unprotected host.

    Raises ``Refused`` without one, which names the request for :func:`plan_observation`.
    """
    plan = plan_observation(host, job)
    if plan is None:
        return None
    return approval_in_force(store, host, job) or store.require(plan, origin).read


def status(connector: Connector, host: Host, approval: Approval | None, job: str) -> JobStatus:
    """How ``job`` is, from one short reading session; ``approval`` is of :func:`require_observation`.

    A host that does not answer makes it ``unreachable``, whatever the job does.

    :raises Refused: the host is protected and this is not approved.
    :raises JobError: the host answers, and what lies there cannot be read.
    """
    job_folder(host, job)
    try:
        with open_session(connector, host, approval) as session:
            return look(session, job)
    except UNREACHED as error:
        return unreachable(job, error)


def all_statuses(connector: Connector, host: Host, approval: Approval | None) -> tuple[JobStatus, ...]:
    """How every job of ``host`` is, the newest first and no more than 200 of them.

    :raises ConnectionFailed: the host does not answer, so nothing is known of any job.
    :raises Refused, JobError: see :func:`status`.
    """
    folder = jobs_folder(host)
    with open_session(connector, host, approval) as session:
        found = _entries(session, folder) or ()
        folders = sorted((one for one in found if one.kind == "directory"), key=lambda one: -one.mtime_ns)
        names = [one.name for one in folders if _is_job_id(one.name)][:MOST_JOBS]
        looked = [_looked(session, name) for name in names]
    return tuple(one for one in looked if one is not None)


def logs(connector: Connector, host: Host, approval: Approval | None, job: str, *, offset: int = 0) -> Iterator[bytes]:
    """What ``job`` has written by now, from ``offset`` on, in pieces of at most 1 MiB.

    :raises JobError: there is no such job, or its log is shorter than that.
    :raises ConnectionFailed, GateError: the host does not answer, or went in the middle.
    """
    job_folder(host, job)
    with open_session(connector, host, approval) as session:
        yield from _written(session, job, offset)


def follow(
    connector: Connector,
    host: Host,
    approval: Approval | None,
    job: str,
    on_bytes: Callable[[bytes], None],
    *,
    offset: int = 0,
    poll: float = 1.0,
    patience: float = 300.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Hand on what ``job`` writes, from ``offset`` on, until it is over, and return how it ended.

    A link that breaks is opened again and nothing is handed on twice. ``unreachable`` is returned when the host has
    not answered for ``patience`` seconds, with what was known of the job before.

    :raises Refused: see :func:`status`; a host without a free session is tried again.
    """
    job_folder(host, job)
    poll = max(poll, PROTECTED_POLL_SECONDS) if host.protected else poll
    answered, wait, known = clock(), poll, JobStatus(job, "unreachable")
    while True:
        try:
            with open_session(connector, host, approval) as session:
                while True:
                    # in this order: what is read after the end was seen is all there is
                    known = look(session, job)
                    for piece in () if known.log_bytes is None else _written(session, job, offset):
                        on_bytes(piece)
                        offset += len(piece)
                    answered, wait = clock(), poll
                    if known.over:
                        return known
                    if host.protected:
                        break
                    sleep(poll)
        except (*UNREACHED, HostBusy) as error:
            if clock() - answered > patience:
                return replace(known, state="unreachable", message=unreachable(job, error).message)
            wait = min(2 * wait, 30.0)
        sleep(wait)


def plan_stop(host: Host, job: str, name: SignalName = "TERM") -> tuple[Signal, Plan | None]:
    """The signal that asks ``job`` to end, and what must be approved for it: each signal is its own approval."""
    job_folder(host, job)
    action = Signal(host=host.name, host_keys=host.fingerprints, jobs=jobs_folder(host), job=job, signal=name)
    effect = f"the processes of job {job} get SIG{name}" + (", and what they did not save is lost" * (name == "KILL"))
    return action, Plan(changes=(action,), effect=effect) if host.protected else None


def stop(connector: Connector, host: Host, approval: Approval | None, action: Signal) -> int:
    """Send the signal of :func:`plan_stop` and return the id of the job's first process.

    :raises JobError: there is no such job, or it has ended; nothing was signalled.
    """
    try:
        return changes.signal(connector, host, approval, action)
    except RequestFailed as error:
        if "No such file" in error.reason:
            raise _unknown(host, action.job) from None
        raise JobError(f"{host.name}: {said(error.reason)}") from None


def jobs_folder(host: Host) -> str:
    """The folder of all jobs of ``host``; raises :class:`NoJobsFolderError`."""
    if host.jobs is None:
        raise NoJobsFolderError(f"hosts.{host.name}.jobs is missing in hosts.yaml: name the folder that jobs lie in")
    return host.jobs


def job_folder(host: Host, job: str) -> str:
    """The folder of ``job`` on ``host``; raises ``UsageError`` for what can be no job's id."""
    if not _is_job_id(job):
        raise UsageError(
            f"'{escape(job)}' is no job's id: letters, digits and . _ - only, at most 100; see dflash-ops jobs list"
        )
    return f"{jobs_folder(host).rstrip('/')}/{job}"


def look(session: GateSession, job: str) -> JobStatus:
    """How ``job`` is, in an open session; see :func:`status` for what it raises."""
    folder = job_folder(session.host, job)
    found = _entries(session, folder)
    if found is None:
        return _never(session.host, job)
    files = {entry.name: entry for entry in found if entry.kind == "file"}
    if "job.json" not in files:
        return _without_record(session, job, folder, files)
    record = _read_model(session, f"{folder}/job.json", _Record)
    known = JobStatus(
        job,
        "running",
        pid=record.pid,
        started=record.started,
        argv=tuple(record.argv),
        log_bytes=files["output.log"].size if "output.log" in files else None,
    )
    if "exit" in files:
        return _exited(session, folder, known)
    alive = _asked(session.stat_job, f"{folder}/job.json")
    decided = judge(known, record.birth, alive, files.get("heartbeat"), time.time())
    if decided.state == "vanished":
        # it may have ended between the two looks
        again = _entries(session, folder)
        if again is None:
            return _never(session.host, job)
        if any(entry.name == "exit" for entry in again):
            return _exited(session, folder, known)
    return decided


UNREACHED = (ConnectionFailed, GateError)
"""That a host, or what serves it, did not answer. A request that failed is a :class:`JobError` before it gets here."""


class _Written(BaseModel):
    """What the gate left in a file; of another kind it is not believed."""

    model_config = ConfigDict(strict=True)


class _Record(_Written):
    job: str
    argv: list[str]
    pid: int
    birth: str
    started: float


class _Exit(_Written):
    exit: int
    ended: float


def _looked(session: GateSession, name: str) -> JobStatus | None:
    """One of several jobs: None for a folder that is no job's; a record that cannot be read hides no other job."""
    try:
        found = look(session, name)
    except JobError as error:
        return JobStatus(name, "unknown job", message=str(error))
    return None if found.state == "unknown job" else found


def _never(host: Host, job: str) -> JobStatus:
    return JobStatus(job, "unknown job", message=str(_unknown(host, job)))


def _unknown(host: Host, job: str) -> JobError:
    return JobError(
        f"{host.name} has no job {job} in {escape(jobs_folder(host))}; see dflash-ops jobs list {host.name}"
    )


def _without_record(session: GateSession, job: str, folder: str, files: dict[str, Entry]) -> JobStatus:
    """A job's folder is made first and its record comes last; what is no job's folder has neither."""
    if "output.log" not in files and files:
        return _never(session.host, job)
    found = _asked(session.stat_job, folder)
    there = time.time() if found.now is None else found.now
    if there - found.mtime_ns / 1e9 < START_SECONDS:
        return JobStatus(job, "running", message="it is being started")
    return JobStatus(job, "vanished", message="its start was interrupted and it never ran; launch the next --attempt")


def _exited(session: GateSession, folder: str, known: JobStatus) -> JobStatus:
    ended = _read_model(session, f"{folder}/exit", _Exit)
    message = ""
    if ended.exit < 0:
        try:
            message = f"ended by {signal.Signals(-ended.exit).name}"
        except ValueError:
            message = f"ended by signal {-ended.exit}"
    return replace(known, state="exited", exit=ended.exit, ended=ended.ended, message=message)


def _written(session: GateSession, job: str, offset: int) -> Iterator[bytes]:
    path = f"{job_folder(session.host, job)}/output.log"
    try:
        size = session.stat(path).size
    except RequestFailed as error:
        if "No such file" in error.reason:
            raise _unknown(session.host, job) from None
        raise JobError(str(error)) from None
    if offset > size:
        raise JobError(f"{session.host.name}:{escape(path)} has {size} bytes; it cannot be read from {offset} on")
    while offset < size:
        piece = _read(session, path, offset, min(PIECE, size - offset))
        yield piece
        offset += len(piece)


def _read_model(session: GateSession, path: str, model: type[Model]) -> Model:
    try:
        size = session.stat(path).size
        if size > LONGEST_RECORD:
            raise JobError(f"{session.host.name}:{escape(path)} has {size} bytes and is no job's record")
        return model.model_validate_json(_read(session, path, 0, size))
    except RequestFailed as error:
        raise JobError(str(error)) from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].lower()
        raise JobError(
            f"{session.host.name}:{escape(path)} is not what the gate writes ({said(problem)}); something else took "
            "its place: look at the folder there"
        ) from None


def _read(session: GateSession, path: str, offset: int, length: int) -> bytes:
    with session.read(path, offset, length) as stream:
        taken = bytearray()
        while len(taken) < length:
            piece = os.read(stream.fileno(), length - len(taken))
            if not piece:
                raise EOFError
            taken += piece
    return bytes(taken)


def _entries(session: GateSession, folder: str) -> tuple[Entry, ...] | None:
    """What lies in ``folder``; None when it is not there."""
    try:
        return session.list(folder)
    except RequestFailed as error:
        if "No such file" in error.reason:
            return None
        raise JobError(f"{error}; jobs lie in a folder that {session.host.user} can read") from None


def _asked(ask: Callable[[str], Answer], path: str) -> Answer:
    try:
        return ask(path)
    except RequestFailed as error:
        raise JobError(str(error)) from None


def _is_job_id(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is not None
