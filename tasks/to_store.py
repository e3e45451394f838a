"""``relay HOST:/path s3://bucket/key``: a file becomes an object, in parts that this machine reads, checks and puts.

An upload that broke stays in the store, unseen, and the same relay puts only the missing parts. Where the store can,
it verifies a checksum of the whole object before it shows it; where it cannot, all of it is read again.
"""

import base64
import hashlib
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import DFlashError
from tasks import journal
from tasks.feeds import Feed, OpenFeed
from tasks.from_store import SIDECAR, sidecar_of
from tasks.journal import Journal, Span
from tasks.object_store import ObjectPlace, ObjectStore
from tasks.repack import combine_crc32
from tasks.staged_leftovers import OLD_SECONDS, transfers_going_on
from tasks.state import state_dir
from tasks.store_errors import ObjectMissingError, StoreBusyError, UntrustworthyStoreError
from tasks.streams import FIRST_PAUSE, LONGEST_PAUSE, PATIENCE_SECONDS, is_lost_link, is_of_changed_source
from tasks.transfer import Pace, Progress, TransferError

PART_BYTES = 16 << 20
"""Two are in memory at once: one comes while the one before goes."""
MOST_PARTS = 10_000


class Put(BaseModel):
    """An object that is whole."""

    sha256: str
    bytes: int
    moved: int
    seconds: float
    etag: str
    crc32: int


class _Part(BaseModel):
    etag: str
    crc32: int


