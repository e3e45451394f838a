"""A Prefect block for every service that Apprise has a URL for: e-mail by ``mailtos://``, Matrix, ntfy, …

Prefect ships blocks for single services only, and none for e-mail over one's own SMTP server. To fill one in on
Prefect's page: ``prefect block register -m flows.apprise_block``.
"""

from typing import Any

from apprise import Apprise as Client
from apprise import AppriseAsset, NotifyFormat
from prefect.blocks.notifications import AbstractAppriseNotificationBlock
from pydantic import Field, SecretStr


class Apprise(AbstractAppriseNotificationBlock):
    """Sends to one Apprise URL. Raises ``ValueError`` for one that Apprise does not understand."""

    _block_type_name = "Apprise"
    _block_type_slug = "apprise"
    _description = "Sends notifications to any service by its Apprise URL, for one mailtos://user:password@host."

    url: SecretStr = Field(title="Apprise URL", description="For example mailtos://user:password@smtp.example.org")

    def block_initialization(self) -> None:
        # what is sent is plain text: without saying so, a mail is HTML in which line ends are lost
        asset = AppriseAsset(app_id="dflash", app_desc="dflash", body_format=NotifyFormat.TEXT)
        client: Any = Client(asset=asset)
        if not client.add(self.url.get_secret_value()):
            raise ValueError("this is no URL that Apprise understands; see https://appriseit.com/services/")
        self._apprise_client = client
