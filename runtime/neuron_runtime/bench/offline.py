"""`neuron-runtime bench offline MODEL`: throughput and latency of a model in this process, without HTTP and text.

Runs scheduler and backend on the caller's thread, like `LLM`. For each number of sequences c it runs all prompts
together, once for one output token (T1) and once for N (TN); decode is c(N - 1) / (TN - T1) tokens per second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from neuron_runtime.arguments import (
    BY_ARGUMENT,
    FLAG_NAMES,
    config_of,
    default_artifacts_dir,
    default_weights_dir,
    naming,
    on_this_machine,
)
from neuron_runtime.bench.model import PREFIX, SHAPES, model_folder_or_uri
from neuron_runtime.bench.number_flags import add_number
from neuron_runtime.bench.report import Load, Meter, Report, Row, Table, check_outputs, deliver, machine_line
from neuron_runtime.flags import add_flags

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST_TOKEN_ID = 256
"""Smallest random id of prompts: lower ids of byte-level vocabularies are single bytes and special tokens."""

MODEL_FLAGS = (
    "backend",
    "dtype",
    "layout",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_gpu_blocks_override",
)
"""Flags of `serve` that hold here too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"as `serve` takes it, or {', '.join(PREFIX + shape for shape in SHAPES)}: random weights of that shape",
    )
    number = partial(add_number, parser)
    number("--concurrency", [1, 4, 8, 16, 32], "C", "numbers of sequences to run", least=1)
    number("--input-len", 32, "N", "tokens of a prompt", least=1)
    number("--output-len", 128, "N", "tokens of an answer", least=2)
    number("--prefill-len", 512, "N", "tokens of the prompt for the prefill measurement", least=1)
    number("--num-iters", 3, "N", "iterations; the table shows medians", least=1)
    number("--seed", 0, "N", "seed of the prompts")
    model = parser.add_argument_group("model flags, as of `serve`")
    needed = dict.fromkeys(("max_model_len", "max_num_seqs"), "what the benchmark needs")
    add_flags(model, (BY_ARGUMENT[name] for name in MODEL_FLAGS), needed)


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of prompts that were submitted together."""

    seconds: float
    """Until the last token."""
    first_token_seconds: tuple[float, ...]
    """Until the first token of each prompt."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """Two runs of the same prompts."""

    first: Timing
    """For one output token of each."""
    whole: Timing
    """For `output_len` tokens of each."""
    output_len: int

    @property
    def step_seconds(self) -> float:
        """Time of one decode step."""
        return (self.whole.seconds - self.first.seconds) / (self.output_len - 1)


@dataclass(frozen=True, slots=True)
class Point:
    """Results for one number of sequences. Rates are tokens per second, medians of the iterations."""

    concurrency: int
    decode: float
    throughput: float
    """Output tokens over the whole time, including prefill."""
    median_first_token_seconds: float
    step_seconds: float
    """Time of one decode step."""
    load: Load

    @classmethod
    def of(cls, concurrency: int, iterations: Sequence[Iteration], load: Load) -> Self:
        step_seconds = statistics.median(one.step_seconds for one in iterations)
        first_tokens = [seconds for one in iterations for seconds in one.whole.first_token_seconds]
        return cls(
            concurrency=concurrency,
            decode=concurrency / step_seconds,
            throughput=statistics.median(concurrency * one.output_len / one.whole.seconds for one in iterations),
            median_first_token_seconds=statistics.median(first_tokens),
            step_seconds=step_seconds,
            load=load,
        )


class OfflineEngine:
    """A loaded engine in this process, after warm-up; a context manager.

    Raises: the errors of `serve` for models that cannot be loaded.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any], cache_dir: Path | None = None) -> None:
        from neuron_runtime.artifacts.loading import Places, load_backend  # noqa: PLC0415
        from neuron_runtime.engine.backends import check_backend  # noqa: PLC0415 - heavy
        from neuron_runtime.engine.loop import Engine  # noqa: PLC0415
        from neuron_runtime.weights.fetching import materialize  # noqa: PLC0415

        config = config_of(model_folder_or_uri(model, cache_dir), on_this_machine(arguments))
        check_backend(config)
        self.model_dir = materialize(config.model, default_weights_dir(), lambda stage, share: None)
        places = Places(default_artifacts_dir())
        self.backend = load_backend(self.model_dir, config, places, lambda stage, share: None)
        self.backend.warm_up(lambda stage, share: None)
        self.engine = Engine(self.backend, max_queued_requests=2**31)
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.backend.close()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timing:
        """Run all prompts together, greedy, for `max_tokens` tokens each."""
        from neuron_runtime.core import Request, Sampling  # noqa: PLC0415

        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        began = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            self.engine.add(Request(str(self._num_requests), tuple(prompt), sampling))
        first: list[float] = []
        while self.engine.has_work:
            events = self.engine.step()
            if any(event.first for event in events):
                now = time.perf_counter() - began
                first += [now for event in events if event.first]
        return Timing(time.perf_counter() - began, tuple(first))


