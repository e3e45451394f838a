"""A target's safetensors files, read by the tensor and by the row: names and shapes from the headers alone.

Used where the whole model is not wanted in memory: layer streaming, and the few embedding rows a drafter borrows.
Bytes come by ``pread`` into the tensor that keeps them. A memory map would count every page it has touched as memory
of the process, and read ahead of what is asked for.
"""

import json
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
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
    """Where one weight lies. ``stored`` is its name in ``file``, ``dtype`` torch's name of what is stored."""

    file: Path
    stored: str
    shape: tuple[int, ...]
    dtype: str


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
                    tensors[name] = StoredTensor(file, stored, record.shape, record.dtype)
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
    """Open files of one :class:`Shards`."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def tensor(self, name: str, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The whole weight; only a few MiB more than it takes are in memory at any time."""
        stored = self._shards.tensors[name]
        result = torch.empty(stored.shape, dtype=dtype, device=device)
        if not stored.shape:
            return result.copy_(self._file(stored).get_tensor(stored.stored))
        row = math.prod(stored.shape[1:]) * torch.empty(0, dtype=getattr(torch, stored.dtype)).element_size()
        step = max(1, _READ_BYTES // max(1, row))
        for start in range(0, stored.shape[0], step):
            self.rows(name, start, min(start + step, stored.shape[0]), out=result[start : start + step])
        return result

    def rows(self, name: str, start: int, stop: int, *, out: Tensor) -> Tensor:
        """Rows ``start`` … ``stop`` - 1 of the weight, into ``out`` of any dtype and device."""
        stored = self._shards.tensors[name]
        try:
            return out.copy_(self._file(stored).get_slice(stored.stored)[start:stop])
        except (SafetensorError, OSError) as error:
            raise TargetLoadError(
                f"target {stored.file}: {stored.stored} cannot be read ({error}); is the file still being written?"
            ) from None

    def _file(self, stored: StoredTensor) -> Any:
        if stored.file not in self._open:
            try:
                opened: Any = safe_open(str(stored.file), framework="pt", backend="pread")
            except (SafetensorError, OSError) as error:
                raise TargetLoadError(f"target {stored.file} cannot be read ({error}); copy the file again") from None
            self._open[stored.file] = self._stack.enter_context(opened)
        return self._open[stored.file]


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
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise TargetLoadError(f"target {index} is not an index of weight files; copy it again") from None
    absent = sorted(name for name in names if not (directory / name).is_file() or Path(name).name != name)
    if absent:
        raise TargetLoadError(f"target {index} names {absent[0]}, which is not in {directory}; complete the directory")
    return sorted(directory / name for name in names)


def _header(file: Path) -> Mapping[str, TensorRecord]:
    try:
        content: Mapping[str, TensorRecord] = read_safetensors_file(file).content
    except CheckpointError as error:
        raise TargetLoadError(f"target {error}") from None
    return content
