"""A file from host to host through the operator's machine, without touching its disk.

Nothing is under the final name until all of this holds: the source is a regular file and stayed the same one (device,
inode, size, mtime) from before the first byte until after the last; its host said that it sent every byte; the sha256
taken on the way is the one the destination took while it wrote.
"""

import errno
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dflash.errors import DFlashError, UsageError
from tasks.actions import MOST_PATHS, ReadGrant, escape, said
from tasks.approvals import Approval
from tasks.channel import EXIT_SSH_FAILED, RequestFailed
from tasks.errors import Refused
from tasks.gate import GateSession, Stat, open_session
from tasks.inventory import Host, Location
from tasks.plans import Plan
from tasks.process import PIPE, Popen, TimeoutExpired, last_line, tail
from tasks.quantities import show_size
from tasks.ssh import Connector
from tasks.transfer import Progress, Receiver, ReceiverError, SinkClosedError, TransferError, pump, receiver_argv

FILE_BYTES, FILE_SESSIONS = 40 * 10**9, 4
"""What is asked for by each file: to read a checkpoint of 17 GB, and once more if the first try breaks."""
CLOSING_SECONDS = 5.0


class SourceError(TransferError):
    """The source is not a file that can be relayed, or did not stay the same while it was read."""


@dataclass(frozen=True)
class RelayResult:
    """A file that arrived; ``seconds`` run from the first byte to the final name."""

    source: Location
    destination: Location
    identity: Stat
    sha256: str
    seconds: float

    @property
    def bytes(self) -> int:
        return self.identity.size

    @property
    def mb_per_s(self) -> float:
        return self.bytes / 1e6 / self.seconds


def plan_relay(
    sources: Sequence[Location], effect: str, *, with_config: bool = False, max_bytes: int = FILE_BYTES
) -> Plan | None:
    """Return what must be approved before ``sources`` may be read; None when their host is not protected.

    ``with_config`` asks for the ``config.json`` beside each as well. How large a file is cannot be known before the
    gate may say it, so the grant asks for ``max_bytes`` for each source. The plan of several covers that of each.
    Raises :class:`UsageError` when a source names no host, when they are not on one host, or when they are too many.
    """
    hosts = {_host(source).name: _host(source) for source in sources}
    if len(hosts) != 1:
        raise UsageError(f"{', '.join(hosts) or 'nothing'}: relay from one host at a time, an approval is for one host")
    (host,) = hosts.values()
    if not host.protected:
        return None
    files = [*sources, *(_beside(source, "config.json") for source in sources if with_config)]
    paths = tuple(dict.fromkeys(file.path for file in files))
    if len(paths) > MOST_PATHS:
        raise UsageError(f"{len(paths)} files are too many for one approval: name fewer, {MOST_PATHS} are the most")
    grant = ReadGrant(
        host=host.name,
        host_keys=host.fingerprints,
        paths=paths,
        verbs=("read", "stat"),
        sessions=FILE_SESSIONS * len(sources),
        bytes=max_bytes * len(sources),
    )
    return Plan(grant=grant, effect=effect)


def relay(
    connector: Connector,
    approval: Approval | None,
    source: Location,
    destination: Location,
    *,
    progress: Progress | None = None,
) -> RelayResult:
    """Stream ``source`` to ``destination`` and return once it is there under its final name.

    ``approval`` is for :func:`plan_relay`'s plan, None for a source that is not protected. ``progress`` gets (bytes
    done, bytes in all). Raises :class:`Refused`, :class:`TransferError` or what the connection raises; then nothing is
    under the final name.
    """
    check_destination(destination)
    with open_session(connector, _host(source), approval) as session:
        return _relay_file(connector, session, source, destination, progress)


def relay_checkpoint(
    connector: Connector,
    approval: Approval | None,
    source: Location,
    destination: Location,
    *,
    progress: Progress | None = None,
) -> RelayResult:
    """Stream a single-file checkpoint as :func:`relay` does, after the ``config.json`` beside it where there is one.

    Where there is none, one that an earlier relay left beside the destination is removed: it would be believed.
    """
    check_destination(destination)
    config, its_place = _beside(source, "config.json"), _beside(destination, "config.json")
    with open_session(connector, _host(source), approval) as session:
        if _exists(session, config):
            _relay_file(connector, session, config, its_place, None)
        else:
            with connector.connect(_host(its_place)) as connection:
                connection.run(shlex.join(["rm", "-f", its_place.path]), hide=True, in_stream=False)
        return _relay_file(connector, session, source, destination, progress)


def check_destination(destination: Location) -> None:
    """Raise :class:`UsageError` unless ``destination`` is on a host, :class:`Refused` when that host is protected."""
    host = _host(destination)
    if host.protected:
        raise Refused(f"{host.name} is protected: a relay reads from there, it does not write there")


def _host(location: Location) -> Host:
    if location.host is None:
        raise UsageError(f"{escape(location.path)} names no host: a relay goes from HOST:/path to HOST:/path")
    return location.host


def _beside(place: Location, name: str) -> Location:
    return Location(place.host, os.path.join(os.path.dirname(place.path), name))


def _exists(session: GateSession, place: Location) -> bool:
    try:
        session.stat(place.path)
    except RequestFailed as error:
        if error.reason.endswith(os.strerror(errno.ENOENT)):
            return False
        raise
    return True


def _relay_file(
    connector: Connector, session: GateSession, source: Location, destination: Location, progress: Progress | None
) -> RelayResult:
    identity = _relayable(session, source)
    with _receiver(connector, destination) as receiver:
        receiver.open(destination.path, identity.size)
        begun = time.monotonic()
        sha256 = _stream(session, source.path, receiver, identity.size, progress)
        _check_unchanged(session, source, identity)
        receiver.commit(sha256)
        seconds = time.monotonic() - begun
    return RelayResult(source, destination, identity, sha256, seconds)


def _relayable(session: GateSession, source: Location) -> Stat:
    found, name = session.stat(source.path), escape(str(source))
    if found.kind != "file":
        kind = "a directory" if found.kind == "directory" else "not a regular file"
        raise SourceError(f"{name} is {kind}: name one file")
    if not found.size:
        raise SourceError(f"{name} is empty: relay it when it has been written")
    approval = session.approval
    if approval is not None and found.size > approval.grant.bytes:
        raise SourceError(
            f"{name} has {show_size(found.size)}, but {show_size(approval.grant.bytes)} were asked for: "
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
    name = escape(str(source))
    try:
        found = session.stat(source.path)
    except RequestFailed as error:
        raise SourceError(f"{name} vanished while it was read ({error}): nothing was kept") from None
    if found != identity:
        raise SourceError(f"{name} changed while it was read: relay it again when its writer is done")


@contextmanager
def _receiver(connector: Connector, destination: Location) -> Iterator[Receiver]:
    """Run the receiver on the destination's host; on leaving it is gone, and with it what was not committed."""
    host, place = _host(destination), escape(str(destination))
    with tempfile.TemporaryFile() as stderr:
        process = connector.start(host, receiver_argv(), stdin=PIPE, stdout=PIPE, stderr=stderr)

        def explain(code: int) -> DFlashError:
            text = tail(stderr)
            if code == EXIT_SSH_FAILED:
                return connector.failure(host, text)
            how = f"ended with exit status {code}" if code >= 0 else f"was ended by signal {-code}"
            return ReceiverError(f"{place}: the receiver {how}: {said(last_line(text)) or 'no word'}")

        try:
            yield Receiver(process, place, explain)
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
