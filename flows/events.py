"""The events that tell Prefect, its automations and its page what happened; nothing of ours waits for one.

An event is news, never the record: what is due stands in the ledger, and an event that was lost loses nothing. What an
event's content says makes its id, so the same news told twice, as after a crash, is one event.
"""

import json
from typing import Any, Final, Literal
from uuid import NAMESPACE_URL, uuid5

from flows.prefect_home import configure_prefect

CHECKPOINT_SAVED: Final = "dflash.checkpoint.saved"
EVALUATION_FINISHED: Final = "dflash.evaluation.finished"
NIGHT_COMPARED: Final = "dflash.night.compared"
GRANT_ENDS_SOON: Final = "dflash.grant.ends-soon"
GRANT_ENDED: Final = "dflash.grant.ended"
GUARD_WARNING: Final = "dflash.guard.warning"

Name = Literal[
    "dflash.checkpoint.saved",
    "dflash.evaluation.finished",
    "dflash.night.compared",
    "dflash.grant.ends-soon",
    "dflash.grant.ended",
    "dflash.guard.warning",
]


def emit(name: Name, subject: str, **payload: Any) -> bool:
    """Tell Prefect that ``name`` happened to ``subject``, a checkpoint's identity or a request's id.

    ``payload`` is plain JSON. Returns whether there was a server to tell: without a configured API and outside a flow
    run none is started for it. Delivery is in the background and may fail; the server being away raises nothing.
    """
    configure_prefect()
    from prefect.context import FlowRunContext
    from prefect.events import emit_event
    from prefect.settings import get_current_settings

    if get_current_settings().api.url is None and FlowRunContext.get() is None:
        return False
    content = json.dumps([name, subject, payload], sort_keys=True, separators=(",", ":"))
    sent = emit_event(
        name,
        {"prefect.resource.id": resource_id(name, subject), "prefect.resource.name": subject},
        payload=payload,
        id=uuid5(NAMESPACE_URL, content),
    )
    return sent is not None


def resource_id(name: str, subject: str) -> str:
    """The id of the Prefect resource that an event is about, as ``dflash.checkpoint.<identity>``."""
    return f"{name.rpartition('.')[0]}.{subject}"
