"""A message reaches a real webhook receiver and a real mail server through blocks of a real Prefect server."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.errors import UsageError
from flows.notify import NotNotifiedError, notify, save_block
from tasks.inventory import Inventory, parse
from tests.guard_state import GuardState
from tests.receivers import MailServer, Webhook, plain_text, running

SUBJECT = "τ fell on two nights running"
BODY = "step 800: τ 4.10\nreference: τ 5.20 <not a tag> & more"


@dataclasses.dataclass
class People:
    webhook: Webhook
    mail: MailServer


@pytest.fixture(scope="module")
def people(prefect_server: str) -> Iterator[People]:
    """A webhook and a mailbox, saved as blocks on the server."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with running(Webhook()) as webhook, running(MailServer()) as mail:
        with temporary_settings({PREFECT_API_URL: prefect_server}):
            save_block("custom-webhook/ops", webhook.url)
            save_block("apprise/mail", mail.url)
        yield People(webhook, mail)


@pytest.fixture
def known(tmp_path: Path) -> GuardState:
    return GuardState(tmp_path / "guard")


def telling(known: GuardState, *blocks: str) -> Inventory:
    """hosts.yaml with ``notify``."""
    return parse(known.hosts_text() + f"notify: [{', '.join(blocks)}]\n")


def test_every_block_gets_subject_and_body(people: People, known: GuardState, prefect_api: str) -> None:
    people.webhook.received.clear()
    people.mail.received.clear()
    told = notify(telling(known, "custom-webhook/ops", "apprise/mail"), SUBJECT, BODY)
    assert told == ("custom-webhook/ops", "apprise/mail")
    assert people.webhook.received == [{"subject": SUBJECT, "body": BODY}]
    (message,) = people.mail.received
    assert message["To"] == "operator@example.org"
    assert message["Subject"] == SUBJECT
    assert plain_text(message).splitlines() == BODY.splitlines()


def test_a_block_that_fails_keeps_no_other_from_being_told(people: People, known: GuardState, prefect_api: str) -> None:
    people.webhook.received.clear()
    people.webhook.status = 503
    people.mail.received.clear()
    try:
        with pytest.raises(NotNotifiedError) as failed:
            notify(telling(known, "custom-webhook/none", "custom-webhook/ops", "apprise/mail"), SUBJECT, BODY)
    finally:
        people.webhook.status = 200
    assert failed.value.state_name == "NotNotified"
    assert "told to apprise/mail" in str(failed.value)
    assert "custom-webhook/ops: it answered with HTTP status 503" in str(failed.value)
    assert "custom-webhook/none: Unable to find block document" in str(failed.value)
    assert len(people.mail.received) == 1


def test_no_message_shows_the_secrets_of_a_block(known: GuardState, prefect_api: str) -> None:
    save_block("custom-webhook/secret", "http://127.0.0.1:1/hook?token=swordfish")
    save_block(
        "apprise/secret",
        "mailto://someone:swordfish@127.0.0.1:1/?from=dflash@example.org&to=operator@example.org&mode=insecure",
    )
    with pytest.raises(NotNotifiedError) as failed:
        notify(telling(known, "custom-webhook/secret", "apprise/secret"), SUBJECT, BODY)
    assert "nobody" in str(failed.value)
    assert "swordfish" not in str(failed.value)
    with pytest.raises(NotNotifiedError, match="no URL that Apprise understands") as failed:
        save_block("apprise/odd", "swordfish")
    assert "swordfish" not in str(failed.value)


def test_nobody_is_asked_where_nobody_is_named(known: GuardState) -> None:
    assert notify(telling(known), SUBJECT, BODY) == ()


def test_a_message_is_sent_from_inside_an_event_loop(people: People, known: GuardState, prefect_api: str) -> None:
    import asyncio

    people.webhook.received.clear()

    async def loop() -> tuple[str, ...]:
        return notify(telling(known, "custom-webhook/ops"), SUBJECT, BODY)

    assert asyncio.run(loop()) == ("custom-webhook/ops",)
    assert len(people.webhook.received) == 1


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("", "https://example.org/hook"),
        ("slack/ops", "https://example.org/hook"),
        ("custom-webhook/", "https://example.org/hook"),
        ("custom-webhook/a/b", "https://example.org/hook"),
        ("apprise/Ops", "mailto://example.org"),
        ("custom-webhook/ops", "swordfish"),
    ],
)
def test_what_cannot_be_a_block_is_refused_before_anything_is_saved(name: str, url: str) -> None:
    with pytest.raises(UsageError, match=r"neither apprise/NAME nor custom-webhook/NAME|begins with https") as refused:
        save_block(name, url)
    assert "swordfish" not in str(refused.value)
