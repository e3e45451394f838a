"""What a relay looks at before the first byte: what the source is, whether it is whole, and where it must not go."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from dflash.errors import UsageError
from tasks.actions import escape
from tasks.channel import RequestFailed
from tasks.contents import SourceError, noticing_if_it_vanished
from tasks.ends import Reader, ReadSource, identity_of
from tasks.gate import Stat
from tasks.inventory import Location
from tasks.quantities import show_size
from tasks.selection import Output, Selection, What, select
from tasks.sources import Reading, require_settled, require_whole

SETTLING_SECONDS = 1.0
"""Between the two looks at a checkpoint that does not say itself that it is whole."""


def look(
    reader: Reader, source: Location, *, what: What, dtype: Literal["bfloat16"] | None, output: Output
) -> Stat | tuple[ReadSource, Selection]:
    """The state of a file that moves as it is, else the selection; the source is whole and has settled.

    Raises :class:`SourceError` or :class:`~dflash.checkpoint_layout.CheckpointError`.
    """
    found = reader.stat(source.path)
    if found.kind == "other":
        raise SourceError(f"{escape(str(source))} is neither a file nor a directory: name one")
    place = ReadSource(reader, source)
    if found.kind == "file" and what == "all":
        return whole_file(reader, source, found)
    approval = reader.approval
    if found.kind == "directory" and approval is not None and "list" not in approval.grant.verbs:
        raise SourceError(
            f"{escape(str(source))} is a directory, and only a file was asked for, as its name says: rename it, or "
            "relay its files one by one"
        )
    selection = select(place, what=what, dtype=dtype, output=output)
    _require_budget(reader, source, selection.moved_bytes - selection.planned)
    if what == "all" and place.left_out:
        raise SourceError(
            f"{escape(str(source))} holds {escape(place.left_out[0])}, which is no file, and no link to one that may "
            "be read: remove it, or relay what is wanted file by file"
        )
    if not selection.sealed:
        time.sleep(SETTLING_SECONDS)
        require_settled(selection.place, selection.look, place.look())
    return place, selection


def relayable(reader: Reader, source: Location, found: Stat) -> Stat:
    """The state ``found`` of a file that can move as it is; :class:`SourceError` says why another cannot."""
    name = escape(str(source))
    if found.kind != "file":
        kind = "a directory" if found.kind == "directory" else "not a regular file"
        raise SourceError(f"{name} is {kind}: name one file")
    if not found.size:
        raise SourceError(f"{name} is empty: relay it when it has been written")
    _require_budget(reader, source, found.size)
    return found


def _require_budget(reader: Reader, source: Location, count: int) -> None:
    """Raise :class:`SourceError` when so many bytes were never asked for."""
    approval = reader.approval
    if approval is not None and count > approval.grant.bytes:
        raise SourceError(
            f"{escape(str(source))} has {show_size(count)}, but {show_size(approval.grant.bytes)} were asked for: "
            f"ask for more with --max-bytes {show_size(count * 11 // 10).replace(' ', '')}"
        )


def whole_file(reader: Reader, source: Location, found: Stat) -> Stat:
    """The state ``found`` of a file that can move as it is.

    Raises as :func:`relayable`. A checkpoint in one file must be whole, too, and still what it was a while later
    (:class:`~dflash.checkpoint_layout.CheckpointError`); of another file nothing is known.
    """
    relayable(reader, source, found)
    name = os.path.basename(source.path)
    before = {name: identity_of(found)}
    place = ReadSource(reader, source)
    if require_whole(Reading(place, before), name):
        time.sleep(SETTLING_SECONDS)
        with noticing_if_it_vanished(source):
            require_settled(place.place, before, {name: identity_of(reader.stat(source.path))})
    return found


def name_of_state(found: Stat) -> str:
    """What names one state of a file whose content nothing names."""
    return f"{found.device}:{found.inode}:{found.size}:{found.mtime_ns}"


def require_another_place(
    reader: Reader,
    source: Location,
    written: Sequence[Sequence[Location]],
    content: Stat | tuple[ReadSource, Selection],
) -> None:
    """Raise :class:`UsageError` when a file to be ``written`` is one of the source's own, by whatever name."""
    states = [content] if isinstance(content, Stat) else list(content[1].look.values())
    own = {(state.device, state.inode) for state in states}
    for place in (place for places in written for place in places if place.host == source.host):
        with suppress(RequestFailed):
            there = reader.stat(place.path)
            if (there.device, there.inode) in own:
                raise UsageError(
                    f"{escape(str(place))} is a file of the source itself, which would be replaced: name another place"
                )
