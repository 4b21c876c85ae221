"""`NxdiBackend`: the Backend protocol over an application of NxD Inference.

Called by `engine.loop`. The application blocks, so it is called on a thread of the backend: the engine schedules the
next step and builds its inputs while the device works. After an exception the state of the device is unknown, and
nothing runs on it again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from neuron_runtime.backend.host_sampling.sampler import Chosen, HostSampler, PerRow
from neuron_runtime.backend.nxdi.buckets import Decode, all_graphs, span_that_takes
from neuron_runtime.backend.nxdi.failures import classified
from neuron_runtime.backend.nxdi.inputs import Call, Inputs
from neuron_runtime.backend.nxdi.library import device_memory
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.backend.slots import FedRows, IntArray
from neuron_runtime.backend.warming import lone_step, timed
from neuron_runtime.backend_protocol import IllegalBatch, ProgressCallback, StepTime
from neuron_runtime.core import (
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    DeviceMemory,
    GraphUse,
    Late,
    StepOutput,
    name_of_step,
    needs_host,
)
from neuron_runtime.errors import ExitCode, FatalError

Application = Callable[..., Any]
"""A loaded model of NxD Inference. A call blocks, and returns its output object; it has only keywords, because
positions differ between versions."""

Job = TypeVar("Job")
Result = TypeVar("Result")

MEMORY_SECONDS = 5.0
"""How often the Neuron runtime is asked for its memory."""


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


class _Raised(NamedTuple):
    error: BaseException


class DeviceThread(Generic[Job, Result]):
    """Calls one function on one job after another; results come in the order of the jobs.

    Two queues cost a step far less of the engine's time than the futures of an executor do.
    """

    def __init__(self, run: Callable[[Job], Result]) -> None:
        self._run = run
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._results: SimpleQueue[Result | _Raised] = SimpleQueue()
        self._closed = False
        # The end of the process waits for no job: a device may hang.
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; never blocks."""
        self._jobs.put(job)

    def get(self) -> Result:
        """The result of the oldest job whose result was not taken; raises what the job raised."""
        result = self._results.get()
        if isinstance(result, _Raised):
            raise result.error
        return result

    def close(self) -> None:
        """Wait for the job that runs; the ones behind it never run. Idempotent."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            try:
                self._results.put(self._run(job))
            except BaseException as error:  # noqa: BLE001 - `get` raises it
                self._results.put(_Raised(error))


class HostRows:
    """Tokens of rows that the host samples: all in mode `Host`, in `DeviceWithLogits` those that the device cannot.

    Used on the backend's thread alone: the step before may still be sampled while a batch is applied.
    """

    def __init__(self, limits: BackendLimits) -> None:
        self._limits = limits
        # The token sampled at the last position is known but never fed.
        self._tokens = np.zeros((limits.max_rows, limits.max_model_length + 1), dtype=np.int32)
        self._sampler = HostSampler(self._tokens, limits.vocabulary_size)
        self.of_host = np.full(limits.max_rows, limits.sampling == "Host")
        """For each slot, whether the host samples its rows."""

    def add(self, added: Added) -> None:
        self._tokens[added.slot, : len(added.token_ids)] = added.token_ids
        self._sampler.add(added)
        self.of_host[added.slot] = self._limits.sampling == "Host" or needs_host(added.sampling, self._limits)

    def choose(self, step: _Step, rows: IntArray, logits: list[torch.Tensor], late: Late | None) -> Chosen:
        """Choose the tokens of these rows of a step, whose logits the calls returned."""
        slots, positions = step.rows.slots[rows], step.rows.ends[rows]
        masks = late.of_rows(rows.tolist()) if late else None
        of_rows = logits[0] if len(logits) == 1 else torch.cat(logits)
        chosen = self._sampler.choose(of_rows, slots, positions, masks)
        self._tokens[slots, positions] = chosen.tokens
        return chosen


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
        times = timed(self, list(warm_up_steps(self._settings, self.limits)), progress)
        self._memory_due = 0.0  # so that the first request's step reports it
        return times

    def graph(self, batch: Batch) -> str:
        return name_of_step(graph.name for graph in self._inputs.graphs(batch))

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
            of_host = self._host.of_host[rows.slots] & rows.samples
        on_device = self.limits.sampling != "Host"
        logits: list[torch.Tensor] = []
        logits_of: list[IntArray] = []
        for call in step.calls:
            call.feed(self._tokens)
            began = time.perf_counter()
            output = self._application(**call.arguments)
            seconds += time.perf_counter() - began
            if on_device:
                tokens[call.rows] = output.tokens.numpy()[call.places]
            if of_host is not None and len(chosen := np.flatnonzero(of_host[call.rows])):
                logits.append(_rows_of(output.logits, call.places[chosen]))
                logits_of.append(call.rows[chosen])
        logprobs: PerRow = ()
        if self._host is not None and logits_of:
            rows_of_host = np.concatenate(logits_of)
            sampled = self._host.choose(step, rows_of_host, logits, late)
            tokens[rows_of_host] = sampled.tokens
            logprobs = sampled.per_row(rows_of_host, len(tokens))
        self._check(tokens)
        tokens[~rows.samples] = NO_TOKEN
        self._tokens = tokens
        return _Done(tokens, logprobs, seconds, self._memory())

    def _memory(self) -> DeviceMemory | None:
        if time.monotonic() < self._memory_due:
            return None
        self._memory_due = time.monotonic() + MEMORY_SECONDS
        return device_memory()

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


def warm_up_steps(settings: Settings, limits: BackendLimits) -> Iterator[Batch]:
    """A step for each graph that a call takes."""
    for graph in all_graphs(settings):
        if span := span_that_takes(settings, graph):
            decodes = isinstance(graph, Decode)
            slot = graph.num_computed_tokens - 1 if decodes and settings.layout == "slots" else 0
            yield lone_step(limits, slot, *span, decodes=decodes)
