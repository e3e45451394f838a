"""One pass of the frozen target over rows of documents: taps by forward hooks on its causal-LM class.

So they are the outputs of the blocks, whatever the engine's own idea of hidden states is. Nothing here adds noise: what
labels are made of is clean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.hidden_states import PASS_TOKENS, passes, require_positions
from dflash.kernels import KernelError
from dflash.target import Target, require_rows
from dflash.training.packing import Layout


@dataclass(frozen=True)
class States:
    """``taps`` [N, S, K·H], and ``hidden`` [N, S, H] as the target's head takes it, or None."""

    taps: Tensor
    hidden: Tensor | None


@torch.no_grad()  # not inference mode: a drafter is trained on these tensors
def target_states(target: Target, layout: Layout, layer_ids: Sequence[int], *, soft: bool) -> States:
    """The states of each document as if it were alone, on the target's device in its dtype; zeros on padding.

    A pass ends with the deepest tap where nothing behind it is wanted. Raises as :meth:`OnlineFeatures.features` does.
    """
    documents = [index for row in layout.samples for index in row]
    lengths = [int(length) for row in range(len(layout.lengths)) for length in layout.borders(row).diff()]
    positions = getattr(target.config, "max_position_embeddings", None)
    require_positions(
        [range(length) for length in lengths], positions, path=target.path, names=[f"sample {one}" for one in documents]
    )
    require_rows(layout.ids, target.vocab_size, path=target.path)
    if any(map(_packed, layout.samples)):
        require_packable(target.kernel, path=target.path)
    width, shape = target.hidden_size, layout.ids.shape
    taps = torch.zeros(*shape, len(layer_ids) * width, dtype=target.dtype, device=target.device)
    hidden = torch.zeros(*shape, width, dtype=target.dtype, device=target.device) if soft else None
    for places, inputs in _passes(target, layout):

        def keep(tap: int, output: Tensor, places: list[int] = places) -> None:
            for row, place in enumerate(places):
                end = layout.lengths[place]
                taps[place, :end, tap * width : (tap + 1) * width].copy_(output[row, :end])
            if not soft and layer_ids[tap] == max(layer_ids):
                raise _DeepestTapError

        try:
            with target.tapped(layer_ids, keep):
                last = target.model.get_submodule("model")(**inputs, use_cache=False).last_hidden_state
        except _DeepestTapError:
            continue
        if hidden is not None:
            for row, place in enumerate(places):
                end = layout.lengths[place]
                hidden[place, :end].copy_(last[row, :end])
    return States(taps, hidden)


def require_packable(kernel: str, *, path: str) -> None:
    """:class:`KernelError` where ``kernel`` cannot keep the documents of a packed row apart.

    A dense target ("none") does it by mask and positions; fla resets the recurrent state of linear attention at each
    border, transformers' torch functions carry it over.
    """
    if kernel == "torch":
        raise KernelError(
            f"features.packing puts several documents into a row, and the torch kernel would carry the linear "
            f"attention's state of {path} from one into the next; leave features.packing out, use kernel fla on a GPU, "
            f"or features.mode offline, whose documents go through the target one a row"
        )


class _DeepestTapError(Exception):
    """Nothing behind the deepest tap is wanted: the pass may end."""


def _passes(target: Target, layout: Layout) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Rows that go through the target together, and its arguments.

    Rows of one document are padded on the right, which no earlier position sees. fla wants packed rows one at a time,
    with the borders of the documents; for full attention the positions, which begin anew at each, are the borders.
    """
    alone = target.kernel != "none"
    packed = [place for place, row in enumerate(layout.samples) if _packed(row)]
    together = [place for place in range(len(layout.samples)) if not (alone and place in packed)]
    groups = [
        [together[one] for one in group] for group in passes([layout.lengths[at] for at in together], PASS_TOKENS)
    ]
    for places in (*groups, *([place] for place in packed if alone)):
        length = max(layout.lengths[place] for place in places)
        inputs: dict[str, Any] = {"input_ids": layout.ids[places, :length].to(target.device)}
        if any(place in packed for place in places):
            inputs["position_ids"] = layout.positions[places, :length].to(target.device)
            if alone:
                inputs["cu_seq_lens_q"] = layout.borders(places[0]).to(target.device)
        yield places, inputs


def _packed(samples: Sequence[int]) -> bool:
    return len(samples) > 1
