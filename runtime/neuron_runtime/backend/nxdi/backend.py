"""`NxdiBackend`: the Backend protocol over an application of NxD Inference.

Created by `load_backend`, called by `engine.loop`. `forward()` blocks, so it is called on a thread of the backend: the
engine schedules the next step and builds its inputs while the device works. A row that waits for the step in flight
gets its token on that thread. After an exception the state of the device is unknown, and nothing runs on it again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from neuron_runtime.backend.nxdi.buckets import (
    Decode,
    Graph,
    all_graphs,
    name_of,
    position_that_takes,
    prefill_that_takes,
)
from neuron_runtime.backend.nxdi.device_thread import DeviceThread
from neuron_runtime.backend.nxdi.failures import classified
from neuron_runtime.backend.nxdi.inputs import Call, Inputs
from neuron_runtime.backend.nxdi.sampling_rows import HostRows
from neuron_runtime.backend.nxdi.settings import Application, Settings
from neuron_runtime.backend.slots import FedRows, IntArray
from neuron_runtime.backend_protocol import IllegalBatch, ProgressCallback, StepTime
from neuron_runtime.core import (
    KNOWN,
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    DeviceMemory,
    GraphUse,
    Late,
    Rows,
    Sampling,
    StepOutput,
    TokenLogprobs,
)
from neuron_runtime.errors import ExitCode, FatalError

PerRow = tuple[tuple[TokenLogprobs, ...], ...]

MEMORY_SECONDS = 5.0
"""How often the Neuron runtime is asked for its memory."""

NUM_WARM_UPS = 2
"""Runs of each graph; only the last one is timed."""


class _Step(NamedTuple):
    """A launched step; its calls are ready except for tokens that the step before samples."""

    batch: Batch
    calls: list[Call]
    rows: FedRows


class _Done(NamedTuple):
    """What a step has produced: a token for each row, NO_TOKEN for rows that do not sample."""

    tokens: IntArray
    logprobs: PerRow
    seconds: float
    memory: DeviceMemory | None


class NxdiBackend:
    """See `backend_protocol.Backend`."""

    def __init__(
        self, application: Application, settings: Settings, limits: BackendLimits, *, in_group: bool = False
    ) -> None:
        """Takes a loaded application that has run nothing. in_group: other nodes run parts of the model."""
        self._in_group = in_group
        self._application = application
        self._settings = settings
        self.limits = limits
        self._inputs = Inputs(settings, limits)
        self._launched: deque[_Step] = deque()
        self._running: deque[_Step] = deque()
        self._thread: DeviceThread[tuple[_Step, Late | None], _Done] = DeviceThread(self._run)
        # Used on that thread alone:
        self._host = None if limits.sampling == "Device" else HostRows(limits)
        self._tokens: IntArray = np.zeros(0, dtype=np.int64)
        """One for each row of the step that ran last."""
        self._failure: BaseException | None = None
        self._memory_due = 0.0

    def warm_up(self, progress: ProgressCallback) -> list[StepTime]:
        """Run every graph. No sequence exists yet, and one overwrites the keys and values that it finds before it reads
        them."""
        batches = list(warm_up_batches(self._settings))
        times: list[StepTime] = []
        for at, batch in enumerate(batches):
            progress("warming up", at / len(batches))
            for _ in range(NUM_WARM_UPS):
                seconds = self._run_alone(batch).device_seconds
                self._run_alone(Batch(step=batch.step, rows=Rows(), released=batch.rows.slot))
            times.append((batch, seconds))
        progress("warming up", 1.0)
        self._memory_due = 0.0  # so that the first request's step reports it
        return times

    def graph(self, batch: Batch) -> str:
        return name_of(self._inputs.graphs(batch))

    def launch(self, batch: Batch) -> None:
        self._launched.append(_Step(batch, *self._inputs.apply(batch)))

    def sample(self, step: int, late: Late | None) -> None:
        launched = self._launched.popleft()
        if launched.batch.step != step:
            raise IllegalBatch(f"sample of step {step}, but step {launched.batch.step} was launched")
        if late is not None and self._host is None:
            raise IllegalBatch(f"step {step} restricts tokens, and the graphs return no logits")
        self._running.append(launched)
        self._thread.put((launched, late))

    def collect(self, step: int) -> StepOutput:
        running = self._running.popleft()
        if running.batch.step != step:
            raise IllegalBatch(f"collect of step {step}, but step {running.batch.step} runs")
        # Whatever need not be done between two calls is done here, while the device works.
        tokens, logprobs, seconds, memory = self._thread.get()
        of_rows = tokens.tolist()
        sampled = NO_TOKEN not in of_rows
        return StepOutput(
            step=step,
            token_ids=tuple(zip(of_rows)) if sampled else tuple([() if t == NO_TOKEN else (t,) for t in of_rows]),
            logprobs=logprobs,
            device_seconds=seconds,
            graphs=tuple(
                [GraphUse(call.graph.name, call.num_tokens, call.graph.num_computed_tokens) for call in running.calls]
            ),
            device_memory=memory,
        )

    def close(self) -> None:
        """Cores stay taken until the process ends."""
        self._thread.close()

    def _run_alone(self, batch: Batch) -> StepOutput:
        self.launch(batch)
        self.sample(batch.step, None)
        return self.collect(batch.step)

    # On the backend's thread

    def _run(self, job: tuple[_Step, Late | None]) -> _Done:
        if self._failure is not None:
            raise self._failure
        try:
            return self._run_calls(*job)
        except Exception as error:
            self._failure = classified(error, in_group=self._in_group)
            if self._failure is error:
                raise
            raise self._failure from error

    @torch.no_grad()
    def _run_calls(self, step: _Step, late: Late | None) -> _Done:
        rows, seconds = step.rows, 0.0
        tokens = np.zeros(len(rows.slots), dtype=np.int64)
        of_host = None
        if self._host is not None:
            for added in step.batch.added:
                self._host.add(added)
            of_host = self._host.of_host(rows.slots) & rows.samples
        on_device = self.limits.sampling != "Host"
        logits: list[torch.Tensor] = []
        logits_of: list[IntArray] = []
        for call in step.calls:
            call.feed(self._tokens)
            began = time.perf_counter()
            output = self._application.forward(**call.arguments)
            seconds += time.perf_counter() - began
            if on_device:
                tokens[call.rows] = output.tokens.numpy()[call.places]
            if of_host is not None and len(chosen := np.flatnonzero(of_host[call.rows])):
                logits.append(_rows_of(output.logits, call.places[chosen]))
                logits_of.append(call.rows[chosen])
        logprobs: PerRow = ()
        if logits_of:
            logprobs = self._choose(step, logits, np.concatenate(logits_of), late, tokens)
        self._check(tokens)
        tokens[~rows.samples] = NO_TOKEN
        self._tokens = tokens
        return _Done(tokens, logprobs, seconds, self._memory())

    def _memory(self) -> DeviceMemory | None:
        if time.monotonic() < self._memory_due:
            return None
        self._memory_due = time.monotonic() + MEMORY_SECONDS
        return self._application.memory()

    def _choose(
        self, step: _Step, logits: list[torch.Tensor], rows: IntArray, late: Late | None, tokens: IntArray
    ) -> PerRow:
        """Choose the tokens of rows that the host samples."""
        assert self._host is not None
        masks = late.of_rows(rows.tolist()) if late else None
        of_rows = logits[0] if len(logits) == 1 else torch.cat(logits)
        chosen = self._host.choose(of_rows, step.rows.slots[rows], step.rows.ends[rows], masks)
        tokens[rows] = chosen.tokens
        if not chosen.logprobs:
            return ()
        per_row: list[tuple[TokenLogprobs, ...]] = [()] * len(tokens)
        for row, one in zip(rows.tolist(), chosen.logprobs, strict=True):
            per_row[row] = (one,) if one else ()
        return tuple(per_row)

    def _check(self, tokens: IntArray) -> None:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._settings.vocabulary_size:
            raise FatalError(
                ExitCode.DEVICE_FAILED,
                f"the device sampled token {tokens.max()} or {tokens.min()}, and the vocabulary has "
                f"{self._settings.vocabulary_size}: its state is unknown",
            )


def _rows_of(logits: torch.Tensor, places: IntArray) -> torch.Tensor:
    """Float32 `[rows, vocabulary]` of NxD Inference's `[rows, 1, vocabulary]`."""
    flat = logits[:, -1].float()
    if len(places) == len(flat) and (places == np.arange(len(flat))).all():
        return flat.contiguous()
    return flat[torch.from_numpy(places)]


