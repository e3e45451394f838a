"""One look into a folder of checkpoints: which lie there whole, by a few small reads of what is new or has changed.

A checkpoint that says itself that it is whole (a manifest, DCP's ``.metadata``, both written last) counts at once. Any
other has to be in the same state at two looks some time apart before anything of it is read, and then be whole by its
format's own end: a zip's directory, a safetensors header against the file's size. What a trainer still writes to is
therefore never read.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from dflash.checkpoint_layout import CheckpointError
from dflash.distributed_checkpoint import METADATA
from dflash.errors import DFlashError
from dflash.manifest import CONFIG, DRAFTER, MANIFEST
from tasks.actions import PathError, escape, is_text, normalise_path
from tasks.approvals import Approval
from tasks.channel import RequestFailed
from tasks.ends import Pool, Reader, ReadSource, is_missing, open_reader
from tasks.errors import FileChanged
from tasks.gate import Entry, Stat
from tasks.inventory import Location
from tasks.look_memory import Known, Memory
from tasks.selection import Selection, select
from tasks.sources import Look as Files
from tasks.ssh import Connector

SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")
"""Of single files that can be checkpoints."""
DEEPEST = 3
"""Folders below the one that is watched: of a project, a run, a kind."""
MOST_FOLDERS = 256
MOST_EXAMINED = 64
"""Checkpoints that one look reads of; the rest is for the next ones."""
MOST_SESSIONS = 4
RECHECKED = 8
"""Known folders without a manifest that one look goes into again: a trainer may have written over their files."""
SETTLED_SECONDS = 20.0
LONGEST_PAUSE = 3600.0
UNNAMED = "no action can name it: its path holds a line break, or is not in Unicode's composed form (NFC); rename it"


class NoSuchFolderError(DFlashError):
    """The folder that is watched is not there."""

    state_name = "NoSuchFolder"


class TooManyFoldersError(DFlashError):
    """The folder that is watched holds too many others to look into every minute."""

    state_name = "TooManyFolders"


@dataclass(frozen=True)
class Whole:
    """A complete checkpoint; ``identity`` is that of :class:`tasks.selection.Selection`."""

    path: str
    identity: str
    step: int | None
    written: float
    """When its last byte was written, by its host's clock."""


@dataclass(frozen=True)
class Look:
    """What one look found, against what was remembered of those before."""

    appeared: tuple[Whole, ...]
    """Complete checkpoints that were not there before, or lie elsewhere now."""
    vanished: tuple[str, ...]
    """Identities that are not there any more."""
    whole: int
    """How many complete checkpoints there are."""
    unfinished: Mapping[str, str]
    """Path → why it does not count (yet)."""
    left: int
    """How many were left to the next look."""


def look(connector: Connector, source: Location, approval: Approval | None, memory: Memory, now: float) -> Look:
    """Look into the folder ``source`` at the time ``now``, and bring ``memory`` up to it.

    ``approval`` is of a read grant over the folder, None for a host that is not protected. Raises
    :class:`NoSuchFolderError`, ``Refused``, and what the connection raises; ``memory`` then stays as it was.
    """
    before = memory.whole()
    # a look that breaks in the middle must not have seen anything: it could tell nobody
    new = replace(memory, entries=dict(memory.entries))
    with Pool(partial(open_reader, connector, source, approval)) as sessions:
        with sessions.take() as reader:
            walk = _Walk(reader, new)
            found = walk.below(source)
        names = {one.name for one in found}
        new.entries = {name: known for name, known in new.entries.items() if name in names}
        new.plain = walk.plain
        left = _examine(sessions, source, found, new, now)
    memory.changed = memory.changed or (memory.entries, memory.plain) != (new.entries, new.plain)
    memory.entries, memory.plain, memory.rechecked = new.entries, new.plain, new.rechecked
    whole = memory.whole()
    vanished = set(before.values()) - set(whole.values())
    # of two copies of which one has gone the other is named again, for it may be the one that nobody knew
    moved = {before[name] for name in set(before) - set(whole)} - vanished
    appeared = [
        Whole(_below(source, name), identity, memory.entries[name].step, memory.entries[name].written)
        for name, identity in whole.items()
        if before.get(name) != identity or identity in moved
    ]
    unfinished = {
        _below(source, name): known.reason or "it is being written"
        for name, known in memory.entries.items()
        if known.kind != "whole"
    }
    return Look(tuple(appeared), tuple(sorted(vanished)), len(whole), unfinished, left)


