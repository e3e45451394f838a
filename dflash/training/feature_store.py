"""The target's states on disk: what ``dflash data features`` writes once and training reads at every epoch.

::

    <directory>/features.json               whose states these are, of which samples, and the shards they lie in
    <directory>/shard-00000.safetensors     ids [T] int32, borders [D + 1] int64, taps [T, K·H], hidden [T, H] if soft,
                                            sums [D, 1 or 2] int64: of each document's taps, and hidden

A shard holds whole documents one behind another, in the order of the samples. It appears under its name whole or not at
all, so writing goes on where it stopped. Any number of processes may write into one directory: each shard is locked by
whoever works on it, and the lock ends with its process. A document is read by ``pread`` straight into its row.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.checkpoint_layout import CheckpointError, TensorRecord, read_safetensors_file
from dflash.errors import DFlashError
from dflash.memory import show_bytes
from dflash.output import to_disk

VERSION: Literal[2] = 2
SHARD_BYTES = 1 << 24, 1 << 30
"""Of states in one shard, at least and at most, unless one document has more. So much is in memory while written."""
SHARES = 64
"""Shards that a small job is cut into, so that a few processes share it evenly and an interruption costs little."""
SUMMED = ("taps", "hidden")
"""What is summed up, in this order: a wrong state looks like any other, wrong ids and borders are found without it."""
Dtype = Literal["float32", "float16", "bfloat16"]
"""What states are kept in: the target's own dtype."""
_INDEX = "features.json"
_LOCK = ".lock"
_WRITE_AGAIN = "remove it and run dflash data features again"


class FeatureStoreError(DFlashError):
    """A directory of features cannot be read or written, is not whole, or is of other samples, taps or target."""


