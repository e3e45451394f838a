"""Which code computes the gated delta rule of hybrid targets: fla's kernels or transformers' torch functions.

transformers decides when its module is imported: if ``fla`` imports, fla's kernel wins, GPU or not, and without a GPU
it dies at the first forward pass. It also falls back to torch without a word when fla is broken. In bfloat16 the two
drift apart by up to 2e-3 a tap, so the choice is made here, in the open, and recorded with every result. The module
looks its functions up by name at call time; binding those names selects the kernel.
"""

import importlib.util
import inspect
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash.errors import DFlashError

Kernel = Literal["fla", "torch"]

_DELTA_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


class KernelError(DFlashError):
    """The asked-for kernel cannot run here, or would mix up packed texts."""

    state_name = "KernelRefused"


def kernel_for(
    config: PreTrainedConfig, name: Literal["auto", "fla", "torch"], *, device: torch.device | str, source: str
) -> Kernel | Literal["none"]:
    """:func:`select_kernel` for a target of this ``config``; "none" where it has no linear attention to compute.

    :class:`KernelError` if ``fla`` was asked for and there is nothing for it to compute: a report that then said "fla"
    would claim what did not happen, one that said "none" would hide that another target was meant.
    """
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        return select_kernel(name, device=device)
    if name == "fla":
        raise KernelError(f"kernel fla was asked for, but {source} has no linear attention; leave --kernel out")
    return "none"


def select_kernel(name: Literal["auto", "fla", "torch"], *, device: torch.device | str) -> Kernel:
    """Bind the linear-attention functions of Qwen3.5 targets for the whole process and say which they are.

    ``auto`` takes fla where fla, triton and a CUDA ``device`` are all there. :class:`KernelError` if ``fla`` was asked
    for and one of them is not: a silent fall-back is the fault this exists to prevent.
    """
    obstacle = _obstacle_to_fla(torch.device(device))
    if name == "fla" and obstacle:
        raise KernelError(f"kernel fla was asked for, but {obstacle}; use --kernel torch or mend that")
    chosen: Kernel = "torch" if name == "torch" or obstacle else "fla"
    for function in (*_DELTA_RULES, *_CONVOLUTIONS):
        wrapped = _AS_IMPORTED[function]
        setattr(modeling_qwen3_5, function, _torch_only(wrapped) if chosen == "torch" else wrapped)
    if chosen == "fla":
        modeling_qwen3_5.causal_conv1d_fn = documents_apart(_AS_IMPORTED["causal_conv1d_fn"])
    return chosen


def documents_apart(convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``convolution`` of [1, C, S] that sees zeros before each document of a packed row, as before the first.

    transformers hands it the documents' borders as ``cu_seq_lens_q`` [D + 1] and it lets them pass: fla resets the
    delta rule there, but brings no convolution, so the first tokens of a document would see the end of another.
    """

    @wraps(convolution)
    def apart(states: Tensor, weight: Tensor, *args: Any, cu_seq_lens_q: Tensor | None = None, **kwargs: Any) -> Tensor:
        if cu_seq_lens_q is None:
            return convolution(states, weight, *args, **kwargs)
        gap = weight.shape[-1] - 1
        tokens = torch.arange(states.shape[2], device=states.device)
        places = tokens + gap * torch.bucketize(tokens, cu_seq_lens_q[1:-1].to(tokens), right=True)
        spread = states.new_zeros(*states.shape[:2], states.shape[2] + gap * (len(cu_seq_lens_q) - 2))
        spread[:, :, places] = states
        return convolution(spread, weight, *args, **kwargs)[:, :, places]

    return apart


def _obstacle_to_fla(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}"
    for package in ("fla", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    for function in _DELTA_RULES:
        # transformers swallows any exception of fla's import and keeps its own function.
        implementation = inspect.getclosurevars(_AS_IMPORTED[function]).nonlocals.get("implementation")
        if not getattr(implementation, "__module__", "").startswith("fla."):
            return f"transformers could not import it and kept its own {function}"
    return None


def _torch_only(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """The torch function under transformers' choice, with transformers' refusal of packed texts kept."""
    function: Callable[..., Any] = inspect.unwrap(wrapped)

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None:
            raise KernelError(f"{function.__name__} cannot keep packed texts apart; give one text a row")
        return function(*args, **kwargs)

    return guarded


def _functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {name: cast(Callable[..., Any], getattr(module, name)) for name in (*_DELTA_RULES, *_CONVOLUTIONS)}


_AS_IMPORTED = _functions(modeling_qwen3_5)
