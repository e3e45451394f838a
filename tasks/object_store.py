"""The object store of ``hosts.yaml``: objects are put, listed and deleted, and presigned URLs let a host do its part.

Stores differ in what they do with a checksum: some refuse a wrong one, some ignore it, and some write the trailer that
carries it into the object. :meth:`ObjectStore.probe` tells them apart before the first byte that matters.

Credentials and presigned URLs are secrets: they stand in no message of this module, and it keeps the libraries below it
from logging the requests that hold them.
"""

import base64
import re
import secrets
import threading
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, Self

import boto3
import botocore.loaders
import botocore.session
from botocore.awsrequest import (
    AWSPreparedRequest,
)
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
)
from botocore.utils import get_environ_proxies

from dflash.errors import UsageError
from tasks.actions import said
from tasks.inventory import Staging
from tasks.store_errors import (
    MOST_SKEW_SECONDS,
    ObjectMissingError,
    StoreAccessError,
    StoreBusyError,
    StoreError,
    UntrustworthyStoreError,
    code_in,
    explained,
    refused,
    skew_in,
    wrong_clock,
)
from tasks.store_http import AskingSession, Feed, keep_requests_out_of_logs

URL_SECONDS = 900
"""How long a presigned URL is good for: it is used at once, and what has begun goes on when it expires."""
CONNECT_SECONDS, READ_SECONDS = 10, 60
ATTEMPTS = 5
_MODELS = botocore.loaders.create_loader()
"""botocore's description of S3, which takes longer to read than most relays of a small file."""
OTHER_CONTENT = b"\0dflash probe\xff" * 7919
"""Of the probe: larger than any block, and of no round length."""

Checksum = Literal["md5", "crc32"]
CHECKSUMS: tuple[Checksum, ...] = ("md5", "crc32")


@dataclass(frozen=True)
class ObjectPlace:
    """``s3://bucket/key``."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises :class:`UsageError` when ``text`` is not ``s3://bucket/key``."""
        match = re.fullmatch(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,62})/([^\x00-\x1f\x7f]{1,1024})", text)
        if match is None or match[2].startswith("/"):
            raise UsageError(f"'{said(text)}' is not s3://BUCKET/KEY, with letters, digits and . _ - in the bucket")
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True)
class StoredObject:
    """One object as it is listed; ``etag`` names one state of it."""

    key: str
    size: int
    modified: datetime
    etag: str


@dataclass(frozen=True)
class Probe:
    """What the store was found to do."""

    verifies: frozenset[Checksum]
    """The checksums for which it refuses other content."""
    skew_seconds: float
    """The store's clock less this machine's."""


