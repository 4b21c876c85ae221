"""The compiled sizes of a model: a graph for prompts of each length and one for each size of decode steps.

Called by the backends for Neuron devices, whose own rules choose the one that a step takes, for names, times and
padding. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Prefill(NamedTuple):
    """Computes `tokens` tokens of one prompt, after at most `prefix` cached ones."""

    tokens: int
    prefix: int = 0

    @property
    def name(self) -> str:
        return f"prefill_{self.tokens}_after_{self.prefix}" if self.prefix else f"prefill_{self.tokens}"

    @property
    def num_computed_tokens(self) -> int:
        return self.tokens


class Decode(NamedTuple):
    """Computes one token, or `width` with drafts, for each of `rows` sequences of at most `length` tokens."""

    rows: int
    length: int
    width: int = 1

    @property
    def name(self) -> str:
        return f"decode_{self.rows}x{self.length}" + (f"_of_{self.width}" if self.width > 1 else "")

    @property
    def num_computed_tokens(self) -> int:
        return self.rows * self.width


class Encode(NamedTuple):
    """Computes the features of pictures, at most so many patches or chunks; `tokens` of a prompt stand for them."""

    size: int
    tokens: int

    @property
    def name(self) -> str:
        return f"encode_{self.size}"

    @property
    def num_computed_tokens(self) -> int:
        return self.tokens


Graph = Prefill | Decode


def at_least(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds the size. Raises ValueError if none does."""
    at = bisect_left(buckets, size)
    if at == len(buckets):
        raise ValueError(f"{size} exceeds the largest bucket, {buckets[-1]}")
    return buckets[at]
