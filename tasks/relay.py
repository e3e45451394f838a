"""A file from host to host through the operator's machine, without touching its disk.

Nothing is under the final name until all of this holds: the source is a regular file and stayed the same one (device,
inode, size, mtime) from before the first byte until after the last; both ssh processes ended well; the sha256 taken on
the way is the one the destination took while it wrote.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dflash.errors import DFlashError, UsageError
from tasks.actions import Plan, ReadGrant, escape
from tasks.approvals import ApprovalStore
from tasks.errors import Refused
from tasks.gate import EXIT_SSH_FAILED, GateError, GateSession, Stat, open_session
from tasks.inventory import Host, Location
from tasks.process import PIPE, Popen, TimeoutExpired, last_line
from tasks.quantities import show_size
from tasks.ssh import Connector
from tasks.transfer import Progress, Receiver, ReceiverError, SinkClosedError, TransferError, pump, receiver_argv

DEFAULT_MAX_BYTES = 40 * 10**9
"""What may be read under one approval: a checkpoint of 17 GB, and once more if the first try breaks."""
SESSIONS = 4
CLOSING_SECONDS = 5.0


class SourceError(TransferError):
    """The source is not a file that can be relayed, or did not stay the same while it was read."""


@dataclass(frozen=True)
class RelayResult:
    """A file that arrived; ``seconds`` run from the first byte to the final name."""

    source: str
    destination: str
    identity: Stat
    bytes: int
    sha256: str
    seconds: float

    @property
    def mb_per_s(self) -> float:
        return self.bytes / 1e6 / self.seconds


def plan_relay(source: Location, destination: Location, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Plan | None:
    """Return what must be approved before ``source`` may be read; None when its host is not protected.

    The size of the file is not known before the gate may say it, so the grant asks for ``max_bytes``.
    Raises :class:`UsageError` unless both ends are on hosts, :class:`Refused` when the destination is protected.
    """
    reading, writing = _host(source), _host(destination)
    if writing.protected:
        raise Refused(f"{writing.name} is protected: a relay reads from there, it does not write there")
    if not reading.protected:
        return None
    grant = ReadGrant(
        host=reading.name,
        host_keys=reading.fingerprints,
        path=source.path,
        verbs=("read", "stat"),
        sessions=SESSIONS,
        bytes=max_bytes,
    )
    return Plan(
        grant=grant, effect=f"the file is read once and written to {destination}; nothing changes on {reading.name}"
    )


def relay(
    connector: Connector,
    store: ApprovalStore,
    source: Location,
    destination: Location,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: Progress | None = None,
) -> RelayResult:
    """Stream ``source`` to ``destination`` and return once it is there under its final name.

    ``progress`` gets (bytes done, bytes in all). Raises :class:`Refused` without an approval for a protected source,
    else :class:`TransferError` or what the connection raises; then nothing is under the final name.
    """
    plan = plan_relay(source, destination, max_bytes=max_bytes)
    approval = None if plan is None else store.require(plan)
    with open_session(connector, _host(source), approval) as session:
        identity = _relayable(session, source, None if plan is None else max_bytes)
        with _receiver(connector, destination) as receiver:
            receiver.open(destination.path, identity.size)
            begun = time.monotonic()
            sha256 = _stream(session, source.path, receiver, identity.size, progress)
            _check_unchanged(session, source, identity)
            receiver.commit(sha256)
            seconds = time.monotonic() - begun
    return RelayResult(str(source), str(destination), identity, identity.size, sha256, seconds)


def _host(location: Location) -> Host:
    if location.host is None:
        raise UsageError(f"{escape(location.path)} names no host: a relay goes from HOST:/path to HOST:/path")
    return location.host


def _relayable(session: GateSession, source: Location, most: int | None) -> Stat:
    found = session.stat(source.path)
    if found.kind != "file":
        kind = "a directory" if found.kind == "directory" else "not a regular file"
        raise SourceError(f"{source} is {kind}: name one file")
    if not found.size:
        raise SourceError(f"{source} is empty: relay it when it has been written")
    if most is not None and found.size > most:
        raise SourceError(
            f"{source} has {show_size(found.size)}, but {show_size(most)} were asked for: "
            f"ask for more with --max-bytes {show_size(found.size * 11 // 10).replace(' ', '')}"
        )
    return found


def _stream(session: GateSession, path: str, receiver: Receiver, size: int, progress: Progress | None) -> str:
    try:
        with session.read(path, 0, size) as stream:
            return pump(stream.fileno(), receiver.sink, size, progress=progress)
    except SinkClosedError:
        raise receiver.failure() from None


def _check_unchanged(session: GateSession, source: Location, identity: Stat) -> None:
    try:
        found = session.stat(source.path)
    except GateError as error:
        raise SourceError(f"{source} vanished while it was read ({error}): nothing was kept") from None
    if found != identity:
        raise SourceError(f"{source} changed while it was read: relay it again when its writer is done")


@contextmanager
def _receiver(connector: Connector, destination: Location) -> Iterator[Receiver]:
    """Run the receiver on the destination's host; on leaving it is gone, and with it what was not committed."""
    host = _host(destination)
    with tempfile.TemporaryFile() as stderr:
        process = connector.start(host, receiver_argv(), stdin=PIPE, stdout=PIPE, stderr=stderr)

        def explain(code: int) -> DFlashError:
            stderr.seek(0)
            said = stderr.read().decode("utf-8", "replace")
            if code == EXIT_SSH_FAILED:
                return connector.failure(host, said)
            how = f"ended with exit status {code}" if code >= 0 else f"was ended by signal {-code}"
            return ReceiverError(f"{destination}: the receiver {how}: {last_line(said) or 'no word'}")

        try:
            yield Receiver(process, str(destination), explain)
        finally:
            _end(process)


def _end(process: Popen[bytes]) -> None:
    """End of input makes the receiver clean up and leave; a connection that hangs is ended here instead."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(OSError):
            stream.close()
    try:
        process.wait(CLOSING_SECONDS)
    except TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
