"""`TorchBackend`: the Backend protocol over a decoder on CPUs; all computation runs on one device thread.

Created by `load_backend`, called by `engine.loop`. Calls only enqueue work or wait for it, so the engine schedules the
next step while this one runs. A row that waits for the step in flight is resolved on the device thread by the mirror.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from neuron_runtime.backend.host_sampling.drawing import NotFinite
from neuron_runtime.backend.host_sampling.sampler import HostSampler, logprobs_of
from neuron_runtime.backend.slots import FedRows, IntArray, SlotMirror
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.compiled import CompiledDecoder
from neuron_runtime.backend.torch.decoder import Decoder
from neuron_runtime.backend.torch.prompt_targets import PromptTargets
from neuron_runtime.backend_protocol import ProgressCallback, StepTime, size_of
from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.core import (
    KNOWN,
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    Late,
    Rows,
    Sampling,
    StepOutput,
    TokenLogprobs,
)

PerRow = tuple[tuple[TokenLogprobs, ...], ...]
"""One tuple per row of a batch; empty when no row requests any."""

Result = TypeVar("Result")

LOGITS_AT_ONCE = 2**23
"""Logits computed together for prompt log-probabilities: 32 MiB."""


class _TorchStep(NamedTuple):
    """A step between run and sample."""

    batch: Batch
    sampled: IntArray
    """The rows that sample."""
    logits: torch.Tensor | None
    """Float32 `[sampled, vocabulary]`; None when no row samples."""
    prompt_logprobs: PerRow
    begin: float


def device_thread(set_up: Callable[[], None] = lambda: None) -> ThreadPoolExecutor:
    """The only thread that runs parallel torch operations, from loading on.

    Each thread that runs them gets its own OpenMP workers. Two such threads would have more workers than CPUs, and
    workers would then sleep between operations instead of spinning: a step took 1.4 times as long.

    set_up: runs first on the thread (thread settings are per thread).
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="device", initializer=set_up)


