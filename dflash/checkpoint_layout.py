"""Where every tensor of a checkpoint lies on disk, found without torch and without running anything in the file.

A single-file checkpoint is a zip (:mod:`dflash.torch_zip`) whose ``data.pkl`` describes the tensors and whose other
members hold their bytes; everything else is safetensors (:mod:`dflash.safetensors_header`). The result is byte ranges:
whoever wants tensors reads those (:mod:`dflash.checkpoints`), whoever moves a checkpoint can move those alone.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal

from dflash.records import (
    ChangedError,
    CheckpointError,
    DamagedError,
    NotACheckpointError,
    OpenFile,
    Record,
    TensorRecord,
    UnsafePickleError,
    require_crc,
)
from dflash.safetensors_header import read_header
from dflash.torch_zip import MAGIC, place, read_content, read_directory

__all__ = [
    "ChangedError",
    "CheckpointError",
    "DamagedError",
    "Format",
    "Identity",
    "NotACheckpointError",
    "Record",
    "TensorFile",
    "TensorRecord",
    "UnsafePickleError",
    "files_of",
    "format_of_config",
    "read_record",
    "read_safetensors_file",
    "read_torch_file",
    "reading",
    "shards_of",
    "sniff",
    "weight_files",
]

Format = Literal["pt", "step", "zlab", "speculators", "torchspec", "transformers"]
"""How a checkpoint lies on disk. SpecForge writes z-lab's names and config, so its exports are ``zlab``."""

_OF_A_STEP = ("drafter.safetensors", "training_state.pt")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the file system says while ``path`` is read, as a :class:`CheckpointError` that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); is it there, whole, and open to this user?"
        ) from None


@dataclass(frozen=True)
class Identity:
    """What tells that a file is still the one that was opened."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "Identity":
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class TensorFile:
    """A file of tensors. ``content`` is what was saved, with a :class:`TensorRecord` for each tensor.

    ``metadata`` is that of a safetensors file.
    """

    path: Path
    identity: Identity
    content: Any
    records: Mapping[str, Record]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def require_unchanged(self) -> None:
        """:class:`ChangedError` if the file is no longer the one whose layout this is."""
        with reading(self.path):
            now = Identity.of(self.path)
        if now != self.identity:
            raise ChangedError(
                f"{self.path} changed while it was read (from {self.identity.size} to {now.size} bytes): it is still "
                f"being written; try again when the trainer is done with it"
            )


def sniff(path: Path) -> Format:
    """The format of a checkpoint by its content; :class:`NotACheckpointError` says what was found instead."""
    with reading(path):
        return _sniff(path)


def _sniff(path: Path) -> Format:
    if path.is_dir():
        return _sniff_directory(path)
    if not path.exists():
        raise NotACheckpointError(f"{path} does not exist; give a checkpoint file or directory")
    if not path.is_file():
        raise NotACheckpointError(f"{path} is a pipe, a socket or a device; give a checkpoint file or directory")
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(MAGIC):
        return "pt"
    if head[:1] == b"\x80":
        raise NotACheckpointError(
            f"{path} is a bare pickle, as torch.save wrote before 1.6; save it again with today's torch.save"
        )
    if not head:
        raise DamagedError(f"{path} is empty; was it cut off while it was written or copied?")
    if path.suffix == ".safetensors":
        raise NotACheckpointError(f"{path} is weights without a config; give the directory that holds its config.json")
    raise NotACheckpointError(f"{path} is neither a torch.save file nor a directory in z-lab's layout")


def _sniff_directory(path: Path) -> Format:
    """By what only one writer leaves there: a manifest, or a key of config.json."""
    if (path / "manifest.json").is_file():
        return "step"
    if left := next((name for name in _OF_A_STEP if (path / name).exists()), None):
        raise DamagedError(
            f"{path} has {left} and no manifest.json: this training checkpoint is still being written, or was copied "
            f"in part; the manifest is written last"
        )
    if not (path / "config.json").is_file():
        raise NotACheckpointError(
            f"{path} has no config.json with a *.safetensors file, as a z-lab directory would"
            f"{_instead(path, 'config.json')}"
        )
    if not any(path.glob("*.safetensors")):
        raise NotACheckpointError(
            f"{path} has a config.json and no *.safetensors file; weights are read from safetensors only"
            f"{_instead(path, '*.safetensors')}"
        )
    return format_of_config((path / "config.json").read_bytes())


def format_of_config(text: bytes) -> Format:
    """The layout of a directory of safetensors by the key of its config.json that only one writer leaves."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return "zlab"  # whoever reads the config says what is wrong with it
    if not isinstance(config, dict):
        return "zlab"
    if "speculators_model_type" in config:
        return "speculators"
    if config.get("model_type") == "muse_glimmer_assistant":
        return "transformers"
    return "torchspec" if "_torchspec_version" in config else "zlab"


