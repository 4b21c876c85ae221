"""The engine: the loop that owns scheduler and backend.

Called by the engine process and by the offline class, always from the one thread that owns the device. Turns requests
into token events, step by step; knows nothing of text, HTTP or processes.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from operator import add
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from neuron_runtime.backend_protocol import AdapterBackend, Backend
from neuron_runtime.console import say
from neuron_runtime.core import (
    BackendLimits,
    Batch,
    FinishReason,
    Late,
    Request,
    StepKind,
    StepOutput,
    TokenEvent,
    fill,
)
from neuron_runtime.engine.adapters import LoadedAdapters
from neuron_runtime.engine.backpressure import DEFAULT_MAX_QUEUED_REQUESTS, Backpressure, QueueLimits
from neuron_runtime.engine.cache_events import CacheEvents
from neuron_runtime.engine.drafting import Drafting, Guided
from neuron_runtime.engine.guides import Guide, Guides
from neuron_runtime.engine.scheduler import Scheduler
from neuron_runtime.engine.sequence import Phase
from neuron_runtime.engine.stats import EngineStats, StepStats
from neuron_runtime.errors import InvalidRequest

PREPARING_SECONDS = 0.02
"""An engine with nothing but requests whose guides are being prepared looks this often for other messages."""


class Engine:
    """Requests in, token events out. Exceptions of the backend pass through; the engine is unusable afterwards."""

    def __init__(
        self,
        backend: Backend,
        *,
        max_queued_requests: int = DEFAULT_MAX_QUEUED_REQUESTS,
        max_queued_tokens: int = sys.maxsize,
        max_consecutive_prefills: int = 1,
        guides: Guides | None = None,
        drafting: Drafting | None = None,
        check_adapter: Callable[[str, Path], None] = lambda digest, folder: None,
        cache_events: CacheEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes a backend after its warm-up.

        max_queued_requests: maximum waiting requests, beyond those that fit the backend's rows.
        max_queued_tokens: maximum prompt tokens of waiting requests.
        max_consecutive_prefills: consecutive prefill steps while decoding sequences wait, if phases do not mix.
        guides: of requests whose answers have a form. Steps with a row of such a request are launched like others, and
            sampled when the tokens before are known. None: a request that has a form is refused.
        drafting: proposes drafts, of which a row has at most the backend's `max_drafts`. None: no row has any.
        check_adapter: called on a thread whenever an adapter was read; raises unless the folder has the one with the
            digest.
        cache_events: gets what changes in the prefix cache.
        """
        self._backend = backend
        self._limits = backend.limits
        self._guides = guides
        self._guide_of: dict[str, Guide] = {}
        """Guides of live requests that have a form."""
        self._drafting = drafting
        self._scheduler = Scheduler(
            self._limits, max_consecutive_prefills, drafting and Guided(drafting, self._guide_of), cache_events
        )
        self._masked: Late | None = None
        """The masks of the step sampled last, until it is applied."""
        self._adapters = None
        if self._limits.max_adapters:
            places = self._scheduler.running.places
            self._adapters = LoadedAdapters(cast(AdapterBackend, backend), places, check_adapter)
        self._adapter_of: dict[str, str] = {}
        """Digests of the adapters of requests in the scheduler that have one."""
        self._preparing: dict[str, tuple[Request, futures.Future[Guide] | None]] = {}
        """Requests whose guides or adapters are not ready; they hold no row and are not in the scheduler."""
        self._refused: list[tuple[str, InvalidRequest]] = []
        self._clock = clock
        self._added_at: dict[str, float] = {}
        """Arrival of requests that are not scheduled yet."""
        self._queue_seconds: dict[str, float] = {}
        """Queue time of scheduled requests, until their first tokens."""
        queue = QueueLimits(max_queued_requests, max_queued_tokens)
        self._backpressure = Backpressure(queue, self._limits.max_rows, clock())
        self._in_flight: deque[Batch] = deque()
        """A batch is completed as soon as the previous step is collected."""
        self._stats = self._scheduler.stats
        self._max_consecutive_prefills = max_consecutive_prefills
        self._longest_step_seconds: dict[StepKind, float] = {}
        self._applied_at: float | None = None
        """When the previous step was applied; None after an idle time."""

    def add(self, request: Request) -> None:
        """Queue an admitted request, whose lengths and parameters are within the limits.

        Raises:
            InvalidRequest: a request with the same id is running, its form cannot be served, or its adapter is not
                loaded.
            Overloaded: the queue is full; includes the time until a retry.
        """
        if request.request_id in self._scheduler or request.request_id in self._preparing:
            raise InvalidRequest(f"a request with the id {request.request_id!r} is running", field="request_id")
        if request.sampling.form is not None and self._guides is None:
            raise InvalidRequest("this server does not serve structured output: leave the form out")
        if request.adapter:
            self._known_adapters().check(request.adapter)
        now, num_live = self._clock(), self._scheduler.num_live + len(self._preparing)
        self._backpressure.enter(request.request_id, len(request.prompt_token_ids), num_live, now)
        if not self.has_work:
            self._applied_at = None
            self._backpressure.resume(now)
        self._added_at[request.request_id] = now
        guide = None if request.sampling.form is None or self._guides is None else self._guides.prepare(request)
        if guide is not None or not self._enter(request):
            self._preparing[request.request_id] = request, guide

    def load_adapter(self, digest: str, folder: Path) -> None:
        """Requests may use this adapter once it is loaded, see `take_adapter_news`. Its files were checked.

        Raises InvalidRequest if the backend has no adapters.
        """
        self._known_adapters().load(digest, folder)

    def drop_adapter(self, digest: str) -> None:
        """No further request may use it; running ones go on. Unknown ones are ignored."""
        if self._adapters is not None:
            self._adapters.drop(digest)

    def take_adapter_news(self) -> list[tuple[str, str]]:
        """The adapters that were loaded since the last call, each with an empty text, or why it cannot be loaded.

        While nothing else is to be done, this waits for a moment if one is being read.
        """
        if self._adapters is None:
            return []
        self._adapters.turn(0.0 if self.has_work else PREPARING_SECONDS)
        return self._adapters.take_news()

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is being read: `take_adapter_news` will have some."""
        return self._adapters is not None and self._adapters.is_reading

    def close(self) -> None:
        """End the threads. The backend is the caller's."""
        if self._adapters is not None:
            self._adapters.close()

    def _known_adapters(self) -> LoadedAdapters:
        if self._adapters is None:
            raise InvalidRequest("this server serves no adapters", field="model")
        return self._adapters

    def _enter(self, request: Request) -> bool:
        """Move a request to the scheduler; False: its adapter is read first. Raises InvalidRequest."""
        if request.adapter:
            if not self._known_adapters().enter(request.adapter):
                return False
            self._adapter_of[request.request_id] = request.adapter
        self._scheduler.add(request)
        return True

    def _leave(self, request_ids: Sequence[str]) -> None:
        """These requests have ended, or will not start."""
        self._backpressure.leave(request_ids)
        if self._adapter_of:
            for digest in (self._adapter_of.pop(name, "") for name in request_ids):
                if digest:
                    self._known_adapters().leave(digest)

    def take_refused(self) -> list[tuple[str, InvalidRequest]]:
        """Requests whose forms were found to be wrong since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def abort(self, request_id: str) -> None:
        """Stop a request; no event follows. Idempotent; unknown ids are ignored."""
        if request_id in self._scheduler or self._preparing.pop(request_id, None) is not None:
            self._leave((request_id,))
        self._scheduler.abort(request_id)
        self._added_at.pop(request_id, None)
        self._queue_seconds.pop(request_id, None)
        self._guide_of.pop(request_id, None)

    @property
    def request_ids(self) -> list[str]:
        """Ids of waiting and running requests."""
        scheduler = self._scheduler
        return [*self._preparing, *(one.request.request_id for one in (*scheduler.waiting, *scheduler.running))]

    @property
    def has_work(self) -> bool:
        """Whether any request is live or a step is in flight."""
        return bool(self._scheduler.num_live or self._in_flight or self._preparing)

    @property
    def stats(self) -> EngineStats:
        """Current values; always the same object."""
        scheduler, stats = self._scheduler, self._stats
        stats.num_running = len(scheduler.running)
        stats.num_waiting = len(scheduler.waiting) + len(self._preparing)
        stats.num_waiting_tokens = self._backpressure.num_tokens
        stats.num_blocks_used = scheduler.blocks.cache.num_used
        if self._adapters is not None:
            stats.running_adapters = tuple(scheduler.running.places.in_use)
            waiting = (*(one.request for one in scheduler.waiting), *(one for one, _ in self._preparing.values()))
            stats.waiting_adapters = tuple({one.adapter: None for one in waiting if one.adapter})
        return stats

    def step(self) -> list[TokenEvent]:
        """One turn: schedule the next step while the one in flight runs, then collect and apply that one.

        The next step is launched as soon as its inputs are known: at once if the device feeds them itself, else after
        `collect`, or after `apply` if it has drafts. A step with a row that has a guide is sampled after `apply`: its
        masks are made while it runs.
        """
        self._stats.last_step = None
        if self._preparing:
            self._take_prepared()
        if self._applied_at is None:
            self._applied_at = self._clock()
        events: list[TokenEvent] = []
        if not self._in_flight and not self._start(events):
            return events
        ahead = self._schedule()
        late = ahead is not None and self._samples_late()
        at_once = ahead is not None and self._is_fed_by_device(ahead)
        if ahead and at_once:
            self._launch(ahead, late)

        current = self._in_flight.popleft()
        began = self._clock()
        output = self._backend.collect(current.step)
        self._stats.backend_seconds_total += self._clock() - began
        if ahead and not at_once:
            ahead = fill(ahead, output, self._located(current))
            self._launch(ahead, late)
        events += self._apply(current, output)
        if ahead and late:
            self._sample_late(ahead, events)
        if ahead is None and self._scheduler.num_live:
            self._start(events)
        return events

    def _located(self, current: Batch) -> Batch:
        """The step just collected with the start of each row, which the device may have had from the step before."""
        if not current.waits_for_step_in_flight:
            return current
        start = tuple([sequence.num_computed_tokens for sequence in self._scheduler.scheduled[0].sequences])
        return replace(current, rows=replace(current.rows, start=start))

    def _take_prepared(self) -> None:
        """Move requests whose guides and adapters are ready to the scheduler, and refuse those that never will be."""
        is_idle = not self._scheduler.num_live and not self._in_flight
        if is_idle and (guides := [guide for _, guide in self._preparing.values() if guide and not guide.done()]):
            futures.wait(guides, PREPARING_SECONDS, futures.FIRST_COMPLETED)
        if self._adapters is not None:
            self._adapters.turn(PREPARING_SECONDS if is_idle else 0.0)
        for name, (request, guide) in list(self._preparing.items()):
            if guide and not guide.done():
                continue
            try:
                made = guide.result() if guide else None
                if not self._enter(request):
                    continue
            except InvalidRequest as error:
                self._leave((name,))
                self._added_at.pop(name, None)
                self._refused.append((name, error))
            else:
                if made is not None:
                    self._guide_of[name] = made
            del self._preparing[name]

    def _start(self, events: list[TokenEvent]) -> bool:
        """Launch a step while nothing is in flight; False if there is no work."""
        batch = self._schedule()
        if batch is None:
            if self._scheduler.num_live:
                raise RuntimeError(f"the scheduler has no step for {self._scheduler.num_live} live requests")
            return False
        late = self._samples_late()
        self._launch(batch, late)
        if late:
            self._sample_late(batch, events)
        return True

    def _schedule(self) -> Batch | None:
        batch = self._scheduler.schedule()
        if batch is not None and batch.added:
            now = self._clock()
            for sequence in self._scheduler.scheduled[-1].sequences:
                name = sequence.request.request_id
                if name in self._added_at:
                    self._queue_seconds[name] = now - self._added_at.pop(name)
                    self._backpressure.take_up(name)
        return batch

    def _is_fed_by_device(self, ahead: Batch) -> bool:
        """Whether the device can take what `ahead` needs of the step in flight from that step, without the host."""
        limits, (current, sequences) = self._limits, self._scheduler.scheduled[0]
        if limits.steps_in_flight == 1:
            return False
        if limits.token_feedback == "same rows" and ahead.rows.after != tuple(range(len(current.rows))):
            return False
        return not any(s.needs_host and samples for s, samples in zip(sequences, current.rows.samples, strict=True))

    def _launch(self, batch: Batch, late: bool) -> None:
        """late: `_sample_late` follows."""
        began = self._clock()
        self._backend.launch(batch)
        if not late:
            self._backend.sample(batch.step, None)
        self._stats.backend_seconds_total += self._clock() - began
        self._in_flight.append(batch)

    def _apply(self, batch: Batch, output: StepOutput) -> list[TokenEvent]:
        broken = self._broken_by(output)
        events = self._scheduler.apply(output)
        ended = []
        for at, event in enumerate(events):
            if event.first:
                first = replace(event.first, queue_seconds=self._queue_seconds.pop(event.request_id))
                events[at] = replace(event, first=first)
            if event.request_id in broken:
                say(f"the backend broke the form of {event.request_id}: no mask allows {broken[event.request_id]}")
                events[at] = replace(events[at], token_ids=(), logprobs=(), finish_reason=FinishReason.ERROR)
            if event.finish_reason:
                self._guide_of.pop(event.request_id, None)
                ended.append(event.request_id)
            elif event.request_id in broken:
                self.abort(event.request_id)
            elif self._guide_of and (guide := self._guide_of.get(event.request_id)) is not None:
                guide.advance(event.token_ids)
        self._measure(batch)
        self._leave(ended)
        # Rows that wait during a prefill step are busy too.
        num_busy = max(len(batch.rows), len(self._scheduler.running))
        self._backpressure.turn(num_busy, self._applied_at or 0.0)
        if waited := output.group_wait_seconds:
            before = self._stats.group_wait_seconds_total or (0.0,) * len(waited)
            self._stats.group_wait_seconds_total = tuple(map(add, before, waited))
        self._stats.device_memory = output.device_memory or self._stats.device_memory
        self._stats.last_step = StepStats(
            step=batch.step,
            kind=batch.kind,
            num_tokens=batch.num_tokens,
            device_seconds=output.device_seconds,
            graphs=output.graphs,
        )
        return events

    def _broken_by(self, output: StepOutput) -> dict[str, tuple[int, ...]]:
        """Of the oldest step, requests with the tokens that no mask allowed: the backend sampled without it."""
        late, self._masked = self._masked, None
        sequences = self._scheduler.scheduled[0].sequences
        if late is None or len(output.token_ids) != len(sequences):
            return {}  # `apply` refuses the output of another step
        return {
            sequences[row].request.request_id: output.token_ids[row]
            for at, row in enumerate(late.rows)
            if sequences[row].phase is not Phase.FINISHED and not late.allows(at, output.token_ids[row])
        }

    def _measure(self, batch: Batch) -> None:
        """Measure the time since the end of the previous step."""
        now, longest, kind = self._clock(), self._longest_step_seconds, batch.kind
        seconds = now - (now if self._applied_at is None else self._applied_at)
        self._applied_at = now
        if self._drafting is not None and batch.num_decodes:
            num_tokens = sum(batch.rows.num_tokens[: batch.num_decodes])
            self._drafting.measure(batch.num_decodes, num_tokens, seconds, batch.num_tokens - num_tokens)
        if seconds > longest.get(kind, 0.0):
            longest[kind] = seconds
            self._stats.stream_gap_bound_seconds = stream_gap_bound(
                self._limits, longest, self._max_consecutive_prefills
            )

    def _samples_late(self) -> bool:
        """Whether the step scheduled last has a row that samples by a guide."""
        return bool(self._guide_of) and any(guide for guide in self._guides_of_rows())

    def _guides_of_rows(self) -> list[Guide | None]:
        """The guide of each row of the step scheduled last that samples and is still wanted."""
        batch, sequences = self._scheduler.scheduled[-1]
        return [
            self._guide_of.get(sequence.request.request_id)
            if samples and sequence.phase is not Phase.FINISHED
            else None
            for sequence, samples in zip(sequences, batch.rows.samples, strict=True)
        ]

    def _sample_late(self, batch: Batch, events: list[TokenEvent]) -> None:
        """Sample the step scheduled last, after the one before was applied. A request whose guide can follow it no
        further ends as one that has all its tokens."""
        assert self._guides is not None
        guided = [(row, guide) for row, guide in enumerate(self._guides_of_rows()) if guide is not None]
        drafts = [batch.rows.drafts[row] for row, _ in guided] if batch.rows.drafts else ()
        masks = self._guides.masks([guide for _, guide in guided], drafts)
        failed = [guided[at][0] for at in masks.failed]
        began = self._clock()
        rows = tuple(row for row, _ in guided)
        self._masked = Late(rows, masks.bits, masks.num_positions) if rows else None
        self._backend.sample(batch.step, self._masked)
        self._stats.backend_seconds_total += self._clock() - began
        for row in failed:
            name = self._scheduler.scheduled[-1].sequences[row].request.request_id
            self.abort(name)
            events.append(TokenEvent(name, (), FinishReason.LENGTH))


def stream_gap_bound(
    limits: BackendLimits, longest_step_seconds: Mapping[StepKind, float], max_consecutive_prefills: int = 1
) -> float:
    """Maximum seconds until a running stream that is not preempted gets its next token.

    If phases mix, every step has a row of each running stream; otherwise at most `max_consecutive_prefills` steps are
    between two that do.

    longest_step_seconds: by kind, from the end of the previous step to the end of the step.
    """
    prefill = longest_step_seconds.get(StepKind.PREFILL, 0.0)
    own = max(longest_step_seconds.get(kind, 0.0) for kind in (StepKind.DECODE, StepKind.MIXED))
    return own if limits.mixes_phases else own + max_consecutive_prefills * prefill