class TorchBackend:
    """See `backend_protocol.Backend`. `device` is the thread on which the decoder was loaded."""

    def __init__(
        self,
        decoder: Decoder | CompiledDecoder,
        cache: KVCache,
        limits: BackendLimits,
        device: ThreadPoolExecutor | None = None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self.limits = limits
        self._mirror = SlotMirror(limits)
        self._prompts = PromptTargets(limits.max_rows)
        self._sampler = HostSampler(self._mirror.tokens, limits.vocabulary_size)
        self._thread = device or device_thread()
        self._running: deque[tuple[int, Future[_TorchStep]]] = deque()
        self._finished: dict[int, Future[StepOutput]] = {}

    def warm_up(self, progress: ProgressCallback) -> list[StepTime]:
        """Run a prefill and a decode step, which selects kernels and allocates scratch memory.

        Raises InvalidModel if the logits are not finite.
        """
        progress("warming up", 0.0)
        length = min(8, self.limits.max_model_length - 1)
        added = Added(
            slot=0,
            token_ids=(0,) * length,
            num_prompt_tokens=length,
            sampling=Sampling(temperature=0.0),
            blocks=tuple(range(-(-(length + 1) // self.limits.block_size))),
        )
        prompt = Rows((0,), (0,), (length,), (NO_TOKEN,), (KNOWN,), (True,))
        decode = Rows((0,), (length,), (1,), (NO_TOKEN,), (KNOWN,), (True,))
        steps = (
            Batch(step=-3, rows=prompt, num_prefills=1, added=(added,)),
            Batch(step=-2, rows=decode),
            Batch(step=-1, rows=Rows(), released=(0,)),
        )
        try:
            for _ in range(2):  # only the second run is timed
                *times, _released = [(batch, self._run_alone(batch).device_seconds) for batch in steps]
        except NotFinite as error:
            # No request is involved, so every request would fail like this.
            raise InvalidModel(str(error)) from error
        progress("warming up", 1.0)
        return times

    def graph(self, batch: Batch) -> str:
        return size_of(batch)

    def launch(self, batch: Batch) -> None:
        self._running.append((batch.step, self._thread.submit(self._run, batch)))

    def sample(self, step: int, late: Late | None) -> None:
        launched_step, launched = self._running.popleft()
        if launched_step != step:
            raise ValueError(f"sample of step {step}, but step {launched_step} was launched")
        self._finished[step] = self._thread.submit(self._sample, launched, late)

    def collect(self, step: int) -> StepOutput:
        return self._finished.pop(step).result()

    def _run_alone(self, batch: Batch) -> StepOutput:
        self.launch(batch)
        self.sample(batch.step, None)
        return self.collect(batch.step)

    def run_on_device(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the device thread, between steps, and return its result."""
        return self._thread.submit(work).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> _TorchStep:
        begin = time.perf_counter()
        rows = self._mirror.resolve(batch)
        self._mirror.apply(batch, rows)
        self._mirror.learn(rows)
        for added in batch.added:
            self._sampler.add(added)
            self._prompts.add(added)
        sampled = np.flatnonzero(rows.samples)
        if not len(batch.rows):
            return _TorchStep(batch, sampled, None, (), begin)
        num_tokens = rows.ends - rows.start
        plan = self._cache.plan(StepRows(rows.start, num_tokens, self._mirror.blocks[rows.slots]))
        hidden = self._decoder.forward(torch.from_numpy(self._mirror.token_ids(rows)), plan)
        ends = np.cumsum(num_tokens)
        prompt_logprobs = self._prompt_logprobs(rows, hidden, ends - num_tokens)
        if not len(sampled):
            return _TorchStep(batch, sampled, None, prompt_logprobs, begin)
        last = torch.from_numpy(ends[sampled] - 1)
        logits = self._decoder.logits(hidden[last] if len(last) != len(hidden) else hidden)
        return _TorchStep(batch, sampled, logits, prompt_logprobs, begin)

    def _prompt_logprobs(self, rows: FedRows, hidden: torch.Tensor, begins: IntArray) -> PerRow:
        """Computed for some positions at a time: logits of a whole prompt could take more memory than the model."""
        targets = self._prompts.of_rows(rows, self._mirror.tokens)
        if not targets:
            return ()
        counts = self._prompts.num_logprobs[rows.slots]
        at_once = max(1, LOGITS_AT_ONCE // self.limits.vocabulary_size)
        per_row: list[tuple[TokenLogprobs, ...]] = [()] * len(rows.slots)
        for row, tokens in targets:
            of_row: list[TokenLogprobs] = []
            for begin in range(0, len(tokens), at_once):
                part = tokens[begin : begin + at_once]
                first = int(begins[row]) + begin
                logits = self._decoder.logits(hidden[first : first + len(part)])
                of_row += logprobs_of(logits, part, int(counts[row]))
            per_row[row] = tuple(of_row)
        return tuple(per_row)

    @torch.inference_mode()
    def _sample(self, launched: Future[_TorchStep], late: Late | None) -> StepOutput:
        step = launched.result()
        token_ids: list[tuple[int, ...]] = [()] * len(step.batch.rows)
        logprobs: PerRow = ()
        if step.logits is not None:
            sampled = step.sampled
            masks = late.of_rows(sampled.tolist()) if late else None
            tokens, of_sampled = self._sampler.choose(step.logits, *self._mirror.sampled_positions(sampled), masks)
            self._mirror.record(sampled, tokens)
            for row, token in zip(sampled.tolist(), tokens.tolist(), strict=True):
                token_ids[row] = (token,)
            if of_sampled:
                of_row = dict(zip(sampled.tolist(), of_sampled, strict=True))
                logprobs = tuple((one,) if (one := of_row.get(row)) else () for row in range(len(token_ids)))
        return StepOutput(
            step=step.batch.step,
            token_ids=tuple(token_ids),
            logprobs=logprobs,
            prompt_logprobs=step.prompt_logprobs,
            device_seconds=time.perf_counter() - step.begin,
        )
