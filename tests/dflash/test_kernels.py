import importlib.util
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3Config
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash.kernels import KernelError, kernel_for, select_kernel


@pytest.fixture(autouse=True)
def _torch_afterwards() -> Iterator[None]:
    yield
    select_kernel("torch", device="cpu")


def test_auto_is_torch_without_a_gpu() -> None:
    assert select_kernel("auto", device="cpu") == "torch"


def test_fla_is_refused_rather_than_replaced() -> None:
    with pytest.raises(KernelError, match="kernel fla was asked for, but the device is cpu"):
        select_kernel("fla", device="cpu")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelError, match="fla is not installed"):
        select_kernel("fla", device="cuda")


def test_the_bound_torch_functions_compute_the_delta_rule() -> None:
    """With fla and triton installed, what transformers bound at import dies here on a machine without a GPU."""
    select_kernel("torch", device="cpu")
    q, k, v = torch.randn(3, 1, 5, 2, 8).unbind(0)
    gate, beta = -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    chunk, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(q, k, v, g=gate, beta=beta)
    recurrent, _ = modeling_qwen3_5.torch_recurrent_gated_delta_rule(q, k, v, g=gate, beta=beta)
    torch.testing.assert_close(chunk, recurrent)


def test_packed_texts_are_refused_by_the_torch_functions() -> None:
    select_kernel("torch", device="cpu")
    with pytest.raises(KernelError, match="cannot keep packed texts apart"):
        modeling_qwen3_5.torch_chunk_gated_delta_rule(cu_seqlens=torch.tensor([0, 2]))


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_target_without_linear_attention_has_no_kernel(name: Literal["auto", "torch"]) -> None:
    assert kernel_for(Qwen3Config(), name, device="cpu", source="target") == "none"
    assert kernel_for(Qwen3_5TextConfig(), name, device="cpu", source="target") == "torch"


def test_fla_for_a_target_without_linear_attention_is_an_error() -> None:
    with pytest.raises(KernelError, match="fla was asked for, but target has no linear attention; leave --kernel out"):
        kernel_for(Qwen3Config(), "fla", device="cpu", source="target")
