"""The Backend protocol over a library that blocks: `DeviceBackend`, with the thread that calls it.

Called by `engine.loop`. The engine schedules the next step and builds its inputs while the device works. After an
exception the state of the device is unknown, and nothing runs on it again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from neuron_runtime.backend.host_sampling.sampler import Chosen, HostSampler, PerRow, Verified
from neuron_runtime.backend.neuron.failures import classified
from neuron_runtime.backend.slots import FedRows, IntArray
from neuron_runtime.backend.warming import timed
from neuron_runtime.backend_protocol import IllegalBatch, ProgressCallback, StepTime
from neuron_runtime.core import (
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    DeviceMemory,
    GraphUse,
    Late,
    Sampling,
    StepOutput,
    name_of_step,
    needs_host,
)
from neuron_runtime.errors import ExitCode, FatalError

FloatArray = npt.NDArray[np.float32]

Application = Callable[..., Any]
"""A loaded model. A call blocks, and returns an object with the tokens or the logits `[rows, 1, vocabulary]` of its
rows, or both; logits of each token that a row feeds with drafts. Where the device makes drafts itself, the tokens are
`[rows, 1 + drafts]`: those that it accepted and one more, then NO_TOKEN. It has only keywords, because positions differ
between versions."""

Job = TypeVar("Job")
Result = TypeVar("Result")

MEMORY_SECONDS = 5.0
"""How often the Neuron runtime is asked for its memory."""

GREEDY = (1.0, 1.0, 1.0)
"""Top_k, top_p, temperature. The device refuses temperature 0 with other values, and overwrites them."""
MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy, as in vLLM: the device divides float32 logits by the temperature."""
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def device_parameters(sampling: Sampling, global_topk: int) -> tuple[float, float, float]:
    """Top_k, top_p and temperature of a request's rows.

    Top_k 0 means all candidates of the device; NxD Inference itself would draw uniformly among them. Without candidates
    it does not sample, but takes parameters all the same.
    """
    if not global_topk or sampling.temperature < MIN_TEMPERATURE:
        return GREEDY
    top_k = sampling.top_k if 0 < sampling.top_k <= global_topk else global_topk
    return float(top_k), min(max(sampling.top_p, SMALLEST), 1.0), min(sampling.temperature, LARGEST)


class Graph(Protocol):
    """A compiled size."""

    @property
    def name(self) -> str: ...

    @property
    def num_computed_tokens(self) -> int: ...


@dataclass(slots=True)
class Call:
    """One call of the application."""

    graph: Graph
    arguments: dict[str, Any]
    rows: IntArray
    """The rows of the batch that the call computes."""
    places: IntArray
    """Index of each of these rows in the output."""
    num_tokens: int
    """Tokens that these rows feed."""
    tokens: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """In a decode call, the token of each of these rows; NO_TOKEN if the step before samples it."""
    after: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """For each of these rows, its row in the step before."""
    source: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """For each row of the call, the index of the row it holds, or repeats."""
    drafts: IntArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    """In a call whose rows feed several tokens, `[rows, width - 1]`: those behind the token of each of these rows."""
    encodes: tuple[Graph, int] | None = None
    """The graph that computes the features of a prompt's pictures before it, and how many they are."""

    @property
    def uses(self) -> Sequence[GraphUse]:
        """What the device runs for it."""
        text = GraphUse(self.graph.name, self.num_tokens, self.graph.num_computed_tokens)
        if self.encodes is None:
            return (text,)
        graph, num_features = self.encodes
        return (GraphUse(graph.name, num_features, graph.num_computed_tokens), text)

    def feed(self, previous: IntArray) -> None:
        """Put in the tokens that the step before has sampled; `previous` holds one for each of its rows."""
        if not len(self.source):
            return
        waits = np.flatnonzero(self.tokens == NO_TOKEN)
        if len(waits):
            self.tokens[waits] = previous[self.after[waits]]
        fed = self.tokens[:, None]
        if self.drafts.size:
            fed = np.concatenate((fed, self.drafts), axis=1)
        self.arguments["input_ids"] = torch.from_numpy(fed[self.source])


