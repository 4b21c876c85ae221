"""Decode steps whose rows have adapters compared with those of the base model, without the engine, in turns in one
process.

Called by the suite. All steps run over the same weights and cache, and uncompiled: so do steps with adapters. They are
measured in CPU time of one thread: others on the machine change it little, and no thread waits for another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.bare_step import BareDecoder
from bench.report import Load, Meter
from neuron_runtime.adapters.peft import TARGETS
from neuron_runtime.backend.torch.adapters import Adapters
from neuron_runtime.backend.torch.architecture import projections
from neuron_runtime.backend.torch.cache import StepPlan
from neuron_runtime.backend.torch.decoder import Decoder
from neuron_runtime.backend.torch.lora import Pair
from neuron_runtime.core import Added, BackendLimits, Batch, Rows, Sampling

STEPS_PER_TURN = 32


@dataclass(frozen=True, slots=True)
class Point:
    """CPU seconds per step; the ratio is the median over pairs of steps, above one: slower."""

    base_seconds: float
    adapted_seconds: float
    ratio: float
    load: Load


def measure(
    model_dir: Path, num_rows: int, num_adapters: int, rank: int, *, start: int, num_turns: int
) -> Mapping[int, Point]:
    """Greedy steps from position `start` on, on this thread, by how many adapters the rows use: none, and all."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(
            BareDecoder(model_dir, num_rows, start + STEPS_PER_TURN), (num_rows, num_adapters, rank), start, num_turns
        )
    finally:
        torch.set_num_threads(num_threads)


def _measure(base: BareDecoder, sizes: tuple[int, int, int], start: int, num_turns: int) -> Mapping[int, Point]:
    assert isinstance(base._decoder, Decoder)
    num_rows, num_adapters, _ = sizes

    def seconds(decoder: BareDecoder, position: int) -> float:
        began = time.thread_time()
        decoder.decode(num_rows, position, 1)
        return time.thread_time() - began

    points = {}
    for used in (0, num_adapters):
        other = copy(base)
        other._decoder = _Adapted(base._decoder, *sizes, used)  # type: ignore[assignment]
        for one in (base, other):
            seconds(one, start)
        meter = Meter()
        pairs = [
            (seconds(base, position), seconds(other, position))
            for _ in range(num_turns)
            for position in range(start, start + STEPS_PER_TURN)
        ]
        before, after = (statistics.median(one) for one in zip(*pairs, strict=True))
        points[used] = Point(before, after, statistics.median(two / one for one, two in pairs), meter.read())
    return points


class _Adapted:
    """A decoder whose rows use so many of its adapters in turns, as the backend calls it."""

    def __init__(self, decoder: Decoder, num_rows: int, *sizes: int) -> None:
        num_adapters, rank, used = sizes
        limits = BackendLimits(
            max_rows=num_rows,
            max_model_length=64,
            max_step_tokens=num_rows,
            num_blocks=4 * num_rows,
            max_adapters=num_adapters,
            max_loaded_adapters=num_adapters,
            max_adapter_rank=rank,
            adapter_targets=TARGETS,
        )
        self._decoder, self.logits = decoder, decoder.logits
        self._adapters = Adapters(decoder, decoder.config, limits, 0, 1)
        dtype = decoder.weights.embedding.dtype
        with torch.inference_mode():

            def random(*sizes: int) -> torch.Tensor:
                return (torch.randn(*sizes) * 0.01).to(dtype)

            pairs = {
                (layer, name): Pair(random(taken, rank), random(rank, given))
                for layer in range(decoder.config.num_layers)
                for name, (taken, given) in projections(decoder.config).items()
            }
            self._adapters.add("random", pairs)
            places = tuple((place, "random") for place in range(1, num_adapters + 1))
            added = tuple(
                Added(slot, (0,), 1, Sampling(), (slot,), adapter=1 + slot % used if used else 0)
                for slot in range(num_rows)
            )
            self._adapters.apply(Batch(0, Rows(), adapters=places, added=added))

    def forward(self, token_ids: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        slots = np.arange(len(token_ids))
        adapted = self._adapters.decoder_for(slots, plan.rows.num_tokens)
        return (adapted or self._decoder).forward(token_ids, plan)
