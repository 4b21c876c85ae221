"""What adapters (LoRA) add to the linear layers of a decoder: one grouped product for tokens of any adapters.

`adapters.py` wraps layers in `AdaptedLinear`, and sets the `Route` of each step: which tokens get the weights of which
places. Knows nothing of sequences or of adapters' names. A few tokens of each place are computed by a kernel,
`lora.cpp`, which reads weights once and is called once for each layer; more of them, and all without a C++ compiler, by
torch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from neuron_runtime.backend.slots import IntArray
from neuron_runtime.backend.torch.cache import lazy_zeros
from neuron_runtime.backend.torch.kernels import built
from neuron_runtime.backend.torch.linear import Linear, packs

SOURCE = Path(__file__).with_suffix(".cpp")
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
MAX_SHORT = 16
"""Neighbouring runs of at most so many tokens are computed together, a longer one alone: all lanes of a product have
the length of the longest."""
MAX_FEW = 64
"""So many tokens of a run are left to the kernel at most. At hundreds torch is as fast, in less memory."""
MAX_GAP = 3
"""A product reads so many places without a token at most, rather than leave those behind them to another product."""


class Pair(NamedTuple):
    """What an adapter adds to a projection: `x @ a @ b`. a: `[in, rank]`; b: `[rank, out]`, with the scaling."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class Lanes:
    """The tokens of a segment by place: a lane for each, all of the same length.

    tokens: `[places * length]`, the token in each position; any token where a lane is shorter.
    empty: `[places, length, 1]`, where that is so; None if all tokens of the segment have one of the places.
    position: `[tokens]`, where each token is; an empty position for those that have none of the places.
    """

    tokens: torch.Tensor
    empty: torch.Tensor | None
    position: torch.Tensor
    length: int
    _taken: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    _given: dict[int, torch.Tensor] = field(default_factory=dict)

    def taken(self, counts: tuple[int, ...]) -> torch.Tensor:
        """`[places * blocks * length]`: the rows of a product `[places, length, projections]` that go into one
        `[places, blocks, length]`. counts: the blocks of each projection."""
        if counts not in self._taken:
            projection = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).view(-1, 1)
            positions = torch.arange(len(self.tokens)).view(-1, 1, self.length)
            self._taken[counts] = (positions * len(counts) + projection).view(-1)
        return self._taken[counts]

    def given(self, num_blocks: int) -> torch.Tensor:
        """`[tokens * blocks]`: the rows of a product `[places, blocks, length]` that are the outputs of each token."""
        if num_blocks not in self._given:
            lane, number = self.position // self.length, self.position % self.length
            blocks = lane.view(-1, 1) * num_blocks + torch.arange(num_blocks)
            self._given[num_blocks] = (blocks * self.length + number.view(-1, 1)).view(-1)
        return self._given[num_blocks]


class Segment(NamedTuple):
    """Tokens `[begin, end)` of a step, and places `[first, last]`. lanes: None if all of these have the one place."""

    begin: int
    end: int
    first: int
    last: int
    lanes: Lanes | None


