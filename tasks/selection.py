"""What of a checkpoint has to move for what is wanted of it, decided from a few small reads and nothing run.

A :class:`Selection` says all before the first byte: which ranges of which files, the files that are made of them with
their exact sizes, and the identity of the source. It is made from any :class:`~tasks.sources.Source`.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dflash.checkpoint_layout import (
    CheckpointError,
    DamagedError,
    Format,
    NotACheckpointError,
    format_of_config,
    shards_of,
)
from dflash.distributed_checkpoint import METADATA
from dflash.formats import our_name, unwrapped
from dflash.manifest import CONFIG, DRAFTER, INDEX, MANIFEST, PROBE, REPLAY, parse_manifest
from dflash.records import read_ranges
from dflash.safetensors_header import TRAINING, read_header
from dflash.torch_zip import MAGIC, place, read_content, read_directory, root_of
from tasks.checkpoint_content import config_in, drafters, scalars_in, state_in
from tasks.distributed_selection import select_distributed
from tasks.packing import MOST_COPIES, Chosen, copied, literal, mirror, pack
from tasks.repack import LARGEST_RANGE, OutputFile
from tasks.sources import BESIDE, Look, Reading, Source, require_settled

What = Literal["drafter", "model", "all"]
SourceFormat = Literal[Format, "dcp", "safetensors", "directory"]
Output = Literal["safetensors", "pt"]

MODEL = "model.safetensors"
_OF_A_STEP = ("training_state.pt", DRAFTER)
_SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class Selection:
    """What moves. ``look`` is the state that the source was in; ``planned`` bytes of it were read to find this out.

    ``identity`` names the content without reading all of it: the digest of the manifest, else of the zip's directory
    with the file's size (it holds the CRC of every record), else of the headers with sizes and times. ``sealed`` is
    whether the checkpoint says itself that it is whole; otherwise two looks some time apart must agree
    (:func:`~tasks.sources.require_settled`). ``files`` are those that were or will be read.
    """

    place: str
    format: SourceFormat
    what: What
    identity: str
    sealed: bool
    look: Look
    outputs: tuple[OutputFile, ...]
    planned: int
    files: frozenset[str]

    @property
    def source_bytes(self) -> int:
        """The size of all that lies at the source."""
        return sum(state.size for state in self.look.values())

    @property
    def moved_bytes(self) -> int:
        """What is read of the source in all, for the plan and for the files."""
        return self.planned + sum(found.length for output in self.outputs for found in output.ranges(LARGEST_RANGE))

    def require_unchanged(self, look: Look) -> None:
        """:class:`ChangedError` unless ``files`` are in the state they were selected in."""
        require_settled(self.place, _only(self.look, self.files), _only(look, self.files))


@dataclass(frozen=True)
class _Found:
    """What a format's own rules come to."""

    format: SourceFormat
    identity: str
    outputs: tuple[OutputFile, ...]
    sealed: bool = False


def select(
    source: Source, *, what: What = "drafter", dtype: Literal["bfloat16"] | None = None, output: Output = "safetensors"
) -> Selection:
    """What has to move from ``source``.

    ``drafter`` is what an evaluation needs: the drafter's tensors under plain names, its config, and of a ``step_N/``
    the manifest, probe and replay batch. ``model`` is all of the weights as they are named, ``all`` every byte.
    ``dtype`` converts wider floats on the way. ``output`` is a directory as every loader reads it, or (of a torch file
    only) a torch file of the same size with holes where nothing was selected.

    Raises a :class:`CheckpointError`: :class:`NotACheckpointError` for an unknown format, :class:`DamagedError` for
    what is cut short or inconsistent, :class:`UnsafePickleError`, :class:`~tasks.packing.NotContiguousError`.
    """
    reading = Reading(source, dict(source.look()))
    if what == "all" and dtype is not None:
        raise CheckpointError(f"{source.place}: all of a checkpoint moves as it is; select the model to convert it")
    if source.single is not None:
        found = _select_file(reading, source.single, what, dtype is not None, output)
    elif output == "pt":
        raise CheckpointError(f"{source.place} is a directory; only of a torch file another can be made")
    else:
        found = _select_directory(reading, what, dtype is not None)
    _require_sane(reading, found.outputs)
    pieces = (piece.file for output in found.outputs for piece in output.pieces)
    return Selection(
        place=reading.place,
        format=found.format,
        what=what,
        identity=found.identity,
        sealed=found.sealed,
        look=reading.look,
        outputs=found.outputs,
        planned=reading.moved,
        files=frozenset(reading.opened).union(pieces),
    )


