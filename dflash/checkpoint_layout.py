"""Where every tensor of a checkpoint lies on disk, found without torch and without running anything in the file.

A single-file checkpoint is a zip whose ``data.pkl`` describes the tensors and whose other members hold their bytes. It
is unpickled here and nowhere else, by a reader that knows a closed list of names and puts an inert stand-in for each;
any other name is an error that says which. The result is byte ranges: whoever wants tensors reads those
(:mod:`dflash.checkpoints`), whoever moves a checkpoint can move those alone.
"""

import io
import json
import math
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from dflash.errors import DFlashError

Format = Literal["pt", "step", "zlab", "speculators", "torchspec", "transformers"]
"""How a checkpoint lies on disk. SpecForge writes z-lab's names and config, so its exports are ``zlab``."""

_MAX_PICKLE = 32 << 20
_MAX_JSON = 100 << 20
_LOCAL_HEADER = 30
_OF_A_STEP = ("drafter.safetensors", "training_state.pt")
_ZIP_MAGIC = b"PK\x03\x04"

_ITEM_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# What training scripts keep beside the weights (random states, arguments, paths): read past, never needed.
_OPAQUE = {
    ("_codecs", "encode"),
    ("argparse", "Namespace"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "device"),
}


class CheckpointError(DFlashError):
    """A checkpoint cannot be read, or is not what it should be."""


class NotACheckpointError(CheckpointError):
    """The path is missing, or holds none of the known formats."""


class DamagedError(CheckpointError):
    """The file is cut short, or its bytes are not those that were written."""


class UnsafePickleError(CheckpointError):
    """The file's pickle names something outside the allow-list; loading it elsewhere could run code."""


class ChangedError(CheckpointError):
    """The file changed while it was read: it is still being written."""


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
class Record:
    """``length`` bytes at ``start`` of the file; ``crc32`` where the format stores one."""

    name: str
    start: int
    length: int
    crc32: int | None


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: ``stride`` and ``offset`` count elements of ``record``, which tied tensors share."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    record: Record


@dataclass(frozen=True)
class TensorFile:
    """A file of tensors. ``content`` is what was saved, with a :class:`TensorRecord` for each tensor."""

    path: Path
    identity: Identity
    content: Any
    records: Mapping[str, Record]

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
    if head.startswith(_ZIP_MAGIC):
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
    try:
        config = json.loads((path / "config.json").read_bytes())
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
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
        shards = tuple(path / name for name in names if Path(name).name == name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{index} is no index of safetensors shards; copy it again") from None
    if not shards or len(shards) != len(names):
        raise DamagedError(f"{index} names no file beside it; copy it again")
    with reading(index):  # a name can be longer than the file system takes
        lost = [shard.name for shard in shards if not shard.is_file()]
    if lost:
        raise DamagedError(f"{index} lists {lost[0]}, which is not there; copy the whole directory")
    return shards


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
        records = _zip_records(path, file, identity.size)
        pickles = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise NotACheckpointError(f"{path} is a zip but not a torch.save file: it has no <name>/data.pkl")
        root = pickles[0].removesuffix("data.pkl")
        byteorder = records.get(f"{root}byteorder")
        if byteorder is not None and read_record(path, file, byteorder) != b"little":
            raise NotACheckpointError(f"{path} was saved on a big-endian machine; save it again on a little-endian one")
        if records[pickles[0]].length > _MAX_PICKLE:
            raise UnsafePickleError(
                f"{path}: data.pkl has {records[pickles[0]].length} bytes, over the {_MAX_PICKLE} that are read; "
                f"tensors belong in their own records"
            )
        content = _unpickle(path, read_record(path, file, records[pickles[0]]), root, records)
    layout = TensorFile(path, identity, content, records)
    layout.require_unchanged()
    return layout


def read_safetensors_file(path: Path) -> TensorFile:
    """The layout of a safetensors file; ``content`` maps names to :class:`TensorRecord`."""
    with reading(path), path.open("rb") as file:
        identity = Identity.of(path)
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_JSON, identity.size - 8):
            raise DamagedError(f"{path} is not a safetensors file, or is cut short: its header would be {length} bytes")
        try:
            header = json.loads(file.read(length))
            tensors = {
                name: _safetensors_entry(path, name, entry, 8 + length)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedError(f"{path}: the safetensors header is malformed; copy the file again") from None
    end = 8 + length
    for record in sorted((tensor.record for tensor in tensors.values()), key=lambda one: (one.start, one.length)):
        if record.start != end:
            raise DamagedError(f"{path}: tensor {record.name} does not begin where the one before ends; copy it again")
        end += record.length
    if end != identity.size:
        raise DamagedError(f"{path} has {identity.size} bytes, its header describes {end}: it is cut short or damaged")
    return TensorFile(path, identity, tensors, {name: tensor.record for name, tensor in tensors.items()})


def read_record(path: Path, file: BinaryIO, record: Record) -> bytearray:
    """The bytes of ``record``, checked against its CRC; :class:`DamagedError` names it."""
    data = bytearray(record.length)
    file.seek(record.start)
    got = file.readinto(data)  # type: ignore[attr-defined]
    if got != record.length:
        raise DamagedError(f"{path}: record {record.name} ends after {got} of {record.length} bytes")
    if record.crc32 is not None and zlib.crc32(data) != record.crc32:
        raise DamagedError(f"{path}: record {record.name} does not match its checksum; copy the file again")
    return data


def _zip_records(path: Path, file: BinaryIO, size: int) -> dict[str, Record]:
    try:
        members = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, EOFError, struct.error):
        raise DamagedError(
            f"{path} starts as a checkpoint but has no end ({size} bytes): it is cut short or still being written"
        ) from None
    records: dict[str, Record] = {}
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.filename in records:
            raise NotACheckpointError(
                f"{path}: member {member.filename} is compressed or doubled, torch.save does neither"
            )
        # The local header's extra field (torch pads with it) differs from the central directory's.
        file.seek(member.header_offset)
        local = file.read(_LOCAL_HEADER)
        if len(local) < _LOCAL_HEADER or not local.startswith(_ZIP_MAGIC):
            raise DamagedError(f"{path}: no record where the directory says {member.filename} is; copy the file again")
        name_length, extra_length = int.from_bytes(local[26:28], "little"), int.from_bytes(local[28:30], "little")
        start = member.header_offset + _LOCAL_HEADER + name_length + extra_length
        if start + member.file_size > size:
            raise DamagedError(f"{path}: record {member.filename} reaches beyond the end of the file; it is cut short")
        records[member.filename] = Record(member.filename, start, member.file_size, member.CRC)
    return records


