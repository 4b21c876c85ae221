"""Rotary positions of sequences with pictures, in models that have three: of time, row and column.

The three of a text are equal, and those of a picture's tokens differ; behind it, positions go on from its longer side.
Called by `vision.py` for models whose `Rope` has parts. Positions in the cache stay the running index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from neuron_runtime.backend.slots import FedRows, IntArray
from neuron_runtime.backend.torch.cache import StepPlan


class Grid(NamedTuple):
    """A picture: the index of its first image token, and its tokens in time, rows and columns."""

    first: int
    shape: tuple[int, int, int]


class _Known(NamedTuple):
    """positions: `[tokens, 3]`, up to the end of the last picture. shift: of the running index behind it."""

    positions: IntArray
    shift: int


class ThreeParts:
    """Those of the sequences in all slots."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def add(self, slot: int, grids: Sequence[Grid]) -> None:
        """A sequence with these pictures, in their order."""
        known, end, shift = [], 0, 0
        for first, shape in grids:
            text = np.arange(end, first) + shift
            known.append(np.stack((text, text, text), axis=1))
            known.append(np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1).reshape(-1, 3))
            known[-1] += first + shift
            end = first + len(known[-1])
            shift += max(shape[1:]) - len(known[-1])
        self._known[slot] = _Known(np.concatenate(known), shift)

    def remove(self, slot: int) -> None:
        self._known.pop(slot, None)

    def turned(self, rows: FedRows, plan: StepPlan) -> StepPlan:
        """The plan with the rotary positions of its tokens: `[tokens]` where all have equal parts, or `[tokens, 3]`."""
        if not self._known:
            return plan
        found: IntArray | None = None
        ends = np.cumsum(rows.ends - rows.start)
        for slot, start, end, last in zip(
            *(one.tolist() for one in (rows.slots, rows.start, rows.ends, ends)), strict=True
        ):
            if slot not in self._known:
                continue
            if found is None:
                found = np.repeat(plan.positions.numpy()[:, np.newaxis], 3, axis=1)
            known, shift = self._known[slot]
            of_row, inside = found[last - (end - start) : last], known[start:end]
            of_row += shift
            of_row[: len(inside)] = inside
        if found is None:
            return plan
        equal = bool((found == found[:, :1]).all())
        return replace(plan, positions=torch.from_numpy(np.ascontiguousarray(found[:, 0]) if equal else found))