def warm_up_batches(settings: Settings) -> Iterator[Batch]:
    """A step for each graph, with one sequence that did not exist before."""
    for number, graph in enumerate(all_graphs(settings)):
        batch = _warm_up_batch(settings, graph, -1 - number)
        if batch is not None:
            yield batch


def _warm_up_batch(settings: Settings, graph: Graph, step: int) -> Batch | None:
    """None: no call takes the graph."""
    slot = 0
    if isinstance(graph, Decode):
        position = position_that_takes(settings, graph)
        if position is None:
            return None
        start, end, num_prefills = position, position + 1, 0
        if settings.layout == "slots":
            slot = graph.rows - 1
    else:
        span = prefill_that_takes(settings, graph)
        if span is None:
            return None
        (start, end), num_prefills = span, 1
    num_blocks = -(-end // settings.block_size)
    added = Added(
        slot=slot,
        token_ids=(0,) * end,
        num_prompt_tokens=end,
        sampling=Sampling(temperature=0.0),
        blocks=tuple(range(num_blocks)) if settings.layout == "blocks" else (slot,),
    )
    rows = Rows((slot,), (start,), (end - start,), (NO_TOKEN,), (KNOWN,), (True,))
    return Batch(step=step, rows=rows, num_prefills=num_prefills, added=(added,))