class Shard(BaseModel):
    """``count`` samples from ``first`` on, with ``tokens`` tokens, in ``file``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    first: int
    count: int
    tokens: int


class FeatureIndex(BaseModel):
    """Whose states a directory holds, of what; two with the same content hold the same states, up to rounding."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dflash_features: Literal[2] = VERSION
    target_fingerprint: str
    tokenizer: str
    kernel: str
    dtype: Dtype
    hidden_size: PositiveInt
    layer_ids: tuple[int, ...] = Field(min_length=1)
    soft: bool
    samples_sha256: str
    samples: int
    tokens: int
    shards: tuple[Shard, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _shards_hold_the_samples(self) -> Self:
        """Each of them in one shard, in their order, all in this directory: what is read goes by it."""
        first = [0, *accumulate(shard.count for shard in self.shards)]
        named = [shard.file == _file(number) for number, shard in enumerate(self.shards)]
        whole = first[-1] == self.samples and sum(shard.tokens for shard in self.shards) == self.tokens
        if not (whole and all(named) and [shard.first for shard in self.shards] == first[:-1]):
            raise ValueError(f"its shards are not those of {self.samples} samples with {self.tokens} tokens")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def token_bytes(self) -> int:
        """Of the states of one token."""
        return bytes_per_token(len(self.layer_ids), self.hidden_size, self.torch_dtype, soft=self.soft)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class FeatureWriter:
    """A directory that is being filled. Raises :class:`FeatureStoreError` throughout."""

    def __init__(self, directory: Path, index: FeatureIndex) -> None:
        self.directory, self.index = directory, index

    @classmethod
    def open(cls, directory: Path, index: FeatureIndex) -> Self:
        """Make ``directory``, or go on in one that was made for the same states. There must be room for what lacks."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / _INDEX).exists():
                if any(not path.name.startswith(".") for path in directory.iterdir()):
                    raise FeatureStoreError(
                        f"{directory} holds files and no {_INDEX}: it is not a directory of features; choose an empty "
                        f"one"
                    )
                _write(directory / _INDEX, index.model_dump_json(indent=1).encode())
            _require_same(directory, read_index(directory), index)
            writer = cls(directory, index)
            writer._require_room()
        except OSError as error:
            raise FeatureStoreError(f"{directory} cannot be used ({error.strerror}); choose another") from None
        return writer

    def missing(self) -> list[int]:
        """Numbers of the shards that are not there yet."""
        return [number for number in range(len(self.index.shards)) if not self._path(number).exists()]

    @contextmanager
    def claimed(self, number: int) -> Iterator[bool]:
        """Whether shard ``number`` is this process's to write while the block runs; not if it is there or another's.

        One at a time: whichever descriptor of the lock file a process closes first takes all of its locks along.
        """
        try:
            descriptor = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FeatureStoreError(f"{self.directory} cannot be written ({error.strerror}); choose another") from None
        try:
            yield _locked(descriptor, number) and not self._path(number).exists()
        finally:
            os.close(descriptor)

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Put down a claimed shard, summed up. When this returns it is on the disk under its name."""
        path = self._path(number)
        for document, (start, end) in enumerate(pairwise(tensors["borders"].tolist())):
            for place, name in enumerate(SUMMED[: tensors["sums"].shape[1]]):
                tensors["sums"][document, place] = checksum(tensors[name][start:end])
        partial = _partial(path)
        try:
            for left in self.directory.glob(f".{path.name}.*"):  # by a process that died
                left.unlink()
            try:
                save_file(dict(tensors), partial, metadata={"store": self.index.digest})
                partial.chmod((self.directory / _INDEX).stat().st_mode)  # safetensors lets nobody else read it
                _rename(partial, path)
            finally:
                partial.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            raise FeatureStoreError(
                f"{path} could not be written ({error}); free space and run the same command again, it goes on with "
                f"this shard"
            ) from None

    def _path(self, number: int) -> Path:
        return self.directory / self.index.shards[number].file

    def _require_room(self) -> None:
        tokens = sum(self.index.shards[number].tokens for number in self.missing())
        need, free = tokens * self.index.token_bytes, shutil.disk_usage(self.directory).free
        if need > free:
            raise FeatureStoreError(
                f"{self.directory}: the states of {tokens} tokens take {show_bytes(need)}, and {show_bytes(free)} are "
                f"free there; take fewer or shorter samples, another disk, or features.mode online"
            )


class FeatureReader:
    """A whole directory of features. Raises :class:`FeatureStoreError` throughout; safe to use from many threads."""

    def __init__(self, directory: Path) -> None:
        """Read the index and the header of every shard; all must be there and whole."""
        self.directory, self.index = directory, read_index(directory)
        absent = [shard.file for shard in self.index.shards if not (directory / shard.file).exists()]
        if absent:
            raise FeatureStoreError(
                f"{directory} is not whole: {len(absent)} of {len(self.index.shards)} shards are missing, {absent[0]} "
                f"the first; run dflash data features again, it goes on where it stopped"
            )
        self._records = [self._header(shard) for shard in self.index.shards]
        shards = list(zip(self.index.shards, self._records, strict=True))
        borders = [self._borders(shard, records) for shard, records in shards]
        self._sums = torch.cat([self._whole(shard, records["sums"]) for shard, records in shards])
        self._starts = torch.cat([one[:-1] for one in borders])
        self._tokens = torch.cat([one.diff() for one in borders])
        self._first = torch.tensor([shard.first for shard in self.index.shards])

    def tokens(self, sample: int) -> int:
        """How many tokens sample ``sample`` has."""
        return int(self._tokens[sample])

    def read(self, name: str, sample: int, out: Tensor) -> None:
        """The rows of ``sample`` in the tensor ``name``, into ``out`` [tokens, …]: of its dtype, contiguous, CPU."""
        shard = int(torch.searchsorted(self._first, sample, right=True)) - 1
        record = self._records[shard][name]
        row = record.record.length // record.shape[0]
        path = self.directory / self.index.shards[shard].file
        _pread(path, record.record.start + int(self._starts[sample]) * row, out)
        if name in SUMMED and checksum(out) != int(self._sums[sample, SUMMED.index(name)]):
            raise FeatureStoreError(
                f"{path}: the {name} of sample {sample} are not what was written; is the disk well? {_WRITE_AGAIN}"
            )

    def _header(self, shard: Shard) -> Mapping[str, TensorRecord]:
        path = self.directory / shard.file
        try:
            records: Mapping[str, TensorRecord] = read_safetensors_file(path).content
            with safe_open(path, "pt") as file:
                written_for = (file.metadata() or {}).get("store")
        except (CheckpointError, SafetensorError, OSError) as error:
            raise FeatureStoreError(f"{error}; or remove it and run dflash data features again") from None
        found = {name: f"{record.dtype} {list(record.shape)}" for name, record in records.items()}
        wanted = {
            name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for name, tensor in empty_shard(self.index, shard, device="meta").items()
        }
        for name in sorted(wanted.keys() | found.keys()):
            if found.get(name) != wanted.get(name):
                raise FeatureStoreError(
                    f"{path}: {name} is {found.get(name, 'missing')}, expected {wanted.get(name, 'no such tensor')}; "
                    f"{_WRITE_AGAIN}"
                )
        if written_for != self.index.digest:
            raise FeatureStoreError(
                f"{path}: was written for another directory than {_INDEX} says, with states of another target, kernel, "
                f"taps or samples; {_WRITE_AGAIN}"
            )
        return records

    def _borders(self, shard: Shard, records: Mapping[str, TensorRecord]) -> Tensor:
        """[D + 1] int64: where each of the shard's documents begins, and where the last one ends."""
        path, borders = self.directory / shard.file, self._whole(shard, records["borders"])
        if int(borders[0]) != 0 or int(borders[-1]) != shard.tokens or bool((borders.diff() <= 0).any()):
            raise FeatureStoreError(f"{path}: its borders do not divide {shard.tokens} tokens; {_WRITE_AGAIN}")
        return borders

    def _whole(self, shard: Shard, record: TensorRecord) -> Tensor:
        tensor = torch.empty(record.shape, dtype=torch.long)
        _pread(self.directory / shard.file, record.record.start, tensor)
        return tensor


def read_index(directory: Path) -> FeatureIndex:
    """What ``directory`` says it holds. Raises :class:`FeatureStoreError`."""
    path = directory / _INDEX
    try:
        return FeatureIndex.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise FeatureStoreError(f"{directory} has no {_INDEX}; write it with dflash data features") from None
    except OSError as error:
        raise FeatureStoreError(f"{path} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        said = error.errors()[0]
        where = ".".join(map(str, said["loc"])) or "it"
        raise FeatureStoreError(
            f"{path} is no index of features of version {VERSION} ({where}: {said['msg']}); write the directory again"
        ) from None


def even(size: int) -> int:
    """Bytes of a shard of a job of ``size`` bytes: the same for everybody who works on it."""
    least, most = SHARD_BYTES
    return min(most, max(least, size // SHARES))


def plan_shards(lengths: Sequence[int], token_bytes: int, *, shard_bytes: int) -> tuple[Shard, ...]:
    """Samples of ``lengths`` tokens in order, in shards of at most ``shard_bytes`` of states, or of one sample."""
    cuts, size = [0], 0
    for place, tokens in enumerate(lengths):
        if size and (size + tokens) * token_bytes > shard_bytes:
            cuts.append(place)
            size = 0
        size += tokens
    cuts.append(len(lengths))
    return tuple(
        Shard(file=_file(number), first=first, count=end - first, tokens=sum(lengths[first:end]))
        for number, (first, end) in enumerate(pairwise(cuts))
    )


def _file(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def bytes_per_token(taps: int, hidden_size: int, dtype: torch.dtype, *, soft: bool) -> int:
    """Of the states of one token: its taps, and the last hidden state where soft labels need it."""
    return (taps + soft) * hidden_size * dtype.itemsize


def checksum(states: Tensor) -> int:
    """Of the bytes of contiguous ``states``: as words added up modulo 2^64, which costs less than reading them."""
    content = states.view(-1).view(torch.uint8).numpy()
    words = len(content) // 8 * 8
    parts = content[:words].view(np.int64).sum(), content[words:].sum(dtype=np.int64)
    return int(np.array(parts).sum())


def empty_shard(index: FeatureIndex, shard: Shard, *, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of ``shard``: ``ids``, ``borders``, ``taps``, and ``hidden`` where labels are soft, to be filled.

    ``sums`` are the writer's to fill.
    """
    dtype, width = index.torch_dtype, index.hidden_size
    tensors = {
        "ids": torch.empty(shard.tokens, dtype=torch.int32, device=device),
        "borders": torch.empty(shard.count + 1, dtype=torch.long, device=device),
        "taps": torch.empty(shard.tokens, len(index.layer_ids) * width, dtype=dtype, device=device),
        "sums": torch.zeros(shard.count, 1 + index.soft, dtype=torch.long, device=device),
    }
    if index.soft:
        tensors["hidden"] = torch.empty(shard.tokens, width, dtype=dtype, device=device)
    return tensors


def _require_same(directory: Path, found: FeatureIndex, wanted: FeatureIndex) -> None:
    other = [
        f"{name} {_shown(getattr(found, name))}, now {_shown(getattr(wanted, name))}"
        for name in FeatureIndex.model_fields
        if getattr(found, name) != getattr(wanted, name)
    ]
    if other:
        raise FeatureStoreError(
            f"{directory}: was begun for other states ({'; '.join(other)}); choose another directory or remove this one"
        )


def _shown(value: object) -> str:
    said = str(value)
    return said if len(said) <= 64 else f"{said[:61]}…"


def _locked(descriptor: int, byte: int) -> bool:
    """Whether the lock on this byte was to be had; the kernel drops it when the process ends, however it ends."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _write(path: Path, content: bytes) -> None:
    partial = _partial(path)
    try:
        partial.write_bytes(content)
        _rename(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """The name that ``path`` has while this process writes it."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def _rename(partial: Path, path: Path) -> None:
    """``path`` is what ``partial`` was, on the disk."""
    to_disk(partial)
    partial.rename(path)
    to_disk(path.parent)


def _pread(path: Path, offset: int, out: Tensor) -> None:
    """Bytes of ``path`` from ``offset`` on, into the whole of ``out``, which is contiguous on the CPU."""
    memory = out.view(-1).view(torch.uint8).numpy().data
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while memory:
                got = os.preadv(descriptor, [memory], offset)
                if not got:
                    raise FeatureStoreError(f"{path} has become shorter since it was opened; {_WRITE_AGAIN}")
                memory, offset = memory[got:], offset + got
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FeatureStoreError(f"{path} cannot be read ({error.strerror})") from None
