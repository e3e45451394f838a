"""A file or a checkpoint from anywhere to anywhere through the operator's machine, without touching its disk.

Nothing is under a final name until all of this holds: the source stayed the same one (device, inode, size, mtime) from
before the first byte until after the last; its host said that it sent every byte; of every range the sha256 taken on
the way is the one the destination took while it wrote. What arrived of a relay that broke stays there under a temporary
name, and the same relay moves only the rest.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from dflash.errors import UsageError
from tasks import journal
from tasks.actions import MOST_PATHS, ReadGrant, escape
from tasks.approvals import Approval
from tasks.contents import RANGE_BYTES, SelectedFile, WholeFile, spans_of
from tasks.ends import Pool, Reader, ReadSource, open_reader
from tasks.errors import Refused
from tasks.gate import Stat
from tasks.inventory import Host, Location
from tasks.plans import Plan
from tasks.relayable import look, name_of_state, require_another_place
from tasks.selection import Output, Selection, What
from tasks.several import beside, open_receivers
from tasks.ssh import Connector
from tasks.streams import PATIENCE_SECONDS, Content, Ends, Transfer
from tasks.transfer import Pace, Progress

FILE_BYTES, FILE_SESSIONS = 40 * 10**9, 16
"""What is asked for by each source: to read a checkpoint of 17 GB, and once more if the first try breaks."""
FILE_SUFFIXES = (
    *(".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf", ".npy", ".npz", ".parquet", ".json", ".jsonl", ".csv"),
    *(".txt", ".log", ".md", ".yaml", ".yml", ".toml", ".zip", ".tar", ".gz", ".tgz", ".zst", ".xz", ".whl"),
)
WINDOW_BYTES = 2 << 20
"""OpenSSH's channel window: what one stream has under way at most, whatever the link could carry."""
MOST_STREAMS = 8
PROTECTED_STREAMS = 2
"""A gate serves no more sessions at once."""
LINK_RATE = 1_250_000_000
"""Bytes a second that are aimed at where nothing slower is known: the 10 Gb/s of the operator's machine."""
LOOKS_AT_THE_WAY = 3


@dataclass(frozen=True)
class Settings:
    """How to move it."""

    what: What = "all"
    dtype: Literal["bfloat16"] | None = None
    output: Output = "safetensors"
    streams: int | None = None
    """Pairs of sessions at once; None: as many as the round trip time and the cores ask for."""
    bandwidth: int = 0
    """Bytes a second, 0 for no limit of this side's."""
    reread: bool = False
    """Have the destination read every range from its disk again before a file gets its name."""
    by_identity: bool = False
    """Put a selection into a folder of the destination that is named after the source's identity."""
    patience: float = PATIENCE_SECONDS
    """Seconds without a byte after which a lost link ends the relay."""
    range_bytes: int = RANGE_BYTES

    def __post_init__(self) -> None:
        """:class:`UsageError` for what says two things at once."""
        if self.what == "all" and (self.dtype is not None or self.output != "safetensors"):
            asked = "dtype" if self.dtype is not None else "output"
            raise UsageError(f"all of it moves as it is, so --{asked} has no say: ask for --what drafter or model")
        if self.dtype is not None and self.output == "pt":
            raise UsageError("the dtype of a torch file cannot be changed on the way: leave out --output pt or --dtype")

    @property
    def selected(self) -> str:
        """Names what is made of a source."""
        return " ".join([self.what, self.dtype or "as it is", self.output])


WHOLE = Settings().selected


class Carried(Protocol):
    """One file on its way, as :class:`~tasks.streams.Transfer` is."""

    missing: int

    def run(self) -> str: ...


Carry = Callable[[Transfer], Carried]
"""Another way for a file than that of the transfer itself."""


@dataclass(frozen=True)
class Arrived:
    """One file at its destination; ``moved`` bytes of it had to move this time."""

    path: str
    bytes: int
    sha256: str
    moved: int


