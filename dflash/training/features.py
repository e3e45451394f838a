"""The target's states for rows of documents: computed beside the drafter, or written once and read at every epoch."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash.hidden_states import (
    PASS_TOKENS,
    HiddenStateError,
    Progress,
    fingerprint,
    first_not_finite,
    not_finite,
    passes,
    tokenizer_digest,
)
from dflash.target import Target, require_layers
from dflash.training.batch import Features, Sample, SampleSet
from dflash.training.feature_store import (
    Dtype,
    FeatureIndex,
    FeatureReader,
    FeatureStoreError,
    FeatureWriter,
    Shard,
    bytes_per_token,
    empty_shard,
    even,
    plan_shards,
)
from dflash.training.packing import Layout, lay_out
from dflash.training.target_states import States, target_states

READERS = 8
"""Documents that are read from disk at a time."""
_DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class StoredSampleSet(SampleSet, Protocol):
    """Samples with an identity, the digest of all their tokens and marks, and with lengths that cost no reading."""

    @property
    def sha256(self) -> str: ...

    @property
    def lengths(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class OnlineFeatures:
    """Runs the frozen ``target`` for each micro-batch; ``soft`` gives its last hidden states as well.

    Raises :class:`dflash.target.TargetMismatchError` for a tap beyond the target or on its last layer.
    """

    target: Target
    layer_ids: Sequence[int]
    _: KW_ONLY
    soft: bool

    def __post_init__(self) -> None:
        require_layers(self.layer_ids, self.target.num_layers, path=self.target.path)

    def features(self, rows: Sequence[Sequence[Sample]]) -> Features:
        """See :class:`dflash.training.batch.FeatureSource`; the tensors are on the target's device, in its dtype.

        Raises :class:`dflash.hidden_states.TextLengthError`, :class:`dflash.target.TargetMismatchError` for a token the
        target has no row for, and :class:`dflash.kernels.KernelError` for packed rows (:func:`require_packable`).
        """
        layout = lay_out(rows)
        states = target_states(self.target, layout, self.layer_ids, soft=self.soft)
        return _features(layout, states, self.target.device)


class StoredFeatures:
    """Reads what :func:`write_features` wrote. :meth:`prefetch` reads ahead while the step before computes."""

    def __init__(self, reader: FeatureReader, layer_ids: Sequence[int], *, soft: bool, device: torch.device) -> None:
        self._reader, self._soft, self._device = reader, soft, device
        stored = reader.index.layer_ids
        self._places = [stored.index(layer) for layer in layer_ids]
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="features")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="features-ahead")
        self._pending: dict[_Key, Future[States]] = {}

    @classmethod
    def open(
        cls,
        directory: Path,
        samples: StoredSampleSet,
        layer_ids: Sequence[int],
        *,
        soft: bool,
        device: torch.device | str,
        dtype: torch.dtype,
        target: Path | None = None,
        kernel: str | None = None,
    ) -> Self:
        """Features of ``samples`` for ``device``. They must have been written in ``dtype``, the run's for its target.

        The directory may hold more taps than asked for. They must be of the target in the directory ``target``, made
        with ``kernel``, where these are given: what a checkpoint's manifest will say of them. Raises
        :class:`FeatureStoreError` that says what is other than asked for.
        """
        reader = FeatureReader(directory)
        _require_fit(reader.index, directory, samples, layer_ids, soft=soft, dtype=dtype, target=target, kernel=kernel)
        return cls(reader, layer_ids, soft=soft, device=torch.device(device))

    @property
    def index(self) -> FeatureIndex:
        """Whose states these are: target, kernel, dtype, taps, samples."""
        return self._reader.index

    def features(self, rows: Sequence[Sequence[Sample]]) -> Features:
        """See :class:`dflash.training.batch.FeatureSource`. Raises :class:`FeatureStoreError`."""
        layout, pending = lay_out(rows), self._pending.pop(_key(rows), None)
        states = self._read(rows, layout) if pending is None else pending.result()
        return _features(layout, states, self._device)

    def prefetch(self, rows: Sequence[Sequence[Sample]]) -> None:
        """Begin to read ``rows``; the next :meth:`features` of the same rows waits for that."""
        if _key(rows) not in self._pending:
            self._pending[_key(rows)] = self._ahead.submit(self._read, rows, lay_out(rows))

    def _read(self, rows: Sequence[Sequence[Sample]], layout: Layout) -> States:
        """In pinned memory where a GPU will copy it."""
        index = self.index
        pinned = self._device.type == "cuda"

        def empty(width: int) -> Tensor:
            states = torch.empty(*layout.ids.shape, width, dtype=index.torch_dtype, pin_memory=pinned)
            for row, length in enumerate(layout.lengths):
                states[row, length:] = 0
            return states

        taps = empty(len(index.layer_ids) * index.hidden_size)
        hidden = empty(index.hidden_size) if self._soft else None
        jobs = [
            (document, row, int(start))
            for row, documents in enumerate(rows)
            for document, start in zip(documents, layout.borders(row)[:-1], strict=True)
        ]

        def read(job: tuple[Sample, int, int]) -> None:
            document, row, start = job
            end = start + len(document.ids)
            self._require_ids(document)
            self._reader.read("taps", document.index, taps[row, start:end])
            if hidden is not None:
                self._reader.read("hidden", document.index, hidden[row, start:end])

        list(self._readers.map(read, jobs))
        return States(self._selected(taps), hidden)

    def _require_ids(self, document: Sample) -> None:
        tokens = self._reader.tokens(document.index)
        ids = torch.empty(tokens, dtype=torch.int32)
        self._reader.read("ids", document.index, ids)
        if not torch.equal(ids.long(), document.ids):
            raise FeatureStoreError(
                f"{self._reader.directory}: the tokens stored for sample {document.index} are not the sample's; the "
                f"directory is damaged, write it again"
            )

    def _selected(self, taps: Tensor) -> Tensor:
        """The columns of the asked layers, in their order."""
        count = len(self.index.layer_ids)
        if self._places == list(range(count)):
            return taps
        return torch.cat([taps.chunk(count, dim=-1)[place] for place in self._places], dim=-1)


@dataclass(frozen=True)
class Written:
    """A directory of features as :func:`write_features` leaves it. ``already`` shards were there before."""

    index: FeatureIndex
    already: int
    _writer: FeatureWriter

    def missing(self) -> list[int]:
        """Numbers of the shards that are not there: other processes have them in hand."""
        return self._writer.missing()


def write_features(
    directory: Path,
    target: Target,
    samples: StoredSampleSet,
    layer_ids: Sequence[int],
    *,
    soft: bool,
    progress: Progress = lambda done, total: None,
    shard_bytes: int | None = None,
) -> Written:
    """Write the states of all ``samples`` to ``directory``, or what lacks there; ``progress`` counts samples.

    Shards have at most ``shard_bytes`` of states; without it they are small enough to be shared out (:func:`even`).
    Several processes may be given the same work at once, one a GPU: they share it. Raises :class:`FeatureStoreError`,
    :class:`HiddenStateError` for a state that is not finite, and as :class:`OnlineFeatures` does.
    """
    require_layers(layer_ids, target.num_layers, path=target.path)
    index = _index(target, samples, layer_ids, soft=soft, shard_bytes=shard_bytes)
    writer = FeatureWriter.open(directory, index)
    already = len(index.shards) - len(writer.missing())
    done = index.samples - sum(index.shards[number].count for number in writer.missing())
    progress(done, index.samples)
    for number in writer.missing():
        shard = index.shards[number]
        with writer.claimed(number) as mine:
            if mine:
                writer.write(number, _computed(target, samples, index, shard, done, progress))
        done += shard.count
        progress(done, index.samples)
    return Written(index, already, writer)


_Key = tuple[tuple[int, ...], ...]


def _features(layout: Layout, states: States, device: torch.device) -> Features:
    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return Features(
        ids=there(layout.ids),
        loss_mask=there(layout.loss_mask),
        starts=there(layout.starts),
        taps=there(states.taps),
        samples=layout.samples,
        hidden=None if states.hidden is None else there(states.hidden),
    )


def _key(rows: Sequence[Sequence[Sample]]) -> _Key:
    return tuple(tuple(document.index for document in row) for row in rows)


def _require_fit(
    index: FeatureIndex,
    directory: Path,
    samples: StoredSampleSet,
    layer_ids: Sequence[int],
    *,
    soft: bool,
    dtype: torch.dtype,
    target: Path | None,
    kernel: str | None,
) -> None:
    absent = [layer for layer in layer_ids if layer not in index.layer_ids]
    asked = str(dtype).removeprefix("torch.")
    problem = None
    if index.samples_sha256 != samples.sha256 or index.samples != len(samples):
        problem = f"of {index.samples} other samples than the run's {len(samples)} (files, template and data settings)"
    elif absent:
        problem = f"of the layers {_listed(index.layer_ids)}, and the drafter taps {_listed(absent)} besides"
    elif soft and not index.soft:
        problem = "without the last hidden states, which this loss needs for its soft labels"
    elif index.dtype != asked:
        problem = f"in {index.dtype}, and target.dtype is {asked}"
    elif kernel is not None and kernel != index.kernel:
        problem = f"that the kernel {index.kernel} computed, and the run's is {kernel}"
    elif target is not None and index.target_fingerprint != fingerprint(target):
        problem = f"of another target than {target}, whose config.json or weights are not those it was written with"
    if problem:
        raise FeatureStoreError(
            f"{directory}: holds features {problem}; write them with dflash data features and this config, to another "
            f"directory"
        )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _index(
    target: Target, samples: StoredSampleSet, layer_ids: Sequence[int], *, soft: bool, shard_bytes: int | None
) -> FeatureIndex:
    lengths: list[int] = samples.lengths.tolist()
    token_bytes = bytes_per_token(len(layer_ids), target.hidden_size, target.dtype, soft=soft)
    return FeatureIndex(
        target_fingerprint=fingerprint(Path(target.path)),
        tokenizer=tokenizer_digest(Path(target.path)),
        kernel=target.kernel,
        dtype=_DTYPES[target.dtype],
        hidden_size=target.hidden_size,
        layer_ids=tuple(layer_ids),
        soft=soft,
        samples_sha256=samples.sha256,
        samples=len(lengths),
        tokens=sum(lengths),
        shards=plan_shards(lengths, token_bytes, shard_bytes=shard_bytes or even(sum(lengths) * token_bytes)),
    )


def _computed(
    target: Target, samples: SampleSet, index: FeatureIndex, shard: Shard, done: int, progress: Progress
) -> dict[str, Tensor]:
    """The tensors of ``shard``, before which ``done`` samples were done."""
    documents = [samples[place] for place in range(shard.first, shard.first + shard.count)]
    lengths = torch.tensor([len(document.ids) for document in documents])
    tensors = empty_shard(index, shard)
    tensors["borders"][0] = 0
    tensors["borders"][1:] = lengths.cumsum(0)
    tensors["ids"].copy_(torch.cat([document.ids for document in documents]))
    for group in passes(lengths.tolist(), PASS_TOKENS):
        states = target_states(
            target, lay_out([[documents[place]] for place in group]), index.layer_ids, soft=index.soft
        )
        for row, place in enumerate(group):
            start, end = tensors["borders"][place : place + 2].tolist()
            tensors["taps"][start:end].copy_(states.taps[row, : end - start])
            if states.hidden is not None:
                tensors["hidden"][start:end].copy_(states.hidden[row, : end - start])
            layer = first_not_finite(tensors["taps"][start:end], index.layer_ids)
            if layer is not None or (index.soft and not bool(tensors["hidden"][start:end].isfinite().all())):
                raise HiddenStateError(not_finite(target.path, shard.first + place, layer, target.spoiled_weight()))
        done += len(group)
        progress(done, index.samples)
    return tensors
