"""The DFlash-1 drafter, whole: names are the checkpoint's, modules stand in the order data passes through them.

The target's taps are fused once into a context that every layer attends to; a block is the target's embedding of
[anchor, MASK, …, MASK] and leaves as hidden states for the target's own head. Embedding and head belong to the target
and are never part of this module. Numbers follow z-lab's ``dflash/model.py``.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from dflash.config import DrafterConfig
from dflash.masks import Mask

KeyValue = tuple[Tensor, Tensor]
"""Keys (normed and rotated) and values of one layer, each [N, n_kv, S, hd]."""


class Drafter(nn.Module):
    """Drafts blocks of B slots in one pass.

    Serving and replay: one row a prompt, one block a row, contexts padded to the longest; the mask cuts at the anchor.
    Training: one row a text, its n blocks side by side, so Q = n·B.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.tap_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project_context(self, taps: Tensor) -> Tensor:
        """Fuse concatenated taps [N, S, K·H] into the context [N, S, H] that all layers share."""
        context: Tensor = self.hidden_norm(self.fc(taps))
        return context

    def context_kv(self, context: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of ``context`` [N, S, H] at ``positions`` [S] or [N, S] for each layer; once per prompt."""
        rotation = rotary(positions, self.config.head_dim, self.config.rope_theta)
        return [cast(Layer, layer).self_attn.key_value(context, rotation) for layer in self.layers]

    def forward(
        self, blocks: Tensor, positions: Tensor, context_kv: Sequence[KeyValue], masks: Sequence[Mask]
    ) -> Tensor:
        """Hidden states [N, Q, H] for the target's head from block embeddings ``blocks`` [N, Q, H].

        ``positions`` [N, Q] are anchor + slot, counted from the text's start; ``masks`` holds one mask over
        [N, 1, Q, S + Q] a layer (:func:`dflash.masks.layer_masks` or ``flex_masks``); keys are the context's, then the
        block's own.
        """
        rotation = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = blocks
        for layer, kv, mask in zip(self.layers, context_kv, masks, strict=True):
            x = layer(x, rotation, kv, mask)
        hidden: Tensor = self.norm(x)
        return hidden


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: "Rotation", context: KeyValue, mask: Mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, mask)
        residual: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return residual


class Attention(nn.Module):
    """Block queries over context and block keys. The context enters without a layer norm of its own."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def key_value(self, x: Tensor, rotation: "Rotation") -> KeyValue:
        """Keys and values [N, n_kv, S, hd] of ``x`` [N, S, H]."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), rotation)
        return keys.transpose(1, 2), self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, rotation: "Rotation", context: KeyValue, mask: Mask) -> Tensor:
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), rotation).transpose(1, 2)
        own_keys, own_values = self.key_value(x, rotation)
        keys = torch.cat((context[0], own_keys), dim=2)
        values = torch.cat((context[1], own_values), dim=2)
        out: Tensor = self.o_proj(attend(queries, keys, values, mask).transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)  # [N, S, heads, hd]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """Mixed values [N, n_q, Q, hd] for ``queries`` [N, n_q, Q, hd] over ``keys`` and ``values`` [N, n_kv, K, hd].

    ``enable_gqa`` gives each K/V head to n_q / n_kv consecutive query heads, the order checkpoints are trained in.
    """
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    mixed: Tensor = _flex_attention(queries)(queries, keys, values, block_mask=mask, enable_gqa=True)
    return mixed


def _flex_attention(queries: Tensor) -> Any:
    """Compiled where it is trained with; otherwise it computes all scores, which serves to compare masks alone."""
    compiled = queries.is_cuda and not torch.compiler.is_compiling()
    return _compiled_flex_attention() if compiled else flex_attention


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Made when it is first needed: the compiler takes seconds to import."""
    return torch.compile(flex_attention)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RMSNorm(nn.Module):
    """Qwen3's norm: float32 inside, plain weight. The targets of the Qwen3.5 family use (1 + w) instead."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


Rotation = tuple[Tensor, Tensor]
"""Cosine and sine, float32, [S, 1, hd] or [N, S, 1, hd]: the unit axis is the heads'."""


def rotary(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """Angles of rotate-half RoPE over the whole head for integer ``positions`` [S] or [N, S].

    Recomputed in float32 from the positions rather than kept as a buffer: a buffer follows ``module.to(bfloat16)``,
    and rounded frequencies dephase far positions.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Apply ``rotation`` to ``x`` [N, S, heads, hd] in x's dtype."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