class Route:
    """What the step that runs adds to its tokens.

    segments: what torch computes. places: `[tokens]`, of each the place whose weights the kernel adds, 0 for none; None
    if it adds nothing.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.kernel = kernel() if dtype in KERNEL_DTYPES else None
        self.segments: tuple[Segment, ...] = ()
        self.places: torch.Tensor | None = None

    def set(self, places: IntArray, num_tokens: IntArray) -> None:
        """Of a step whose row i feeds `num_tokens[i]` tokens of the place `places[i]`, 0 for none."""
        self.segments, self.places = tuple(segments_of(places, num_tokens, self.kernel is not None)), None
        if self.kernel is not None:
            of_token = np.repeat(places, num_tokens)
            for one in self.segments:
                of_token[one.begin : one.end] = 0
            if of_token.any():
                self.places = torch.from_numpy(of_token)


@cache
def kernel() -> ctypes.CDLL | None:
    """None where it cannot be built, which is said once."""
    return built(SOURCE, _declared, "adapters are computed without the kernel for them, more slowly")


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.add.restype = None
    library.add.argtypes = [
        *(address, address, address, address, number, number, number, number, number, ctypes.c_int, number),
        *(address, number, address, address, ctypes.c_int),
    ]
    return library


class AdaptedLinear:
    """A linear layer, called as `Linear` is, which adds to its outputs what adapters say.

    sizes: outputs of each projection that the layer computes side by side. Outputs are stored and computed in blocks of
    equal size, so that one product has those of all projections. Zeros where an adapter has a smaller rank, or nothing
    for a projection.
    """

    def __init__(
        self,
        base: Linear,
        num_inputs: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        *,
        num_places: int,
        rank: int,
        route: Route,
    ) -> None:
        self._base, self._route, self._rank = base, route, rank
        self._block = math.gcd(*sizes)
        self._counts = tuple(size // self._block for size in sizes)
        self._parts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(self._counts))
        """Of each block, the projection whose outputs it has."""
        # Half precision without instructions for it is computed in float32, as `Widened` does.
        self._dtype = dtype if packs(dtype) else torch.float32
        self._a = lazy_zeros((num_places, len(sizes) * rank, num_inputs), dtype)
        self._b = lazy_zeros((num_places, len(self._parts), rank, self._block), dtype)
        self._ranks = torch.zeros(num_places, len(sizes), dtype=torch.int64)
        """By place and projection, those that add anything."""
        self._used: set[int] = set()
        """Places that add anything."""
        self._span, self._of_span = (1, num_places), (self._a.transpose(1, 2), self._b.flatten(0, 1))

    def put(self, place: int, pairs: Sequence[Pair | None]) -> None:
        """What this place, from 1 on, adds to each projection from now on."""
        if not any(pairs) and place not in self._used:
            return
        a = self._a[place - 1].view(len(pairs), self._rank, -1)
        blocks = torch.split(self._b[place - 1], list(self._counts))
        for part, (b, pair) in enumerate(zip(blocks, pairs, strict=True)):
            rank = 0
            if pair is not None:
                rank = len(pair.b)
                a[part, :rank] = pair.a.t()
                b[:, :rank] = pair.b.view(rank, -1, self._block).transpose(0, 1)
            a[part, rank:] = 0
            b[:, rank:] = 0
            self._ranks[place - 1, part] = rank
        (self._used.add if any(pairs) else self._used.discard)(place)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        segments = [one for one in self._route.segments if not self._used.isdisjoint(range(one.first, one.last + 1))]
        if len(segments) == 1 and segments[0].end - segments[0].begin == len(x):
            return self._base.plus(x, self._added(x, segments[0]).reshape(len(x), -1))
        out = self._base(x)
        for one in segments:
            added = self._added(x[one.begin : one.end], one)
            out[one.begin : one.end].view(added.shape).add_(added)
        if self._route.places is not None and self._used:
            self._add_few(x, out, self._route.places)
        return out

    def _add_few(self, x: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
        assert self._route.kernel is not None
        x = x.contiguous()
        self._route.kernel.add(
            *(self._a.data_ptr(), self._b.data_ptr(), self._ranks.data_ptr(), self._parts.data_ptr()),
            *(len(self._counts), self._rank, x.shape[1], len(self._parts), self._block),
            *(x.dtype is torch.bfloat16, len(self._ranks)),
            *(places.data_ptr(), len(x), x.data_ptr(), out.data_ptr(), torch.get_num_threads()),
        )

    def _added(self, x: torch.Tensor, segment: Segment) -> torch.Tensor:
        """`[tokens, blocks, outputs of a block]`. x: the inputs of the segment."""
        a, b = self._weights(segment.first, segment.last)
        lanes, num_blocks = segment.lanes, len(self._parts)
        laid = (x if lanes is None else x.index_select(0, lanes.tokens)).view(len(a), -1, a.shape[1])
        low = torch.bmm(laid if laid.dtype == a.dtype else laid.to(a.dtype), a)
        if lanes is None:
            if num_blocks > 1:
                low = low.view(len(x), -1, self._rank).transpose(0, 1).index_select(0, self._parts)
            return torch.bmm(low, b).transpose(0, 1)
        if lanes.empty is not None:
            low.masked_fill_(lanes.empty, 0.0)
        if num_blocks > 1:
            low = low.view(-1, self._rank).index_select(0, lanes.taken(self._counts)).view(len(b), -1, self._rank)
        high = torch.bmm(low, b).view(-1, self._block)
        return high.index_select(0, lanes.given(num_blocks)).view(len(x), num_blocks, -1)

    def _weights(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of these places: A `[places, in, projections * rank]`, B `[places * blocks, rank, outputs of a block]`."""
        if (first, last) != self._span:
            # Most steps have the places of the step before.
            span = slice(first - 1, last)
            self._span, self._of_span = (first, last), (self._a[span].transpose(1, 2), self._b[span].flatten(0, 1))
        a, b = self._of_span
        return (a, b) if a.dtype == self._dtype else (a.to(self._dtype), b.to(self._dtype))


