"""Attention of the torch backend: decode rows together as two batched matrix products, prompt rows one by one.

Called by the decoder once per layer. On CPUs two products and a softmax over grouped queries beat the fused kernel
for decoding by about two, and repeating keys and values (or `enable_gqa`) loses by 4 to 30 times.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query position per lane.

    Args:
        query: `[lanes, kv_heads, group, dim]`, the queries that share a key head side by side.
        key, value: `[lanes, kv_heads, length, dim]`, views of the cache are fine.
        mask: `[lanes, 1, 1, length]`, 0 where a lane may look and -inf elsewhere.

    Returns:
        `[lanes, kv_heads * group, dim]`
    """
    lanes, kv_heads, group, dim = query.shape
    length = key.shape[2]
    bias = mask.expand(lanes, kv_heads, group, length).reshape(lanes * kv_heads, group, length)
    scores = torch.baddbmm(bias, query.reshape(-1, group, dim), key.flatten(0, 1).transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(dim=-1), value.flatten(0, 1)).view(lanes, kv_heads * group, dim)


def prompt_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Many query positions of one sequence.

    Args:
        query: `[positions, heads, dim]`
        key, value: `[kv_heads, length, dim]`
        mask: `[positions, length]` (0 or -inf), or None when positions == length and each sees those before it.

    Returns:
        `[positions, heads, dim]`
    """
    positions, heads, dim = query.shape
    kv_heads, length, _ = key.shape
    group = heads // kv_heads
    # Key heads play the batch and their group the heads, so that keys are shared by stride instead of by copy.
    grouped = query.view(positions, kv_heads, group, dim).permute(1, 2, 0, 3)
    shared = (kv_heads, group, length, dim)
    out = functional.scaled_dot_product_attention(
        grouped,
        key.unsqueeze(1).expand(shared),
        value.unsqueeze(1).expand(shared),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(positions, heads, dim)