class Inputs(Protocol):
    """Batches as calls. Used on the engine's thread, while the step before runs."""

    def graphs(self, batch: Batch) -> Sequence[Graph]:
        """The graphs that the batch will run, before or after it is applied. Raises IllegalBatch if none fits a row."""

    def apply(self, batch: Batch) -> tuple[Sequence[Call], FedRows]:
        """Apply the delta; returns the calls in the order in which they must run, and the rows."""


class _Step(NamedTuple):
    """A launched step; its calls are ready except for tokens that the step before samples."""

    batch: Batch
    calls: Sequence[Call]
    rows: FedRows
    before: Sequence[Callable[[], None]] = ()
    """What the library is told before the calls."""


class _Done(NamedTuple):
    """What a step has produced: a token for each row, NO_TOKEN for rows that do not sample; with drafts several."""

    tokens: IntArray | list[tuple[int, ...]]
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

    def verify(self, step: _Step, rows: IntArray, logits: list[torch.Tensor], late: Late | None) -> Verified:
        """The same with drafts: logits behind the token of each row and behind each of its drafts, row after row."""
        drafts, num_drafts = step.rows.drafts, step.rows.num_drafts
        assert drafts is not None
        assert num_drafts is not None
        return self._sampler.verify(
            logits[0] if len(logits) == 1 else torch.cat(logits),
            step.rows.slots[rows],
            step.rows.samples_at(rows),
            drafts[rows],
            num_drafts[rows],
            masks=late.of_rows(rows.tolist()) if late else None,
            num_masks=late.num_positions if late else 1,
        )


