"""The KV cache of all live sequences, and which parts of it a step reads and writes.

One storage shape serves both layouts, `[line, kv_head, position, dim]` per layer: a line is a slot of the model's
length, or a block. The backend makes one `StepPlan` per step from its mirror; the decoder uses it in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch

from neuron_runtime.backend.slots import IntArray
from neuron_runtime.backend.torch.architecture import Window

LENGTH_STEP = 32
"""Decode attention rounds lengths up to a multiple of this."""
MAX_RANGE_WASTE = 2
"""Slots are read in place as one range unless the range has more than this many lines per row."""


class Together(NamedTuple):
    """Positions `[begin, end)` that a row feeds, each of which sees those behind it too."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, resolved: row i feeds `num_tokens[i]` tokens at `start[i]` of its sequence.

    lines: `[rows, lines per sequence]`, the cache lines of each row in order, padded with any valid line.
    """

    start: IntArray
    num_tokens: IntArray
    lines: IntArray
    together: tuple[Together, ...] = ()


class SeenColumns(NamedTuple):
    """What one-token rows attend to: columns `[begin, end)` of `lines`, in the order of the row's positions.

    lines: `[rows, lines per row]`. A row sees positions `[seen_from, seen_to)` of these columns, counted through all
        of its lines.
    """

    lines: IntArray
    begin: int
    end: int
    seen_from: IntArray
    seen_to: IntArray


@dataclass(frozen=True, slots=True)
class DecodePart:
    """The one-token rows of a step.

    flat: index of each row among the step's tokens, None when the step has no others.
    range: lines `[begin, end)` to read in place, or None to gather.
    gather: lines to gather, `[rows, lines per row]`, where `range` is None.
    lanes: the lane of each row; None when lanes are the rows in order.
    span: positions `[begin, end)` of each line that attention covers. mask: `[lanes, 1, 1, positions]`.
    """

    flat: torch.Tensor | None
    range: tuple[int, int] | None
    gather: torch.Tensor | None
    lanes: torch.Tensor | None
    span: slice
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A row of several tokens: tokens `[begin, end)` of the step.

    lines: cache lines that the row attends to. span: the positions of them that it sees, counted from the first.
    mask: `[end - begin, positions of span]`; None for plain causal attention from the start of the sequence.
    """

    begin: int
    end: int
    lines: torch.Tensor
    span: slice
    mask: torch.Tensor | None


class Reads(NamedTuple):
    """What the tokens of a step attend to in a layer."""

    decode: DecodePart | None
    prompts: tuple[PromptPart, ...]


@dataclass(frozen=True)
class StepPlan:
    """Where the tokens of these rows are written in `cache`, and what they attend to.

    positions, write_line, write_offset: `[tokens]`. positions: those that rotate, see `three_parts.py`.
    """

    cache: KVCache
    rows: StepRows
    positions: torch.Tensor
    write_line: torch.Tensor
    write_offset: torch.Tensor

    @cached_property
    def reads(self) -> tuple[Reads, ...]:
        """Per layer; layers with equal windows share one. Made on demand: a compiled step does not need it."""
        return self.cache.plan_reads(self.rows)


class TracedPlan(NamedTuple):
    """The same of traced tensors."""

    cache: KVCache
    positions: torch.Tensor
    write_line: torch.Tensor
    write_offset: torch.Tensor
    reads: tuple[Reads, ...]


CachePlan = StepPlan | TracedPlan


