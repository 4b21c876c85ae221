"""Rotary position embedding, for the decoder.

Formulas: https://arxiv.org/abs/2104.09864. The kinds of scaling are those of transformers (`modeling_rope_utils`).
`llama3` and `yarn` (https://arxiv.org/abs/2309.00071) divide frequencies of long wavelengths by `factor`, leave short
wavelengths unchanged and interpolate linearly between them. `dynamic` changes nothing up to the model's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from neuron_runtime.backend.torch.architecture import DecoderConfig, Rope, RopeKind

Place = Callable[[torch.Tensor], torch.Tensor]
"""Called with heads of queries and keys `[tokens, heads + kv_heads, head_dim]`, queries first, and returns as much."""


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    return _SCALED[rope.kind](plain, rope)


def turns(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine of each position `[tokens]`, or of each pair of dimensions `[tokens, head_dim / 2]`, times
    `scale`, both `[tokens, 1, head_dim]`; computed in float32.

    With `swap` exchanging the halves of the last dimension, the rotation is `x * cosine + swap(x) * sine`; the first
    half of the sines is negated.
    """
    each = positions.float().unsqueeze(-1) if positions.dim() == 1 else positions.float()
    angles = (each * frequencies).unsqueeze(1)
    cosine, sine = angles.cos(), angles.sin()
    if scale != 1:
        cosine, sine = cosine * scale, sine * scale
    cosine, sine = cosine.to(dtype), sine.to(dtype)
    return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)


def frequencies_of(config: DecoderConfig) -> tuple[torch.Tensor, ...]:
    """Those of each of a model's kinds of rotary positions."""
    return tuple(inverse_frequencies(rope, config.head_dim) for rope in (config.rope, config.local_rope) if rope)


def placing(
    config: DecoderConfig, positions: torch.Tensor, frequencies: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[Place]:
    """What each layer does to heads of queries and keys that are at these positions `[tokens]`, or `[tokens, 3]` where
    their parts differ. frequencies: see `frequencies_of`."""
    factors: torch.Tensor | None = None
    if config.tempering is not None:
        step, scale = config.tempering
        of_queries = torch.log1p(torch.floor((positions.float() + 1) / step)) * scale + 1
        factors = of_queries.new_ones(len(positions), config.num_heads + config.num_kv_heads, 1)
        factors[:, : config.num_heads] = of_queries.view(-1, 1, 1)
        factors = factors.to(dtype)

    def turning(rope: Rope, own: torch.Tensor) -> Place:
        at = positions if positions.dim() == 1 else positions[:, list(rope.parts)]
        cosine, sine = turns(at, own, rope.scale, dtype)

        def turned(x: torch.Tensor) -> torch.Tensor:
            if rope.interleaved:
                # Scores of queries and keys are the same in any order of dimensions.
                x = x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
            return rotate(x, cosine, sine)

        return turned

    def unturned(x: torch.Tensor) -> torch.Tensor:
        return x if factors is None else x * factors

    everywhere = turning(config.rope, frequencies[0])
    local = everywhere if config.local_rope is None else turning(config.local_rope, frequencies[1])
    return [
        unturned if layer in config.unrotated else local if layer in config.local_layers else everywhere
        for layer in range(config.num_layers)
    ]


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate `x` `[tokens, heads, head_dim]` by `cosine` and `sine` `[tokens, 1, head_dim]`."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cosine, swapped, sine)


def _llama3(plain: torch.Tensor, rope: Rope) -> torch.Tensor:
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    # Llama 4 has equal factors: between them is nothing.
    between = (rope.high_freq_factor - rope.low_freq_factor) or 1e-6
    share = ((original / wavelength - rope.low_freq_factor) / between).clamp(0.0, 1.0)
    return (1 - share) * plain / rope.factor + share * plain


def _yarn(plain: torch.Tensor, rope: Rope) -> torch.Tensor:
    def pair_that_turns(times: float) -> float:
        """The number of the pair of dimensions that turns so often in the original length."""
        length = rope.original_max_position_embeddings
        return len(plain) * math.log(length / (times * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float32) - first) / (last - first or 0.001)
    share = 1 - ramp.clamp(0.0, 1.0)
    return (1 - share) * (plain / rope.factor) + share * plain


_SCALED: Mapping[RopeKind, Callable[[torch.Tensor, Rope], torch.Tensor]] = {
    "default": lambda plain, rope: plain,
    "linear": lambda plain, rope: plain / rope.factor,
    "dynamic": lambda plain, rope: plain,
    "llama3": _llama3,
    "yarn": _yarn,
}
