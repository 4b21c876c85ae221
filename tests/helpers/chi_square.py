"""Whether counts follow a distribution: Pearson's chi-square."""

from __future__ import annotations

import math

import numpy as np


def bound(degrees: int) -> float:
    """The 99.9 % point of chi-square, after Wilson and Hilferty (1931)."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + 3.0902 * math.sqrt(part)) ** 3)


def assert_follows(counts: np.ndarray, shares: np.ndarray) -> None:
    assert not counts[shares == 0].any()
    expected = shares * counts.sum()
    rare = expected < 5
    merged = [(expected[~rare], counts[~rare]), (expected[rare].sum(keepdims=True), counts[rare].sum(keepdims=True))]
    wanted, found = (np.concatenate(both) for both in zip(*merged, strict=True))
    wanted, found = wanted[wanted > 0], found[wanted > 0]
    if len(wanted) > 1:
        assert (((found - wanted) ** 2) / wanted).sum() < bound(len(wanted) - 1)
