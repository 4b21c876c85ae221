"""Which buckets a configuration compiles: powers of two up to the length, or the lists that the configuration names."""

from __future__ import annotations

from math import log2
from typing import Any


def doubling(shortest: int, longest: int) -> list[int]:
    """Powers of two that leave a distance to the longest, then the longest."""
    if shortest == longest:
        return [longest]
    return [2**power for power in range(int(log2(shortest)), round(log2(longest)))] + [longest]


def context_buckets(neuron: Any) -> list[Any]:
    longest = neuron.max_context_length
    if not neuron.is_prefix_caching:
        if not neuron.enable_bucketing:
            return [longest]
        return neuron.context_encoding_buckets or doubling(128, longest)
    active, prefix = [longest], [longest]
    if neuron.enable_bucketing:
        if neuron.context_encoding_buckets is not None:
            active, prefix = neuron.context_encoding_buckets, neuron.prefix_buckets
        else:
            active = prefix = doubling(512, longest)
    return [[new, cached] for new in active for cached in [0] + prefix]  # noqa: RUF005


def decode_buckets(neuron: Any) -> list[Any]:
    longest = neuron.max_length
    if not neuron.enable_bucketing:
        lengths = [longest]
    elif neuron.token_generation_buckets is not None:
        lengths = neuron.token_generation_buckets
    else:
        lengths = doubling(256 if neuron.is_prefix_caching else 128, longest)
    if neuron.is_prefix_caching:
        return [[1, length] for length in lengths]
    batches = getattr(neuron, "token_generation_batches", None)
    if batches is None:
        return list(lengths)
    return [[rows, length] for rows in sorted({*batches, neuron.tkg_batch_size}, reverse=True) for length in lengths]
