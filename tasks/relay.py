"""A file from host to host through the operator's machine, without touching its disk.

Nothing is under the final name until all of this holds: the source is a regular file and stayed the same one (device,
inode, size, mtime) from before the first byte until after the last; its host said that it sent every byte; of every
range the sha256 taken on the way is the one the destination took while it wrote. What arrived of a relay that broke
stays there under a temporary name, and the same relay moves only the rest.
"""

import errno
import math
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256

from dflash.errors import DFlashError, UsageError
from tasks import journal
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
from tasks.streams import PATIENCE_SECONDS, Ends, Transfer
from tasks.transfer import (
    Moved,
    Pace,
    Progress,
    Receiver,
    ReceiverLostError,
    SourceChangedError,
    TransferError,
    pump,
    receiver_argv,
)

FILE_BYTES, FILE_SESSIONS = 40 * 10**9, 16
"""What is asked for by each file: to read a checkpoint of 17 GB, and once more if the first try breaks."""
CLOSING_SECONDS = 5.0
RANGE_BYTES = 256 << 20
WINDOW_BYTES = 2 << 20
"""OpenSSH's channel window: what one stream has under way at most, whatever the link could carry."""
MOST_STREAMS = 8
PROTECTED_STREAMS = 2
"""A gate serves no more sessions at once."""
LINK_RATE = 1_250_000_000
"""Bytes a second that are aimed at where nothing slower is known: the 10 Gb/s of the operator's machine."""


class SourceError(TransferError):
    """The source is not a file that can be relayed."""


@dataclass(frozen=True)
class Settings:
    """How to move it."""

    streams: int | None = None
    """Pairs of sessions at once; None: as many as the round trip time and the cores ask for."""
    bandwidth: int = 0
    """Bytes a second, 0 for no limit of this side's."""
    reread: bool = False
    """Have the destination read every range from its disk again before the file gets its name."""
    patience: float = PATIENCE_SECONDS
    """Seconds without a byte after which a lost link ends the relay."""
    range_bytes: int = RANGE_BYTES


@dataclass(frozen=True)
class RelayResult:
    """A file that arrived; ``seconds`` run from the first byte to the final name."""

    source: Location
    destination: Location
    identity: Stat
    sha256: str
    seconds: float
    streams: int = 1
    moved: int = 0
    """Bytes that had to move this time."""

    @property
    def bytes(self) -> int:
        return self.identity.size

    @property
    def mb_per_s(self) -> float:
        return self.moved / 1e6 / self.seconds


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
    settings: Settings | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> RelayResult:
    """Stream ``source`` to ``destination`` and return once it is there under its final name.

    ``approval`` is for :func:`plan_relay`'s plan, None for a source that is not protected. ``progress`` gets (bytes
    done, bytes in all), ``notice`` a sentence when a link is lost and tried again. Raises :class:`Refused`,
    :class:`TransferError` or what the connection raises; then nothing is under the final name.
    """
    check_destination(destination)
    return _relay_file(connector, approval, source, destination, settings or Settings(), progress, notice)


