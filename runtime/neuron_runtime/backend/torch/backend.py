"""`TorchBackend`: the Backend protocol over a decoder on CPUs, with everything that computes on one device thread.

Made by `load_backend`, called by `engine.loop`. The caller only queues work and waits, so it schedules the next
step while this one runs. A row that waits for the step in flight is resolved on the device thread from the mirror.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from neuron_runtime.backend.base import Progress
from neuron_runtime.backend.torch import sampling
from neuron_runtime.backend.torch.cache import IntArray, KVCache
from neuron_runtime.backend.torch.decoder import Decoder
from neuron_runtime.backend.torch.mirror import SlotMirror
from neuron_runtime.checkpoint import InvalidModel
from neuron_runtime.core import (
    KNOWN,
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    Kind,
    Late,
    Rows,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)


class _Launched(NamedTuple):
    """A step between run and sample."""

    batch: Batch
    sampled: IntArray
    """The rows that sample."""
    logits: torch.Tensor | None
    """Theirs, float32 `[sampled, vocabulary]`; None when there are none."""
    begin: float


class TorchBackend:
    """See `backend.base.Backend`. `set_up` runs first on the device thread (thread settings are per thread)."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, limits: BackendLimits, set_up: Callable[[], None] = lambda: None
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._limits = limits
        self._mirror = SlotMirror(limits)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device", initializer=set_up)
        self._running: deque[tuple[int, Future[_Launched]]] = deque()
        self._finished: dict[int, Future[StepOutput]] = {}

    @property
    def limits(self) -> BackendLimits:
        return self._limits

    def warm_up(self, progress: Progress) -> None:
        """Run a prompt and a decode step once: the kernels are chosen and their scratch memory is taken.

        Raises:
            InvalidModel: the model computes no numbers.
        """
        progress("warming up", 0.0)
        length = min(8, self._limits.max_model_length - 1)
        added = Added(
            slot=0,
            token_ids=(0,) * length,
            num_prompt_tokens=length,
            sampling=SamplingParams(temperature=0.0),
            blocks=tuple(range(-(-(length + 1) // self._limits.block_size))),
        )
        prompt = Rows((0,), (0,), (length,), (NO_TOKEN,), (KNOWN,), (True,))
        decode = Rows((0,), (length,), (1,), (NO_TOKEN,), (KNOWN,), (True,))
        for batch in (
            Batch(step=-3, kind=Kind.PREFILL, rows=prompt, added=(added,)),
            Batch(step=-2, kind=Kind.DECODE, rows=decode),
            Batch(step=-1, kind=Kind.DECODE, rows=Rows(), released=(0,)),
        ):
            self.launch(batch)
            self.sample(batch.step, None)
            try:
                self.collect(batch.step)
            except sampling.NotFinite as error:
                # No request had a part in this: the same would come of any.
                raise InvalidModel(str(error)) from error
        progress("warming up", 1.0)

    def launch(self, batch: Batch) -> None:
        self._running.append((batch.step, self._thread.submit(self._run, batch)))

    def sample(self, step: int, late: Late | None) -> None:
        launched_step, launched = self._running.popleft()
        if launched_step != step:
            raise ValueError(f"sample of step {step}, but step {launched_step} was launched")
        self._finished[step] = self._thread.submit(self._sample, launched, late)

    def collect(self, step: int) -> StepOutput:
        return self._finished.pop(step).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> _Launched:
        begin = time.perf_counter()
        rows, token_ids = self._mirror.apply(batch)
        sampled = np.flatnonzero(np.array(batch.rows.samples, dtype=bool))
        if not len(batch.rows):
            return _Launched(batch, sampled, None, begin)
        last = np.cumsum(rows.num_tokens) - 1
        logits = self._decoder.forward(
            torch.from_numpy(token_ids), self._cache.plan(rows), torch.from_numpy(last[sampled])
        )
        return _Launched(batch, sampled, logits if len(sampled) else None, begin)

    @torch.inference_mode()
    def _sample(self, launched: Future[_Launched], late: Late | None) -> StepOutput:
        step = launched.result()
        token_ids: list[tuple[int, ...]] = [()] * len(step.batch.rows)
        logprobs: list[tuple[TokenLogprobs, ...]] = []
        if step.logits is not None:
            sampling.check_finite(step.logits)
            logits = step.logits if late is None else sampling.restrict(step.logits, step.sampled, late)
            slots, positions = self._mirror.sampled_positions(step.sampled)
            table = self._mirror.sampling
            tokens = sampling.choose(logits, table, slots, positions)
            self._mirror.record(step.sampled, tokens)
            for row, token in zip(step.sampled.tolist(), tokens.tolist(), strict=True):
                token_ids[row] = (token,)
            wanted = table.num_logprobs[slots]
            if (wanted >= 0).any():
                logprobs = [()] * len(token_ids)
                for row, found in zip(
                    step.sampled.tolist(), sampling.logprobs(step.logits, tokens, wanted), strict=True
                ):
                    logprobs[row] = found
        return StepOutput(
            step=step.batch.step,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            device_seconds=time.perf_counter() - step.begin,
        )
