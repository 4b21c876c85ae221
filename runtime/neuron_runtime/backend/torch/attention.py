"""Attention of the torch backend: decode rows together as two batched matrix products, prompt rows one by one.

Called by the decoder once per layer. For decoding on CPUs two products and a softmax over grouped queries beat the
fused kernel, except for a single row; repeating keys and values (or `enable_gqa`) is 4 to 30 times slower.

sinks: of each head of queries, a score beside those of the keys that has no value: what it takes of the softmax, no
position gets (https://arxiv.org/abs/2309.17453). None: there are none.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query position per lane.

    Args:
        query: `[lanes, kv_heads, group, dim]`, queries of one key head adjacent.
        key, value: `[lanes, kv_heads, length, dim]`, may be views of the cache.
        mask: `[lanes, 1, 1, length]`, 0 where a lane attends and -inf elsewhere.

    Returns:
        `[lanes, kv_heads * group, dim]`
    """
    lanes, kv_heads, group, dim = query.shape
    if lanes == 1 and sinks is None:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return out.view(lanes, kv_heads * group, dim)
    # Copies a slice of a longer line in order; bmm would copy it transposed, which is much slower.
    keys = key.contiguous().view(lanes * kv_heads, -1, dim)
    scores = torch.bmm((query * scale).view(-1, group, dim), keys.transpose(1, 2))
    scores = scores.view(lanes, kv_heads, group, -1).add_(mask)
    if sinks is None:
        scores = scores.softmax(dim=-1)
    else:
        column = sinks.to(scores.dtype).view(1, kv_heads, group, 1).expand(lanes, -1, -1, -1)
        scores = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.bmm(scores.reshape(lanes * kv_heads, group, -1), value.flatten(0, 1)).view(
        lanes, kv_heads * group, dim
    )


def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Many query positions of one sequence.

    Args:
        query: `[positions, heads, dim]`
        key, value: `[kv_heads, length, dim]`
        mask: `[positions, length]` (0 or -inf), or None for causal attention with positions == length.

    Returns:
        `[positions, heads, dim]`
    """
    positions, heads, dim = query.shape
    kv_heads, length, _ = key.shape
    group = heads // kv_heads
    # Key heads become the batch and their group the heads, so that keys are shared by stride instead of copied.
    grouped = query.view(positions, kv_heads, group, dim).permute(1, 2, 0, 3)
    shared = (kv_heads, group, length, dim)
    keys, values = key.unsqueeze(1).expand(shared), value.unsqueeze(1).expand(shared)
    if sinks is None:
        out = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    else:
        # The same kernel, which also tells how much the scores add up to; sinks take their share of that afterwards.
        out, total = FLASH(grouped, keys, values, 0.0, mask is None, attn_mask=mask, scale=scale)
        out = out * torch.sigmoid(total - sinks.view(kv_heads, group, 1)).unsqueeze(-1).to(out.dtype)
    return out.permute(2, 0, 1, 3).reshape(positions, heads, dim)


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