@dataclass(frozen=True)
class _Candidate:
    """Something below the folder that can be a checkpoint."""

    name: str
    state: str
    mtime_ns: int
    directory: bool
    sealed: bool = False
    """It holds the file that is written last."""


class _Walk:
    """Goes through the folder and what lies below; known and unchanged folders are not opened."""

    def __init__(self, reader: Reader, memory: Memory) -> None:
        self._reader, self._memory = reader, memory
        self._opened = 0
        self.plain: dict[str, str] = {}

    def below(self, source: Location) -> list[_Candidate]:
        try:
            entries = self._reader.list(source.path)
        except RequestFailed as error:
            if not is_missing(error):
                raise
            raise NoSuchFolderError(
                f"{escape(str(source))} is not there: is the path right, and is its disk mounted?"
            ) from None
        return list(self._in(source, "", entries, DEEPEST))

    def _in(self, source: Location, folder: str, entries: Sequence[Entry], deepest: int) -> Iterator[_Candidate]:
        for entry in entries:
            if entry.name.startswith(".") or not is_text(entry.name):
                continue  # a temporary name, or one that no request can name
            name = f"{folder}{entry.name}"
            if entry.kind == "file" and entry.name.endswith(SUFFIXES):
                yield _Candidate(name, _state(entry), entry.mtime_ns, directory=False)
            elif entry.kind == "directory":
                yield from self._directory(source, name, entry, deepest)

    def _directory(self, source: Location, name: str, entry: Entry, deepest: int) -> Iterator[_Candidate]:
        state = _state(entry)
        known = self._memory.entries.get(name)
        if known is not None and known.state == state:
            yield _Candidate(name, state, entry.mtime_ns, directory=True)
            return
        if self._memory.plain.get(name) == state:
            self.plain[name] = state
            return
        self._opened += 1
        if self._opened > MOST_FOLDERS:
            raise TooManyFoldersError(
                f"{escape(str(source))} holds more than {MOST_FOLDERS} folders that are no checkpoints: watch the "
                "folder of a run instead"
            )
        try:
            inside = self._reader.list(_below(source, name))
        except RequestFailed:
            return  # gone meanwhile, or closed to us; the next look asks again
        names = {one.name for one in inside}
        if _is_checkpoint(names):
            sealed = MANIFEST in names or METADATA in names
            yield _Candidate(name, state, entry.mtime_ns, directory=True, sealed=sealed)
            return
        found = list(self._in(source, f"{name}/", inside, deepest - 1)) if deepest else []
        if not found and all(one.kind != "directory" for one in inside):
            # a new name in it would change it
            self.plain[name] = state
        yield from found


def _examine(sessions: Pool[Reader], source: Location, found: Sequence[_Candidate], memory: Memory, now: float) -> int:
    """Look into those that are new, changed or due again, the newest first; how many were left for the next time."""
    named = []
    for one in found:
        known = memory.entries.get(one.name)
        if _is_named(source, one.name):
            named.append(one)
        elif known is None or known.reason != UNNAMED:
            memory.entries[one.name] = Known(one.state, "unfinished", now, reason=UNNAMED)
    wanted = sorted((one for one in named if _is_due(one, memory, now)), key=lambda one: -one.mtime_ns)
    wanted += _to_recheck(named, memory)
    opened = 0
    for done, candidate in enumerate(wanted):
        if done >= MOST_EXAMINED or opened >= MOST_SESSIONS:
            return len(wanted) - done
        try:
            with sessions.take() as reader:
                known = _examined(reader, source, candidate, memory.entries.get(candidate.name), now)
        except FileChanged:
            # that ended the session; whoever writes to it is not done
            opened += 1
            known = Known(candidate.state, "settling", now)
        if known is None:
            memory.entries.pop(candidate.name, None)
        else:
            memory.entries[candidate.name] = known
    return 0