class ObjectStore:
    """One bucket of the store that ``staging`` names; its methods may be called from several threads.

    Every method raises a :class:`StoreError` that says what to mend, and never a URL or a secret; so does making one
    where the endpoint is no URL that requests can be made below.
    """

    def __init__(self, staging: Staging, *, bucket: str | None = None) -> None:
        keep_requests_out_of_logs()
        self.bucket, self.prefix = bucket or staging.bucket, staging.prefix
        self._staging = staging.model_copy(update={"endpoint_url": _checked(staging.endpoint_url)})
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The store and the bucket, for messages."""
        return f"{self._staging.endpoint_url or 'S3'}/{self.bucket}"

    @cached_property
    def endpoint(self) -> str:
        """Scheme, host and port of presigned URLs; the bucket is the first part of their path."""
        target = urllib.parse.urlsplit(self.presign_get("any"))
        return f"{target.scheme}://{target.netloc}"

    @property
    def takes_uploads(self) -> bool:
        """Whether a host can put objects there by itself: an approval names scheme, host and port, and no more."""
        return not urllib.parse.urlsplit(self._staging.endpoint_url or "").path

    def probe(self) -> Probe:
        """Try everything that a relay needs with objects of its own, which are gone afterwards.

        :raises StoreAccessError: no such bucket, no right to it, or clocks that are more than five minutes apart.
        :raises UntrustworthyStoreError: it corrupts what is put as ``staging.checksums`` says, ignores checksums that
            it is told to verify, or serves objects to whoever knows their name.
        """
        skew = self._check_clock()
        key = f"{self.prefix}probe-{secrets.token_hex(8)}"
        try:
            self._call("put_object", Key=key, Body=OTHER_CONTENT)
            self._check_content(key, "put")
            self._check_privacy(key)
            verifies = frozenset(kind for kind in CHECKSUMS if self._refuses_wrong(kind, key))
            self.put(key, len(OTHER_CONTENT), [OTHER_CONTENT])
            self._check_content(key, "put to a presigned URL")
        finally:
            self.delete([key])
        if self._staging.checksums == "when_supported" and "crc32" not in verifies:
            raise UntrustworthyStoreError(
                f"{self.name} takes objects whose checksum is wrong, so it does not verify them: write "
                "staging.checksums: when_required in hosts.yaml; what is relayed is verified where it arrives"
            )
        return Probe(verifies, skew)

    def presign_put(self, key: str, *, seconds: int = URL_SECONDS) -> str:
        """A URL to PUT ``key`` to; a secret."""
        return self._presigned("put_object", key, seconds)

    def presign_get(self, key: str, *, seconds: int = URL_SECONDS) -> str:
        """A URL to GET ``key`` from; a secret."""
        return self._presigned("get_object", key, seconds)

    def put(self, key: str, length: int, chunks: Iterable[bytes | memoryview]) -> None:
        """Store ``length`` bytes that come as ``chunks``, which are not kept; what they raise ends it and is raised.

        The store is asked before the first of them is taken, so that a refusal costs none.
        """
        feed = Feed(chunks)
        headers = {
            "Content-Length": str(length),
            "Content-Type": "application/octet-stream",
            "Expect": b"100-continue",
        }
        try:
            request = AWSPreparedRequest("PUT", self.presign_put(key), headers, iter(feed), False)
            response = self._plain.send(request)
        except BotoCoreError as error:
            if feed.failure is not None:
                raise feed.failure from None
            raise StoreBusyError(f"{self.name}: {type(error).__name__} while {key} was put there") from None
        if response.status_code not in (200, 201, 204):
            raise refused(
                response.status_code,
                code_in(response.content),
                f"PUT of {key}",
                response.headers,
                self.name,
                self._staging.profile,
            )

    def read(self, key: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes of ``key``, all of them or a range, in pieces of at most 1 MiB."""
        span = {} if length is None else {"Range": f"bytes={offset}-{offset + length - 1}"}
        body = self._call("get_object", Key=key, **span)["Body"]
        try:
            left = length
            while piece := body.read(1 << 20):
                left = None if left is None else left - len(piece)
                yield piece
        except (BotoCoreError, OSError) as error:
            raise StoreBusyError(f"{self.name}: {type(error).__name__} while {key} was read") from None
        finally:
            body.close()
        if left:
            raise StoreBusyError(f"{self.name}: {key} ended {left} bytes early")

    def find(self, key: str) -> StoredObject:
        """``key`` as it is now; :class:`ObjectMissingError` when there is none."""
        found = self._call("head_object", Key=key)
        return StoredObject(key, found["ContentLength"], found["LastModified"], found["ETag"].strip('"'))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose key begins with ``prefix``."""
        more: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=prefix, **more)
            for found in page.get("Contents", ()):
                yield StoredObject(found["Key"], found["Size"], found["LastModified"], found["ETag"].strip('"'))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        """Delete ``keys``; one that is not there is no error."""
        for key in keys:
            # one by one: not every store takes a list, and those that do want different checksums of it
            try:
                self._call("delete_object", Key=key)
            except ObjectMissingError:
                continue

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """One call of boto3's client on this bucket, for what the other methods do not cover."""
        return self._call(operation, **arguments)

    # --- the probe's steps

    def _check_clock(self) -> float:
        reply = self._call("list_objects_v2", Prefix=f"{self.prefix}probe-", MaxKeys=1)
        skew = skew_in(reply["ResponseMetadata"]["HTTPHeaders"])
        if abs(skew) > MOST_SKEW_SECONDS:
            raise wrong_clock(self.name, skew)
        return skew

    def _check_content(self, key: str, how: str) -> None:
        if b"".join(self.read(key)) != OTHER_CONTENT:
            mode = self._staging.checksums
            raise UntrustworthyStoreError(
                f"{self.name} does not give back what was {how} with staging.checksums: {mode}; "
                + ("write when_required" if mode == "when_supported" else "use another store")
            )

    def _check_privacy(self, key: str) -> None:
        unsigned = self.presign_get(key).partition("?")[0]
        try:
            response = self._plain.send(AWSPreparedRequest("GET", unsigned, {}, None, False))
        except BotoCoreError as error:
            raise StoreBusyError(f"{self.name}: {type(error).__name__}") from None
        if response.status_code == 200:
            raise UntrustworthyStoreError(
                f"{self.name} hands objects to everybody, signed or not: make the bucket private, or use another one"
            )

    def _refuses_wrong(self, kind: Checksum, key: str) -> bool:
        wrong = {"md5": {"ContentMD5": _base64(bytes(16))}, "crc32": {"ChecksumCRC32": _base64(bytes(4))}}[kind]
        assert zlib.crc32(OTHER_CONTENT) != 0
        try:
            self._client.put_object(Bucket=self.bucket, Key=key, Body=OTHER_CONTENT, **wrong)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 400:
                return True
            raise self._explained(error, "the probe") from None
        except BotoCoreError as error:
            raise self._explained(error, "the probe") from None
        return False

    # --- the clients

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        about = arguments.get("Key") or arguments.get("Prefix") or self.bucket
        try:
            return dict(getattr(self._client, operation)(Bucket=self.bucket, **arguments))
        except (BotoCoreError, ClientError) as error:
            raise self._explained(error, f"{operation} of {about}") from None

    def _presigned(self, operation: str, key: str, seconds: int) -> str:
        place = {"Bucket": self.bucket, "Key": key}
        try:
            return str(self._signer.generate_presigned_url(operation, Params=place, ExpiresIn=seconds))
        except (BotoCoreError, ClientError) as error:
            raise self._explained(error, "signing") from None

    @cached_property
    def _session(self) -> Any:
        try:
            session = botocore.session.Session(profile=self._staging.profile)
            session.register_component("data_loader", _MODELS)
            return session
        except BotoCoreError as error:
            raise self._explained(error, "reading the profile") from None

    @cached_property
    def _boto(self) -> Any:
        return boto3.Session(botocore_session=self._session)

    @property
    def _client(self) -> Any:
        with self._lock:
            return self._made_client

    @property
    def _signer(self) -> Any:
        with self._lock:
            return self._made_signer

    @cached_property
    def _made_client(self) -> Any:
        style = "path" if self._staging.endpoint_url else "auto"
        return self._new_client(self._staging.checksums, style)

    @cached_property
    def _made_signer(self) -> Any:
        if self._staging.endpoint_url and self._staging.checksums == "when_required":
            return self._made_client
        # a default checksum would be signed into the URL, as that of an empty body
        return self._new_client("when_required", "path")

    def _new_client(self, checksums: str, style: str) -> Any:
        settings = Config(
            signature_version="s3v4",
            s3={"addressing_style": style},
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
        )
        try:
            region = self._boto.region_name or "us-east-1"
            return self._boto.client("s3", endpoint_url=self._staging.endpoint_url, region_name=region, config=settings)
        except (BotoCoreError, ValueError) as error:
            raise self._explained(error, "the client") from None

    @cached_property
    def _plain(self) -> AskingSession:
        """What sends requests that a URL signs already, as the client itself would: its proxies, its certificates."""
        address = self._staging.endpoint_url or "https://s3.amazonaws.com"
        return AskingSession(
            verify=self._session.get_config_variable("ca_bundle") or True,
            proxies=get_environ_proxies(address),
            timeout=(CONNECT_SECONDS, READ_SECONDS),
        )

    def _explained(self, error: Exception, what: str) -> StoreError:
        return explained(error, what, self.name, self._staging.profile)


def _checked(endpoint_url: str | None) -> str | None:
    """``endpoint_url`` without a slash at its end; :class:`StoreAccessError` when nothing can be asked of it."""
    if endpoint_url is None:
        return None
    address = f"staging.endpoint_url {said(repr(endpoint_url))}"
    try:
        target = urllib.parse.urlsplit(endpoint_url)
        usual = target.scheme in ("http", "https") and target.hostname is not None and target.port != 0
    except ValueError:
        usual = False
        target = urllib.parse.SplitResult("", endpoint_url, "", "", "")
    if "@" in target.netloc:
        # a password among it is not repeated
        raise StoreAccessError("staging.endpoint_url holds credentials: write them into a profile, and name that one")
    if not usual or target.query or target.fragment:
        raise StoreAccessError(f"{address} is no URL of a store; write http(s)://HOST[:PORT][/PATH]")
    return endpoint_url.rstrip("/")


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode("ascii")
