"""The wheels for another machine's Python: which they are, with their hashes, and the files themselves.

pip asks the index and picks files by the tags of that machine, but believes this machine's markers (``sys_platform``,
``python_version``, …), so what belongs to what is followed here, with that machine's. What was once resolved stays as
it is: two provisionings of one request are the same wheels, whatever the index has learnt meanwhile.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import signal
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from dflash.errors import DFlashError
from tasks import process
from tasks.actions import escape, said
from tasks.own_wheel import OwnWheel
from tasks.resolving import Candidate, ConflictError, Lock, Target, WheelMissingError, resolve
from tasks.state import state_dir

FORGOTTEN_SECONDS = 60 * 24 * 3600.0
"""Wheels that nobody asked for so long are removed from this machine."""
PIP_SECONDS = 1800.0
CHUNK = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
UNREACHABLE = (
    "NewConnectionError",
    "Max retries exceeded",
    "Connection broken",
    "Read timed out",
    "ConnectTimeoutError",
)

Notice = Callable[[str], None]


class IndexFailedError(DFlashError):
    """The package index did not give what was asked of it."""

    state_name = "IndexFailed"


class IndexUnreachableError(IndexFailedError):
    """No package index answers this machine."""

    state_name = "IndexUnreachable"


class NoRoomError(DFlashError):
    """This machine's disk is full."""

    state_name = "DiskFull"


