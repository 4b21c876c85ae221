"""Durations of device steps: curves over step size, compiled sizes (buckets), and published measurements.

Used by the simulated backend only. Pure data and arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a size (rows or tokens): linear interpolation between points in ascending order of size.

    Constant below the first point, because a small step still reads all weights. Beyond the last point it continues
    with the last slope; beyond a single point it is proportional to size.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"sizes must be positive and in ascending order, got {sizes}")
        if any(seconds <= 0 for _, seconds in self.points):
            raise ValueError("every duration must be positive")

    def seconds(self, size: int) -> float:
        at = bisect_left(self.points, (size, 0.0))
        if at == 0:
            return self.points[0][1]
        if len(self.points) == 1:
            return self.points[0][1] * size / self.points[0][0]
        (low, low_seconds), (high, high_seconds) = self.points[min(at, len(self.points) - 1) - 1 :][:2]
        return low_seconds + (high_seconds - low_seconds) * (size - low) / (high - low)


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The steps of one phase: their times, and the sizes that are compiled."""

    curve: Curve
    buckets: tuple[int, ...] = ()
    """In ascending order; empty: every size is compiled."""

    def bucket(self, size: int) -> int:
        """The size computed for `size`: the smallest bucket that fits it, or a multiple of the largest one."""
        if not self.buckets:
            return size
        at = bisect_left(self.buckets, size)
        largest = self.buckets[-1]
        return self.buckets[at] if at < len(self.buckets) else -(-size // largest) * largest

    def seconds(self, size: int) -> float:
        return self.curve.seconds(self.bucket(size))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The two phases of a model on a device. A step that mixes them takes the sum of both.

    decode: over rows, one token each.
    prefill: over prompt tokens, without those found in the prefix cache.
    """

    decode: PhaseTimes
    prefill: PhaseTimes


def constant(seconds: float) -> Curve:
    """The same time, whatever the size."""
    return Curve(((1, seconds), (2, seconds)))


@dataclass(frozen=True, slots=True)
class Published:
    """Step times of one model on one machine, in milliseconds, with their source."""

    max_rows: int
    """Rows that the model was compiled for."""
    max_model_length: int
    decode: tuple[tuple[int, float], ...]
    prefill: tuple[tuple[int, float], ...]
    source: str


def milliseconds(points: Iterable[tuple[int, float]]) -> Curve:
    """Raises ValueError if the points are not a valid curve."""
    return Curve(tuple((size, value / 1000) for size, value in points))


_OPTIMUM = "huggingface/optimum-neuron, benchmark/vllm, one client at a time: "
_AWS = "aws-neuron/aws-neuron-sdk, about-neuron/benchmarks/trn1 (SDK 2.18, Transformers NeuronX, 32 cores): "

PUBLISHED = {
    "llama-3.1-8b-trn2-tp4": Published(
        max_rows=32,
        max_model_length=4096,
        decode=((32, 22.1),),
        prefill=((128, 22.1), (4096, 197.0)),
        source=_OPTIMUM + "llama-3.1-8b-trn2, October 2025. A prompt of 128 tokens is estimated as a decode step",
    ),
    "llama-3.1-8b-trn1-tp8": Published(
        max_rows=32,
        max_model_length=4096,
        decode=((32, 26.6),),
        prefill=((128, 26.6), (4096, 242.0)),
        source=_OPTIMUM + "llama3.1-8b, trn1.32xlarge, September 2025. A prompt of 128 tokens is estimated",
    ),
    "llama-3.1-8b-inf2-tp8": Published(
        max_rows=32,
        max_model_length=4096,
        decode=((32, 23.9),),
        prefill=((128, 23.9), (1024, 160.0), (4096, 310.0)),
        source=_OPTIMUM + "chunked-prefill, August 2026. A prompt of 128 tokens is estimated",
    ),
    "llama-3-8b-trn1-tp32": Published(
        max_rows=8,
        max_model_length=4096,
        decode=((1, 5.86), (8, 7.65)),
        prefill=((128, 14.75), (4096, 153.0)),
        source=_AWS + "Llama-3-8B, weights in int8",
    ),
    "llama-3-70b-trn1-tp32": Published(
        max_rows=4,
        max_model_length=4096,
        decode=((1, 26.2), (4, 32.3)),
        prefill=((128, 53.2), (1024, 237.0), (2048, 547.0)),
        source=_AWS + "Llama-3-70B, for 1,024 tokens Llama-2-70B",
    ),
}
"""Prefill times are measured times to first token, which include overhead of the measured server."""
