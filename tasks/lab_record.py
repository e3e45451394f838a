"""What a running lab consists of, written down before it is made: the only things a lab may ever take away again."""

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import DFlashError
from tasks.process import birth

# the names of network namespaces belong to the whole machine and end with the boot, and so does this record of them
ISOLATED_RECORD = Path("/run/dflash-lab.json")


class LabError(DFlashError):
    """The lab cannot be made, used or taken down."""


class LabBusyError(LabError):
    """Another lab, or another command of this one, is in the way."""


class LabDownError(LabError):
    """There is no lab where one was expected."""


class Life(BaseModel):
    """A process that the lab started; a later process with the same number is not it."""

    model_config = ConfigDict(frozen=True)

    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> "Life":
        """The process that has the number ``pid`` now."""
        born = birth(pid)
        if born is None:
            raise LabError(f"process {pid} of the lab ended while it was started; see the lab's sshd.log")
        return cls(pid=pid, birth=born)

    @property
    def alive(self) -> bool:
        return birth(self.pid) == self.birth

    def kill(self, *, patience: float = 5.0) -> None:
        """Kill it and wait up to ``patience`` seconds until it is gone."""
        if not self.alive:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + patience
        while self.alive:
            if time.monotonic() > deadline:
                raise LabError(f"process {self.pid} of the lab does not end although it was killed; end it by hand")
            time.sleep(0.005)


class Record(BaseModel):
    """One lab: where its files are, who brought it up, and all that it runs."""

    model_config = ConfigDict(extra="forbid")

    folder: Path
    owner: Life
    """The process that brought it up; it need not live any more."""
    isolated: bool
    namespaces: dict[str, str] = {}
    """Network namespaces by name, each with its identity, empty while it is being made."""
    first_processes: dict[str, Life] = {}
    sshds: dict[str, Life] = {}
    ports: dict[str, int] = {}
    folders: list[Path] = []
    """Folders outside the lab's own that had to be made."""

    @property
    def file(self) -> Path:
        return record_file(self.folder, isolated=self.isolated)

    def tree(self, host: str) -> Path:
        """The folder that holds a host's files."""
        return self.folder / host

    @property
    def alive(self) -> bool:
        """Whether any of its processes still lives."""
        return any(life.alive for life in (*self.first_processes.values(), *self.sshds.values()))

    def save(self) -> None:
        """Write the record, whole or not at all."""
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.file)

    def remove(self) -> None:
        self.file.unlink(missing_ok=True)


def record_file(folder: Path, *, isolated: bool) -> Path:
    """Where the record of a lab in ``folder`` is."""
    return ISOLATED_RECORD if isolated else folder / "lab.json"


def read_record(folder: Path, *, isolated: bool) -> Record | None:
    """The record on disk, or None; an isolated lab's is the one record of the machine, whatever its folder."""
    file = record_file(folder, isolated=isolated)
    try:
        return Record.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValidationError, ValueError, OSError):
        raise LabError(
            f"{file} cannot be read as the record of a lab: take its namespaces down with `ip netns delete`, "
            "its sshds by hand, and remove the file"
        ) from None


@contextmanager
def exclusive(directory: Path, *, patience: float = 30.0) -> Iterator[None]:
    """Keep other lab commands out; ``directory`` itself is locked, so that no lock file is left behind."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabBusyError(
                        f"another lab command has held {directory} for {patience:g} s: wait for it or end it"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
