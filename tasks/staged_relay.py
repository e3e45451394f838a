"""``relay --via s3``: a file, or what is wanted of a checkpoint, through the object store of ``hosts.yaml``."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from dflash.errors import UsageError
from tasks import journal
from tasks.approvals import Approval, Approved
from tasks.contents import WholeFile, spans_of
from tasks.ends import open_reader
from tasks.inventory import Inventory, Location
from tasks.object_store import ObjectStore
from tasks.plans import Plan
from tasks.relay import WHOLE, RelayResult, Settings, check_destinations, relay
from tasks.relayable import name_of_state, relayable
from tasks.ssh import Connector
from tasks.staged_senders import ByHost, ThroughOperator, plan_uploads
from tasks.staging import CHUNK_BYTES, StagedTransfer
from tasks.streams import Content, Transfer
from tasks.transfer import Progress


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
    host, asked = source.host, _in_chunks(settings or Settings())
    if host is None:
        raise UsageError(f"{source.path} is on this machine, which asks nobody before it uploads")
    if not store.takes_uploads:
        raise UsageError(
            f"{store.name} is below a path of its host, and an upload's approval names a host alone: leave out --upload"
        )
    with open_reader(connector, source, approval) as reader:
        content = WholeFile(source, relayable(reader, source, reader.stat(source.path)))
    spans = spans_of(content.size, streams=1, range_bytes=asked.range_bytes)
    about = f"{name_of_state(content.identity)} {WHOLE}"
    with journal.opened(str(source), str(destination), about, content.size, spans) as notes:
        return plan_uploads(store, host, content, notes, rate=asked.bandwidth)


def relay_staged(
    connector: Connector,
    store: ObjectStore,
    approval: Approval | None,
    source: Location,
    destination: Location,
    *,
    also: Sequence[Location] = (),
    uploads: Approved | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> RelayResult:
    """Move ``source`` to ``destination``, and to those of ``also``, by ``store``; return once it has its final name.

    All of a file a host that is not protected uploads by itself, and a protected one under ``uploads``, the approval of
    :func:`plan_staged_uploads`; else the source is read under ``approval`` and this machine uploads. A relay that broke
    is gone on with, also one that went over ssh alone. Raises as :func:`tasks.relay.relay`, and a
    :class:`~tasks.object_store.StoreError` when the store is what is wrong; then nothing is under the final name.
    """
    check_destinations((destination, *also))
    store.probe()
    asked = _in_chunks(settings or Settings())

    def carry(transfer: Transfer) -> StagedTransfer:
        through = ThroughOperator(transfer.content, transfer.ends.session, store, pace=transfer.pace)
        return StagedTransfer(transfer, store, _by_host(transfer.content, through) or through)

    def _by_host(content: Content, through: ThroughOperator) -> ByHost | None:
        host = source.host
        if not isinstance(content, WholeFile) or host is None or (host.protected and uploads is None):
            return None
        if not store.takes_uploads:
            return None
        approvals = () if uploads is None else uploads.approvals
        return ByHost(connector, host, content, store, approvals=approvals, otherwise=through, rate=asked.bandwidth)

    return relay(
        connector, approval, source, destination, asked, also=also, progress=progress, notice=notice, carry=carry
    )


def _in_chunks(settings: Settings) -> Settings:
    return replace(settings, streams=1, range_bytes=min(settings.range_bytes, CHUNK_BYTES))
