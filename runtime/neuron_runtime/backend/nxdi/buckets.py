"""Which compiled graph a call of NxD Inference takes, by the rules of NxD Inference itself.

Called by the backend for names, times and padding of steps, and by whoever plans buckets. Pure: sizes in, sizes out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from neuron_runtime.backend.nxdi.settings import RECOMPUTED, Settings
from neuron_runtime.core import name_of_step

LOOKAHEAD = 2
"""In asynchronous mode, a decode step this close below the end of a bucket runs alone, in the next larger bucket."""


class Prefill(NamedTuple):
    """A context-encoding graph: computes `tokens` tokens of one prompt, after at most `prefix` cached ones."""

    tokens: int
    prefix: int = 0

    @property
    def name(self) -> str:
        return f"prefill_{self.tokens}_after_{self.prefix}" if self.prefix else f"prefill_{self.tokens}"

    @property
    def num_computed_tokens(self) -> int:
        return self.tokens


class Decode(NamedTuple):
    """A token-generation graph: one token for each of `rows` sequences shorter than `length`."""

    rows: int
    length: int

    @property
    def name(self) -> str:
        return f"decode_{self.rows}x{self.length}"

    @property
    def num_computed_tokens(self) -> int:
        return self.rows


Graph = Prefill | Decode


def name_of(graphs: Iterable[Graph]) -> str:
    """Name of a step that runs these graphs, one after another, any number of times each."""
    return name_of_step(graph.name for graph in graphs)


def prefill_graph(settings: Settings, start: int, end: int) -> Prefill:
    """The graph that computes the tokens of a prompt from `start` to `end`. Raises ValueError if none does."""
    if settings.layout == "slots":
        return Prefill(_above(settings.context_buckets, end))
    return _prefill_after(settings.context_buckets, settings.prefix_buckets, start, end)


def decode_graph(settings: Settings, num_rows: int, position: int) -> Decode:
    """The graph of a decode call. Raises ValueError if none fits.

    num_rows: rows of the call; with slots at least the highest one plus 1. position: the largest of a row.
    """
    buckets = settings.token_buckets
    if settings.row_buckets:
        rows = _at_least(sorted({*settings.row_buckets, settings.max_rows}), num_rows)
        return Decode(rows, _at_least(buckets, position))
    if settings.asynchronous and any(position < bucket <= position + LOOKAHEAD for bucket in buckets):
        return Decode(settings.max_rows, buckets[min(bisect_right(buckets, position) + 1, len(buckets) - 1)])
    return Decode(settings.max_rows, _above(buckets, position))


def all_graphs(settings: Settings) -> Iterator[Graph]:
    """Every graph that is compiled, in the order of NxD Inference."""
    prefixes = settings.prefix_buckets if settings.layout == "blocks" else (0,)
    for tokens in settings.context_buckets:
        for prefix in prefixes:
            yield Prefill(tokens, prefix)
    for rows in sorted({*settings.row_buckets, settings.max_rows}, reverse=True):
        for length in settings.token_buckets:
            yield Decode(rows, length)


def prefill_that_takes(settings: Settings, graph: Prefill) -> tuple[int, int] | None:
    """Start and end of a prefill call that takes this graph; None if no call within the model's length does."""
    if settings.layout == "slots":
        candidates = [(0, end) for end in (graph.tokens, graph.tokens - 1)]
    else:
        # The longest call within the prefix's size; if that one is recomputed, the longest that is not.
        ends = (min(graph.prefix + graph.tokens, settings.max_model_length), RECOMPUTED[0])
        candidates = [(max(end - graph.tokens, 0), end) for end in ends if end <= settings.max_model_length]
    return next((one for one in candidates if one[1] > one[0] >= 0 and _takes(settings, graph, *one)), None)


def position_that_takes(settings: Settings, graph: Decode) -> int | None:
    """The smallest position, at least 1, at which a decode call takes this graph; None if none does."""
    smaller = [length for length in settings.token_buckets if length < graph.length]
    first = max(smaller, default=1)
    for position in (first, first + 1):
        if position < graph.length and decode_graph(settings, graph.rows, position) == graph:
            return position
    return None


def _takes(settings: Settings, graph: Prefill, start: int, end: int) -> bool:
    try:
        return prefill_graph(settings, start, end) == graph
    except ValueError:
        return False


def _prefill_after(active: Sequence[int], prefixes: Sequence[int], start: int, end: int) -> Prefill:
    least, most = RECOMPUTED
    if least < end <= most and most in active and 0 in prefixes:
        return Prefill(most)
    tokens = _at_least(active, end - start)
    free = tokens - (end - start)
    return Prefill(tokens, _at_least(prefixes, max(start - free, 0)))


def _above(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket above the size; the largest may be equal to it."""
    at = bisect_right(buckets, size)
    if at < len(buckets):
        return buckets[at]
    return _at_least(buckets, size)


def _at_least(buckets: Sequence[int], size: int) -> int:
    at = bisect_left(buckets, size)
    if at == len(buckets):
        raise ValueError(f"{size} exceeds the largest bucket, {buckets[-1]}")
    return buckets[at]
