"""Rotary position embedding, for the decoder.

Formulas: https://arxiv.org/abs/2104.09864. Scaling `llama3` as published with Llama 3.1 and implemented in transformers
(`modeling_rope_utils`): frequencies of long wavelengths are divided by `factor`, short wavelengths are unchanged, and
those between are interpolated linearly.
"""

from __future__ import annotations

import math

import torch

from neuron_runtime.backend.torch.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)


def turns(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine of each position `[tokens]`, both `[tokens, 1, head_dim]`; computed in float32.

    With `swap` exchanging the halves of the last dimension, the rotation is `x * cosine + swap(x) * sine`; the first
    half of the sines is negated.
    """
    angles = torch.outer(positions.float(), frequencies).unsqueeze(1)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate `x` `[tokens, heads, head_dim]` by `cosine` and `sine` `[tokens, 1, head_dim]`."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cosine, swapped, sine)


def _llama3(plain: torch.Tensor, rope: Rope) -> torch.Tensor:
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    share = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / rope.factor + share * plain