class KVCache:
    """Storage of `[lines, kv_heads, line_length, dim]` for keys and for values of each layer.

    windows: per layer, which positions a token sees; None for all. Every layer stores all positions, so that any of
        them may be shared; positions outside every window are not read.
    first: the first position that is stored, which is as if the sequence began there.
    """

    def __init__(
        self,
        windows: Sequence[Window | None],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        first: int = 0,
    ) -> None:
        self.windows, self.keys, self.values, self.first = tuple(windows), keys, values, first
        self.line_length = keys[0].shape[2]

    @classmethod
    def empty(cls, windows: Sequence[Window | None], shape: Sequence[int], dtype: torch.dtype, first: int = 0) -> Self:
        """A cache that takes memory as it is used. shape: of the storage."""
        keys, values = ([lazy_zeros(shape, dtype) for _ in windows] for _ in range(2))
        return cls(windows, keys, values, first)

    def plan(self, rows: StepRows) -> StepPlan:
        """Plan one step for all layers."""
        num_tokens, start = rows.num_tokens, rows.start
        begins = np.cumsum(num_tokens) - num_tokens
        row_of_token = np.repeat(np.arange(len(num_tokens)), num_tokens)
        positions = np.arange(int(num_tokens.sum())) - begins[row_of_token] + start[row_of_token]
        line, offset = np.divmod(positions, self.line_length)
        return StepPlan(
            cache=self,
            rows=rows,
            positions=torch.from_numpy(positions),
            write_line=torch.from_numpy(rows.lines[row_of_token, line]),
            write_offset=torch.from_numpy(offset),
        )

    def plan_reads(self, rows: StepRows) -> tuple[Reads, ...]:
        """What the tokens of a step attend to, per layer."""
        ends = np.cumsum(rows.num_tokens)
        begins = ends - rows.num_tokens
        decodes, prompts = np.flatnonzero(rows.num_tokens == 1), np.flatnonzero(rows.num_tokens > 1)
        reads = {
            window: Reads(
                self._plan_decode(rows, decodes, begins, window) if len(decodes) else None,
                tuple(self._plan_prompt(rows, int(i), int(begins[i]), int(ends[i]), window) for i in prompts),
            )
            for window in set(self.windows)
        }
        return tuple(reads[window] for window in self.windows)

    def write(self, layer: int, plan: CachePlan, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values `[tokens, kv_heads, dim]` of the step's tokens."""
        self.keys[layer][plan.write_line, :, plan.write_offset] = key
        self.values[layer][plan.write_line, :, plan.write_offset] = value

    def read_decode(self, layer: int, part: DecodePart) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[lanes, kv_heads, positions, dim]`."""
        return self._read(self.keys[layer], part), self._read(self.values[layer], part)

    def read_prompt(self, layer: int, part: PromptPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[kv_heads, positions, dim]` of one sequence."""
        return self._read_sequence(self.keys[layer], part), self._read_sequence(self.values[layer], part)

    def _read(self, storage: torch.Tensor, part: DecodePart) -> torch.Tensor:
        if part.range is not None:
            return storage[part.range[0] : part.range[1], :, part.span]
        assert part.gather is not None
        _, kv_heads, line_length, dim = storage.shape
        if part.gather.shape[1] == 1:
            return storage[:, :, part.span].index_select(0, part.gather.view(-1))
        # (line, head) pairs as rows of a matrix: one copy makes the blocks of a head contiguous.
        pairs = (part.gather.unsqueeze(1) * kv_heads + torch.arange(kv_heads).view(1, -1, 1)).view(-1)
        gathered = storage.view(-1, line_length * dim).index_select(0, pairs)
        return gathered.view(len(part.gather), kv_heads, -1, dim)

    def _read_sequence(self, storage: torch.Tensor, part: PromptPart) -> torch.Tensor:
        if part.lines.numel() == 1:
            return storage[int(part.lines), :, part.span]
        return storage.index_select(0, part.lines).transpose(0, 1).flatten(1, 2)[:, part.span]

    def seen(self, positions: IntArray, lines: IntArray, window: Window | None) -> SeenColumns:
        """What a token at each of `positions` `[rows]` attends to, of `lines` `[rows, lines per sequence]`."""
        ends, firsts = positions + 1, self._first_seen(positions, window)
        if lines.shape[1] == 1:
            # The same columns for all rows, from the first to the last position that any of them sees.
            begin = int(firsts.min() // LENGTH_STEP * LENGTH_STEP)
            end = min(_rounded(ends.max(), LENGTH_STEP), self.line_length)
            return SeenColumns(lines, begin, end, firsts - begin, ends - begin)
        # Each row starts at the line of the first position that it sees.
        first_lines = firsts // self.line_length
        origins = first_lines * self.line_length
        num_lines = min(-(-_rounded((ends - origins).max(), LENGTH_STEP) // self.line_length), lines.shape[1])
        columns = np.minimum(first_lines[:, np.newaxis] + np.arange(num_lines), lines.shape[1] - 1)
        wanted_lines = np.take_along_axis(lines, columns, axis=1)
        return SeenColumns(wanted_lines, 0, self.line_length, firsts - origins, ends - origins)

    def _plan_decode(self, rows: StepRows, decodes: IntArray, begins: IntArray, window: Window | None) -> DecodePart:
        seen = self.seen(rows.start[decodes], rows.lines[decodes], window)
        read_range, gather, lanes = None, None, np.arange(len(decodes))
        begin, end = seen.begin, seen.begin + (seen.end - seen.begin) * seen.lines.shape[1]
        low, high = int(seen.lines.min()), int(seen.lines.max()) + 1
        if rows.lines.shape[1] == 1 and high - low <= MAX_RANGE_WASTE * len(decodes):
            read_range, lanes = (low, high), seen.lines[:, 0] - low
        else:
            gather = torch.from_numpy(seen.lines)
        num_lanes = read_range[1] - read_range[0] if read_range else len(decodes)
        # Lanes without a row attend to one position, so that no row of scores is empty.
        seen_from, seen_to = np.zeros(num_lanes, dtype=np.int64), np.ones(num_lanes, dtype=np.int64)
        seen_from[lanes], seen_to[lanes] = seen.seen_from, seen.seen_to
        column = torch.arange(end - begin)
        visible = column < torch.from_numpy(seen_to).view(-1, 1, 1, 1)
        if window is not None or self.first:
            visible &= column >= torch.from_numpy(seen_from).view(-1, 1, 1, 1)
        in_order = num_lanes == len(decodes) and bool((lanes == np.arange(num_lanes)).all())
        return DecodePart(
            flat=None if len(decodes) == len(rows.start) else torch.from_numpy(begins[decodes]),
            range=read_range,
            gather=gather,
            lanes=None if in_order else torch.from_numpy(lanes),
            span=slice(begin, end),
            mask=additive(visible, self.keys[0].dtype),
        )

    def _plan_prompt(self, rows: StepRows, row: int, begin: int, end: int, window: Window | None) -> PromptPart:
        start = int(rows.start[row])
        length = start + end - begin
        first = int(self._first_seen(rows.start[row : row + 1], window)[0])
        first_line, num_lines = first // self.line_length, -(-length // self.line_length)
        origin = first_line * self.line_length
        query, key = torch.arange(start, length).view(-1, 1), torch.arange(first, length)
        visible = key <= query
        if window is not None:
            visible &= key >= window.first(query)
        together = [one for one in rows.together if one.row == row]
        for _, of, to in together:
            visible[of - start : to - start] |= (key >= query[of - start : to - start]) & (key < to)
        is_causal = not together and (window is None or window.first(length - 1) <= start)
        return PromptPart(
            begin=begin,
            end=end,
            lines=torch.from_numpy(np.ascontiguousarray(rows.lines[row, first_line:num_lines])),
            span=slice(first - origin, length - origin),
            mask=None if is_causal and start == self.first else additive(visible, self.keys[0].dtype),
        )

    def _first_seen(self, position: IntArray, window: Window | None) -> IntArray:
        """The first position that a token at `position` sees."""
        return np.full_like(position, self.first) if window is None else np.maximum(window.first(position), self.first)


def _rounded(number: np.int64, step: int) -> int:
    return int(-(-number // step) * step)


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written.

    So a line of a cache costs memory only once a sequence uses it. The zeros matter: masked positions take part in the
    products, where uninitialized memory could be NaN.
    """
    # numpy gets zeroed pages without touching them.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(*shape)
