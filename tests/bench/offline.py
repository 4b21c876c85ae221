"""Throughput and latency of a model in this process, without HTTP and text. Called by the suite.

Runs scheduler and backend on the caller's thread, like `LLM`. For a number of sequences c it runs all prompts
together, once for one output token (T1) and once for N (TN); decode is c(N - 1) / (TN - T1) tokens per second.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.model import model_folder_or_uri
from bench.report import Load, Meter
from neuron_runtime.arguments import config_of, default_artifacts_dir, default_weights_dir, on_this_machine
from neuron_runtime.local_settings import LocalSettings

FIRST_TOKEN_ID = 256
"""Smallest random id of prompts: lower ids of byte-level vocabularies are single bytes and special tokens."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """Two runs of the same prompts."""

    first_seconds: float
    """For one output token of each."""
    whole_seconds: float
    """For `output_len` tokens of each."""
    output_len: int

    @property
    def step_seconds(self) -> float:
        """Time of one decode step."""
        return (self.whole_seconds - self.first_seconds) / (self.output_len - 1)


@dataclass(frozen=True, slots=True)
class Point:
    """Results for one number of sequences. Rates are tokens per second, medians of the iterations."""

    concurrency: int
    decode: float
    step_seconds: float
    """Time of one decode step."""
    load: Load

    @classmethod
    def of(cls, concurrency: int, iterations: Sequence[Iteration], load: Load) -> Self:
        step_seconds = statistics.median(one.step_seconds for one in iterations)
        return cls(
            concurrency=concurrency,
            decode=concurrency / step_seconds,
            step_seconds=step_seconds,
            load=load,
        )


class OfflineEngine:
    """A loaded engine in this process, after warm-up; a context manager.

    Raises: the errors of `serve` for models that cannot be loaded.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any], cache_dir: Path | None = None) -> None:
        from neuron_runtime.artifacts.loading import load_backend
        from neuron_runtime.engine.backends import check_backend
        from neuron_runtime.engine.loop import Engine
        from neuron_runtime.weights.fetching import materialize

        config = config_of(model_folder_or_uri(model, cache_dir), on_this_machine(arguments))
        check_backend(config)
        self.model_dir = materialize(config.model, default_weights_dir(), lambda stage, share: None)
        settings = LocalSettings(default_weights_dir(), default_artifacts_dir())
        self.backend = load_backend(self.model_dir, config, settings, lambda stage, share: None)
        self.backend.warm_up(lambda stage, share: None)
        self.engine = Engine(self.backend, max_queued_requests=2**31)
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.backend.close()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Run all prompts together, greedy, for `max_tokens` tokens each; seconds until the last token."""
        from neuron_runtime.core import Request, Sampling

        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        began = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            self.engine.add(Request(str(self._num_requests), tuple(prompt), sampling))
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - began


def random_prompts(count: int, length: int, seed: int, vocabulary_size: int) -> list[tuple[int, ...]]:
    """`count` prompts of `length` token ids that are text in most vocabularies."""
    source = random.Random(seed)
    low = min(FIRST_TOKEN_ID, vocabulary_size // 2)
    return [tuple(source.randrange(low, vocabulary_size) for _ in range(length)) for _ in range(count)]


def prompts_of_iterations(
    engine: OfflineEngine, concurrency: int, input_len: int, num_iters: int, seed: int
) -> list[list[tuple[int, ...]]]:
    """For each iteration, one prompt per sequence; no prompt occurs twice."""
    prompts = random_prompts(concurrency * num_iters, input_len, seed, engine.backend.limits.vocabulary_size)
    return [prompts[at : at + concurrency] for at in range(0, len(prompts), concurrency)]


def iterate(engine: OfflineEngine, prompts: Sequence[Sequence[int]], output_len: int) -> Iteration:
    """Time the prompts for one token, then for all.

    Repeats a pair in which one token took longer than all of them, because something else delayed it.
    """
    while True:
        first, whole = engine.generate(prompts, 1), engine.generate(prompts, output_len)
        if whole > first:
            return Iteration(first, whole, output_len)


def measure(
    engine: OfflineEngine, concurrency: int, *, input_len: int, output_len: int, num_iters: int, seed: int = 0
) -> Point:
    """Time one number of sequences."""
    meter = Meter()
    prompts = prompts_of_iterations(engine, concurrency, input_len, num_iters, seed)
    iterations = [iterate(engine, some, output_len) for some in prompts]
    return Point.of(concurrency, iterations, meter.read())
