"""``relay --via s3``: a file from host to host through the object store of ``hosts.yaml``."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash.errors import UsageError
from tasks import journal
from tasks.approvals import Approval, Approved
from tasks.contents import WholeFile, spans_of
from tasks.ends import open_receiver
from tasks.gate import Stat, open_session
from tasks.inventory import Host, Inventory, Location
from tasks.journal import Journal
from tasks.object_store import ObjectStore
from tasks.plans import Plan
from tasks.relay import WHOLE, Arrived, RelayResult, Settings, check_destination, name_of_state, relayable
from tasks.ssh import Connector
from tasks.staged_senders import ByHost, Sender, ThroughOperator, plan_uploads
from tasks.staging import CHUNK_BYTES, StagedTransfer
from tasks.transfer import Pace, Progress


def open_store(inventory: Inventory) -> ObjectStore:
    """The object store of ``hosts.yaml``; :class:`UsageError` when it names none."""
    if inventory.staging is None:
        raise UsageError("hosts.yaml names no object store; add staging: {kind: s3, bucket: …}, or use --via ssh")
    return ObjectStore(inventory.staging)


def plan_staged_uploads(
    connector: Connector,
    store: ObjectStore,
    approval: Approval | None,
    source: Location,
    destination: Location,
    *,
    settings: Settings | None = None,
) -> Plan | None:
    """What must be approved before ``source``'s host, which is protected, may put it into ``store`` by itself.

    Looking at the source costs a session of ``approval``. The plan is the same until something of the file has
    arrived; None when nothing is missing any more.
    """
    host, asked = _host(source), settings or Settings()
    identity = _look(connector, host, approval, source)
    with _journal(source, destination, identity, asked) as notes:
        return plan_uploads(store, host, source.path, identity, notes, rate=asked.bandwidth)


def relay_staged(
    connector: Connector,
    store: ObjectStore,
    approval: Approval | None,
    source: Location,
    destination: Location,
    *,
    uploads: Approved | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> RelayResult:
    """Move ``source`` to ``destination`` by ``store`` and return once it is there under its final name.

    A host that is not protected uploads by itself, and a protected one does under ``uploads``, the approval of
    :func:`plan_staged_uploads`; otherwise it is read under ``approval`` and this machine uploads. A relay that broke
    is gone on with, also one that went over ssh alone. Raises as :func:`tasks.relay.relay`, and a
    :class:`~tasks.object_store.StoreError` when the store is what is wrong; then nothing is under the final name.
    """
    check_destination(destination)
    store.probe()
    host, asked = _host(source), settings or Settings()
    identity = _look(connector, host, approval, source)
    content = WholeFile(source, identity)
    through = ThroughOperator(
        content, lambda: open_session(connector, host, approval), store, pace=Pace(asked.bandwidth)
    )
    sender: Sender = through
    if not host.protected or uploads is not None:
        approvals = () if uploads is None else uploads.approvals
        sender = ByHost(
            connector,
            host,
            source.path,
            identity,
            store,
            approvals=approvals,
            otherwise=through,
            rate=asked.bandwidth,
        )
    with _journal(source, destination, identity, asked) as notes:
        transfer = StagedTransfer(
            journal=notes,
            receiver=lambda: open_receiver(connector, destination),
            store=store,
            sender=sender,
            path=destination.path,
            sidecar={"source": str(source), "identity": name_of_state(identity), "selected": WHOLE, "via": store.name},
            progress=progress,
            notice=notice,
            reread=asked.reread,
            patience=asked.patience,
        )
        missing = identity.size - sum(span.length for span in notes.spans if span.stored)
        begun = time.monotonic()
        digest = transfer.run()
        seconds = time.monotonic() - begun
    arrived = Arrived(destination.path, identity.size, digest, missing)
    about = name_of_state(identity)
    return RelayResult(source, destination, about, "all", identity.size, (arrived,), seconds, streams=1)


def _host(location: Location) -> Host:
    if location.host is None:
        raise UsageError(f"{location.path} names no host: a relay through an object store goes from host to host")
    return location.host


def _look(connector: Connector, host: Host, approval: Approval | None, source: Location) -> Stat:
    with open_session(connector, host, approval) as session:
        return relayable(session, source, session.stat(source.path))


@contextmanager
def _journal(source: Location, destination: Location, identity: Stat, settings: Settings) -> Iterator[Journal]:
    spans = spans_of(identity.size, streams=1, range_bytes=min(settings.range_bytes, CHUNK_BYTES))
    with journal.opened(
        str(source), str(destination), f"{name_of_state(identity)} {WHOLE}", identity.size, spans
    ) as notes:
        yield notes
