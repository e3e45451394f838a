"""What an object store can do wrong, and the sentence for each answer of it.

An answer may repeat a signature: of its text only the error's code is taken.
"""

import email.utils
import re
import time
from typing import Any

from botocore.exceptions import (
    ClientError,
    ConfigNotFound,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from tasks.actions import said
from tasks.transfer import TransferError

MOST_SKEW_SECONDS = 300.0
NO_ENTRY = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "403")
TOO_SKEWED = ("RequestTimeTooSkewed", "RequestExpired")
MISSING = ("NoSuchKey", "404", "NotFound", "NoSuchUpload")


class StoreError(TransferError):
    """The object store did not do what it was asked for."""

    state_name = "StoreFailed"


class StoreAccessError(StoreError):
    """Credentials, bucket or clock are wrong; trying again does not help."""

    state_name = "StoreRefused"


class StoreBusyError(StoreError):
    """The store cannot be reached or says that it is overloaded or broken; it may be over soon."""

    state_name = "StoreUnreachable"


class ObjectMissingError(StoreError):
    """There is no such object, or no such unfinished upload."""

    state_name = "NoSuchObject"


class UntrustworthyStoreError(StoreError):
    """The store does not give back what it was given, or hands it to everybody."""

    state_name = "StoreUntrustworthy"


def explained(error: Exception, what: str, store: str, profile: str | None) -> StoreError:
    """The error of ``store`` that one of boto3's means; ``what`` was tried with the credentials of ``profile``."""
    if isinstance(error, ClientError):
        about = error.response["ResponseMetadata"]
        code = str(error.response.get("Error", {}).get("Code", ""))
        # some say of clocks only in words that they are the trouble
        if "request time" in str(error.response.get("Error", {}).get("Message", "")):
            code = TOO_SKEWED[0]
        return refused(about["HTTPStatusCode"], code, what, about.get("HTTPHeaders", {}), store, profile)
    if isinstance(error, NoCredentialsError | PartialCredentialsError | ProfileNotFound | ConfigNotFound):
        return StoreAccessError(
            f"{store}: no whole credentials in {_named(profile)}: name one that has them as staging.profile in "
            "hosts.yaml, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, ValueError):
        return StoreAccessError(f"staging.endpoint_url {said(store)} is no URL; write http(s)://HOST[:PORT]")
    return StoreBusyError(f"{store}: {type(error).__name__} at {said(what)}; is it up, and reached from here?")


def refused(status: int, code: str, what: str, headers: Any, store: str, profile: str | None) -> StoreError:
    """The error of an answer; ``headers`` tell the store's time."""
    skew = skew_in(headers)
    if code in TOO_SKEWED or (code in NO_ENTRY and abs(skew) > MOST_SKEW_SECONDS):
        return wrong_clock(store, skew)
    if code == "NoSuchBucket":
        return StoreAccessError(f"{store}: there is no such bucket; make it, or correct staging.bucket in hosts.yaml")
    if code in NO_ENTRY or status in (401, 403):
        return StoreAccessError(
            f"{store} refused the credentials of {_named(profile)} for {said(what)} ({status} {said(code)}): correct "
            "them, or have the bucket's owner allow them to get, put, list and delete"
        )
    if code in MISSING or status == 404:
        return ObjectMissingError(f"{store}: {said(what)}: not there ({status} {said(code)})")
    message = f"{store} answered {status} {said(code)} to {said(what)}"
    return StoreBusyError(message) if status >= 500 or status == 429 else StoreError(message)


def code_in(body: bytes) -> str:
    """The error's code in an XML answer, empty when there is none."""
    match = re.search(rb"<Code>([A-Za-z0-9.]{1,64})</Code>", body[:4096])
    return match[1].decode("ascii") if match else ""


def skew_in(headers: Any) -> float:
    """Seconds that the clock of whoever sent ``headers`` is ahead of this one; 0 where it does not say."""
    try:
        stamp = email.utils.parsedate_to_datetime({name.lower(): value for name, value in headers.items()}["date"])
    except (KeyError, ValueError, TypeError):
        return 0.0
    return stamp.timestamp() - _now()


def wrong_clock(store: str, skew: float) -> StoreAccessError:
    ahead = "ahead of" if skew > 0 else "behind"
    return StoreAccessError(
        f"the clock of {store} is {abs(skew):.0f} s {ahead} this machine's, so signatures are refused: set the clocks"
    )


def _named(profile: str | None) -> str:
    return f"profile {profile}" if profile else "the environment"


def _now() -> float:
    return time.time()
