"""Steps of the torch backend with quantized weights compared with those of the model's dtype, without the engine, in
turns in one process.

Called by the suite. Weights are quantized while they are read; each kind has its own copy of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bare_step import BareDecoder
from bench.report import Load, Meter
from neuron_runtime.checkpoint import read_checkpoint
from neuron_runtime.conversion.plan import conversion_of
from neuron_runtime.quantization import Kind

TURN_STEPS = 8
"""Steps of one kind before the other has its turn: few, so that both see the same machine."""


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds of a step; the ratio is the median over pairs of turns, above one: faster than the model's dtype."""

    plain_seconds: float
    seconds: float
    ratio: float
    load: Load


@dataclass(frozen=True, slots=True)
class Measured:
    """decode: by number of rows. format_bytes: of the same weights in a converted checkpoint."""

    decode: Mapping[int, Point]
    prefill: Point
    resident_bytes: int
    format_bytes: int


def measure(
    model_dir: Path, kinds: Sequence[Kind], counts: Sequence[int], *, prompt: int, start: int, num_turns: int
) -> dict[Kind, Measured]:
    """Greedy steps of each number of rows, from position `start` on, and prefills of `prompt` tokens."""
    checkpoint = read_checkpoint(model_dir)
    cache = max(counts), max(prompt, start + TURN_STEPS)
    plain, found = BareDecoder(model_dir, *cache), {}
    for kind in kinds:
        converted = conversion_of(checkpoint.config, checkpoint.tensors, "torch", kind)
        assert converted is not None  # the model is not quantized
        other = BareDecoder(model_dir, *cache, kind)

        def in_turns(seconds: Callable[[BareDecoder], float], pair: tuple[BareDecoder, BareDecoder]) -> Point:
            for one in pair:
                seconds(one)
            meter = Meter()
            turns = [tuple(seconds(one) for one in pair) for _ in range(num_turns)]
            before, after = (statistics.median(one) for one in zip(*turns, strict=True))
            return Point(before, after, statistics.median(one / two for one, two in turns), meter.read())

        def step(rows: int) -> Callable[[BareDecoder], float]:
            return lambda one: statistics.fmean(one.decode(rows, start, TURN_STEPS))

        found[kind] = Measured(
            {rows: in_turns(step(rows), (plain, other)) for rows in counts},
            in_turns(lambda one: one.prefill(prompt), (plain, other)),
            other.resident_bytes,
            converted.num_bytes,
        )
    return found