def _require_sane(reading: Reading, outputs: Iterable[OutputFile]) -> None:
    """A file that names the same bytes many times would fill the destination."""
    source = sum(state.size for state in reading.look.values())
    made = sum(output.size - sum(len(data) for _, data in output.literals) for output in outputs)
    if made > MOST_COPIES * source:
        raise DamagedError(
            f"{reading.place} has {source} bytes, but describes {made} bytes of tensors: they overlap; was it made to "
            f"fill a disk?"
        )


def _select_file(reading: Reading, name: str, what: What, narrow: bool, output: Output) -> _Found:
    file = reading.file(name)
    if file.size < len(MAGIC):
        raise DamagedError(f"{file.name} has {file.size} bytes; was it cut off while it was written or copied?")
    (head,) = read_ranges(file, [(0, len(MAGIC))])
    if head == MAGIC:
        return _select_torch(reading, name, what, narrow, output)
    if name.endswith(_SAFETENSORS) and output == "safetensors":
        return _select_weights(reading, "safetensors", (name,), what, narrow)
    raise NotACheckpointError(
        f"{file.name} is neither a torch.save file nor safetensors; give a checkpoint file or directory"
    )


def _select_torch(reading: Reading, name: str, what: What, narrow: bool, output: Output) -> _Found:
    file = reading.file(name)
    directory = read_directory(file)
    content = read_content(file, directory, directory.unplaced())
    identity = f"zip:{directory.sha256}:{file.size}"
    if not directory.checked:
        identity += f":{reading.look[name].mtime_ns}"
    beside = _beside(reading)
    if what == "all":
        records = place(file, directory, directory.entries)
        return _Found("pt", identity, (mirror(name, file, name, directory, records, directory.entries), *beside))
    state = state_in(file.name, content)
    tensors = drafters(file.name, state) if what == "drafter" else state
    wanted = {tensor.record.name for tensor in tensors.values()}
    if output == "pt":
        if narrow:
            raise CheckpointError(f"{file.name}: the dtype of a torch file cannot be changed; make it safetensors")
        data = f"{root_of(file, directory)}data/"
        kept = wanted | {entry for entry in directory.entries if not entry.startswith(data)}
        records = place(file, directory, directory.entries)
        return _Found("pt", identity, (mirror(name, file, name, directory, records, kept), *beside))
    records = place(file, directory, sorted(wanted, key=lambda record: directory.entries[record].header))
    chosen = [
        Chosen.whole(tensor_name, name, replace(tensor, record=records[tensor.record.name]))
        for tensor_name, tensor in tensors.items()
    ]
    config = config_in(file.name, content)
    training = scalars_in(content)
    metadata = {"format": "pt"} | ({TRAINING: json.dumps(training)} if training else {})
    packed = pack(MODEL, chosen, metadata=metadata, narrow=narrow)
    return _Found("pt", identity, (packed, *((literal(CONFIG, config),) if config else beside)))


def _beside(reading: Reading) -> tuple[OutputFile, ...]:
    return (copied(BESIDE, reading.look[BESIDE].size),) if BESIDE in reading.look else ()


def _select_directory(reading: Reading, what: What, narrow: bool) -> _Found:
    """By what only one writer leaves there, as :func:`dflash.checkpoint_layout.sniff`."""
    look = reading.look
    if MANIFEST in look:
        return _select_step(reading, what, narrow)
    if left := next((name for name in _OF_A_STEP if name in look), None):
        raise DamagedError(
            f"{reading.place} has {left} and no {MANIFEST}: this training checkpoint is still being written, or was "
            f"copied in part; the manifest is written last"
        )
    if METADATA in look:
        outputs, identity = select_distributed(reading, MODEL, what, narrow)
        return _Found("dcp", identity, outputs, sealed=True)
    if left := next((name for name in look if name.endswith(".distcp")), None):
        raise DamagedError(
            f"{reading.place} has {left} and no {METADATA}: it is still being written; {METADATA} is written last"
        )
    if CONFIG not in look or not any(_at_top(name) and name.endswith(_SAFETENSORS) for name in look):
        if what == "all" and look:
            return _every_file(look)
        found = ", ".join(sorted(look)[:5]) or "nothing"
        raise NotACheckpointError(
            f"{reading.place} holds {found}; expected a {MANIFEST}, a {METADATA}, or a {CONFIG} with *{_SAFETENSORS}"
        )
    if INDEX in look:
        shards = shards_of(reading.whole(INDEX), f"{reading.place}/{INDEX}")
    else:
        shards = tuple(name for name in sorted(look) if _at_top(name) and name.endswith(_SAFETENSORS))
    return _select_weights(reading, format_of_config(reading.whole(CONFIG)), shards, what, narrow)