def segments_of(places: IntArray, num_tokens: IntArray, beside_kernel: bool) -> Iterator[Segment]:
    """See `Route.set`. beside_kernel: only those that are too long for it."""
    longest = MAX_FEW if beside_kernel else MAX_SHORT
    firsts = np.flatnonzero(np.diff(places, prepend=-1))
    begins = (np.cumsum(num_tokens) - num_tokens)[firsts]
    ends = np.append(begins[1:], num_tokens.sum())
    runs = list(zip(begins.tolist(), ends.tolist(), places[firsts].tolist(), strict=True))
    for is_long, group in groupby(runs, key=lambda run: run[1] - run[0] > longest):
        if beside_kernel and not is_long:
            continue
        members = list(group)
        for together in [[one] for one in members] if is_long else [members]:
            yield from _segments(together)


def _segments(runs: Sequence[tuple[int, int, int]]) -> Iterator[Segment]:
    """Of runs (begin, end, place) that are computed together."""
    begin, end = runs[0][0], runs[-1][1]
    active = sorted({place for _, _, place in runs} - {0})
    if len(runs) == 1:
        yield from (Segment(begin, end, place, place, None) for place in active)
        return
    of_token = np.repeat([place for _, _, place in runs], [run_end - run_begin for run_begin, run_end, _ in runs])
    spans: list[list[int]] = []
    for place in active:
        if spans and place - spans[-1][-1] <= MAX_GAP + 1:
            spans[-1].append(place)
        else:
            spans.append([place])
    for span in spans:
        yield Segment(begin, end, span[0], span[-1], _lanes(of_token, span[0], span[-1]))


def _lanes(places: IntArray, first: int, last: int) -> Lanes:
    """The lanes of places `[first, last]`. places: of each token."""
    order = np.argsort(places, kind="stable")
    lane = places[order] - first
    mine = (lane >= 0) & (places[order] <= last)
    order, lane = order[mine], lane[mine]
    counts = np.bincount(lane, minlength=last - first + 1)
    has_others = len(order) < len(places)
    # The others need an empty position.
    length = int(counts.max()) + int(has_others and counts.min() == counts.max())
    position = lane * length + np.arange(len(lane)) - (np.cumsum(counts) - counts)[lane]
    tokens = np.zeros(len(counts) * length, dtype=np.int64)
    empty = np.ones(len(tokens), dtype=bool)
    tokens[position], empty[position] = order, False
    of_token = np.full(len(places), empty.argmax(), dtype=np.int64)
    of_token[order] = position
    return Lanes(
        torch.from_numpy(tokens),
        torch.from_numpy(empty).view(len(counts), length, 1) if has_others else None,
        torch.from_numpy(of_token),
        length,
    )
