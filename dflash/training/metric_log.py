"""What a run measured, step by step: always as JSON lines, and beside them wherever the config asks for it.

``metrics.jsonl`` has one object a line, ``{"step", "kind", …values}``, ``kind`` being "train" or "eval"; a value that
is not finite is null. It is written in the order of the steps, so that a resumed run goes on after the last line of
its checkpoint: lines of steps that will be made again are cut off. Imports no torch by itself.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

from dflash.errors import DFlashError
from dflash.training.run_config import RunConfig, TrackingSection
from dflash.training.trackers import Tracker, open_trackers

Kind = Literal["train", "eval"]

METRICS = "metrics.jsonl"


class MetricLogError(DFlashError):
    """The metrics cannot be written where the run's output is."""


class MetricLog:
    """One run's metrics; of several processes only one, the first rank's, has a log.

    A disk that is full, or a tracking service that is away, costs lines and a warning, never the run.
    """

    def __init__(self, path: Path, trackers: list[Tracker]) -> None:
        self.path = path
        self._trackers = trackers
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._warned: set[str] = set()

    @classmethod
    def open(cls, output: Path, tracking: TrackingSection, *, run: RunConfig, resumed_at: int | None) -> Self:
        """Go on after step ``resumed_at``, or begin with None, where lines of a run before are set aside, not lost.

        Raises :class:`MetricLogError` where the file cannot be written, and
        :class:`~dflash.training.trackers.TrackerError` for tracking that cannot be started.
        """
        path = output / METRICS
        try:
            output.mkdir(parents=True, exist_ok=True)
            if resumed_at is None:
                _set_aside(path)
            else:
                cut_after(path, resumed_at)
            return cls(path, open_trackers(output, tracking, run=run, resumed_at=resumed_at))
        except OSError as error:
            raise MetricLogError(f"{path}: cannot be written ({error.strerror}); choose another output") from None

    def write(self, step: int, values: Mapping[str, float], kind: Kind) -> None:
        """Add one line, which a reader sees when this returns, and tell every tracker."""
        finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        self._append(json.dumps({"step": step, "kind": kind, **finite}).encode() + b"\n")
        for tracker in self._trackers:
            try:
                tracker.write(step, {f"{kind}/{name}": value for name, value in finite.items() if value is not None})
            except Exception as error:  # a service's client may raise anything, and the run is worth more than its plot
                self._warn(f"{tracker.name}: step {step} was not logged ({error})")

    def close(self) -> None:
        """Finish every tracker and the file; once is enough."""
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                self._warn(f"{tracker.name}: could not be finished ({error})")
        self._trackers = []
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        if self._file is None:
            raise MetricLogError(f"{self.path}: the log is closed; open it again to write")
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])  # raises what stopped the first one
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            self._warn(f"{self.path}: lines are missing from here on ({error.strerror}); free space")

    def _warn(self, message: str) -> None:
        """Once for each kind of trouble: a service that is away is away at every step."""
        cause = message.split(":", 1)[0]
        if cause not in self._warned:
            self._warned.add(cause)
            print(f"warning: {message}", file=sys.stderr)


def read_metrics(path: Path) -> list[dict[str, float | int | str | None]]:
    """The lines of a ``metrics.jsonl``, without one that a crash cut off."""
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.split(b"\n") if line]


def cut_after(path: Path, step: int) -> None:
    """Drop from ``path`` the first line of a later step, or one that is not whole, and everything behind it."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as lines:
        for line in lines:
            if not _belongs(line, step):
                break
            kept += len(line)
    os.truncate(path, kept)


def _belongs(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        found = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(found, int) and found <= step


def _set_aside(path: Path) -> None:
    if not path.exists() or not path.stat().st_size:
        return
    number = 1
    while (aside := path.with_name(f"metrics.{number}.jsonl")).exists():
        number += 1
    path.rename(aside)
