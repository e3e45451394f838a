"""The operator's record of what was asked, decided, used and refused: append-only, each line chained to the one before.

A line holds the sha256 of the previous line, so an edited, removed or moved line breaks the chain behind it. The end of
a chain can be cut off without a trace; therefore its head is signed into every approval, and :meth:`Audit.verify`
takes those heads and finds a log that no longer contains them.
"""

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.errors import Refused
from tasks.state import state_dir

GENESIS = "0" * 64
CLOCK_TOLERANCE = 2.0
"""Seconds a clock may be corrected backwards between two entries."""
LATEST = 2.0**37
"""Seconds since the epoch, in the year 6325; calendars end in 9999."""
TAIL = 64 * 1024
"""Longest entry in bytes."""


class Audit:
    """The log in one file; safe for several processes at once. What cannot be read or written raises ``Refused``."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or state_dir() / "guard" / "audit.jsonl"

    def append(self, event: str, **fields: Any) -> str:
        """Write one entry durably and return the new head. Raises ``Refused`` when the clock went back."""
        with self._locked() as descriptor:
            last = _last_line(descriptor, self.file)
            now = time.time()
            if last is not None:
                self._check_clock(json.loads(last), now)
            entry = {"time": round(now, 3), "event": event, **fields, "prev": _hash(last) if last else GENESIS}
            line = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
            if len(line) >= TAIL:
                raise Refused(f"an audit entry of {len(line)} bytes was refused; the longest is {TAIL - 1}")
            _write_whole(descriptor, line + b"\n")
            return _hash(line)

    def last(self) -> dict[str, Any] | None:
        """The newest entry; None when there is none."""
        with self._locked() as descriptor:
            line = _last_line(descriptor, self.file)
        return None if line is None else _entry(line, self.file)

    def check_clock(self) -> None:
        """Raise ``Refused`` when the clock stands before the newest entry."""
        if (last := self.last()) is not None:
            self._check_clock(last, time.time())

    def entries(self) -> Iterator[dict[str, Any]]:
        """Every entry from the oldest on."""
        for line in _lines(self._content()):
            yield _entry(line, self.file)

    def uses(self, serial: int | None = None) -> Iterator[dict[str, Any]]:
        """The entries ``consumption`` and ``end``, the oldest first; ``serial`` takes those of one certificate."""
        wanted = b'"serial":' if serial is None else f'"serial":{serial}'.encode()
        for line in _lines(self._content()):
            # most lines are about something else, and parsing them all takes longest
            if wanted in line:
                entry = _entry(line, self.file)
                if entry["event"] in ("consumption", "end") and _is_of(entry, serial):
                    yield entry

    def verify(self, heads: Iterable[str] = ()) -> list[str]:
        """What is wrong with the log, one sentence each; ``heads`` are those signed into approvals."""
        problems: list[str] = []
        previous, seen = GENESIS, {GENESIS}
        content = self._content()
        if content and not content.endswith(b"\n"):
            problems.append("the last line is unfinished")
        for number, line in enumerate(_lines(content), 1):
            try:
                named = json.loads(line)["prev"]
            except (ValueError, KeyError, TypeError, RecursionError):
                problems.append(f"line {number} is not an audit entry")
                named = None
            if named is not None and named != previous:
                problems.append(f"line {number} does not follow line {number - 1}: one was edited, removed or moved")
            previous = _hash(line)
            seen.add(previous)
        missing = [head for head in dict.fromkeys(heads) if head not in seen]
        problems += [
            f"the entry {head[:16]}… that an approval was signed over is gone: the log was cut or rewritten"
            for head in missing
        ]
        return problems

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _unusable(self.file, error.strerror or "input/output error") from None

    def _content(self) -> bytes:
        try:
            return self.file.read_bytes() if self.file.exists() else b""
        except OSError as error:
            raise _unusable(self.file, error.strerror or "input/output error") from None

    def _check_clock(self, last: dict[str, Any], now: float) -> None:
        if now < last["time"] - CLOCK_TOLERANCE:
            raise Refused(
                f"the clock says {show_time(now)}, before the last audit entry of {show_time(last['time'])}; "
                "set the clock right, no approval is believed meanwhile"
            )


def select(
    entries: Iterable[dict[str, Any]],
    *,
    event: str | None = None,
    host: str | None = None,
    request: str | None = None,
    since: float | None = None,
) -> list[dict[str, Any]]:
    """Those of ``entries`` that have all of what is given, in their order; ``since`` in seconds since the epoch."""
    wanted = {name: value for name, value in (("event", event), ("host", host), ("request", request)) if value}
    return [
        entry
        for entry in entries
        if all(entry.get(name) == value for name, value in wanted.items()) and entry["time"] >= (since or 0)
    ]


def show_time(seconds: float) -> str:
    """Seconds since the epoch as local time to the second."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _is_of(entry: dict[str, Any], serial: int | None) -> bool:
    found = entry.get("serial")
    return type(found) is int and serial in (None, found)


def _lines(content: bytes) -> list[bytes]:
    return content.removesuffix(b"\n").split(b"\n") if content else []


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _write_whole(descriptor: int, line: bytes) -> None:
    """Write and sync ``line``; a disk that fills up in the middle of it keeps nothing of it."""
    end = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def _last_line(descriptor: int, file: Path) -> bytes | None:
    end = os.fstat(descriptor).st_size
    if end == 0:
        return None
    tail = os.pread(descriptor, TAIL, max(0, end - TAIL))
    if not tail.endswith(b"\n"):
        raise _unusable(file, "its last line is unfinished")
    line = tail[:-1].rsplit(b"\n", 1)[-1]
    _entry(line, file)
    return line


def _entry(line: bytes, file: Path) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        texts = isinstance(entry["event"], str) and isinstance(entry["prev"], str)
        if not texts or type(entry["time"]) is not float or not 0 <= entry["time"] <= LATEST:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _unusable(file, "a line is not an audit entry") from None
    assert isinstance(entry, dict)
    return entry


def _unusable(file: Path, reason: str) -> Refused:
    return Refused(
        f"audit log {file}: {reason}; nothing is approved without it: run 'dflash-ops audit verify', "
        "then make it readable and writable or move it and the approvals beside it away"
    )
