"""``relay s3://bucket/key HOST:/path``: the destination fetches an object, range by range, with presigned URLs."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash.errors import DFlashError
from tasks import journal
from tasks.actions import Count, Sha256, said
from tasks.contents import spans_of
from tasks.ends import open_receiver
from tasks.inventory import Location
from tasks.object_store import ObjectPlace, ObjectStore, StoredObject
from tasks.relay import Settings, check_destination
from tasks.ssh import Connector
from tasks.staging import CHUNK_BYTES
from tasks.store_errors import ObjectMissingError
from tasks.streams import FIRST_PAUSE, LONGEST_PAUSE, is_lost_link
from tasks.transfer import (
    FetchError,
    Progress,
    Receiver,
    SourceChangedError,
    StoredOtherwiseError,
    TransferError,
)

SIDECAR = ".relay.json"
TRIES = 3


class Sidecar(BaseModel):
    """What stands beside an object that a relay has put there; it may hold more."""

    model_config = ConfigDict(strict=True)

    bytes: Count
    sha256: Sha256
    etag: str
    ranges: tuple[tuple[Count, Count, Sha256], ...] = Field(min_length=1)
    source: str = ""
    identity: str = ""
    crc32: Count = 0


class Fetched(BaseModel):
    """A file that came out of a store; ``verified`` when its ranges were those that its writer put there."""

    sha256: str
    bytes: int
    moved: int
    seconds: float
    verified: bool


def fetch_object(
    connector: Connector,
    store: ObjectStore,
    place: ObjectPlace,
    destination: Location,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> Fetched:
    """Move ``place``, which is in ``store``'s bucket, to a host or to a file of this machine.

    A relay that broke is gone on with. Where a relay put the object there, its sidecar tells the sha256 of every range,
    and they must be the same; otherwise only the object's size, and that it stayed the same, can be told.

    :raises SourceChangedError: the object is another than it was at first; nothing is under the final name.
    :raises TransferError: anything else is wrong; see :class:`~tasks.object_store.StoreError`.
    """
    check_destination(destination)
    asked = settings or Settings()
    found = store.find(place.key)
    sidecar = sidecar_of(store, found)
    if sidecar is not None:
        spans = [(offset, length) for offset, length, _ in sidecar.ranges]
    else:
        spans = spans_of(found.size, streams=1, range_bytes=min(asked.range_bytes, CHUNK_BYTES))
    about = f"{found.etag}:{found.size}:{found.modified.timestamp()}"
    with journal.opened(str(place), str(destination), about, found.size, spans) as notes:
        fetching = _Fetching(store, found, sidecar, notes, destination.path, progress, notice, asked)
        missing = found.size - fetching.stored
        begun = time.monotonic()
        record = {"source": str(place), "identity": about, "selected": "all"}
        sha256 = fetching.run(lambda: open_receiver(connector, destination), record)
        seconds = time.monotonic() - begun
    return Fetched(sha256=sha256, bytes=found.size, moved=missing, seconds=seconds, verified=sidecar is not None)


class _Fetching:
    def __init__(
        self,
        store: ObjectStore,
        found: StoredObject,
        sidecar: Sidecar | None,
        notes: journal.Journal,
        path: str,
        progress: Progress | None,
        notice: Callable[[str], None] | None,
        settings: Settings,
    ) -> None:
        self._store, self._found, self._journal, self._path = store, found, notes, path
        self._expected = {} if sidecar is None else {offset: sha256 for offset, _, sha256 in sidecar.ranges}
        self._progress, self._notice, self._settings = progress, notice, settings
        self._last_moved = time.monotonic()

    @property
    def stored(self) -> int:
        return sum(span.length for span in self._journal.spans if span.stored)

    def run(self, receiver: Callable[[], AbstractContextManager[Receiver]], record: dict[str, str]) -> str:
        pause = FIRST_PAUSE
        while True:
            begun = time.monotonic()
            try:
                with receiver() as destination:
                    return self._run(destination, record)
            except DFlashError as error:
                lost = is_lost_link(error) or (isinstance(error, FetchError) and error.may_pass)
                if not lost or begun - self._last_moved > self._settings.patience:
                    raise
                if self._notice is not None:
                    self._notice(f"{error}; trying again")
            pause = FIRST_PAUSE if self._last_moved > begun else min(2 * pause, LONGEST_PAUSE)
            time.sleep(pause)

    def _run(self, receiver: Receiver, record: dict[str, str]) -> str:
        notes = self._journal
        opened = receiver.open(self._path, notes.size, notes.transfer, about=notes.about)
        if opened.committed is not None:
            self._journal.remove()
            return opened.committed
        if opened.fresh:
            self._journal.begin_anew()
        for span in self._journal.spans:
            self._report()
            if not span.stored:
                self._fetch(receiver, span)
        self._report()
        try:
            self._check_unchanged()
        except SourceChangedError:
            self._journal.remove()
            receiver.discard()
            raise
        ranges = [(span.offset, span.length, span.sha256 or "") for span in self._journal.spans]
        try:
            sha256 = receiver.commit(ranges, record, reread=self._settings.reread)
        except StoredOtherwiseError:
            self._journal.begin_anew()
            raise
        self._journal.remove()
        return sha256

    def _fetch(self, receiver: Receiver, span: journal.Span) -> None:
        for number in range(TRIES):
            url = self._store.presign_get(self._found.key)
            try:
                sha256 = receiver.fetch(span.offset, span.length, url, start=span.offset)
            except FetchError as error:
                if error.may_pass:
                    raise
                # what is wrong is told to this machine at length; a range behind the end is a shorter object
                self._check_unchanged()
                if number == TRIES - 1:
                    raise
                continue
            if sha256 == self._expected.get(span.offset, sha256):
                self._journal.sent(span, sha256)
                self._journal.stored(span)
                self._last_moved = time.monotonic()
                return
        raise TransferError(
            f"{self._store.name}/{said(self._found.key)}: {span.length} bytes at {span.offset} are not those that were "
            "put there: the store has changed them, or it is another file's sidecar that lies beside it"
        )

    def _check_unchanged(self) -> None:
        name = f"{self._store.name}/{said(self._found.key)}"
        try:
            now = self._store.find(self._found.key)
        except ObjectMissingError:
            raise SourceChangedError(f"{name} vanished while it was read: nothing was kept") from None
        if now != self._found:
            raise SourceChangedError(f"{name} changed while read: relay it again when its writer is done")

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self.stored, self._journal.size)


def sidecar_of(store: ObjectStore, found: StoredObject) -> Sidecar | None:
    """What a relay noted of this very object; None where there is no such note, or of another one."""
    try:
        text = b"".join(store.read(found.key + SIDECAR))
        sidecar = Sidecar.model_validate_json(json.dumps(json.loads(text)))
    except (ObjectMissingError, ValidationError, ValueError, RecursionError):
        return None
    at = 0
    for offset, length, _ in sidecar.ranges:
        if offset != at or not length:
            return None
        at += length
    return sidecar if (at, sidecar.bytes, sidecar.etag) == (found.size, found.size, found.etag) else None