def random_prompts(count: int, length: int, seed: int, vocabulary_size: int) -> list[tuple[int, ...]]:
    """`count` prompts of `length` token ids that are text in most vocabularies."""
    source = random.Random(seed)  # noqa: S311 - not a secret
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
        if whole.seconds > first.seconds:
            return Iteration(first, whole, output_len)


def measure(
    engine: OfflineEngine, concurrency: int, *, input_len: int, output_len: int, num_iters: int, seed: int = 0
) -> Point:
    """Time one number of sequences."""
    meter = Meter()
    prompts = prompts_of_iterations(engine, concurrency, input_len, num_iters, seed)
    iterations = [iterate(engine, some, output_len) for some in prompts]
    return Point.of(concurrency, iterations, meter.read())


def measure_prefill(engine: OfflineEngine, length: int, num_iters: int, seed: int = 0) -> tuple[float, Load]:
    """Median seconds to the first token of one prompt of `length` tokens, and the load during the measurement."""
    meter = Meter()
    prompts = random_prompts(num_iters, length, seed + 1, engine.backend.limits.vocabulary_size)
    return statistics.median(engine.generate([prompt], 1).seconds for prompt in prompts), meter.read()


def run(options: argparse.Namespace) -> None:
    check_outputs(options)
    arguments = {name: getattr(options, name) for name in MODEL_FLAGS}
    longest = max(options.input_len + options.output_len, options.prefill_len + 1)
    arguments["max_model_len"] = arguments["max_model_len"] or longest
    arguments["max_num_seqs"] = arguments["max_num_seqs"] or max(options.concurrency)
    with (
        naming(FLAG_NAMES),
        OfflineEngine(options.model, {name: value for name, value in arguments.items() if value}) as engine,
    ):
        measure(engine, 1, input_len=8, output_len=4, num_iters=1)
        prefill_seconds, prefill_load = measure_prefill(engine, options.prefill_len, options.num_iters, options.seed)
        points = [
            measure(
                engine,
                concurrency,
                input_len=options.input_len,
                output_len=options.output_len,
                num_iters=options.num_iters,
                seed=options.seed,
            )
            for concurrency in options.concurrency
        ]
    deliver(_report(options, arguments, points, prefill_seconds, prefill_load), options)


def _report(
    options: argparse.Namespace,
    arguments: dict[str, Any],
    points: Sequence[Point],
    prefill_seconds: float,
    prefill_load: Load,
) -> Report:
    columns = tuple(f"c={point.concurrency}" for point in points)
    figures: list[tuple[str, str, Callable[[Point], float | None]]] = [
        ("decode", "tokens/s", lambda point: point.decode),
        ("end to end", "tokens/s", lambda point: point.throughput),
        ("decode step", "ms", lambda point: 1000 * point.step_seconds),
        ("time to first token", "ms", lambda point: 1000 * point.median_first_token_seconds),
        ("foreign CPU", "share", lambda point: point.load.foreign_cpu_share),
    ]
    title = (
        f"{options.model}: {options.input_len} tokens in, {options.output_len} out, medians of {options.num_iters}; "
        f"{machine_line()}"
    )
    rows = tuple(Row(name, tuple(of(point) for point in points), unit) for name, unit, of in figures)
    prefill = Row(
        f"prefill of {options.prefill_len} tokens",
        (options.prefill_len / prefill_seconds,),
        "tokens/s",
        load=prefill_load,
    )
    first = Row("time to first token", (1000 * prefill_seconds,), "ms", load=prefill_load)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        together = [point.concurrency for point in points]
        axes.plot(together, [point.decode for point in points], "o-", label="decode")
        axes.plot(together, [point.throughput for point in points], "s--", label="end to end")
        axes.set(xlabel="concurrent sequences", ylabel="tokens per second", title=title, ylim=(0, None))
        axes.set_xticks(together)
        axes.legend()

    settings = {name: value for name, value in vars(options).items() if isinstance(value, int | str | list)}
    return Report(
        command="bench offline",
        options=settings | {name: value for name, value in arguments.items() if value},
        tables=(Table(title, rows, columns), Table("one long prompt", (prefill, first))),
        draw=draw,
    )
