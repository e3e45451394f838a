"""The drafter's forward pass a second time, slowly, to check the fast one by.

Written from the definition and from nothing else of this project: float32, one block, the context cut by slicing, no
mask, no cache, no batching, attention one head and one slot at a time. It shares no code with what it checks, so a
block that both draft alike is not wrong by a shifted position, a leaked tap or a misplaced K/V head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HEAD_ROWS = 1 << 14  # a head of 248 320 rows is never copied to float32 whole


def draft_logits(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    embed: Tensor | Callable[[Tensor], Tensor],
    head: Tensor,
    taps: Tensor,
    tokens: list[int],
    anchor: int,
    *,
    block_shift: int = 0,
    tiled: bool = False,
) -> Tensor:
    """Logits [B-1, V] of slots 1 … B-1, slot k standing for position anchor + k, computed where ``taps`` are.

    ``weights`` and ``config`` are z-lab's checkpoint and ``config.json``, ``embed`` is the target's [V, H] or gives its
    rows [B, H] of ids, ``head`` is its [V, H], ``taps`` [S, K·H] are the text's tapped states, of which only those
    before ``anchor`` are read. ``block_shift`` and ``tiled`` compute it wrongly on purpose, to put a name to a fault:
    position ids of the block moved against the context's, and query head i served by K/V head i mod n_kv.
    """
    nested, eps = config["dflash_config"], config["rms_norm_eps"]
    size = config.get("block_size") or nested["block_size"]

    def weight(name: str) -> Tensor:
        return weights[name].to(taps.device).float()  # one at a time: the whole drafter in float32 may not fit

    context = norm(taps[:anchor].float() @ weight("fc.weight").T, weight("hidden_norm.weight"), eps)
    ids = torch.tensor([tokens[anchor]] + [nested["mask_token_id"]] * (size - 1), device=taps.device)
    block = (embed(ids) if callable(embed) else embed[ids]).float()
    for index in range(config["num_hidden_layers"]):
        normed = norm(block, weight(f"layers.{index}.input_layernorm.weight"), eps)
        block = block + attention(weight, config, index, context, normed, anchor, block_shift, tiled)
        normed = norm(block, weight(f"layers.{index}.post_attention_layernorm.weight"), eps)
        gate, up = (normed @ weight(f"layers.{index}.mlp.{name}_proj.weight").T for name in ("gate", "up"))
        block = block + (gate * torch.sigmoid(gate) * up) @ weight(f"layers.{index}.mlp.down_proj.weight").T
    hidden = norm(block, weight("norm.weight"), eps)[1:]
    return torch.cat([hidden @ rows.to(taps.device).float().T for rows in torch.split(head, HEAD_ROWS)], dim=1)


def attention(
    weight: Callable[[str], Tensor], config: dict[str, Any], index: int, context: Tensor, block: Tensor, anchor: int,
    block_shift: int, tiled: bool,
) -> Tensor:  # fmt: skip
    """[B, H] of one layer; every slot and every query head looks up its own stretch of keys."""
    dim, eps, theta = config["head_dim"], config["rms_norm_eps"], rope_theta(config)
    causal, window = layer_rule(config, index)
    sequence = torch.cat((context, block))  # position p of the text is row p
    q, k, v = (heads(x @ weight(f"layers.{index}.self_attn.{name}_proj.weight").T, dim)
               for name, x in (("q", block), ("k", sequence), ("v", sequence)))  # fmt: skip
    rows_at = torch.arange(len(sequence), device=block.device)
    rows_at[anchor:] += block_shift
    queries = turn(norm(q, weight(f"layers.{index}.self_attn.q_norm.weight"), eps), rows_at[anchor:], theta)
    keys = turn(norm(k, weight(f"layers.{index}.self_attn.k_norm.weight"), eps), rows_at, theta)
    count, groups = config["num_attention_heads"], config["num_key_value_heads"]
    rows = []
    for slot in range(len(block)):
        position = anchor + slot
        first = 0 if window is None else max(0, position - window + 1)
        last = position if causal else len(sequence) - 1 if window is None else position + window - 1
        mixed = []
        for number in range(count):
            shared = number % groups if tiled else number // (count // groups)
            scores = keys[first : last + 1, shared] @ queries[slot, number] / dim**0.5
            mixed.append(torch.softmax(scores, dim=0) @ v[first : last + 1, shared])
        rows.append(torch.cat(mixed))
    return torch.stack(rows) @ weight(f"layers.{index}.self_attn.o_proj.weight").T


def layer_rule(config: dict[str, Any], index: int) -> tuple[bool, int | None]:
    """(causal inside the block, window): the config's word, else the layer's type."""
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    sliding = types[index] == "sliding_attention"
    causal = config.get("is_causal")
    if causal is None:
        causal = config["dflash_config"].get("causal")
    return sliding if causal is None else causal, config["sliding_window"] if sliding else None


def heads(x: Tensor, dim: int) -> Tensor:
    return x.reshape(len(x), -1, dim)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis with a plain weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope_theta(config: dict[str, Any]) -> float:
    return float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate ``x`` [S, heads, hd] at ``positions`` [S]; (i, i + hd/2) is one complex number."""
    half = x.shape[-1] // 2
    angles = positions.float()[:, None, None] / theta ** (torch.arange(half, device=x.device).float() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)