class _Upload(BaseModel):
    """An unfinished upload, as this machine remembers it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    store: str
    key: str
    upload_id: str
    begun: float
    parts: dict[int, _Part] = {}

    @staticmethod
    def file(transfer: str) -> Path:
        return state_dir() / "relays" / f"{transfer}.upload"

    def save(self, transfer: str) -> None:
        file = self.file(transfer)
        partial = file.with_suffix(".upload-part")
        try:
            partial.write_text(self.model_dump_json(), encoding="utf-8")
            partial.replace(file)
        except OSError as error:
            raise TransferError(f"{file}: {error.strerror}; make room and make it writable") from None

    @classmethod
    def load(cls, file: Path) -> "_Upload | None":
        try:
            return cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return None


def put_object(
    feed: Feed,
    source: str,
    store: ObjectStore,
    place: ObjectPlace,
    *,
    bandwidth: int = 0,
    reread: bool = False,
    patience: float = PATIENCE_SECONDS,
    least: int = PART_BYTES,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> Put:
    """Put ``feed``, called ``source``, into ``store`` as ``place``; until it is whole and checked nobody sees it.

    ``<key>.relay.json`` beside it names the source and the sha256 of every part. Raises :class:`TransferError`,
    ``Refused`` or what the source's connection raises. Where the store verifies no checksum of a whole object, it is
    there before it is read again, and deleted when it is not what was put. An object that a relay put there of the same
    state of the source, and that nobody has written since, does not move again, unless it is to be ``reread``.
    """
    there = None if reread else _there_already(feed, source, store, place)
    if there is not None:
        return there
    probe = store.probe()
    abort_abandoned(store)
    length = part_bytes(feed.size, least=least)
    spans = [(offset, min(length, feed.size - offset)) for offset in range(0, feed.size, length)]
    with journal.opened(source, str(place), feed.identity, feed.size, spans) as notes:
        putting = _Putting(feed, store, place, notes, "crc32" in probe.verifies, Pace(bandwidth), progress, notice)
        begun = time.monotonic()
        return putting.run(source, reread=reread, patience=patience, begun=begun)


def _there_already(feed: Feed, source: str, store: ObjectStore, place: ObjectPlace) -> Put | None:
    try:
        found = store.find(place.key)
    except ObjectMissingError:
        return None
    noted = sidecar_of(store, found)
    if noted is None or (noted.source, noted.identity, noted.bytes) != (source, feed.identity, feed.size):
        return None
    return Put(sha256=noted.sha256, bytes=noted.bytes, moved=0, seconds=0.0, etag=noted.etag, crc32=noted.crc32)


def part_bytes(size: int, *, least: int = PART_BYTES) -> int:
    """How large the parts of an object of ``size`` bytes are: ``least``, and more where they would be too many."""
    return max(least, -(-math.ceil(size / MOST_PARTS) >> 20 << 20))


def abort_abandoned(store: ObjectStore, *, now: Callable[[], float] = time.time) -> int:
    """End the unfinished uploads of this machine that nobody goes on with, and those of more than a day; how many."""
    going_on, count = transfers_going_on(), 0
    for file in (state_dir() / "relays").glob("*.upload"):
        upload = _Upload.load(file)
        if upload is None or upload.store != store.name:
            continue
        if file.stem not in going_on or now() - upload.begun > OLD_SECONDS:
            _abort(store, upload)
            file.unlink(missing_ok=True)
            count += 1
    return count


class _Putting:
    def __init__(
        self,
        feed: Feed,
        store: ObjectStore,
        place: ObjectPlace,
        notes: Journal,
        whole_checksum: bool,
        pace: Pace,
        progress: Progress | None,
        notice: Callable[[str], None] | None,
    ) -> None:
        self._feed, self._store, self._key, self._journal = feed, store, place.key, notes
        self._whole_checksum, self._pace, self._progress, self._notice = whole_checksum, pace, progress, notice
        self._upload: _Upload | None = None
        self._sha256 = hashlib.sha256()
        self._done = self._moved = 0
        self._last_moved = time.monotonic()

    def run(self, source: str, *, reread: bool, patience: float, begun: float) -> Put:
        self._upload = self._take_up() or self._begin()
        resumed = any(span.stored for span in self._journal.spans)
        self._done = sum(span.length for span in self._journal.spans if span.stored)
        try:
            self._persistently(patience)
        except DFlashError as error:
            if is_of_changed_source(error):
                _abort(self._store, self._upload)
                _Upload.file(self._journal.transfer).unlink(missing_ok=True)
                self._journal.remove()
            raise
        crc32 = self._complete()
        by_reading = resumed or reread or not self._whole_checksum
        sha256 = self._reread() if by_reading else self._sha256.hexdigest()
        found = self._store.find(self._key)
        if found.size != self._feed.size:
            raise UntrustworthyStoreError(f"{self._store.name}: {self._key} has {found.size} bytes, not what was put")
        self._write_sidecar(source, sha256, found.etag, crc32)
        _Upload.file(self._journal.transfer).unlink(missing_ok=True)
        self._journal.remove()
        seconds = time.monotonic() - begun
        return Put(sha256=sha256, bytes=found.size, moved=self._moved, seconds=seconds, etag=found.etag, crc32=crc32)

    # --- what there is already

    def _take_up(self) -> _Upload | None:
        """The upload that a broken relay left, with the parts that the store still has as they were sent."""
        upload = _Upload.load(_Upload.file(self._journal.transfer))
        if upload is None or (upload.store, upload.key) != (self._store.name, self._key):
            return None
        try:
            there = dict(self._list_parts(upload))
        except ObjectMissingError:
            return None
        for number, span in enumerate(self._journal.spans, 1):
            part = upload.parts.get(number)
            if part is None or not span.stored or there.get(number) != (part.etag, span.length):
                upload.parts.pop(number, None)
                self._journal.lost(span)
        return upload

    def _list_parts(self, upload: _Upload) -> Iterator[tuple[int, tuple[str, int]]]:
        marker = 0
        while True:
            page = self._store.call("list_parts", Key=upload.key, UploadId=upload.upload_id, PartNumberMarker=marker)
            for part in page.get("Parts", ()):
                yield part["PartNumber"], (part["ETag"].strip('"'), part["Size"])
            if not page.get("IsTruncated"):
                return
            marker = page["NextPartNumberMarker"]

    def _begin(self) -> _Upload:
        self._journal.begin_anew()
        kind = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"} if self._whole_checksum else {}
        reply = self._store.call(
            "create_multipart_upload", Key=self._key, ContentType="application/octet-stream", **kind
        )
        upload = _Upload(store=self._store.name, key=self._key, upload_id=reply["UploadId"], begun=time.time())
        upload.save(self._journal.transfer)
        return upload

    # --- the parts

    def _persistently(self, patience: float) -> None:
        pause = FIRST_PAUSE
        while True:
            begun = time.monotonic()
            try:
                with self._feed.opened() as feed, ThreadPoolExecutor(1, "put") as putting:
                    self._put_missing(feed, putting)
                    feed.check_unchanged()
                    return
            except DFlashError as error:
                lost = is_lost_link(error) or isinstance(error, StoreBusyError)
                if not lost or begun - self._last_moved > patience:
                    raise
                if self._notice is not None:
                    self._notice(f"{error}; trying again")
            pause = FIRST_PAUSE if self._last_moved > begun else min(2 * pause, LONGEST_PAUSE)
            time.sleep(pause)

    def _put_missing(self, feed: OpenFeed, putting: ThreadPoolExecutor) -> None:
        going: Future[None] | None = None
        try:
            for number, span in enumerate(self._journal.spans, 1):
                if span.stored:
                    continue
                sha256, content = self._collected(feed, span)
                if going is not None:
                    going.result()
                going = putting.submit(self._put, number, span, sha256, content)
        finally:
            if going is not None:
                going.result()

    def _collected(self, feed: OpenFeed, span: Span) -> tuple[str, bytearray]:
        source, sink = os.pipe()
        content = bytearray(span.length)

        def collect() -> None:
            view = memoryview(content)
            while view and (count := os.readv(source, [view])):
                view = view[count:]

        collecting = threading.Thread(target=collect, daemon=True)
        collecting.start()
        try:
            sha256 = feed.send(span.offset, span.length, sink, self._on_moved)
        finally:
            os.close(sink)
            collecting.join()
            os.close(source)
        return sha256, content

    def _put(self, number: int, span: Span, sha256: str, content: bytearray) -> None:
        """One part; with a checksum that the store verifies, of what was read."""
        assert self._upload is not None
        if hashlib.sha256(content).hexdigest() != sha256:
            raise TransferError(f"{self._key}: part {number} was changed in this machine's memory; relay it again")
        crc32 = zlib.crc32(content)
        if self._whole_checksum:
            checksum = {"ChecksumCRC32": _base64(crc32.to_bytes(4, "big"))}
        else:
            checksum = {"ContentMD5": _base64(hashlib.md5(content, usedforsecurity=False).digest())}
        reply = self._store.call(
            "upload_part",
            Key=self._key,
            UploadId=self._upload.upload_id,
            PartNumber=number,
            Body=content,
            **checksum,
        )
        self._upload.parts[number] = _Part(etag=reply["ETag"].strip('"'), crc32=crc32)
        self._upload.save(self._journal.transfer)
        self._journal.sent(span, sha256)
        self._journal.stored(span)
        self._sha256.update(content)
        self._moved += span.length

    def _on_moved(self, count: int) -> None:
        self._last_moved = time.monotonic()
        self._done += count
        if self._progress is not None:
            self._progress(min(self._done, self._feed.size), self._feed.size)
        self._pace(count)

    # --- the end

    def _complete(self) -> int:
        assert self._upload is not None
        crc32, parts = 0, []
        for number, span in enumerate(self._journal.spans, 1):
            part = self._upload.parts[number]
            crc32 = combine_crc32(crc32, part.crc32, span.length)
            whole = {"ChecksumCRC32": _base64(part.crc32.to_bytes(4, "big"))} if self._whole_checksum else {}
            parts.append({"ETag": part.etag, "PartNumber": number, **whole})
        checksum: dict[str, Any] = {}
        if self._whole_checksum:
            checksum = {"ChecksumCRC32": _base64(crc32.to_bytes(4, "big")), "ChecksumType": "FULL_OBJECT"}
        self._store.call(
            "complete_multipart_upload",
            Key=self._key,
            UploadId=self._upload.upload_id,
            MultipartUpload={"Parts": parts},
            **checksum,
        )
        return crc32

    def _reread(self) -> str:
        """The sha256 of the object as it can be read there, every part of it the one that was sent."""
        whole = hashlib.sha256()
        for span in self._journal.spans:
            part = hashlib.sha256()
            for piece in self._store.read(self._key, span.offset, span.length):
                part.update(piece)
                whole.update(piece)
            if part.hexdigest() != span.sha256:
                self._store.delete([self._key])
                self._journal.remove()
                raise UntrustworthyStoreError(
                    f"{self._store.name}: {self._key} does not hold what was put there at {span.offset}; it was "
                    "deleted: use another store"
                )
        return whole.hexdigest()

    def _write_sidecar(self, source: str, sha256: str, etag: str, crc32: int) -> None:
        fields = {
            "source": source,
            "identity": self._feed.identity,
            "selected": "all",
            "bytes": self._feed.size,
            "sha256": sha256,
            "etag": etag,
            "crc32": crc32,
            "ranges": [(span.offset, span.length, span.sha256) for span in self._journal.spans],
        }
        text = json.dumps(fields, indent=2, sort_keys=True).encode("ascii") + b"\n"
        self._store.put(self._key + SIDECAR, len(text), [text])


def _abort(store: ObjectStore, upload: _Upload) -> None:
    try:
        store.call("abort_multipart_upload", Key=upload.key, UploadId=upload.upload_id)
    except ObjectMissingError:
        return


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode("ascii")