def relay_checkpoint(
    connector: Connector,
    approval: Approval | None,
    source: Location,
    destination: Location,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> RelayResult:
    """Stream a single-file checkpoint as :func:`relay` does, after the ``config.json`` beside it where there is one.

    Where there is none, one that an earlier relay left beside the destination is removed: it would be believed.
    """
    check_destination(destination)
    config, its_place = _beside(source, "config.json"), _beside(destination, "config.json")
    with open_session(connector, _host(source), approval) as session:
        there = _exists(session, config)
    if there:
        _relay_file(connector, approval, config, its_place, settings or Settings(), None, notice)
    else:
        with connector.connect(_host(its_place)) as connection:
            connection.run(shlex.join(["rm", "-f", its_place.path]), hide=True, in_stream=False)
    return _relay_file(connector, approval, source, destination, settings or Settings(), progress, notice)


def check_destination(destination: Location) -> None:
    """Raise :class:`UsageError` unless ``destination`` is on a host, :class:`Refused` when that host is protected."""
    host = _host(destination)
    if host.protected:
        raise Refused(f"{host.name} is protected: a relay reads from there, it does not write there")


def stream_count(round_trip: float, *, rate: int, cores: int, sessions: int, protected: bool) -> int:
    """How many streams fill a link: one carries a window a round trip (seconds), and each wants a core.

    ``rate`` is in bytes a second, the most that source, link and limit allow; ``sessions`` what the grant has.
    """
    wanted = math.ceil(rate * round_trip / WINDOW_BYTES)
    most = min(MOST_STREAMS, cores, sessions, PROTECTED_STREAMS if protected else MOST_STREAMS)
    return max(1, min(wanted, most))


def spans_of(size: int, *, streams: int, range_bytes: int = RANGE_BYTES) -> list[tuple[int, int]]:
    """Consecutive (offset, length) over ``size`` bytes: ranges of ``range_bytes``, smaller where streams would idle."""
    length = max(1, min(range_bytes, math.ceil(size / streams)))
    return [(offset, min(length, size - offset)) for offset in range(0, size, length)]


@dataclass(frozen=True)
class WholeFile:
    """All of one file, as it is."""

    source: Location
    identity: Stat

    @property
    def size(self) -> int:
        return self.identity.size

    def send(self, session: GateSession, offset: int, length: int, sink: int, moved: Moved) -> str:
        digest = sha256()
        try:
            with session.read(self.source.path, offset, length) as stream:
                pump(stream.fileno(), sink, length, digests=[digest], moved=moved)
        except RequestFailed as error:
            self._check_still_there(error)
            raise
        return digest.hexdigest()

    def check_unchanged(self, session: GateSession) -> None:
        try:
            found = session.stat(self.source.path)
        except RequestFailed as error:
            self._check_still_there(error)
            raise
        if found != self.identity:
            raise SourceChangedError(
                f"{escape(str(self.source))} changed while read: relay it again when its writer is done"
            )

    def _check_still_there(self, error: RequestFailed) -> None:
        if error.reason.endswith(os.strerror(errno.ENOENT)):
            name = escape(str(self.source))
            raise SourceChangedError(f"{name} vanished while it was read: nothing was kept") from None


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
    connector: Connector,
    approval: Approval | None,
    source: Location,
    destination: Location,
    settings: Settings,
    progress: Progress | None,
    notice: Callable[[str], None] | None,
) -> RelayResult:
    host = _host(source)
    first = _First(open_session(connector, host, approval))
    with first:
        identity = _relayable(first.session, source)
        streams = settings.streams or _streams(_round_trip(first.session, source), host, approval, settings)
        spans = spans_of(identity.size, streams=streams, range_bytes=settings.range_bytes)
        about = f"{identity.device}:{identity.inode}:{identity.size}:{identity.mtime_ns}"
        with journal.opened(str(source), str(destination), about, spans) as notes:
            transfer = Transfer(
                content=WholeFile(source, identity),
                journal=notes,
                ends=Ends(
                    session=lambda: first.take() or open_session(connector, host, approval),
                    receiver=lambda: _receiver(connector, destination),
                ),
                path=destination.path,
                sidecar={"source": str(source), "identity": about, "selected": "all"},
                streams=streams,
                pace=Pace(settings.bandwidth),
                progress=progress,
                notice=notice,
                reread=settings.reread,
                patience=settings.patience,
            )
            begun = time.monotonic()
            digest = transfer.run()
            seconds = time.monotonic() - begun
    return RelayResult(source, destination, identity, digest, seconds, streams, transfer.missing)


class _First:
    """The session that looked at the source becomes the first stream's, so that it costs the grant one session."""

    def __init__(self, session: GateSession) -> None:
        self.session = session
        self._taken = False

    def take(self) -> GateSession | None:
        if self._taken:
            return None
        self._taken = True
        return self.session

    def __enter__(self) -> "_First":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._taken:
            self.session.__exit__(*error)  # type: ignore[arg-type]


def _round_trip(session: GateSession, source: Location) -> float:
    """Seconds from a small request to its answer."""
    begun = time.monotonic()
    session.stat(source.path)
    return time.monotonic() - begun


def _streams(round_trip: float, host: Host, approval: Approval | None, settings: Settings) -> int:
    rates = [LINK_RATE, settings.bandwidth, *([host.read_limit] if host.protected else [])]
    return stream_count(
        round_trip,
        rate=min(rate for rate in rates if rate),
        cores=os.cpu_count() or 1,
        sessions=MOST_STREAMS if approval is None else approval.grant.sessions,
        protected=host.protected,
    )


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
            return ReceiverLostError(f"{place}: the receiver {how}: {said(last_line(text)) or 'no word'}")

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