def _is_due(candidate: _Candidate, memory: Memory, now: float) -> bool:
    known = memory.entries.get(candidate.name)
    if known is None or known.state != candidate.state:
        return True
    if known.kind == "settling":
        return abs(now - known.since) >= SETTLED_SECONDS
    pause = min(SETTLED_SECONDS * 2**known.tries, LONGEST_PAUSE)
    return known.kind == "unfinished" and abs(now - known.since) >= pause


def _to_recheck(found: Sequence[_Candidate], memory: Memory) -> list[_Candidate]:
    """Some of the known directories that nothing seals, in turns: their files can change and they do not."""
    open_ones = [
        one
        for one in found
        if one.directory
        and (known := memory.entries.get(one.name)) is not None
        and (known.kind, known.sealed, known.state) == ("whole", False, one.state)
    ]
    if not open_ones:
        return []
    start = memory.rechecked % len(open_ones)
    memory.rechecked = start + RECHECKED
    return (open_ones[start:] + open_ones[:start])[:RECHECKED]


def _examined(reader: Reader, source: Location, candidate: _Candidate, known: Known | None, now: float) -> Known | None:
    """What is known of it now; None when it has gone meanwhile."""
    same = known if known is not None and known.state == candidate.state else None
    try:
        place = ReadSource(reader, Location(source.host, _below(source, candidate.name)))
        inside = _digest(place.look()) if candidate.directory and not candidate.sealed else ""
        if same is not None and same.kind == "whole" and same.inside == inside:
            return same
        settled = same is not None and same.kind != "whole" and same.inside == inside
        if not candidate.sealed and not settled:
            return Known(candidate.state, "settling", now, inside)
        selection = select(place)
    except RequestFailed as error:
        if is_missing(error):
            return None
        return _unfinished(candidate, same, now, str(error))
    except CheckpointError as error:
        return _unfinished(candidate, same, now, str(error))
    if candidate.directory and not selection.sealed and _digest(selection.look) != inside:
        return Known(candidate.state, "settling", now, _digest(selection.look))
    return Known(
        candidate.state,
        "whole",
        now,
        inside,
        sealed=selection.sealed,
        identity=selection.identity,
        step=step_of(candidate.name),
        written=_written(selection),
    )


def step_of(name: str) -> int | None:
    """The last number in the last part of a path, as in ``step_400.pt`` or ``checkpoint-400``; None without one."""
    numbers = re.findall("[0-9]+", name.rstrip("/").rpartition("/")[2])
    # SQLite's integers end there, and no training gets so far
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 19 else None


def _unfinished(candidate: _Candidate, known: Known | None, now: float, reason: str) -> Known:
    tries = 0 if known is None else known.tries + 1
    inside = "" if known is None else known.inside
    return Known(candidate.state, "unfinished", now, inside, tries=tries, reason=reason)


def _is_named(source: Location, name: str) -> bool:
    """Whether an action can name what lies there, as it has to; what lies on this machine needs none."""
    path = _below(source, name)
    try:
        return source.host is None or normalise_path(path) == path
    except PathError:
        return False


def _is_checkpoint(names: set[str]) -> bool:
    """Whether a directory with these names is, or becomes, a checkpoint; as :func:`tasks.selection.select` has it."""
    if names & {MANIFEST, METADATA, DRAFTER, "training_state.pt"}:
        return True
    weights = any(name.endswith(".safetensors") for name in names)
    return (CONFIG in names and weights) or any(name.endswith(".distcp") for name in names)


def _written(selection: Selection) -> float:
    return max((selection.look[file].mtime_ns for file in selection.files), default=0) / 1e9


def _state(entry: Stat) -> str:
    return f"{entry.device}:{entry.inode}:{entry.size}:{entry.mtime_ns}"


def _digest(files: Files) -> str:
    told = [(name, *asdict(state).values()) for name, state in sorted(files.items())]
    return hashlib.sha256(json.dumps(told).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _below(source: Location, name: str) -> str:
    return f"{source.path.rstrip('/')}/{name}"
