"""The drafter's forward pass a second time, slowly, to check the fast one by.

Written from the definition and from nothing else of this project: float32, one block, the context cut by slicing, no
mask, no cache, no batching, attention one head and one slot at a time. It shares no code with what it checks, so a
block that both draft alike is not wrong by a shifted position, a leaked tap or a misplaced K/V head.
"""

from typing import Any

import torch
from torch import Tensor


def draft(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    embed: Tensor,
    head: Tensor,
    taps: Tensor,
    tokens: list[int],
    anchor: int,
) -> list[int]:
    """The B-1 greedy tokens after ``tokens[anchor]``; arguments as in :func:`draft_logits`."""
    return [int(token) for token in draft_logits(weights, config, embed, head, taps, tokens, anchor).argmax(-1)]


def draft_logits(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    embed: Tensor,
    head: Tensor,
    taps: Tensor,
    tokens: list[int],
    anchor: int,
) -> Tensor:
    """Logits [B-1, V] of slots 1 … B-1, slot k standing for position anchor + k.

    ``weights`` and ``config`` are z-lab's checkpoint and ``config.json``, ``embed`` and ``head`` the target's [V, H],
    ``taps`` [S, K·H] the text's tapped states, of which only those before ``anchor`` are read.
    """
    weights = {name: tensor.float() for name, tensor in weights.items()}
    nested, eps = config["dflash_config"], config["rms_norm_eps"]
    size = config.get("block_size") or nested["block_size"]
    context = norm(taps[:anchor].float() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    block = embed[torch.tensor([tokens[anchor]] + [nested["mask_token_id"]] * (size - 1), device=embed.device)].float()
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        layer = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        normed = norm(block, layer["input_layernorm.weight"], eps)
        block = block + attention(layer, config, index, context, normed, anchor)
        normed = norm(block, layer["post_attention_layernorm.weight"], eps)
        gate, up = normed @ layer["mlp.gate_proj.weight"].T, normed @ layer["mlp.up_proj.weight"].T
        block = block + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    return norm(block, weights["norm.weight"], eps)[1:] @ head.float().T


def attention(
    layer: dict[str, Tensor], config: dict[str, Any], index: int, context: Tensor, block: Tensor, anchor: int
) -> Tensor:
    """[B, H] of one layer; every slot and every query head looks up its own stretch of keys."""
    dim, eps, theta = config["head_dim"], config["rms_norm_eps"], rope_theta(config)
    causal, window = layer_rule(config, index)
    sequence = torch.cat((context, block))  # position p of the text is row p
    keys = (sequence @ layer["self_attn.k_proj.weight"].T).unflatten(1, (-1, dim))  # type: ignore[no-untyped-call]
    values = (sequence @ layer["self_attn.v_proj.weight"].T).unflatten(1, (-1, dim))  # type: ignore[no-untyped-call]
    queries = (block @ layer["self_attn.q_proj.weight"].T).unflatten(1, (-1, dim))  # type: ignore[no-untyped-call]
    keys = turn(norm(keys, layer["self_attn.k_norm.weight"], eps), 0, theta)
    queries = turn(norm(queries, layer["self_attn.q_norm.weight"], eps), anchor, theta)
    shared_by = config["num_attention_heads"] // config["num_key_value_heads"]
    rows = []
    for slot in range(len(block)):
        position = anchor + slot
        first = 0 if window is None else max(0, position - window + 1)
        last = position if causal else len(sequence) - 1 if window is None else position + window - 1
        heads = []
        for number in range(config["num_attention_heads"]):
            k, v = keys[first : last + 1, number // shared_by], values[first : last + 1, number // shared_by]
            heads.append(torch.softmax(k @ queries[slot, number] / dim**0.5, dim=0) @ v)
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ layer["self_attn.o_proj.weight"].T


def layer_rule(config: dict[str, Any], index: int) -> tuple[bool, int | None]:
    """(causal inside the block, window): the config's word, else the layer's type."""
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    sliding = types[index] == "sliding_attention"
    causal = config.get("is_causal")
    if causal is None:
        causal = config["dflash_config"].get("causal")
    return sliding if causal is None else causal, config["sliding_window"] if sliding else None


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis with a plain weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope_theta(config: dict[str, Any]) -> float:
    return float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])


def turn(x: Tensor, first: int, theta: float) -> Tensor:
    """Rotate ``x`` [S, heads, hd] at positions first, first + 1, …; (i, i + hd/2) is one complex number."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(half, device=x.device).float() / half)
    angles = (first + torch.arange(len(x), device=x.device)).float()[:, None, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)
