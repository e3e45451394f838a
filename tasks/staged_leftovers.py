"""Where staged chunks lie in the store, and what a relay that was killed left there.

This machine keeps a note of each transfer of its own, so that it can tell what is left of one that nobody goes on with;
of another machine's it knows only the age.
"""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tasks import journal
from tasks.object_store import ObjectStore, StoredObject
from tasks.state import state_dir
from tasks.transfer import TransferError

OLD_SECONDS = 24 * 3600.0
"""A chunk lies in the store for minutes; a transfer that added none for a day is dead."""
CHUNK = re.compile(r"([0-9a-f]{16})/[0-9]{5}")
PROBE = re.compile(r"probe-[0-9a-f]{16}")


def chunk_prefix(store: ObjectStore, transfer: str) -> str:
    return f"{store.prefix}{transfer}/"


def chunk_key(store: ObjectStore, transfer: str, number: int) -> str:
    return f"{chunk_prefix(store, transfer)}{number:05}"


def remember(store: ObjectStore, transfer: str) -> None:
    """Note that chunks of ``transfer`` are about to be put into ``store``."""
    note = _notes() / f"{transfer}.staged"
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_text(json.dumps({"store": store.name}), encoding="ascii")
    except OSError as error:
        raise TransferError(f"{note}: {error.strerror}; make room and make it writable") from None


def forget(transfer: str) -> None:
    """Note that nothing of ``transfer`` is in the store any more."""
    (_notes() / f"{transfer}.staged").unlink(missing_ok=True)


def sweep(store: ObjectStore, *, now: Callable[[], float] = time.time) -> list[str]:
    """Delete what relays left in ``store`` that were killed, and return the keys.

    That is what belongs to a transfer of this machine that no journal goes on with, and whatever nothing was added to
    for a day. Nothing else is touched: not even below the prefix, unless it has the name of a chunk or a probe.
    """
    groups: dict[str, list[StoredObject]] = {}
    for found in store.list(store.prefix):
        name = found.key.removeprefix(store.prefix)
        if (chunk := CHUNK.fullmatch(name)) is not None:
            groups.setdefault(chunk[1], []).append(found)
        elif PROBE.fullmatch(name):
            groups.setdefault(name, []).append(found)
    abandoned = _remembered(store) - transfers_going_on()
    deleted: list[str] = []
    for group, objects in groups.items():
        newest = max(found.modified.timestamp() for found in objects)
        if group in abandoned or now() - newest > OLD_SECONDS:
            keys = [found.key for found in objects]
            store.delete(keys)
            deleted += keys
    for transfer in abandoned:
        forget(transfer)
    return deleted


def _notes() -> Path:
    return state_dir() / "relays"


def _remembered(store: ObjectStore) -> set[str]:
    """The transfers of this machine that may have chunks in ``store``."""
    found = set()
    for note in _notes().glob("*.staged"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(note.read_bytes())["store"] == store.name:
                found.add(note.stem)
    return found


def transfers_going_on() -> set[str]:
    """The transfers that a journal can go on with."""
    return {transfer for file in _notes().glob("*.json") if (transfer := journal.transfer_of(file)) is not None}