def _select_step(reading: Reading, what: What, narrow: bool) -> _Found:
    text = reading.whole(MANIFEST)
    manifest, raw = parse_manifest(text, f"{reading.place}/{MANIFEST}")
    identity = f"manifest:{hashlib.sha256(text).hexdigest()}"
    needed = [name for name in (DRAFTER, CONFIG, INDEX, PROBE, REPLAY) if name in manifest.files]
    for name, entry in manifest.files.items():
        if what != "all" and name not in needed:
            continue
        size = reading.file(name).size
        if size != entry.size:
            raise DamagedError(
                f"{reading.place}/{name} has {size} bytes, the manifest says {entry.size}: it is damaged or was changed"
            )
    if what == "all":
        hashes = {name: entry.sha256 for name, entry in manifest.files.items()}
        outputs = tuple(copied(name, state.size, sha256=hashes.get(name)) for name, state in reading.look.items())
        return _Found("step", identity, outputs, sealed=True)
    header = read_header(reading.file(DRAFTER))
    if narrow:
        training = scalars_in(raw)
        chosen = [Chosen.whole(name, DRAFTER, tensor) for name, tensor in header.tensors.items()]
        packed = pack(MODEL, chosen, metadata={"format": "pt", TRAINING: json.dumps(training)}, narrow=True)
        return _Found("step", identity, (packed, copied(CONFIG, manifest.files[CONFIG].size)), sealed=True)
    kept = tuple(copied(name, manifest.files[name].size, sha256=manifest.files[name].sha256) for name in needed)
    return _Found("step", identity, (*kept, copied(MANIFEST, reading.look[MANIFEST].size)), sealed=True)


def _select_weights(
    reading: Reading, format: SourceFormat, shards: tuple[str, ...], what: What, narrow: bool
) -> _Found:
    headers = {shard: read_header(reading.file(shard)) for shard in shards}
    told = [
        (shard, reading.look[shard].size, reading.look[shard].mtime_ns, header.sha256)
        for shard, header in headers.items()
    ]
    identity = f"headers:{hashlib.sha256(json.dumps(told).encode()).hexdigest()}"
    if what == "all":
        return _Found(format, identity, tuple(copied(name, state.size) for name, state in reading.look.items()))
    chosen: list[Chosen] = []
    dropped = 0
    for shard, header in headers.items():
        for name, tensor in header.tensors.items():
            if what == "drafter" and _of_the_target(format, name):
                dropped += 1
            else:
                chosen.append(Chosen.whole(name, shard, tensor))
    if not narrow and not dropped:
        names = (*shards, *(name for name in (CONFIG, INDEX) if name in reading.look))
        return _Found(format, identity, tuple(copied(name, reading.look[name].size) for name in names))
    packed = pack(MODEL, chosen, metadata={"format": "pt"}, narrow=narrow)
    return _Found(format, identity, (packed, *_beside(reading)))


def _every_file(look: Look) -> _Found:
    """A directory that is no checkpoint, of which nothing is known but the states of its files."""
    told = [(name, state.size, state.mtime_ns) for name, state in sorted(look.items())]
    identity = f"files:{hashlib.sha256(json.dumps(told).encode()).hexdigest()}"
    return _Found("directory", identity, tuple(copied(name, state.size) for name, state in look.items()))


def _of_the_target(format: SourceFormat, name: str) -> bool:
    """Whether a tensor is a copy of the target's own, which an evaluation takes from the target."""
    if format == "safetensors" or format == "dcp" or format == "directory":
        return False
    return our_name(format, unwrapped(name)) is None


def _at_top(name: str) -> bool:
    return "/" not in name


def _only(look: Look, files: frozenset[str]) -> Look:
    return {name: state for name, state in look.items() if name in files}
