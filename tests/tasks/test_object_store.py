"""The object store's client, against two servers that have nothing in common."""

import datetime
import hashlib
import logging
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import botocore.auth
import pytest

from dflash.errors import UsageError
from tasks import object_store, store_errors
from tasks.inventory import Staging
from tasks.object_store import ObjectPlace, ObjectStore
from tasks.store_errors import ObjectMissingError, StoreAccessError, StoreBusyError, UntrustworthyStoreError
from tests.object_stores import BUCKET, StoreServer

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second try, so that what fails fails at once."""
    monkeypatch.setattr(object_store, "ATTEMPTS", 1)


def test_probe_of_a_sound_store_leaves_nothing_and_says_what_it_verifies(
    store: ObjectStore, server: StoreServer
) -> None:
    probe = store.probe()
    assert probe.verifies == ({"md5", "crc32"} if server.kind == "seaweedfs" else {"md5"})
    assert abs(probe.skew_seconds) < 60
    assert server.keys() == []


def test_probe_finds_a_store_that_ignores_the_checksums_it_is_sent(server: StoreServer) -> None:
    asking = ObjectStore(server.staging(checksums="when_supported"))
    if server.kind == "seaweedfs":
        assert "crc32" in asking.probe().verifies
    else:
        with pytest.raises(UntrustworthyStoreError, match="does not verify them: write"):
            asking.probe()
    assert server.keys() == []


def test_what_is_put_in_pieces_is_there_and_can_be_read_listed_and_deleted(
    store: ObjectStore, server: StoreServer
) -> None:
    key = "relay/0123456789abcdef/step 1's «τ» +.pt"
    store.put(key, len(CONTENT), iter([CONTENT[:100], memoryview(CONTENT)[100:]]))
    assert server.content(key) == CONTENT
    assert b"".join(store.read(key)) == CONTENT
    assert b"".join(store.read(key, 1000, 70)) == CONTENT[1000:1070]
    (found,) = store.list("relay/")
    assert (found.key, found.size, found.etag) == (key, len(CONTENT), hashlib.md5(CONTENT).hexdigest())
    assert store.find(key).etag == found.etag
    store.delete([key, "relay/never there"])
    assert server.keys() == []


def test_list_goes_on_over_pages(store: ObjectStore, server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        store.put(f"relay/{number}", 1, [b"x"])
    real = ObjectStore._call
    monkeypatch.setattr(store, "_call", lambda operation, **fields: real(store, operation, MaxKeys=2, **fields))
    assert [found.key for found in store.list("relay/")] == [f"relay/{number}" for number in range(5)]


def test_presigned_urls_work_without_credentials_until_they_expire(store: ObjectStore) -> None:
    def request(url: str, data: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/octet-stream"}
        asked = urllib.request.Request(url, data, headers, method="GET" if data is None else "PUT")
        with urllib.request.urlopen(asked) as reply:
            return bytes(reply.read())

    request(store.presign_put("relay/key"), CONTENT)
    assert request(store.presign_get("relay/key")) == CONTENT
    assert store.presign_get("relay/key").startswith(f"{store.endpoint}/{BUCKET}/relay/key?")
    for url in (
        store.presign_get("relay/key").partition("?")[0],
        store.presign_get("relay/other").replace("other", "key"),
        store.presign_get("relay/key", seconds=-5),
    ):
        with pytest.raises(urllib.error.HTTPError, match=r"40[03]"):
            request(url)


def test_what_the_chunks_raise_ends_the_put_and_leaves_no_object(store: ObjectStore, server: StoreServer) -> None:
    def broken() -> Iterator[bytes]:
        yield CONTENT
        raise ZeroDivisionError("the source is gone")

    with pytest.raises(ZeroDivisionError, match="the source is gone"):
        store.put("relay/half", 2 * len(CONTENT), broken())
    assert server.keys() == []


def test_refused_put_takes_none_of_the_chunks(server: StoreServer) -> None:
    taken: list[int] = []

    def chunks() -> Iterator[bytes]:
        for number in range(100):
            taken.append(number)
            yield CONTENT

    with answering(overloaded, at_once=True) as endpoint, pytest.raises(StoreBusyError, match="503 SlowDown to PUT"):
        ObjectStore(server.staging(endpoint_url=endpoint)).put("relay/key", 100 * len(CONTENT), chunks())
    assert taken == []


def test_missing_object_has_an_error_of_its_own(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissingError, match="relay/none: not there"):
        store.find("relay/none")
    with pytest.raises(ObjectMissingError):
        next(store.read("relay/none"))


Fails = Callable[[ObjectStore], object]


@pytest.mark.parametrize(
    "attempt",
    [
        lambda store: store.probe(),
        lambda store: store.put("relay/key", 3, [b"abc"]),
        lambda store: list(store.list("relay/")),
    ],
    ids=["probe", "put", "list"],
)
class TestTrouble:
    def test_wrong_secret(self, server: StoreServer, monkeypatch: pytest.MonkeyPatch, attempt: Fails) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-but-wrong")
        with pytest.raises(StoreAccessError, match="refused the credentials of the environment") as error:
            attempt(ObjectStore(server.staging()))
        assert_no_secret(str(error.value), server, "s3cret-but-wrong")

    def test_no_credentials(self, server: StoreServer, monkeypatch: pytest.MonkeyPatch, attempt: Fails) -> None:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(StoreAccessError, match="no whole credentials in the environment"):
            attempt(ObjectStore(server.staging()))

    def test_unknown_profile(self, server: StoreServer, attempt: Fails) -> None:
        with pytest.raises(StoreAccessError, match="no whole credentials in profile nobody"):
            attempt(ObjectStore(server.staging(profile="nobody")))

    def test_bucket_gone(self, server: StoreServer, attempt: Fails) -> None:
        with pytest.raises(StoreAccessError, match="there is no such bucket; make it, or"):
            attempt(ObjectStore(server.staging(bucket="another")))

    def test_clock_skew(self, server: StoreServer, monkeypatch: pytest.MonkeyPatch, attempt: Fails) -> None:
        behind = datetime.timedelta(hours=2)
        now = botocore.auth.get_current_datetime
        monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: now() - behind)
        real = store_errors._now
        monkeypatch.setattr(store_errors, "_now", lambda: real() - behind.total_seconds())
        with pytest.raises(StoreAccessError, match=r"(72|71)\d\d s ahead of this machine's.*set the clocks"):
            attempt(ObjectStore(server.staging()))

    @pytest.mark.usefixtures("impatient")
    def test_nobody_there(self, server: StoreServer, attempt: Fails) -> None:
        with pytest.raises(StoreBusyError, match=r"is it up|was put there") as error:
            attempt(ObjectStore(server.staging(endpoint_url="http://127.9.9.9:9")))
        assert_no_secret(str(error.value), server)

    @pytest.mark.usefixtures("impatient")
    def test_overloaded(self, server: StoreServer, attempt: Fails) -> None:
        with (
            answering(overloaded, at_once=True) as endpoint,
            pytest.raises(StoreBusyError, match="answered 503 SlowDown"),
        ):
            attempt(ObjectStore(server.staging(endpoint_url=endpoint)))

    def test_no_message_and_no_log_tells_a_secret(
        self, server: StoreServer, caplog: pytest.LogCaptureFixture, attempt: Fails
    ) -> None:
        caplog.set_level(logging.DEBUG)
        attempt(ObjectStore(server.staging()))
        assert_no_secret(caplog.text, server)


def test_store_that_writes_the_trailer_into_the_object_is_caught(server: StoreServer) -> None:
    """What stores without support for trailing checksums did when clients began to send them."""
    kept: dict[str, bytes] = {}

    def forgetful(handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path = handler.path.partition("?")[0]
        if handler.command == "PUT":
            kept[path] = body + b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n"
        if "list-type" in handler.path:
            return answer(handler, 200, b"<ListBucketResult></ListBucketResult>")
        answer(handler, 200, kept.get(path, b"") if handler.command == "GET" else b"")

    with answering(forgetful) as endpoint, pytest.raises(UntrustworthyStoreError, match="does not give back what was"):
        ObjectStore(server.staging(endpoint_url=endpoint)).probe()


def test_store_that_serves_everybody_is_caught(server: StoreServer) -> None:
    kept: dict[str, bytes] = {}

    def open_to_all(handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path = handler.path.partition("?")[0]
        if handler.command == "PUT":
            kept[path] = body
        if "list-type" in handler.path:
            return answer(handler, 200, b"<ListBucketResult></ListBucketResult>")
        answer(handler, 200, kept.get(path, b"") if handler.command == "GET" else b"")

    with answering(open_to_all) as endpoint, pytest.raises(UntrustworthyStoreError, match="make the bucket private"):
        ObjectStore(server.staging(endpoint_url=endpoint)).probe()


@pytest.mark.parametrize(
    "text", ["s3://", "s3://b/", "s3://bucket", "s3://bucket//key", "s3://bucket/a\nb", "/a", "s3://-b/k"]
)
def test_odd_places_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not s3://BUCKET/KEY"):
        ObjectPlace.parse(text)


def test_place_is_read_and_shown() -> None:
    place = ObjectPlace.parse("s3://dflash/step 1/model.pt")
    assert (place.bucket, place.key, str(place)) == ("dflash", "step 1/model.pt", "s3://dflash/step 1/model.pt")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:9000",
        "",
        "http://",
        "ftp://h",
        "http://h:port",
        "http://h:0",
        "http://[::1",
        "http://h?a",
        "http://h#a",
    ],
)
def test_endpoint_that_is_no_url_is_named(url: str) -> None:
    with pytest.raises(StoreAccessError, match=re.escape(f"{url!r} is no URL of a store; write http(s)://HOST")):
        ObjectStore(Staging(kind="s3", bucket="b", endpoint_url=url))


def test_password_in_an_endpoint_is_not_repeated() -> None:
    with pytest.raises(StoreAccessError, match="holds credentials") as error:
        ObjectStore(Staging(kind="s3", bucket="b", endpoint_url="http://user:s3cret@h"))
    assert "s3cret" not in str(error.value)


def test_endpoint_may_end_with_a_slash_and_one_with_a_path_takes_no_uploads_of_hosts(server: StoreServer) -> None:
    slash = ObjectStore(server.staging(endpoint_url=f"{server.endpoint}/"))
    assert (slash.name, slash.endpoint, slash.takes_uploads) == (f"{server.endpoint}/dflash", server.endpoint, True)
    below = ObjectStore(server.staging(endpoint_url=f"{server.endpoint}/storage/s3/"))
    assert below.presign_get("a").startswith(f"{server.endpoint}/storage/s3/dflash/a?")
    assert not below.takes_uploads


def assert_no_secret(text: str, server: StoreServer, *others: str) -> None:
    for secret in (server.secret_key, "X-Amz-Signature", "Signature=", *others):
        assert secret not in text


@contextmanager
def answering(handle: Callable[[BaseHTTPRequestHandler], None], *, at_once: bool = False) -> Iterator[str]:
    """A server of whatever ``handle`` does; its address. ``at_once``: without asking for the body first."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            handle(self)

        do_PUT = do_HEAD = do_DELETE = do_GET

        def handle_expect_100(self) -> bool:
            return at_once or super().handle_expect_100()

        def log_message(self, *_: object) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()


def overloaded(handler: BaseHTTPRequestHandler) -> None:
    answer(handler, 503, b"<Error><Code>SlowDown</Code></Error>")


def answer(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(body)