@dataclass(frozen=True)
class RelayResult:
    """What arrived; ``seconds`` run from the first byte to the last final name."""

    source: Location
    destination: Location
    """The file, or the folder of the files of a selection."""
    identity: str
    what: What
    source_bytes: int
    files: tuple[Arrived, ...]
    seconds: float
    streams: int

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def moved(self) -> int:
        return sum(file.moved for file in self.files)

    @property
    def mb_per_s(self) -> float:
        return self.moved / 1e6 / self.seconds

    @property
    def sha256(self) -> str:
        """That of the file; of several, that of the lines sha256sum would print in their folder."""
        if len(self.files) == 1:
            return self.files[0].sha256
        lines = (f"{file.sha256}  {os.path.relpath(file.path, self.destination.path)}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def plan_relay(sources: Sequence[Location], effect: str, *, max_bytes: int = FILE_BYTES) -> Plan | None:
    """What must be approved before ``sources`` may be read; None when their host is not protected.

    What a source is cannot be known before the gate may say it, so its name decides what is asked for: one with a
    file's suffix is a file, with the ``config.json`` beside it, any other a directory; several directories ask for the
    folder they are all in. ``max_bytes`` is for each source. The plan of several covers that of each. Raises
    :class:`UsageError` when they are not on one host, when they are too many, and when directories of them have no
    folder in common that holds little else.
    """
    hosts = {source.host for source in sources}
    if len(hosts) != 1:
        names = ", ".join(sorted(host.name if host else "this machine" for host in hosts)) or "nothing"
        raise UsageError(f"{names}: relay from one host at a time, an approval is for one host")
    (host,) = hosts
    if host is None or not host.protected:
        return None
    files = [source.path for source in sources if is_file_name(source.path)]
    root = None if len(files) == len(sources) else _folder_of_all([source.path for source in sources], host)
    paths = () if root else tuple(dict.fromkeys(path for file in files for path in (file, _config_beside(file))))
    if len(paths) > MOST_PATHS:
        raise UsageError(f"{len(paths)} files are too many for one approval: name fewer, {MOST_PATHS} are the most")
    grant = ReadGrant(
        host=host.name,
        host_keys=host.fingerprints,
        paths=paths,
        root=root,
        verbs=("list", "read", "stat") if root else ("read", "stat"),
        sessions=FILE_SESSIONS * len(sources),
        bytes=max_bytes * len(sources),
    )
    return Plan(grant=grant, effect=effect)


def _folder_of_all(paths: Sequence[str], host: Host) -> str:
    """The folder that all of ``paths`` are in: that of one alone, of siblings, or one below the host's checkpoints."""
    root = os.path.commonpath(paths)
    siblings = all(os.path.dirname(path) == root for path in paths)
    below = host.checkpoints is not None and f"{root}/".startswith(f"{host.checkpoints.rstrip('/')}/")
    if root != "/" and (root in paths or siblings or below):
        return root
    raise UsageError(
        f"the directories have only {escape(root)} in common, and to read all below it is more than anybody should "
        "approve: name those of one folder, or one after the other"
    )


def is_file_name(path: str) -> bool:
    """Whether ``path`` is asked for as one file: its name ends as a file's; a model's may hold a dot as well."""
    return os.path.splitext(path)[1].lower() in FILE_SUFFIXES


def relay(
    connector: Connector,
    approval: Approval | None,
    source: Location,
    destination: Location,
    settings: Settings | None = None,
    *,
    also: Sequence[Location] = (),
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
    carry: Carry | None = None,
) -> RelayResult:
    """Stream ``source`` to ``destination``, and to those of ``also`` from the same reading; return once it is there.

    All of a file becomes the file ``destination``; everything else becomes files in the folder ``destination``.
    ``approval`` is for :func:`plan_relay`'s plan, None for a source that is not protected. ``progress`` gets (bytes
    done, bytes in all) of what the destination gets, ``notice`` a sentence when a link is lost and tried again.

    Raises :class:`Refused`, :class:`TransferError`, :class:`~dflash.checkpoint_layout.CheckpointError` for a source
    that cannot be understood, or what the connection raises; then the file that it is about has no name there.
    """
    destinations = (destination, *also)
    check_destinations(destinations)
    asked = settings or Settings()
    with ExitStack() as stack:
        readers = stack.enter_context(Pool(partial(open_reader, connector, source, approval)))
        receivers = stack.enter_context(Pool(partial(open_receivers, connector, destinations, set())))
        with readers.take() as reader:
            content = look(reader, source, what=asked.what, dtype=asked.dtype, output=asked.output)
            require_another_place(reader, source, [_files_at(place, content, asked) for place in destinations], content)
            streams = asked.streams or _streams(_round_trip(reader, source), source.host, approval, asked)
        ends = Ends(readers.take, receivers.take)
        relayed = _Relay(source, destinations, asked, streams, ends, progress, notice, carry)
        if isinstance(content, Stat):
            return relayed.file(content)
        return relayed.selection(*content)


@dataclass(frozen=True)
class Estimate:
    """What a relay would come to."""

    source_bytes: int
    moving_bytes: int
    streams: int
    rate: int
    """Bytes a second at most: by the limits, the source's, and what the streams carry in a round trip."""


def estimate(connector: Connector, approval: Approval | None, source: Location, settings: Settings) -> Estimate:
    """What :func:`relay` would move, found out by the few small reads it begins with."""
    with open_reader(connector, source, approval) as reader:
        found = look(reader, source, what=settings.what, dtype=settings.dtype, output=settings.output)
        round_trip = _round_trip(reader, source)
    streams = settings.streams or _streams(round_trip, source.host, approval, settings)
    carried = round(streams * WINDOW_BYTES / max(round_trip, 1e-6))
    fastest = min(carried, _rate(source.host, settings))
    if isinstance(found, Stat):
        return Estimate(found.size, found.size, streams, fastest)
    _, selection = found
    return Estimate(selection.source_bytes, selection.moved_bytes, streams, fastest)


def check_destinations(destinations: Sequence[Location]) -> None:
    """Raise :class:`UsageError` when one is named twice, and as :func:`check_destination` for each."""
    for number, place in enumerate(destinations):
        check_destination(place)
        if place in destinations[:number]:
            raise UsageError(f"{escape(str(place))} is named twice: name each destination once")


def check_destination(destination: Location) -> None:
    """Raise :class:`Refused` when the host of ``destination`` is protected."""
    if destination.host is not None and destination.host.protected:
        raise Refused(f"{destination.host.name} is protected: a relay reads from there, it does not write there")


def stream_count(round_trip: float, *, rate: int, cores: int, sessions: int, protected: bool) -> int:
    """How many streams fill a link: one carries a window a round trip (seconds), and each wants a core.

    ``rate`` is in bytes a second, the most that source, link and limit allow; ``sessions`` what the grant has.
    """
    wanted = math.ceil(rate * round_trip / WINDOW_BYTES)
    most = min(MOST_STREAMS, cores, sessions, PROTECTED_STREAMS if protected else MOST_STREAMS)
    return max(1, min(wanted, most))


def _files_at(place: Location, content: Stat | tuple[ReadSource, Selection], settings: Settings) -> list[Location]:
    """What will be written at the destination ``place``."""
    if isinstance(content, Stat):
        return [place]
    _, selection = content
    folder = _folder_of(place, selection, settings)
    return [Location(place.host, os.path.join(folder, output.name)) for output in selection.outputs]


def _folder_of(place: Location, selection: Selection, settings: Settings) -> str:
    """Where the files of ``selection`` go at ``place``."""
    if not settings.by_identity:
        return place.path
    return os.path.join(place.path, hashlib.sha256(selection.identity.encode()).hexdigest()[:16])


def _round_trip(reader: Reader, source: Location) -> float:
    """Seconds from a small request to its answer: the least of a few, because a busy machine is no long way."""
    times = []
    for _ in range(LOOKS_AT_THE_WAY):
        begun = time.monotonic()
        reader.stat(source.path)
        times.append(time.monotonic() - begun)
    return min(times)


def _streams(round_trip: float, host: Host | None, approval: Approval | None, settings: Settings) -> int:
    protected = host is not None and host.protected
    return stream_count(
        round_trip,
        rate=_rate(host, settings),
        cores=os.cpu_count() or 1,
        sessions=MOST_STREAMS if approval is None else approval.grant.sessions,
        protected=protected,
    )


def _rate(host: Host | None, settings: Settings) -> int:
    limit = host.read_limit if host is not None and host.protected else 0
    return min(rate for rate in (LINK_RATE, settings.bandwidth, limit) if rate)


def _config_beside(path: str) -> str:
    return os.path.join(os.path.dirname(path), "config.json")


@dataclass
class _Relay:
    """One source on its way, file by file."""

    source: Location
    destinations: tuple[Location, ...]
    settings: Settings
    streams: int
    ends: Ends
    progress: Progress | None
    notice: Callable[[str], None] | None
    carry: Carry | None

    @property
    def destination(self) -> Location:
        return self.destinations[0]

    def file(self, found: Stat) -> RelayResult:
        """All of one file, which becomes the file that the destination names."""
        identity = name_of_state(found)
        spans = spans_of(found.size, streams=self.streams, range_bytes=self.settings.range_bytes)
        begun = time.monotonic()
        arrived = self._transfer(WholeFile(self.source, found), spans, self.destination, identity, self.progress)
        return self._result(self.destination, identity, found.size, (arrived,), begun)

    def selection(self, place: ReadSource, selection: Selection) -> RelayResult:
        """The files of a selection, below the folder that the destination names; what makes them whole comes last."""
        folder = _folder_of(self.destination, selection, self.settings)
        with self.ends.receiver() as receiver:
            about = {"identity": selection.identity, "selected": self.settings.selected}
            receiver.require_alone(folder, [output.name for output in selection.outputs], about)
        total = sum(output.size for output in selection.outputs)
        arrived: list[Arrived] = []
        begun = time.monotonic()
        for output in selection.outputs:
            content = SelectedFile(self.source, place, output, selection, self.settings.range_bytes)
            there = Location(self.destination.host, os.path.join(folder, output.name))
            progress = self._part_of(sum(file.bytes for file in arrived), total)
            arrived.append(
                self._transfer(content, content.spans, there, selection.identity, progress, expected=output.sha256)
            )
        there = Location(self.destination.host, folder)
        return self._result(there, selection.identity, selection.source_bytes, tuple(arrived), begun)

    def _transfer(
        self,
        content: Content,
        spans: Sequence[tuple[int, int]],
        there: Location,
        identity: str,
        progress: Progress | None,
        *,
        expected: str | None = None,
    ) -> Arrived:
        selected = self.settings.selected
        named = " and ".join(str(place) for place in self._alike(there))
        about = f"{identity} {selected}"
        with journal.opened(str(self.source), named, about, content.size, spans, fits=content.fits) as notes:
            transfer = Transfer(
                content=content,
                journal=notes,
                ends=self.ends,
                path=there.path,
                sidecar={"source": str(self.source), "identity": identity, "selected": selected},
                streams=self.streams,
                pace=Pace(self.settings.bandwidth),
                progress=progress,
                notice=self.notice,
                reread=self.settings.reread,
                expected=expected,
                patience=self.settings.patience,
            )
            carried: Carried = transfer if self.carry is None else self.carry(transfer)
            sha256 = carried.run()
        return Arrived(there.path, content.size, sha256, carried.missing)

    def _alike(self, there: Location) -> list[Location]:
        """Where the file ``there``, of the first destination, lies at each of them."""
        first = self.destination.path
        return [Location(place.host, beside(there.path, first, place.path)) for place in self.destinations]

    def _part_of(self, before: int, total: int) -> Progress | None:
        if self.progress is None:
            return None
        progress = self.progress
        return lambda done, _: progress(before + done, total)

    def _result(
        self, there: Location, identity: str, source_bytes: int, files: tuple[Arrived, ...], begun: float
    ) -> RelayResult:
        seconds = time.monotonic() - begun
        return RelayResult(self.source, there, identity, self.settings.what, source_bytes, files, seconds, self.streams)