def _unpickle(path: Path, data: bytearray, root: str, records: Mapping[str, Record]) -> Any:
    try:
        for opcode, argument, _ in pickletools.genops(bytes(data)):
            # The memo is an array: one absurd index would allocate all memory before anything is looked at.
            if "PUT" in opcode.name and isinstance(argument, int) and argument > len(data):
                raise UnsafePickleError(f"{path}: data.pkl numbers its objects up to {argument}; refused")
        return _InertUnpickler(path, data, root, records).load()
    except CheckpointError:
        raise
    except Exception as error:  # a hostile or broken pickle can raise anything from its stand-ins
        raise DamagedError(f"{path}: data.pkl cannot be read ({type(error).__name__}: {error})") from None


@dataclass(frozen=True)
class _Storage:
    dtype: str
    record: Record


class _Opaque:
    """Takes any arguments, any state, and keeps none of it."""

    __slots__ = ()

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _InertUnpickler(pickle.Unpickler):
    """Stand-ins are made anew for each file, so that a pickle which pokes at one reaches no other read."""

    def __init__(self, path: Path, data: bytearray, root: str, records: Mapping[str, Record]) -> None:
        super().__init__(io.BytesIO(data))
        self._path, self._root, self._records = path, root, records
        self._known: dict[tuple[str, str], Any] = {
            ("collections", "Counter"): lambda items=(): dict(items),
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): lambda sizes=(): tuple(sizes),
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor_stand_in(),
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *ignored: tensor,
        }
        for module, builtin in ((module, kind) for module in ("builtins", "__builtin__") for kind in (set, frozenset)):
            self._known[module, builtin.__name__] = builtin
        self._known |= {("torch", name): dtype for name, dtype in _STORAGES.items()}
        self._known |= {("torch", dtype): dtype for dtype in _ITEM_SIZES}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OPAQUE:
            return type(name, (_Opaque,), {"__slots__": ()})
        if (module, name) not in self._known:
            raise UnsafePickleError(
                f"{self._path}: its pickle names {module}.{name}, which is not on the allow-list; nothing of it was "
                f"run; save plain tensors, numbers and strings only"
            )
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _location, elements = pid
        record = self._records.get(f"{self._root}data/{key}")
        if kind != "storage" or record is None:
            self._malformed(f"storage {key} has no record")
        if record.length != elements * _ITEM_SIZES[dtype]:
            self._malformed(f"storage {key} has {record.length} bytes for {elements} elements of {dtype}")
        return _Storage(dtype, record)

    def _tensor_stand_in(self) -> Callable[..., TensorRecord]:
        def rebuild(storage: _Storage, offset: int, shape: Any, stride: Any, *_ignored: object) -> TensorRecord:
            tensor = TensorRecord(storage.dtype, tuple(shape), tuple(stride), offset, storage.record)
            if not _within(tensor):
                self._malformed(f"a tensor of shape {tensor.shape} reaches outside its storage {storage.record.name}")
            return tensor

        return rebuild

    def _malformed(self, what: str) -> NoReturn:
        raise DamagedError(f"{self._path}: {what}; copy the file again")


def _within(tensor: TensorRecord) -> bool:
    numbers = (tensor.offset, *tensor.shape, *tensor.stride)
    if len(tensor.shape) != len(tensor.stride) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        return False
    last = tensor.offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return 0 in tensor.shape or (last + 1) * _ITEM_SIZES[tensor.dtype] <= tensor.record.length


def _safetensors_entry(path: Path, name: str, entry: Mapping[str, Any], base: int) -> TensorRecord:
    if entry["dtype"] not in _SAFETENSORS:
        raise CheckpointError(f"{path}: tensor {name} is {entry['dtype']}, expected one of {', '.join(_SAFETENSORS)}")
    dtype, shape, (begin, end) = _SAFETENSORS[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(name)
    if begin > end or end - begin != math.prod(shape) * _ITEM_SIZES[dtype]:
        raise ValueError(name)
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorRecord(dtype, shape, stride, 0, Record(name, base + begin, end - begin, None))
