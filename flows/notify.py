"""Telling people: one message to every Prefect notification block that ``notify`` of hosts.yaml names.

Blocks hold the addresses and the secrets, so hosts.yaml holds none. A block that fails keeps no other from being told.
"""

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash.errors import DFlashError, UsageError
from flows.prefect_home import configure_prefect
from tasks.actions import escape, said
from tasks.inventory import Inventory

if TYPE_CHECKING:
    from prefect.blocks.abstract import NotificationBlock

KINDS = ("apprise", "custom-webhook")
"""Of blocks that are made here."""
SHORTEST_SECRET = 4
"""What is shorter is not cut out of a message: it would stand in every word."""


class NotNotifiedError(DFlashError):
    """Somebody who should have been told was not; the message says which block failed and why."""

    state_name = "NotNotified"


def notify(inventory: Inventory, subject: str, body: str) -> tuple[str, ...]:
    """Send ``subject`` and ``body``, both plain text, to every block of ``inventory.notify``; those that took it.

    Every block is tried. Raises :class:`NotNotifiedError` afterwards when one of them is not there or failed; secrets
    of the block stand in no message. Nothing is sent, and no server asked, where no block is named.
    """
    if not inventory.notify:
        return ()
    configure_prefect()
    failures = {name: why for name in inventory.notify if (why := _tell(name, subject, body)) is not None}
    if failures:
        told = ", ".join(name for name in inventory.notify if name not in failures) or "nobody"
        reasons = "; ".join(f"{escape(name)}: {why}" for name, why in failures.items())
        raise NotNotifiedError(
            f"'{escape(subject)}' was told to {told}, but not by {reasons}. Mend the block on Prefect's page or with "
            "'dflash-ops notify add', and try it with 'dflash-ops notify test'"
        )
    return inventory.notify


def save_block(name: str, url: str) -> None:
    """Save ``url`` as the notification block ``name`` ("custom-webhook/ops" or "apprise/mail"), over an older one.

    A webhook gets ``{"subject": …, "body": …}`` by POST. Raises ``UsageError`` for a name or a webhook's URL that is
    none, :class:`NotNotifiedError` when Prefect or Apprise does not take it; the URL, which may hold a secret, stands
    in no message.
    """
    kind, _, called = name.partition("/")
    if kind not in KINDS or re.fullmatch("[a-z0-9-]+", called) is None:
        raise UsageError(
            f"'{escape(name)}' is neither apprise/NAME nor custom-webhook/NAME, with a NAME of small letters, digits "
            "and dashes; make blocks of other kinds on Prefect's page"
        )
    if kind == "custom-webhook" and re.match(r"https?://[^/\s]", url) is None:
        raise UsageError(f"what was given for {name} is no URL of a webhook; it begins with https:// or http://")
    configure_prefect()
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.types import SecretDict
    from pydantic import SecretStr

    from flows.apprise_block import Apprise

    def save() -> None:
        block: NotificationBlock
        if kind == "apprise":
            block = Apprise(url=SecretStr(url))
        else:
            block = CustomWebhookNotificationBlock(
                name=called,
                url="{{url}}",
                json_data={"subject": "{{subject}}", "body": "{{body}}"},
                headers=None,
                cookies=None,
                secrets=SecretDict({"url": url}),
            )
        _now(block.save, called, overwrite=True)

    why = _failure(save, {url})
    if why is not None:
        raise NotNotifiedError(f"{escape(name)} was not saved: {why}")


def _tell(name: str, subject: str, body: str) -> str | None:
    """Why ``name`` could not be told; None when it was."""
    from prefect.blocks.abstract import NotificationBlock
    from prefect.blocks.core import Block

    import flows.apprise_block  # noqa: F401  # Prefect finds a block's class among those that were imported

    secrets: set[str] = set()

    def tell() -> None:
        block = _now(Block.load, name)
        if not isinstance(block, NotificationBlock):
            raise TypeError("it is no notification block")
        secrets.update(_secrets(block))
        with block.raise_on_failure():
            _now(block.notify, body, subject)

    return _failure(tell, secrets)


def _now(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What ``call`` returns, at once; Prefect's own calls give a coroutine where they find a running event loop."""
    if hasattr(call, "aio"):
        options["_sync"] = True
    result = call(*arguments, **options)
    if inspect.isawaitable(result):
        from prefect.utilities.asyncutils import run_coro_as_sync

        async def awaited() -> Any:
            return await result

        return run_coro_as_sync(awaited())
    return result


def _failure(act: Callable[[], None], secrets: set[str]) -> str | None:
    """What went wrong in ``act``, in a line without ``secrets``; blocks are other people's code and raise anything."""
    import httpx
    from prefect.blocks.abstract import NotificationError

    try:
        act()
    except httpx.HTTPStatusError as error:
        return f"it answered with HTTP status {error.response.status_code}"
    except Exception as error:
        text = error.log if isinstance(error, NotificationError) else str(error)
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "…")
        return said(" ".join(text.split())) or type(error).__name__
    return None


def _secrets(block: "NotificationBlock") -> set[str]:
    """Every secret text of ``block`` that is long enough to be told from a word."""
    found: set[str] = set()
    for name in type(block).model_fields:
        value = getattr(block, name)
        if hasattr(value, "get_secret_value"):
            inner = value.get_secret_value()
            found |= {str(one) for one in (inner.values() if isinstance(inner, dict) else [inner])}
    return {secret for secret in found if len(secret) >= SHORTEST_SECRET}
