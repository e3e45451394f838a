"""An evaluation as a job on the inference host: started at most once, found again, followed, its report brought home.

The job belongs to no process of ours. What becomes of the flow, the link or the operator's machine meanwhile, it goes
on there, under a name that follows from checkpoint, suite and attempt; whoever comes next with the same attempt finds
it by that name. That a host does not answer is no result.
"""

import codecs
import errno
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import DFlashError, NotValidError
from dflash.failure import Failure, parse_failure
from dflash.prompts import read_prompts
from dflash.renderings import ROUNDS, write_renderings
from dflash.report import RelayInfo, Report, ReportError, read_report
from dflash.rounds_file import RoundsError, read_rounds
from tasks import changes, jobs
from tasks.actions import said
from tasks.channel import GateError, RequestFailed
from tasks.evaluation import (
    EvaluationError,
    Suite,
    Workspace,
    evaluation_launch,
    folder_of,
    not_provisioned,
    program,
    prompts_place,
    workspace,
)
from tasks.inventory import Host
from tasks.jobs import JobStatus
from tasks.relay import RelayResult
from tasks.ssh import NETWORK_ERRORS, ConnectionFailed, Connector
from tasks.state import state_dir

REPORT_FILES = ("report.json", ROUNDS)
"""What is brought home; the rest is made from them here, where it is known how the checkpoint came."""
POLL_SECONDS = 0.5
PATIENCE_SECONDS = 300.0
START_TRIES = 3
LONGEST_FAILURE = 1 << 16


class JobVanishedError(EvaluationError):
    """The job is gone and nothing wrote down how it ended: the host was started anew, or ran out of memory."""

    state_name = "JobVanished"


class GpuBusyError(EvaluationError):
    """Other evaluations held the host's GPUs for too long."""

    state_name = "GpuBusy"


class GpuMemoryError(EvaluationError):
    """What is free on the host's GPU, less the reserve, is too little."""

    state_name = "GpuMemoryShort"


class KernelRefusedError(EvaluationError):
    """The kernel that hosts.yaml asks for is not the one that would have run."""

    state_name = "KernelRefused"


class ServedModelSlowError(EvaluationError):
    """The model that the host serves was slow while the evaluation waited for it."""

    state_name = "ServedModelSlow"


class HostDiskFullError(EvaluationError):
    """There is no space left where the host keeps its jobs or its cache."""

    state_name = "DiskFull"


class NotStoredError(DFlashError):
    """The report cannot be written here; it stays on the host and is fetched by the next run."""

    state_name = "ReportNotStored"


class DiskFullError(NotStoredError):
    """There is no space left on this machine."""

    state_name = "DiskFull"


class ReportLostError(EvaluationError):
    """The evaluation ended well, and its report is not there or cannot be read."""

    state_name = "ReportLost"


SAID_BY_HOSTS: dict[str, type[EvaluationError]] = {
    error.state_name: error
    for error in (GpuBusyError, GpuMemoryError, HostDiskFullError, KernelRefusedError, ServedModelSlowError)
}
"""By what ``dflash evaluate`` calls a failure; what else it may call one is no state of ours."""


class Prepared(BaseModel):
    """What an evaluation begins with, kept in the state folder: it is needed again when the report is brought home."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    """The checkpoint's, at its source."""
    identity: str
    checkpoint: str
    """Where it lies on the inference host."""
    relay: RelayInfo

    @classmethod
    def of(cls, relayed: RelayResult) -> "Prepared":
        """What is known when the checkpoint has arrived."""
        weights = [file.sha256 for file in relayed.files if file.path.endswith((".safetensors", ".pt"))]
        digest = weights[0] if len(weights) == 1 else relayed.sha256
        way = RelayInfo(source=str(relayed.source), sha256=digest, selected=relayed.what, bytes=relayed.bytes)
        name = PurePosixPath(relayed.source.path).stem
        return cls(name=name, identity=relayed.identity, checkpoint=relayed.destination.path, relay=way)

    def keep(self, job: str, state: Path | None = None) -> None:
        """Write it down under the name of the job that it is for."""
        file = _kept(job, state)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        partial = file.with_suffix(".new")
        partial.write_text(self.model_dump_json(), encoding="utf-8")
        partial.replace(file)

    @classmethod
    def kept(cls, job: str, state: Path | None = None) -> "Prepared | None":
        """What was written down for ``job``; None when nothing was, or nothing that can be read."""
        with suppress(OSError, ValidationError):
            return cls.model_validate_json(_kept(job, state).read_bytes())
        return None