class DeviceBackend:
    """See `backend_protocol.Backend`. A subclass says what its library is called with."""

    def __init__(
        self,
        application: Application,
        inputs: Inputs,
        limits: BackendLimits,
        warm_up_steps: Iterable[Batch],
        *,
        memory: Callable[[], DeviceMemory | None] = lambda: None,
        in_group: bool = False,
        prefills_on_host: bool = False,
    ) -> None:
        """Takes a loaded application that has run nothing.

        Args:
            warm_up_steps: one for each graph that a call takes.
            memory: asks the device; not called while it works.
            in_group: other nodes run parts of the model.
            prefills_on_host: calls for prompts return logits, although the device samples the other rows.
        """
        self._in_group = in_group
        self._prefills_on_host = prefills_on_host
        self._application = application
        self.limits = limits
        self._inputs = inputs
        self._warm_up_steps = warm_up_steps
        self._ask_memory = memory
        self._launched: deque[_Step] = deque()
        self._running: deque[_Step] = deque()
        self._before: list[Callable[[], None]] = []
        """For the next step."""
        self._thread: DeviceThread[tuple[_Step, Late | None], _Done] = DeviceThread(self._run)
        # Used on that thread alone:
        self._host = None if limits.sampling == "Device" and not prefills_on_host else HostRows(limits)
        self._tokens: IntArray = np.zeros(0, dtype=np.int64)
        """One for each row of the step that ran last."""
        self._failure: BaseException | None = None
        self._memory_due = 0.0

    def warm_up(self, progress: ProgressCallback) -> list[StepTime]:
        """Run every graph. No sequence exists yet, and one overwrites the keys and values that it finds before it reads
        them."""
        times = timed(self, list(self._warm_up_steps), progress)
        self._memory_due = 0.0  # so that the first request's step reports it
        return times

    def graph(self, batch: Batch) -> str:
        return name_of_step(graph.name for graph in self._inputs.graphs(batch))

    def launch(self, batch: Batch) -> None:
        before, self._before = self._before, []
        self._launched.append(_Step(batch, *self._inputs.apply(batch), before=before))

    def before_next_step(self, change: Callable[[], None]) -> None:
        """Call this on the backend's thread, before the calls of the step that is launched next."""
        self._before.append(change)

    def sample(self, step: int, late: Late | None) -> None:
        launched = self._launched.popleft()
        if launched.batch.step != step:
            raise IllegalBatch(f"sample of step {step}, but step {launched.batch.step} was launched")
        if late is not None and self.limits.sampling == "Device":
            raise IllegalBatch(f"step {step} restricts tokens, and the graphs return no logits")
        self._running.append(launched)
        self._thread.put((launched, late))

    def collect(self, step: int) -> StepOutput:
        running = self._running.popleft()
        if running.batch.step != step:
            raise IllegalBatch(f"collect of step {step}, but step {running.batch.step} runs")
        # Whatever need not be done between two calls is done here, while the device works.
        tokens, logprobs, seconds, memory = self._thread.get()
        return StepOutput(
            step=step,
            token_ids=tuple(tokens) if isinstance(tokens, list) else _of_rows(tokens.tolist()),
            logprobs=logprobs,
            device_seconds=seconds,
            graphs=tuple([use for call in running.calls for use in call.uses]),
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
        for change in step.before:
            change()
        rows, seconds = step.rows, 0.0
        tokens = np.zeros(len(rows.slots), dtype=np.int64)
        of_host = None
        if self._host is not None:
            for added in step.batch.added:
                self._host.add(added)
            of_host = self._host.of_host[rows.slots] & rows.samples
            if self._prefills_on_host:
                of_host[rows.num_decodes :] = rows.samples[rows.num_decodes :]
        on_device = self.limits.sampling != "Host"
        several: list[tuple[int, ...]] = [()] * len(tokens)
        """With drafts, the tokens of each row."""
        logits: list[torch.Tensor] = []
        logits_of: list[IntArray] = []
        for call in step.calls:
            call.feed(self._tokens)
            began = time.perf_counter()
            output = self._application(**call.arguments)
            seconds += time.perf_counter() - began
            if on_device and output.tokens is not None:
                of_rows = output.tokens.numpy()[call.places]
                if rows.num_drafts is not None:
                    for row, of_row in zip(call.rows.tolist(), of_rows.tolist(), strict=True):
                        # It may accept more than the row has room for.
                        kept = [token for token in of_row[: 1 + rows.num_drafts[row]] if token != NO_TOKEN]
                        self._check(np.array(kept))
                        several[row] = tuple(kept)
                tokens[call.rows] = of_rows if of_rows.ndim == 1 else of_rows[:, 0]
            if of_host is not None and len(chosen := np.flatnonzero(of_host[call.rows])):
                logits.append(_rows_of(output.logits, call.places[chosen], _num_places(rows, call.rows[chosen])))
                logits_of.append(call.rows[chosen])
        logprobs: PerRow = ()
        if self._host is not None and rows.num_drafts is not None:
            rows_of_host = np.concatenate(logits_of)
            verified = self._host.verify(step, rows_of_host, logits, late)
            for row, of_row in zip(rows_of_host.tolist(), verified.tokens, strict=True):
                several[row] = of_row
            logprobs = verified.per_row(rows_of_host, len(tokens))
        if rows.num_drafts is not None:
            # No step follows one with drafts before its tokens are known.
            self._tokens = np.full(len(tokens), NO_TOKEN, dtype=np.int64)
            return _Done(several, logprobs, seconds, self._memory())
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
        return self._ask_memory()

    def _check(self, tokens: IntArray) -> None:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.limits.vocabulary_size:
            raise FatalError(
                ExitCode.DEVICE_FAILED,
                f"the device sampled token {tokens.max()} or {tokens.min()}, and the vocabulary has "
                f"{self.limits.vocabulary_size}: its state is unknown",
            )


def _of_rows(tokens: list[int]) -> tuple[tuple[int, ...], ...]:
    if NO_TOKEN not in tokens:
        return tuple(zip(tokens))
    return tuple([() if token == NO_TOKEN else (token,) for token in tokens])


def _num_places(rows: FedRows, chosen: IntArray) -> IntArray | None:
    """Logits that each of these rows needs; None: one."""
    return None if rows.num_drafts is None else 1 + rows.num_drafts[chosen]


def _rows_of(logits: torch.Tensor, places: IntArray, counts: IntArray | None = None) -> torch.Tensor:
    """Float32 `[rows, vocabulary]` of `[rows, tokens, vocabulary]`: of each row the first `counts`, or the first."""
    if counts is not None:
        of_row = np.repeat(places, counts)
        behind = np.arange(len(of_row)) - np.repeat(np.cumsum(counts) - counts, counts)
        return logits[torch.from_numpy(of_row), torch.from_numpy(behind)].float()
    flat = logits[:, 0].float()
    if len(places) == len(flat) and (places == np.arange(len(flat))).all():
        return flat.contiguous()
    return flat[torch.from_numpy(places)]


def row_of(values: IntArray) -> torch.Tensor:
    return torch.from_numpy(values.reshape(1, -1))


def column(values: IntArray) -> torch.Tensor:
    return torch.from_numpy(values.reshape(-1, 1))
