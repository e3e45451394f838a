"""JSON over HTTP to one server, with retries, for programs that must get through a long prompt set.

What is tried again: no connection, a connection that breaks off, 429, 502, 503 and 504 for ``PATIENCE`` seconds from
the first failure of a request (a server that is restarted comes back within it); 408, 409 and other 5xx, which often
fail the same way every time, ``ATTEMPTS`` times within it. Every other 4xx and an answer that takes longer than its
time-out are errors at once. ``Retry-After`` is honoured.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from dflash.errors import DFlashError, one_line

CONNECT_TIMEOUT = 10.0
"""Seconds until a connection must stand."""
PATIENCE = 300.0
"""Seconds for which a request that cannot get through is tried again."""
ATTEMPTS = 5
"""How often a request is sent that the server fails with an internal error."""
FIRST_WAIT = 0.5
"""Seconds before the first retry; doubled each time, up to ``LONGEST_WAIT``, less up to half of it by chance."""
LONGEST_WAIT = 20.0

Item = TypeVar("Item")
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class ServerError(DFlashError):
    """A server is not there, is not what it should be, or does not answer as it should."""


class StatusError(ServerError):
    """The server answered, with an error status."""

    def __init__(self, message: str, status: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class LostError(ServerError):
    """No connection, or one that broke off before the whole answer was there."""


class AbortedError(ServerError):
    """The server gave up on the request and said so in an answer that otherwise looks complete."""


class Http:
    """One server, asked within ``async with``. ``timeout`` is in seconds, for one whole answer."""

    def __init__(self, base: str, *, timeout: float) -> None:
        self.base = base
        self._timeout = timeout
        self._client: httpx.AsyncClient
        self._trouble_said = False

    async def __aenter__(self) -> Self:
        # how many connections there are is the caller's business; an answer's time is watched as a whole, so that one
        # that trickles in is not waited for endlessly
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None),
            trust_env=not is_loopback(self.base),
            verify=self.base.startswith("https://"),  # reading the certificates takes longer than a connection
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Any:
        """The parsed JSON of a page. Raises :class:`ServerError`."""
        return self._parse(path, await self.get_text(path))

    async def get_text(self, path: str) -> str:
        """The text of a page. Raises :class:`ServerError`."""
        return await self._send("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The parsed JSON with which the server answers ``body``. Raises :class:`ServerError`."""
        return self._parse(path, await self._send("POST", path, body))

    async def persistently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """What ``call`` returns, called again while its :class:`ServerError` is one that may pass.

        Raises the last error when it does not.
        """
        failures = 0
        first_failure = 0.0
        while True:
            try:
                result = await call()
            except ServerError as error:
                failures += 1
                first_failure = first_failure or time.monotonic()
                left = PATIENCE - (time.monotonic() - first_failure)
                wait = _wait(error, failures)
                if wait is None or wait > left:
                    raise
                self._say_trouble(error)
                await asyncio.sleep(wait)
            else:
                self._trouble_said = False
                return result

    def _say_trouble(self, error: ServerError) -> None:
        if not self._trouble_said:
            logger.warning("%s (trying again for up to %.0f s)", one_line(str(error)), PATIENCE)
            self._trouble_said = True

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        url = self.base + path
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._client.request(method, url, json=body)
        except TimeoutError:
            raise ServerError(f"server {url}: no answer within {self._timeout:.0f} s; is it overloaded?") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise ServerError(f"server {url}: cannot be asked ({error}); expected http://host:port") from None
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise LostError(f"server {url}: no answer ({reason}); is the server running there?") from None
        except httpx.HTTPError as error:
            raise ServerError(f"server {url}: the answer cannot be read ({error})") from None
        except ExceptionGroup as error:  # a port that no machine has, out of asyncio's name look-up
            raise ServerError(
                f"server {url}: cannot be asked ({error.exceptions[0]}); expected http://host:port"
            ) from None
        text = reply.content.decode(errors="replace")  # JSON is UTF-8 whatever the header says
        if not reply.is_success:
            said = " ".join(text[:300].split())
            raise StatusError(
                f"server {url}: answered {reply.status_code} {reply.reason_phrase}: {said}",
                reply.status_code,
                _seconds(reply.headers.get("Retry-After")),
            )
        return text

    def _parse(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ServerError(f"server {self.base}{path}: the answer is not JSON; is this the model server?") from None


async def each(items: Sequence[Item], work: Callable[[Item], Awaitable[Result]], *, concurrency: int) -> list[Result]:
    """``work`` done on every item, at most ``concurrency`` at once; results in the order of ``items``.

    The first failure, or Ctrl-C, cancels what is under way and is raised.
    """
    turns = asyncio.Semaphore(concurrency)

    async def in_turn(item: Item) -> Result:
        async with turns:
            return await work(item)

    tasks = [asyncio.ensure_future(in_turn(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_loopback(url: str) -> bool:
    """Whether ``url`` is on this machine, where no proxy of the environment may be in between."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False  # no URL, as the first request will say
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _wait(error: ServerError, failures: int) -> float | None:
    """Seconds until the next attempt; ``None`` when there should be none."""
    backoff = min(FIRST_WAIT * 2.0 ** (failures - 1), LONGEST_WAIT) * random.uniform(0.5, 1.0)
    if isinstance(error, LostError):
        return backoff
    if isinstance(error, AbortedError):
        return backoff if failures < ATTEMPTS else None
    if not isinstance(error, StatusError):
        return None
    wait = max(backoff, error.retry_after or 0.0)
    if error.status in (429, 502, 503, 504):
        return wait
    if error.status in (408, 409) or error.status >= 500:
        return wait if failures < ATTEMPTS else None
    return None


def _seconds(retry_after: str | None) -> float | None:
    """The header's seconds, which may also be given as a date (RFC 9110, 10.2.3); ``None`` if it says nothing."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(retry_after)
    except (ValueError, OverflowError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
