"""HTTP as boto3 does it, for the one request that it cannot send: a body that comes as it is read."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool
from botocore.httpsession import URLLib3Session


class _Asking:
    """A connection that sends nothing of a body once the store has answered.

    botocore waits for the answer to ``Expect: 100-continue`` and then lets the body come, to drop it.
    """

    def endheaders(self, *arguments: Any, **more: Any) -> None:
        super().endheaders(*arguments, **more)  # type: ignore[misc]
        if self._response_received:  # type: ignore[attr-defined]
            # urllib3 goes on to read what the server had to say
            raise BrokenPipeError


class AskingSession(URLLib3Session):  # type: ignore[misc]
    """botocore's session, over :class:`_Asking` connections."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        plain = type("", (_Asking, AWSHTTPConnection), {})
        secure = type("", (_Asking, AWSHTTPSConnection), {})
        self._pool_classes_by_scheme = {
            "http": type("", (AWSHTTPConnectionPool,), {"ConnectionCls": plain}),
            "https": type("", (AWSHTTPSConnectionPool,), {"ConnectionCls": secure}),
        }
        self._manager.pool_classes_by_scheme = self._pool_classes_by_scheme


class Feed:
    """Chunks for a request that remember why they ended: the HTTP library hides what they raise."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = chunks
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[bytes | memoryview]:
        try:
            yield from self._chunks
        except GeneratorExit:
            raise
        except BaseException as error:
            self.failure = error
            raise


def keep_requests_out_of_logs() -> None:
    """Their debug lines hold presigned URLs and signatures."""
    for library in ("botocore", "boto3", "s3transfer", "urllib3"):
        logger = logging.getLogger(library)
        if logger.level < logging.ERROR:
            logger.setLevel(logging.ERROR)