def _instead(path: Path, wanted: str) -> str:
    """What a directory without the ``wanted`` file holds, with a step in it named if there is one."""
    names = sorted(entry.name for entry in path.iterdir())
    if steps := [name for name in names if name.startswith("step_")]:
        return f"; it holds checkpoints: give one of them, as {path / steps[-1]}"
    found = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"; it holds {found}" if names else f"; it is empty, {wanted} was expected"


def weight_files(path: Path, format: Format) -> tuple[Path, ...]:
    """The files that hold the drafter's tensors, in the order of their names.

    Of a directory with ``model.safetensors.index.json`` those the index names, as every loader takes them; else all
    its ``*.safetensors``. :class:`DamagedError` names a shard that the index lists and the directory lacks.
    """
    if format == "pt":
        return (path,)
    if format == "step":
        return (path / "drafter.safetensors",)
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return tuple(sorted(path.glob("*.safetensors")))
    with reading(index):
        text = index.read_bytes()
    shards = tuple(path / name for name in shards_of(text, str(index)))
    with reading(index):  # a name can be longer than the file system takes
        lost = [shard.name for shard in shards if not shard.is_file()]
    if lost:
        raise DamagedError(f"{index} lists {lost[0]}, which is not there; copy the whole directory")
    return shards


def shards_of(text: bytes, name: str) -> tuple[str, ...]:
    """The files that an index of shards names, in order; :class:`DamagedError` with ``name`` if it is none."""
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
        plain = [shard for shard in names if Path(shard).name == shard]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{name} is no index of safetensors shards; copy it again") from None
    if not names or len(plain) != len(names):
        raise DamagedError(f"{name} names no file beside it; copy it again")
    return tuple(names)


def step_in_name(path: str | PurePath) -> int | None:
    """The training step that a checkpoint's name tells, as in ``step_400.pt``; None where it tells none."""
    told = re.search(r"step[_-]?(\d+)", PurePath(path).name)
    return int(told[1]) if told else None


def files_of(path: Path) -> tuple[Path, ...]:
    """What has to be moved for the drafter at ``path`` to be evaluated elsewhere: no optimizer state of a ``step_N/``.

    Of a single file only the file; its tensors' places are in :func:`read_torch_file`.
    """
    format = sniff(path)
    if format == "pt":
        return (path,)
    beside = [path / name for name in ("config.json", "model.safetensors.index.json")]
    if format == "step":
        beside += [path / name for name in ("manifest.json", "probe.safetensors", "replay.safetensors")]
    return (*weight_files(path, format), *(file for file in beside if file.is_file()))


def read_torch_file(path: Path) -> TensorFile:
    """The layout of a ``torch.save`` zip. Tensor bytes are not read; their CRC is for whoever reads them."""
    with reading(path), path.open("rb") as file:
        identity = Identity.of(path)
        reader = OpenFile(path, file, identity.size)
        directory = read_directory(reader)
        records = place(reader, directory, directory.entries)
        content = read_content(reader, directory, records)
    layout = TensorFile(path, identity, content, records)
    layout.require_unchanged()
    return layout


def read_safetensors_file(path: Path) -> TensorFile:
    """The layout of a safetensors file; ``content`` maps names to :class:`TensorRecord`."""
    with reading(path), path.open("rb") as file:
        identity = Identity.of(path)
        header = read_header(OpenFile(path, file, identity.size))
    records = {tensor.record.name: tensor.record for tensor in header.tensors.values()}
    return TensorFile(path, identity, header.tensors, records, header.metadata)


def read_record(path: Path, file: BinaryIO, record: Record) -> bytearray:
    """The bytes of ``record``, checked against its CRC; :class:`DamagedError` names it."""
    data = bytearray(record.length)
    file.seek(record.start)
    got = file.readinto(data)  # type: ignore[attr-defined]
    if got != record.length:
        raise DamagedError(f"{path}: record {record.name} ends after {got} of {record.length} bytes")
    require_crc(str(path), record, zlib.crc32(data))
    return data
