"""A target's safetensors files, read by the tensor and by the row: names and shapes from the headers alone.

Used where the whole model is not wanted in memory: layer streaming, and the few embedding rows a drafter borrows.
Bytes come by ``pread`` into the tensor that keeps them. safetensors' memory map counts every page it has touched as
memory of the process, and its ``pread`` backend (0.8) reads the whole tensor for one row of it.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from dflash.checkpoint_layout import CheckpointError, TensorRecord, read_safetensors_file
from dflash.target import CAUSAL_LM, TargetLoadError, misfit, text_config

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
# Vision-language checkpoints keep the text model one level deeper.
_TEXT_MODEL = "model.language_model."
_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class StoredTensor:
    """Where one weight lies: ``stored`` is its name in ``file``, ``start`` the offset of its first byte there."""

    file: Path
    stored: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.torch_dtype.itemsize

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Shards:
    """The weights of the text model at ``directory``, by the names they have in its causal-LM class."""

    directory: Path
    config: PreTrainedConfig
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Read the headers and compare them with the class. Raises :class:`TargetLoadError`, which names the weights.

        The vision tower and the MTP head are apart, as when the model is loaded.
        """
        directory = Path(directory)
        config = text_config(str(directory))
        model_class = CAUSAL_LM[config.model_type]
        ignored = [re.compile(pattern) for pattern in model_class._keys_to_ignore_on_load_unexpected or ()]
        tensors: dict[str, StoredTensor] = {}
        for file in _files(directory):
            for stored, record in _header(file).items():
                name = "model." + stored.removeprefix(_TEXT_MODEL) if stored.startswith(_TEXT_MODEL) else stored
                if not any(pattern.search(name) for pattern in ignored):
                    if name in tensors:
                        first = tensors[name]
                        raise TargetLoadError(
                            f"target {directory} has {name} twice, as {first.stored} in {first.file.name} and {stored} "
                            f"in {file.name}; keep the right one"
                        )
                    tensors[name] = StoredTensor(file, stored, record.shape, record.dtype, record.record.start)
        shards = cls(directory, config, tensors)
        shards._require_exact(model_class)
        return shards

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return CAUSAL_LM[self.config.model_type]

    @property
    def head_name(self) -> str:
        """The weight that gives the logits: the embedding itself where the two are tied."""
        return HEAD if HEAD in self.tensors else EMBEDDING

    @property
    def embedding_name(self) -> str:
        """The embedding; a tied checkpoint may hold the one weight under the head's name."""
        return EMBEDDING if EMBEDDING in self.tensors else HEAD

    def layer(self, index: int) -> list[str]:
        """Names of the weights of block ``index``."""
        prefix = f"model.layers.{index}."
        return [name for name in self.tensors if name.startswith(prefix)]

    def layer_bytes(self, dtype: torch.dtype) -> list[int]:
        """Size of each block in memory, in ``dtype``."""
        return [
            sum(math.prod(self.tensors[name].shape) for name in self.layer(index)) * dtype.itemsize
            for index in range(self.config.num_hidden_layers)
        ]

    def reader(self) -> "Reader":
        """To be used as a context; each file is opened when something in it is first asked for."""
        return Reader(self)

    def skeleton(self) -> PreTrainedModel:
        """The class on the meta device: modules and shapes, no memory."""
        with torch.device("meta"):
            return self.model_class(self.config)

    def _require_exact(self, model_class: type[PreTrainedModel]) -> None:
        wanted = {name: tuple(tensor.shape) for name, tensor in self.skeleton().state_dict().items()}
        found = {name: tensor.shape for name, tensor in self.tensors.items()}
        tied = {HEAD, EMBEDDING} if self.config.tie_word_embeddings and {HEAD, EMBEDDING} & found.keys() else set()
        misshaped = [
            f"{name} {list(found[name])} for {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ]
        problem = misfit(
            str(self.directory),
            model_class.__name__,
            missing=wanted.keys() - found.keys() - tied,
            unexpected=found.keys() - wanted.keys(),
            misshaped=misshaped,
        )
        if problem:
            raise TargetLoadError(problem)


class Reader:
    """Open files of one :class:`Shards`. One thread at a time."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def tensor(self, name: str, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The whole weight; only a few MiB more than it takes are in memory at any time."""
        stored = self._shards.tensors[name]
        result = torch.empty(stored.shape, dtype=dtype, device=device)
        flat = result.view(1) if not stored.shape else result
        step = max(1, _READ_BYTES // max(1, stored.row_bytes))
        for start in range(0, len(flat), step):
            self.rows(name, start, min(start + step, len(flat)), out=flat[start : start + step])
        return result

    def rows(self, name: str, start: int, stop: int, *, out: Tensor) -> Tensor:
        """Rows ``start`` … ``stop`` - 1 of the weight, into ``out`` of any dtype and device."""
        stored = self._shards.tensors[name]
        direct = out.device.type == "cpu" and out.dtype == stored.torch_dtype and out.is_contiguous()
        there = out if direct else torch.empty(out.shape, dtype=stored.torch_dtype)
        memory = there.view(-1).view(torch.uint8).numpy().data
        offset = stored.start + start * stored.row_bytes
        try:
            while memory:
                got = os.preadv(self._file(stored.file), [memory], offset)
                if not got:
                    raise TargetLoadError(
                        f"target {stored.file} ends inside {stored.stored}; is it still being written?"
                    )
                memory, offset = memory[got:], offset + got
        except OSError as error:
            raise TargetLoadError(f"target {stored.file} cannot be read ({error.strerror})") from None
        return out if direct else out.copy_(there)

    def _file(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]


def _files(directory: Path) -> list[Path]:
    """The files that the index names, else ``model.safetensors``, else every ``*.safetensors``."""
    index = directory / _INDEX
    if not index.is_file():
        files = [directory / _WHOLE] if (directory / _WHOLE).is_file() else sorted(directory.glob("*.safetensors"))
        if not files:
            raise TargetLoadError(f"target {directory} has no *.safetensors; give a directory with its weights")
        return files
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        absent = sorted(name for name in names if not (directory / name).is_file() or Path(name).name != name)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise TargetLoadError(f"target {index} is not an index of weight files; copy it again") from None
    if absent:
        raise TargetLoadError(f"target {index} names {absent[0]}, which is not in {directory}; complete the directory")
    return sorted(directory / name for name in names)


def _header(file: Path) -> Mapping[str, TensorRecord]:
    try:
        content: Mapping[str, TensorRecord] = read_safetensors_file(file).content
    except CheckpointError as error:
        raise TargetLoadError(f"target {error}") from None
    return content