def forget(job: str, state: Path | None = None) -> None:
    """Remove what was kept for ``job``: its report is home, or there will be none."""
    _kept(job, state).unlink(missing_ok=True)


def find_or_start(connector: Connector, host: Host, checkpoint: PurePosixPath, suite: Suite, job: str) -> bool:
    """Have ``job`` on ``host`` evaluate ``checkpoint``; False when it was started before and goes on, or has ended.

    Raises :class:`ConnectionFailed` when the host does not answer, and what it says otherwise. A start whose answer was
    lost is looked for before it is tried again.
    """
    action = evaluation_launch(host, checkpoint, suite, job)
    for left in reversed(range(START_TRIES)):
        found = jobs.status(connector, host, None, job)
        if found.state == "unreachable":
            raise ConnectionFailed(f"{host.name}: {found.message}")
        if found.state != "unknown job":
            return False
        make_ready(connector, host, suite)
        try:
            changes.launch(connector, host, None, action)
            return True
        except RequestFailed as error:
            if "File exists" in error.reason:
                return False
            raise EvaluationError(f"{host.name} could not start the evaluation: {said(error.reason)}") from None
        except GateError:
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def make_ready(connector: Connector, host: Host, suite: Suite) -> None:
    """Make the host's folders and put the prompts there, under the name of their content, whole or not at all.

    Raises :class:`~tasks.evaluation.NotProvisionedError` where nothing is there to evaluate with.
    """
    prompts = prompts_place(host, read_prompts(suite.prompts).sha256)
    folders = [folder_of(host, "jobs"), folder_of(host, "cache") / "gpu-locks", prompts.parent]
    partial = f"{prompts}.{time.time_ns()}.part"
    try:
        with connector.connect(host) as connection:
            made = connection.run(shlex.join(["mkdir", "-p", *map(str, folders)]), hide=True, warn=True)
            if not made.ok:
                raise _refused_by_disk(host, made.stderr.strip())
            if not connection.run(shlex.join(["test", "-x", str(program(host))]), hide=True, warn=True).ok:
                raise not_provisioned(host)
            connection.put(str(suite.prompts), partial)
            connection.sftp().posix_rename(partial, str(prompts))
    except NETWORK_ERRORS as error:
        raise _broken(host, f"{prompts} could not be written", error) from error


def follow(
    connector: Connector,
    host: Host,
    job: str,
    on_line: Callable[[str], None],
    *,
    poll: float = POLL_SECONDS,
    patience: float = PATIENCE_SECONDS,
) -> None:
    """Wait for the end of ``job``; ``on_line`` gets what it prints, from its beginning.

    A report that is not valid is still a report: exit code 3 of the command raises nothing here. Any other end raises
    the :class:`EvaluationError` that the host named, else one with the last line that it printed;
    :class:`ConnectionFailed` says that the host has not answered for ``patience`` seconds, and the job may well run.
    """
    lines = LineSplitter(on_line)
    ended = jobs.follow(connector, host, None, job, lines.write, poll=poll, patience=patience)
    lines.close()
    match ended.state:
        case "unreachable":
            raise ConnectionFailed(f"{host.name}: {ended.message}")
        case "exited" if ended.exit in (0, NotValidError.exit_code):
            return
        case "exited":
            raise explained(host, ended, _failure(connector, host, workspace(host, job)), lines.last)
        case _:
            raise JobVanishedError(f"the evaluation {job} on {host.name} is gone: {ended.message}")


def fetch_report(
    connector: Connector, host: Host, place: Workspace, relayed: RelayInfo | None, destination: Path
) -> Report:
    """Bring the report home into the new folder ``destination``, add how its checkpoint came, and return it.

    One that was brought home before is read there. Raises :class:`ReportLostError` when the host answers and a file is
    missing, :class:`ConnectionFailed` when it does not; ``destination`` does not exist then.
    """
    with suppress(ReportError):
        return read_report(destination / "report.json")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=destination.parent) as scratch:
            partial = Path(scratch) / destination.name
            partial.mkdir()
            _get(connector, host, place.output, partial)
            report = _read(host, place, partial).model_copy(update={"relay": relayed})
            (partial / "report.json").write_text(report.to_json(), encoding="utf-8")
            write_renderings(partial, report)
            _to_its_name(partial, destination)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = "free space here" if full else "make that folder writable, or name another"
        raise (DiskFullError if full else NotStoredError)(
            f"the report could not be written to {destination} ({error.strerror or error}): {todo}; it is still "
            f"{host.name}:{place.output}, and the next run fetches it from there"
        ) from error
    return read_report(destination / "report.json")