class Wheelhouse:
    """Locks and wheels in the state folder; safe for several commands at once."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or state_dir() / "wheelhouse"

    def lock(
        self, own: OwnWheel, extras: Sequence[str], target: Target, constraints: str, *, refresh: bool = False
    ) -> Lock:
        """The wheels of ``own`` with ``extras`` for ``target``, ``own`` among them; asked of the index only once.

        ``refresh`` asks anew. Raises :class:`WheelMissingError`, :class:`IndexUnreachableError`,
        :class:`~tasks.resolving.ConflictError` and :class:`NoRoomError`.
        """
        question = [own.requirements, sorted(extras), constraints, target.model_dump(mode="json")]
        digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        file = self.folder / "locks" / f"{digest}.json"
        with _room(self.folder), self.alone():
            answered = None if refresh else _read_lock(file)
            if answered is None:
                answered = resolve(
                    own.requirements,
                    extras,
                    target,
                    lambda asked, narrowed: self._ask(asked, narrowed, constraints, target),
                    _installed_requirements,
                )
                _write(file, answered.model_dump_json().encode())
            _write(self._place(own.sha256, own.file_name), own.content)
        return answered.with_own(own.file_name, own.sha256)

    def gather(
        self, lock: Lock, wanted: Sequence[str], target: Target, notice: Notice | None = None
    ) -> dict[str, Path]:
        """The files of the wheels with the sha256 of ``wanted``; those that are not here yet are downloaded.

        ``notice`` gets a line for each. Raises as :meth:`lock`.
        """
        named = {one.sha256: one for one in (*lock.packages, lock.pip)}
        places = {sha256: self._place(sha256, named[sha256].file_name) for sha256 in wanted}
        with _room(self.folder), self.alone():
            missing = [named[sha256] for sha256, place in places.items() if not place.exists()]
            if missing:
                self._download(missing, target, notice)
            for place in places.values():
                os.utime(place.parent)
            self._forget()
        return places

    def _ask(self, asked: Sequence[str], narrowed: Sequence[str], constraints: str, target: Target) -> list[Candidate]:
        """What pip would install for ``asked``, and for nothing that it asks for itself."""
        with tempfile.TemporaryDirectory(prefix="dflash-wheels-") as scratch:
            report = Path(scratch, "report.json")
            options = [
                "install",
                "--dry-run",
                "--ignore-installed",
                "--quiet",
                "--target",
                scratch,
                "--report",
                str(report),
            ]
            narrow = constraints + "\n" + "\n".join(narrowed)
            _pip(scratch, options, asked, target, narrow)
            return read_report(report.read_text("utf-8"))

    def _download(self, packages: Sequence[Candidate], target: Target, notice: Notice | None) -> None:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=self.folder) as scratch:
            lines = [f"{one.name}=={one.version} --hash=sha256:{one.sha256}" for one in packages]
            _pip(
                scratch,
                ["download", "--require-hashes", "--progress-bar", "off", "--dest", scratch],
                lines,
                target,
                "",
                notice,
            )
            for one in packages:
                found = Path(scratch, one.file_name)
                if not found.exists() or sha256_of(found) != one.sha256:
                    raise IndexFailedError(
                        f"the index gave another file for {escape(one.name)} {escape(one.version)} than it named "
                        "before; run it again with --refresh"
                    )
                place = self._place(one.sha256, one.file_name)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(found, place)

    def _place(self, sha256: str, file_name: str) -> Path:
        return self.folder / "wheels" / sha256 / file_name

    def _forget(self) -> None:
        """Remove what nobody asked for in a long time."""
        for folder in (self.folder / "wheels").iterdir():
            if time.time() - folder.stat().st_mtime > FORGOTTEN_SECONDS:
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have no other command change anything here in the block."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _installed_requirements(name: str) -> list[str] | None:
    """What the project asks for in the version that is installed here."""
    try:
        return metadata.requires(name)
    except metadata.PackageNotFoundError:
        return None


def read_report(text: str) -> list[Candidate]:
    """The wheels of an installation report of pip's. Raises :class:`IndexFailedError` when it is none."""
    try:
        report = json.loads(text)
        return [_candidate(one) for one in report["install"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IndexFailedError(
            f"pip's report cannot be read ({said(str(error))}); this is written for pip 23.1 and newer"
        ) from None


def _candidate(found: dict[str, Any]) -> Candidate:
    about, download = found["metadata"], found["download_info"]
    return Candidate(
        name=about["name"],
        version=about["version"],
        file_name=unquote(os.path.basename(urlsplit(download["url"]).path)),
        sha256=download["archive_info"]["hashes"]["sha256"],
        requires=tuple(about.get("requires_dist") or ()),
    )


def _pip(
    scratch: str,
    options: Sequence[str],
    requirements: Sequence[str],
    target: Target,
    constraints: str,
    notice: Notice | None = None,
) -> None:
    """Run the pip beside this Python, for ``target``; ``notice`` gets the lines that name a download."""
    asked, narrow, log = (Path(scratch, name) for name in ("asked.txt", "constraints.txt", "pip.log"))
    asked.write_text("\n".join(requirements) + "\n", "utf-8")
    narrow.write_text(constraints, "utf-8")
    for_it = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", target.version]
    for_it += [f"--platform={tag}" for tag in target.platforms()]
    argv = [
        sys.executable,
        "-m",
        "pip",
        *options,
        *for_it,
        "-r",
        str(asked),
        "-c",
        str(narrow),
        "--disable-pip-version-check",
        "--no-input",
    ]
    with (
        log.open("wb") as stderr,
        process.start(argv, stdin=process.DEVNULL, stdout=process.PIPE, stderr=stderr) as running,
    ):
        assert running.stdout is not None
        late = Timer(PIP_SECONDS, running.kill)
        late.start()
        try:
            for line in running.stdout:
                if notice is not None and line.strip().startswith(b"Downloading "):
                    notice(said(line.decode("utf-8", "replace").strip()))
        except BaseException:
            running.kill()
            raise
        finally:
            late.cancel()
    if running.returncode == -signal.SIGKILL:
        raise IndexUnreachableError(f"pip did not end within {PIP_SECONDS:.0f} s; look at the way to the index")
    if running.returncode:
        raise failure(log.read_text("utf-8", "replace"), target)


def failure(log: str, target: Target) -> DFlashError:
    """What pip's stderr means."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no word"]
    impossible = errors[-1].startswith("ResolutionImpossible") and len(errors) > 1
    if impossible:
        errors.pop()  # it names nothing but a page about conflicts
    where = f"Python {target.version} on {target.machine} with {target.libc[0]} {target.libc[1]}"
    if "No module named pip" in log:
        return IndexFailedError(
            f"{sys.executable} has no pip, which gathers the wheels; add it with: {sys.executable} -m ensurepip"
        )
    if any(os.strerror(code) in log for code in FULL):
        return NoRoomError(
            f"no room for the wheels: {said(errors[-1])}; make room on this machine, or name another $DFLASH_STATE"
        )
    broken = [line for line in lines if any(word in line for word in UNREACHABLE)]
    if broken:
        return IndexUnreachableError(
            f"no package index answers this machine: {said(_reason(broken[-1]))}; see to the network, or name an index "
            "or a folder of wheels in pip's configuration"
        )
    if impossible:
        return ConflictError(
            f"no version that the index has for {where} is one that the constraints allow: {said(errors[-1])}; relax "
            "the constraints, or ask the index anew with --refresh"
        )
    if errors[-1].startswith("No matching distribution found for "):
        name = errors[-1].removeprefix("No matching distribution found for ")
        return WheelMissingError(
            f"there is no wheel of {said(name)} for {where}: take another Python there with --python, relax the "
            "constraints, or put a wheel where pip's configuration finds it (find-links)"
        )
    return IndexFailedError(f"pip could not gather the wheels for {where}: {said(errors[-1])}")


def _reason(line: str) -> str:
    """What pip's ``line`` about a connection says of it, without the objects that tell nobody anything."""
    within = re.search(r"broken by '(.*)': /", line)
    words = re.sub(r"<[^<>]*>(: )?|\bobject at 0x[0-9a-f]+(: )?", "", within[1] if within else line)
    return words.removeprefix("ERROR: ").removeprefix("WARNING: ")


def pack(wheels: dict[str, Path], file: Path) -> None:
    """One tar of ``wheels`` (by sha256) at ``file``: the same wheels, the same bytes. Raises :class:`NoRoomError`."""
    if file.exists():
        return
    with _room(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".packing{file.name}")
        try:
            with tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as parcel:
                for sha256, wheel in sorted(wheels.items()):
                    entry = tarfile.TarInfo(f"{sha256}/{wheel.name}")
                    entry.size = wheel.stat().st_size
                    with wheel.open("rb") as content:
                        parcel.addfile(entry, content)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


def unpacked_bytes(wheels: Iterable[Path]) -> int:
    """What the content of ``wheels`` takes on a disk."""
    total = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as content:
            # in blocks of a file system
            total += sum(entry.file_size + 4096 for entry in content.infolist())
    return total


@contextmanager
def _room(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise NoRoomError(
            f"{folder}: {error.strerror}; make room on this machine, or name another $DFLASH_STATE"
        ) from None


def _read_lock(file: Path) -> Lock | None:
    # what is not whole is resolved anew
    with suppress(OSError, ValidationError):
        return Lock.model_validate_json(file.read_bytes())
    return None


def _write(file: Path, content: bytes) -> None:
    """``content`` at ``file``, whole or not at all."""
    if file.exists() and file.read_bytes() == content:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, file)


def sha256_of(file: Path) -> str:
    """In hex."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
