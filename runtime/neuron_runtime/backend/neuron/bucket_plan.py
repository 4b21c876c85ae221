"""Chooses compiled sizes (buckets): for which lengths of prompts and contexts a model gets graphs.

A bucket more means less padding in every step, but one more graph to compile, to load and to keep on the device. Called
by `settings` for sizes that nobody has set, and by the command `plan-buckets`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

STEP = 128
"""Sizes are multiples of it, as those that the Neuron SDK chooses itself; the largest may be any."""

MAX_CANDIDATES = 64
"""More sizes are not compared; beyond, they grow geometrically."""

MAX_CONTEXT_BUCKETS = 12
MAX_SEGMENT_BUCKETS = 4
"""With blocks, where each is compiled for every prefix bucket."""
MAX_PREFIX_BUCKETS = 4
"""With no prefix and the longest one."""
MAX_TOKEN_BUCKETS = 8
"""At most 24 graphs of one model: all are compiled one after another, and all are loaded."""

SHORTEST_PROMPT = 16
"""The shortest prompt of the traffic that is assumed."""

MIN_SAVING = 0.02
"""A further bucket must save at least this share of the device time of its phase."""

FIXED_TOKENS = 384
"""A prefill takes as long as this many tokens, plus its own: reading the weights takes time, whatever the size. From
22.1 ms for 128 tokens and 197 ms for 4,096 (`PUBLISHED` of the simulated device, Llama 3.1 8B on four cores)."""

Lengths = tuple[tuple[int, float], ...]
"""A distribution: (length in tokens, probability), ascending."""


def log_uniform(low: int, high: int, num_points: int = 256) -> Lengths:
    """Every order of magnitude equally likely: the assumption about traffic that nobody has measured."""
    if high <= low:
        return ((high, 1.0),)
    points = sorted({round(low * (high / low) ** (at / (num_points - 1))) for at in range(num_points)})
    edges = [points[0], *(math.sqrt(a * b) for a, b in pairwise(points)), points[-1]]
    total = math.log(high / low)
    return tuple((point, math.log(b / a) / total) for point, (a, b) in zip(points, pairwise(edges), strict=True))


def longest_of(lengths: Lengths, count: int) -> Lengths:
    """The distribution of the longest of `count` independent lengths: it decides the bucket of a decode step."""
    distribution, before = [], 0.0
    for length, probability in lengths:
        up_to = before + probability
        distribution.append((length, min(up_to, 1.0) ** count - min(before, 1.0) ** count))
        before = up_to
    return tuple(distribution)


def contexts_of(lengths: Lengths, rows: int) -> Lengths:
    """Lengths of the longest context in a decode step; every order of magnitude of rows is equally likely."""
    counts = [1 << at for at in range(rows.bit_length())]
    distributions = [longest_of(lengths, count) for count in counts]
    return tuple(
        (length, sum(one[at][1] for one in distributions) / len(counts)) for at, (length, _) in enumerate(lengths)
    )


def prompts(lengths: Lengths, largest: int) -> Lengths:
    """Lengths of what one call computes; if none is given, every order of magnitude is equally likely.

    Prompts above the largest are computed in several calls, of which all but the last are full: they count as it.
    """
    shares: dict[int, float] = {}
    for length, probability in lengths:
        shares[min(length, largest)] = shares.get(min(length, largest), 0.0) + probability
    return tuple(sorted(shares.items())) or log_uniform(SHORTEST_PROMPT, largest)


def prefill_cost(size: int) -> float:
    return FIXED_TOKENS + size


def decode_cost(model: Mapping[str, Any], rows: int) -> Callable[[int], float]:
    """Cost of a decode step over its context bucket: the numbers that it reads, of weights and of the cache.

    model: config.json; a number that it lacks counts as 1.
    """
    hidden, heads = number(model, "hidden_size"), number(model, "num_attention_heads")
    layers = number(model, "num_hidden_layers")
    cached = number(model, "num_key_value_heads", heads) * number(model, "head_dim", hidden // heads)
    attention = 2 * hidden * hidden + 2 * hidden * cached
    weights = layers * (attention + 3 * hidden * number(model, "intermediate_size"))
    weights += hidden * number(model, "vocab_size")
    return lambda size: float(weights + 2 * layers * cached * rows * size)


def number(model: Mapping[str, Any], name: str, default: int = 1) -> int:
    """A number of config.json, which may lack it."""
    value = model.get(name)
    return value if isinstance(value, int) else default


def choose(
    lengths: Lengths,
    largest: int,
    max_buckets: int,
    cost: Callable[[int], float],
    *,
    least: int = STEP,
    multiple: int = STEP,
    strict: bool = True,
    never: tuple[int, int] = (0, 0),
) -> tuple[int, ...]:
    """The buckets with the least device time for these lengths, as few as are worth their graph.

    Exact, by dynamic programming over candidate sizes: the best k buckets end with `largest`, and every length takes
    the smallest one that fits.

    Args:
        largest: the last bucket; no length is above it.
        cost: device time of a call of one size, in any unit.
        least: smallest bucket.
        multiple: buckets other than the largest are multiples of it.
        strict: only the largest bucket takes as many tokens as its size, the others one less.
        never: no bucket lies between these two, apart from the largest.
    """
    sizes = [
        size for size in _candidates(least, largest, multiple) if size == largest or not never[0] < size < never[1]
    ]
    weight = _weights(lengths, sizes, strict)
    above = [0.0]
    for one in weight:
        above.append(above[-1] + one)
    costs = [cost(size) for size in sizes]
    last = len(sizes) - 1
    # best[j]: least cost of the lengths up to sizes[j] if sizes[j] is a bucket; one table per number of buckets.
    best = [above[j + 1] * costs[j] for j in range(last + 1)]
    chains: list[tuple[int, ...]] = [(j,) for j in range(last + 1)]
    chosen, chain = best[last], chains[last]
    for _ in range(min(max_buckets, len(sizes)) - 1):
        following, longer = list(best), list(chains)
        for j in range(1, last + 1):
            value, at = min((best[i] + (above[j + 1] - above[i + 1]) * costs[j], i) for i in range(j))
            if value < best[j]:
                following[j], longer[j] = value, (*chains[at], j)
        best, chains = following, longer
        if best[last] > chosen * (1 - MIN_SAVING):
            break
        chosen, chain = best[last], chains[last]
    return tuple(sizes[j] for j in chain)


def _candidates(least: int, largest: int, multiple: int) -> list[int]:
    first = min(-(-least // multiple) * multiple, largest)
    count = max(1, -(-(largest - first) // multiple))
    if count < MAX_CANDIDATES:
        steps: Sequence[float] = [first + multiple * at for at in range(count)]
    else:
        steps = [first * (largest / first) ** (at / MAX_CANDIDATES) for at in range(MAX_CANDIDATES)]
    rounded = {-(-round(size) // multiple) * multiple for size in steps}
    return sorted({size for size in rounded if first <= size < largest} | {largest})


def _weights(lengths: Lengths, sizes: Sequence[int], strict: bool) -> list[float]:
    """Probability of the lengths whose smallest fitting candidate is each size."""
    weight = [0.0] * len(sizes)
    takes = [size - strict for size in sizes[:-1]]
    for length, probability in lengths:
        weight[bisect_left(takes, length)] += probability
    return weight
