"""The bare decode step of the torch backend: the same kernels on the same shapes without the engine.

Used by the suite to measure the cost of scheduler, mirror, sampling options and thread hand-over. It has its own copy
of the weights and runs on the engine's device thread to share its worker threads: a second pool would slow down both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from bench import offline
from bench.report import Meter
from neuron_runtime.backend.host_sampling.drawing import best
from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.choices import stored_dtype
from neuron_runtime.backend.torch.compiled import CompiledDecoder, eager_because
from neuron_runtime.backend.torch.decoder import Decoder
from neuron_runtime.backend.torch.held import held_as
from neuron_runtime.backend.torch.linear import tiled_kinds
from neuron_runtime.backend.torch.loader import DTYPES, load_decoder
from neuron_runtime.backend.torch.naming import as_named
from neuron_runtime.backend.torch.step_module import constants
from neuron_runtime.checkpoint import read_checkpoint
from neuron_runtime.quantization import Quantizing

BareSteps = Callable[[int, int, int], list[float]]
"""Runs (number of rows, start position, number of steps); returns seconds of each step."""


@dataclass(frozen=True, slots=True)
class Point:
    """Engine and bare steps measured in turns, for one number of sequences."""

    engine: offline.Point
    bare_step_seconds: float
    ratio: float
    """Decode rate relative to bare decode: the median of the ratios per iteration."""


def bare_steps(engine: offline.OfflineEngine) -> BareSteps:
    """The bare steps of an engine over the torch backend."""
    backend = engine.backend
    assert isinstance(backend, TorchBackend)
    decoder = backend.run_on_device(
        lambda: BareDecoder(engine.model_dir, backend.limits.max_rows, backend.limits.max_model_length)
    )
    return lambda rows, start, steps: backend.run_on_device(lambda: decoder.decode(rows, start, steps))


def prefill_seconds(engine: offline.OfflineEngine, num_tokens: int, num_iters: int) -> float:
    """Seconds of one prompt on an engine over the torch backend, the best of several."""
    backend = engine.backend
    assert isinstance(backend, TorchBackend)

    def run() -> float:
        decoder = BareDecoder(engine.model_dir, num_lines=1, line_length=num_tokens)
        return min(decoder.prefill(num_tokens) for _ in range(1 + num_iters))

    return backend.run_on_device(run)


def measure(
    engine: offline.OfflineEngine,
    bare: BareSteps,
    concurrency: int,
    *,
    input_len: int,
    output_len: int,
    num_iters: int,
    seed: int = 0,
) -> Point:
    """Times one number of sequences, with bare steps of the same rows before each iteration."""
    meter = Meter()
    iterations, seconds = [], []
    for prompts in offline.prompts_of_iterations(engine, concurrency, input_len, num_iters, seed):
        seconds.append(statistics.fmean(bare(concurrency, input_len, output_len - 1)))
        iterations.append(offline.iterate(engine, prompts, output_len))
    ratios = [one / whole.step_seconds for one, whole in zip(seconds, iterations, strict=True)]
    return Point(
        offline.Point.of(concurrency, iterations, meter.read()), statistics.median(seconds), statistics.median(ratios)
    )


class BareDecoder:
    """A decoder and a cache in the slot layout, in the dtype of the file.

    num_lines, line_length: rows and tokens of its cache; those of the engine where both are compared.
    """

    def __init__(self, model_dir: Path, num_lines: int, line_length: int, quantization: Quantizing = "auto") -> None:
        checkpoint = read_checkpoint(model_dir)
        model = decoder_config(checkpoint.config)
        checkpoint = as_named(checkpoint, model)
        dtype = DTYPES[stored_dtype(checkpoint)]
        own = tiled_kinds(dtype) if quantization != "auto" else ()
        held = held_as(checkpoint, tensor_shapes(model), model.quantization, quantization, own=own)
        self._decoder: Decoder | CompiledDecoder = load_decoder(
            checkpoint, model, dtype, lambda stage, share: None, held=held
        )
        shape = (num_lines, model.num_kv_heads, line_length, model.head_dim)
        self._cache = KVCache.empty(model.windows, shape, dtype)

    @property
    def resident_bytes(self) -> int:
        """Memory of the weights."""
        assert isinstance(self._decoder, Decoder)
        return sum(one.numel() * one.element_size() for one in constants(self._decoder.weights).values())

    def eager_because(self) -> str | None:
        """Why this machine cannot run compiled steps, if so."""
        assert isinstance(self._decoder, Decoder)
        return eager_because(self._decoder)

    def compiled(self, artifact: Path) -> Self:
        """The same weights and cache with compiled steps."""
        assert isinstance(self._decoder, Decoder)
        other = copy(self)
        other._decoder = CompiledDecoder.load(self._decoder, artifact, blocks=False)
        return other

    @torch.inference_mode()
    def prefill(self, num_tokens: int) -> float:
        """Seconds of one prompt, up to its first token."""
        token_ids = torch.arange(num_tokens)
        rows = StepRows(start=np.zeros(1, np.int64), num_tokens=np.array([num_tokens]), lines=np.array([[0]]))
        began = time.perf_counter()
        best(self._decoder.logits(self._decoder.forward(token_ids, self._cache.plan(rows))[-1:]))
        return time.perf_counter() - began

    @torch.inference_mode()
    def decode(self, num_rows: int, start: int, num_steps: int) -> list[float]:
        """Seconds of each of `num_steps` greedy steps of `num_rows` rows, the first at position `start`."""
        token_ids = torch.zeros(num_rows, dtype=torch.int64)
        lines, ones = np.arange(num_rows).reshape(-1, 1), np.ones(num_rows, dtype=np.int64)
        seconds = []
        for position in range(start, start + num_steps):
            began = time.perf_counter()
            plan = self._cache.plan(StepRows(start=np.full(num_rows, position), num_tokens=ones, lines=lines))
            token_ids = torch.from_numpy(best(self._decoder.logits(self._decoder.forward(token_ids, plan))))
            seconds.append(time.perf_counter() - began)
        return seconds
