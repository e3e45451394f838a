"""Bytes behind a presigned URL. Stdlib only, Python 3.9."""

from __future__ import annotations

import contextlib
import http.client
import re
import urllib.parse
from collections.abc import Callable, Iterator

FETCH_SECONDS = 60

Read = Callable[[memoryview], int]
"""Fills a buffer from its start and returns how many bytes came."""


class FetchFailed(Exception):
    """A presigned URL did not give its bytes; ``status`` is that of the answer, 0 where there was none."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def fetch(url: str, length: int, start: int | None, write: Callable[[Read], str]) -> str:
    """Have ``write`` store the object behind a presigned URL, or ``length`` bytes of it from ``start`` on.

    Raises :class:`FetchFailed`. The URL is a secret, and an answer may repeat it: of both only the host and the error's
    code stand in a message.
    """
    target = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    connection = kind(target.netloc, timeout=FETCH_SECONDS)
    # asked for a range, some answer 200 and say in the header only that it is one
    span = "" if start is None else f"{start}-{start + length - 1}"
    headers, wanted = ({"Range": f"bytes={span}"}, (200, 206)) if span else ({}, (200,))

    def read(buffer: memoryview) -> int:
        with answering(target.netloc):
            count = response.readinto(buffer)
        if not count:
            raise FetchFailed(f"{target.netloc}: the object ended early", 0)
        return count

    try:
        with answering(target.netloc):
            connection.request("GET", f"{target.path}?{target.query}", headers=headers)
            response = connection.getresponse()
            right = response.getheader("Content-Range", "").startswith(f"bytes {span}/") or not span
            if response.status not in wanted or response.length != length or not right:
                said = f"{response.length}"
                if response.status not in wanted:
                    code = re.search(rb"<Code>([A-Za-z0-9.]{1,64})</Code>", response.read(4096))
                    said = code[1].decode("ascii") if code else "no code"
                raise FetchFailed(
                    f"{target.netloc} answered {response.status} {response.reason} where {length} bytes were "
                    f"expected: {said}",
                    response.status,
                )
        return write(read)
    finally:
        connection.close()


@contextlib.contextmanager
def answering(netloc: str) -> Iterator[None]:
    try:
        yield
    except (http.client.HTTPException, OSError) as error:
        raise FetchFailed(f"{netloc}: {type(error).__name__} {error}", 0) from None
