"""Child processes of the operator's machine, except the programs that open connections.

Those (ssh, scp, sftp, rsync, rclone) belong to ``tasks/ssh.py``, behind the guard; here they are refused by what the
name resolves to, so that a symlink, a hard link or another path to the same program changes nothing.
"""

import os
import shutil
import subprocess  # noqa: TID251 - the module that everything else goes through
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from dflash.errors import DFlashError

TAIL_BYTES = 1 << 16
CONNECTING_PROGRAMS = ("ssh", "scp", "sftp", "rsync", "rclone")

CompletedProcess = subprocess.CompletedProcess
Popen = subprocess.Popen
TimeoutExpired = subprocess.TimeoutExpired
DEVNULL = subprocess.DEVNULL
PIPE = subprocess.PIPE

Argument = str | os.PathLike[str]
Stream = int | IO[bytes] | IO[str] | None


class ProcessError(DFlashError):
    """A child process could not be started, ran out of time or failed; the message ends with its last stderr line."""

    def __init__(self, message: str, *, returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


class ConnectingProgramError(ProcessError):
    """A program that opens connections was to be started past the guard."""


def run(
    argv: Sequence[Argument],
    *,
    input: str | None = None,
    timeout: float | None = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> CompletedProcess[str]:
    """Run ``argv`` to its end, without a shell, and return its exit code and its output as text.

    ``timeout`` is in seconds; ``env`` replaces the whole environment when given. Without ``input`` the child's stdin
    is empty. Raises :class:`ProcessError` when the program is missing, when it runs out of time and, unless ``check``
    is false, when it exits with anything but 0; :class:`ConnectingProgramError` for ssh and its like.
    """
    program = _resolve(argv, env, cwd)
    try:
        finished = subprocess.run(
            _strings(argv),
            executable=program,
            input="" if input is None else input,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            env=env,
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProcessError(f"{_named(argv)} did not finish within {timeout:g} s and was stopped") from None
    except OSError as error:
        raise ProcessError(f"{_named(argv)} could not be started: {error.strerror}") from None
    if check and finished.returncode:
        reason = last_line(finished.stderr) or last_line(finished.stdout) or "it printed nothing"
        raise ProcessError(
            f"{_named(argv)} failed with exit code {finished.returncode}: {reason}", returncode=finished.returncode
        )
    return finished


def start(
    argv: Sequence[Argument],
    *,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    start_new_session: bool = False,
) -> Popen[bytes]:
    """Start ``argv`` without a shell and return at once; streams left out are inherited.

    ``env`` replaces the whole environment when given; ``start_new_session`` keeps a Ctrl-C at the terminal from the
    child. The caller waits for the child. Raises as :func:`run`.
    """
    program = _resolve(argv, env, cwd)
    try:
        return subprocess.Popen(
            _strings(argv),
            executable=program,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=start_new_session,
        )
    except OSError as error:
        raise ProcessError(f"{_named(argv)} could not be started: {error.strerror}") from None


def birth(pid: int) -> str | None:
    """Return what tells this life of ``pid`` from any other: boot and start time; None when no such process lives."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the second field is the program's name in brackets, which may hold anything
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def last_line(text: str) -> str:
    """Return the last line of ``text`` that is not blank, or an empty string."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def tail(written: IO[bytes]) -> str:
    """Return the end of what a child wrote into the file ``written``, at most 64 KiB of it."""
    end = written.seek(0, os.SEEK_END)
    written.seek(max(0, end - TAIL_BYTES))
    return written.read().decode("utf-8", "replace")


def _resolve(argv: Sequence[Argument], env: Mapping[str, str] | None, cwd: Path | None) -> str:
    """Return the executable that ``argv[0]`` names; raise when there is none or when it opens connections."""
    name = os.fspath(argv[0])
    if cwd is not None and os.sep in name:
        name = os.path.join(cwd, name)
    found = shutil.which(name, path=None if env is None else env.get("PATH", os.defpath))
    if found is None:
        raise ProcessError(f"no program {name!r} was found: install it or correct PATH")
    real = os.path.realpath(found)
    for connecting in CONNECTING_PROGRAMS:
        other = shutil.which(connecting)
        named = connecting in (os.path.basename(found), os.path.basename(real))
        if named or (other is not None and os.path.samefile(real, other)):
            raise ConnectingProgramError(
                f"{name!r} is {connecting}, which opens connections: start it through tasks/ssh.py, behind the guard"
            )
    return os.path.abspath(found)


def _strings(argv: Sequence[Argument]) -> list[str]:
    return [os.fspath(argument) for argument in argv]


def _named(argv: Sequence[Argument]) -> str:
    return os.path.basename(os.fspath(argv[0]))