def _read(host: Host, place: Workspace, here: Path) -> Report:
    """The report as it came. A damaged one is no report, and its rounds belong to it."""
    try:
        report = read_report(here / "report.json")
        read_rounds(here / ROUNDS, report)
        return report
    except (ReportError, RoundsError) as error:
        raise ReportLostError(f"{host.name}:{place.output} holds no report that can be read: {error}") from error


def _to_its_name(partial: Path, destination: Path) -> None:
    """Another process may have brought the same report home meanwhile; then that one stays."""
    try:
        partial.rename(destination)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or not (destination / "report.json").exists():
            raise


def is_away(connector: Connector, host: Host) -> bool:
    """Whether ``host`` does not answer now."""
    try:
        with connector.connect(host):
            return False
    except ConnectionFailed:
        return True


def _get(connector: Connector, host: Host, folder: PurePosixPath, here: Path) -> None:
    name = ""
    try:
        with connector.connect(host) as connection:
            for name in REPORT_FILES:
                connection.get(str(folder / name), str(here / name))
    except FileNotFoundError:
        raise ReportLostError(
            f"{host.name}:{folder / name} is not there, though the evaluation ended well: somebody removed it; "
            "evaluate again"
        ) from None
    except NETWORK_ERRORS as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # this machine's own disk
        raise _broken(host, f"{folder / name} could not be read", error) from error


def _broken(host: Host, what: str, error: Exception) -> DFlashError:
    """Whether it was the link, or an answer of the host's file system: paramiko has only ``OSError`` for the latter."""
    if type(error) in (OSError, PermissionError):
        return _refused_by_disk(host, f"{what}: {error}")
    return ConnectionFailed(f"{host.name}: {what}: {said(str(error) or type(error).__name__)}")


def _refused_by_disk(host: Host, why: str) -> EvaluationError:
    if os.strerror(errno.ENOSPC) in why:
        return HostDiskFullError(f"{host.name}: {said(why)}; free space there, old folders in its cache can go")
    return EvaluationError(f"{host.name}: {said(why)}; correct the folders in hosts.yaml, or who may write there")


def explained(host: Host, ended: JobStatus, told: Failure | None, last: str) -> EvaluationError:
    """The error of a job that ended badly: what it said itself, else the last line of its output and where all is."""
    how = ended.message or f"ended with exit code {ended.exit}"
    if told is None:
        # nothing here sends that signal
        killed = ": the host ran out of memory, or somebody killed it" if ended.exit == -signal.SIGKILL else ""
        return EvaluationError(
            f"the evaluation on {host.name} {how}{killed}; its last line: {last or 'it printed nothing'}; all of it: "
            f"dflash-ops jobs logs {host.name} {ended.job}"
        )
    error = SAID_BY_HOSTS.get(told.state, EvaluationError)
    return error(f"the evaluation on {host.name} {how}: {said(told.message)}")


def _failure(connector: Connector, host: Host, place: Workspace) -> Failure | None:
    """What the host wrote about the failure; None where it wrote nothing, which is not worth another failure."""
    with suppress(*NETWORK_ERRORS, DFlashError), connector.connect(host) as connection:
        file: Any = connection.sftp().open(str(place.failure))
        with file:
            return parse_failure(file.read(LONGEST_FAILURE))
    return None


def _kept(job: str, state: Path | None) -> Path:
    return (state or state_dir()) / "evaluations" / f"{job}.json"


class LineSplitter:
    """Takes UTF-8 in pieces of any size and hands on whole lines, escaped; a carriage return ends a line as well."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self.last = ""

    def write(self, piece: bytes) -> None:
        """Take what has arrived; it may end in the middle of a character."""
        *lines, self._rest = (self._rest + self._decoder.decode(piece)).replace("\r", "\n").split("\n")
        for line in lines:
            self._hand_on(line)

    def close(self) -> None:
        """Hand on what came without an end of line."""
        self._hand_on(self._rest)
        self._rest = ""

    def _hand_on(self, line: str) -> None:
        if line.strip():
            self.last = said(line.strip())
            self._on_line(said(line))
