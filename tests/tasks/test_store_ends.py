"""An object as the source or the destination of a relay."""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash.checkpoint_layout import DamagedError
from tasks.feeds import StoredFeed, feed_of
from tasks.from_store import Fetched, fetch_object
from tasks.inventory import Location
from tasks.object_store import ObjectPlace, ObjectStore, Probe
from tasks.relay import Settings
from tasks.store_errors import StoreError
from tasks.to_store import Put, abort_abandoned, put_object
from tasks.transfer import Progress, SourceChangedError, TransferError
from tests.object_stores import BUCKET, StoreServer
from tests.sshds import Operator

# both take the same here, so the second is for the slow run
pytestmark = pytest.mark.parametrize(
    "any_server", ["seaweedfs", pytest.param("rclone", marks=pytest.mark.slow)], indirect=True
)

PART = 5 << 20  # stores take no smaller one but as the last
SIZE = 3 * PART + 12345
PLACE = ObjectPlace(BUCKET, "checkpoints/step 1's «τ».pt")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source on this machine."""
    monkeypatch.setenv("DFLASH_STATE", str(tmp_path / "state"))
    path = tmp_path / "step_1.pt"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def put(operator: Operator, file: Path, store: ObjectStore) -> Callable[..., Put]:
    """Put the file of this machine into the store."""

    def put_it(progress: Progress | None = None) -> Put:
        feed = feed_of(operator.connector, None, Location(None, str(file)))
        return put_object(feed, str(file), store, PLACE, least=PART, progress=progress)

    return put_it


def fetch(operator: Operator, store: ObjectStore, destination: Location, **options: Any) -> Fetched:
    return fetch_object(operator.connector, store, PLACE, destination, **options)


def left_behind(server: StoreServer) -> list[str]:
    """Unfinished uploads in the store."""
    uploads = server.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return [upload["UploadId"] for upload in uploads]


def test_file_of_a_protected_host_goes_into_the_store_and_out_to_another(
    operator: Operator, store: ObjectStore, server: StoreServer, file: Path, tmp_path: Path
) -> None:
    approval = operator.approve(path=str(file))
    source = Location(operator.train, str(file))
    feed = feed_of(operator.connector, approval, source)
    told: list[int] = []
    result = put_object(feed, str(source), store, PLACE, least=PART, progress=lambda done, total: told.append(done))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert server.content(PLACE.key) == file.read_bytes()
    assert (result.sha256, result.bytes, result.moved, told[-1]) == (digest, SIZE, SIZE, SIZE)
    sidecar = json.loads(server.content(f"{PLACE.key}.relay.json"))
    assert (sidecar["sha256"], sidecar["bytes"], sidecar["source"]) == (digest, SIZE, str(source))
    assert left_behind(server) == []

    there = tmp_path / "there" / "copy.pt"
    fetched = fetch(operator, store, Location(operator.infer, str(there)))
    assert there.read_bytes() == file.read_bytes()
    assert (fetched.sha256, fetched.verified, fetched.moved) == (digest, True, SIZE)
    beside = json.loads(there.with_name("copy.pt.relay.json").read_bytes())
    assert (beside["source"], beside["sha256"]) == (str(PLACE), digest)


def test_object_comes_to_this_machine_and_goes_to_another_key(
    operator: Operator, store: ObjectStore, server: StoreServer, file: Path, tmp_path: Path
) -> None:
    server.client().put_object(Bucket=BUCKET, Key=PLACE.key, Body=file.read_bytes())
    here = tmp_path / "here.pt"
    fetched = fetch(operator, store, Location(None, str(here)), settings=Settings(range_bytes=PART, reread=True))
    assert here.read_bytes() == file.read_bytes()
    # nobody wrote down what it was when it was put there
    assert (fetched.verified, fetched.bytes) == (False, SIZE)
    copy = ObjectPlace(BUCKET, "copy.pt")
    result = put_object(StoredFeed(store, PLACE), str(PLACE), store, copy, least=PART)
    assert server.content(copy.key) == file.read_bytes()
    assert result.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_what_is_in_the_store_already_does_not_move_again(
    store: ObjectStore, server: StoreServer, file: Path, put: Callable[..., Put]
) -> None:
    first, second = put(), put()
    assert (second.moved, second.sha256, second.crc32) == (0, first.sha256, first.crc32)
    server.client().put_object(Bucket=BUCKET, Key=PLACE.key, Body=bytes(SIZE))
    assert put().moved == SIZE
    os.utime(file, (0, 0))
    assert put().moved == SIZE
    assert server.content(PLACE.key) == file.read_bytes()


def test_checkpoint_that_is_cut_short_becomes_no_object(
    server: StoreServer, file: Path, put: Callable[..., Put]
) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("step/data.pkl", bytes(1000))
    os.truncate(file, 900)
    with pytest.raises(DamagedError, match="cut short or still being written"):
        put()
    assert server.keys() == []


def test_upload_that_broke_goes_on_with_the_missing_parts(
    store: ObjectStore, server: StoreServer, file: Path, put: Callable[..., Put], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZeroDivisionError):
        put(lambda done, total: done > total * 0.9 and 1 // 0)
    assert server.keys() == []
    (upload,) = left_behind(server)
    sent: list[int] = []
    call = ObjectStore.call

    def counting(store: ObjectStore, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "upload_part":
            assert arguments["UploadId"] == upload
            sent.append(arguments["PartNumber"])
        return call(store, operation, **arguments)

    monkeypatch.setattr(ObjectStore, "call", counting)
    result = put()
    assert server.content(PLACE.key) == file.read_bytes()
    assert result.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert result.moved < SIZE
    assert sent
    assert 1 not in sent


def test_upload_that_the_store_has_forgotten_begins_anew(
    store: ObjectStore, server: StoreServer, file: Path, put: Callable[..., Put]
) -> None:
    with pytest.raises(ZeroDivisionError):
        put(lambda done, total: done > total * 0.9 and 1 // 0)
    for upload in left_behind(server):
        server.client().abort_multipart_upload(Bucket=BUCKET, Key=PLACE.key, UploadId=upload)
    assert put().moved == SIZE
    assert server.content(PLACE.key) == file.read_bytes()


def test_upload_that_nobody_goes_on_with_is_aborted(
    store: ObjectStore, server: StoreServer, file: Path, put: Callable[..., Put]
) -> None:
    with pytest.raises(ZeroDivisionError):
        put(lambda done, total: done > total * 0.9 and 1 // 0)
    assert abort_abandoned(store) == 0
    (journal,) = (file.parent / "state" / "relays").glob("*.json")
    journal.unlink()
    assert abort_abandoned(store) == 1
    assert left_behind(server) == []


def test_source_that_changes_leaves_what_was_there_before(
    store: ObjectStore, server: StoreServer, file: Path, put: Callable[..., Put]
) -> None:
    server.client().put_object(Bucket=BUCKET, Key=PLACE.key, Body=b"before")

    def rewrite(done: int, total: int) -> None:
        if done > total // 2:
            os.utime(file, (0, 0))

    with pytest.raises(SourceChangedError, match="changed while read"):
        put(rewrite)
    assert server.content(PLACE.key) == b"before"
    assert left_behind(server) == []


@pytest.mark.parametrize("verifies", [frozenset(), frozenset({"crc32"})], ids=["not at all", "checksums"])
def test_store_that_keeps_other_bytes_is_found_out(
    store: ObjectStore,
    server: StoreServer,
    file: Path,
    put: Callable[..., Put],
    monkeypatch: pytest.MonkeyPatch,
    verifies: frozenset[Any],
) -> None:
    call = ObjectStore.call

    def spoiling(store: ObjectStore, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "upload_part" and arguments["PartNumber"] == 2:
            arguments["Body"] = bytes(len(arguments["Body"]))
            # as if it were spoilt behind the check; where the store has checksums, its own then betrays it
            arguments.pop("ContentMD5", None)
        return call(store, operation, **arguments)

    if "crc32" in verifies and server.kind == "rclone":
        pytest.skip("it verifies none")
    monkeypatch.setattr(ObjectStore, "call", spoiling)
    monkeypatch.setattr(ObjectStore, "probe", lambda store: Probe(verifies, 0.0))
    with pytest.raises(StoreError, match="BadDigest" if verifies else "does not hold what was put there"):
        put()
    assert server.keys() == []


def test_object_that_changes_while_it_is_fetched_never_gets_its_final_name(
    operator: Operator, store: ObjectStore, server: StoreServer, file: Path, tmp_path: Path
) -> None:
    server.client().put_object(Bucket=BUCKET, Key=PLACE.key, Body=file.read_bytes())

    def replace(done: int, total: int) -> None:
        if done > total // 2:
            server.client().put_object(Bucket=BUCKET, Key=PLACE.key, Body=bytes(SIZE))

    there = tmp_path / "there" / "copy.pt"
    with pytest.raises(SourceChangedError, match="changed while read"):
        fetch(
            operator,
            store,
            Location(operator.infer, str(there)),
            settings=Settings(range_bytes=PART),
            progress=replace,
        )
    assert list(there.parent.iterdir()) == []


def test_object_that_is_not_what_was_put_there_is_refused(
    operator: Operator, store: ObjectStore, server: StoreServer, file: Path, put: Callable[..., Put], tmp_path: Path
) -> None:
    put()
    key = f"{PLACE.key}.relay.json"
    sidecar = json.loads(server.content(key))
    sidecar["ranges"][1][2] = "0" * 64
    server.client().put_object(Bucket=BUCKET, Key=key, Body=json.dumps(sidecar).encode())
    there = tmp_path / "there" / "copy.pt"
    with pytest.raises(TransferError, match="are not those that were put there"):
        fetch(operator, store, Location(operator.infer, str(there)))
    assert not there.exists()


def test_missing_object_is_named(operator: Operator, store: ObjectStore, file: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not there"):
        fetch(operator, store, Location(operator.infer, str(tmp_path / "copy.pt")))
