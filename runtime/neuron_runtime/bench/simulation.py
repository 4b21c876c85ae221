"""Runs the engine on a simulated device in virtual time and records the times of each request.

Called by `bench simulate`, once per policy and rate. Engine, scheduler and prefix cache are the real ones; only the
device is simulated. Equal traffic, device and policy give equal results on any machine.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from neuron_runtime.backend.simulated.device import Shape, ShapeUse, SimulatedBackend, VirtualClock
from neuron_runtime.backend.simulated.step_times import StepTimes
from neuron_runtime.bench.planned import PlannedBackend
from neuron_runtime.bench.traffic import Conversation, Turn
from neuron_runtime.core import BackendLimits, Request, Sampling, TokenEvent
from neuron_runtime.engine.drafts import Drafts, OnDevice
from neuron_runtime.engine.loop import Engine

if TYPE_CHECKING:
    from neuron_runtime.backend.nxdi.settings import Settings


@dataclass(frozen=True, slots=True)
class Policy:
    """How a scheduler uses a device: ours, or what another engine does with the same compiled model."""

    name: str
    max_consecutive_prefills: int = 1
    whole_prompts: bool = False
    """One whole prompt per step, never a part of one."""
    waits_for_tokens: bool = False
    """A step is launched when the tokens of the previous one have reached the host."""
    reserves_whole_length: bool = False
    """A request runs only if there are blocks for the model's full length."""
    num_drafts: int = 0
    """Drafts of a row at most, where they pay."""
    acceptance: float = 0.0
    """Share of them that are right."""
    draft_cost: float = 0.0
    """Time of the model that makes them relative to that of the model; 0: they come from the text."""

    @property
    def prefills_first(self) -> bool:
        return self.max_consecutive_prefills == sys.maxsize

    def applied_to(self, limits: BackendLimits) -> BackendLimits:
        """The limits with this policy; a prefill-first policy never mixes phases."""
        mixes = limits.mixes_phases and not self.prefills_first
        limits = replace(limits, mixes_phases=mixes, max_drafts=self.num_drafts)
        if self.waits_for_tokens:
            limits = replace(limits, steps_in_flight=1, token_feedback="host")
        if self.whole_prompts:
            length = max(limits.max_step_tokens, limits.max_model_length)
            limits = replace(
                limits, chunks_prefill=False, max_prefill_rows=1, max_step_tokens=length, prefill_buckets=()
            )
        if self.reserves_whole_length:
            rows = limits.num_blocks // limits.blocks_for(limits.max_model_length)
            limits = replace(limits, max_rows=min(limits.max_rows, rows))
        return limits


PREFILL_FIRST = Policy("prefill first", sys.maxsize)
"""Prefills every request that fits before any decode step."""

VLLM_NEURON = Policy("vllm-neuron", sys.maxsize, whole_prompts=True, waits_for_tokens=True, reserves_whole_length=True)
"""The scheduler of the vllm-neuron plugin, 0.2 to 0.5 (`core/scheduler.py` there): while a request waits and a row is
free, a step prefills that one prompt and all running requests are hidden from it; chunked prefill is off; it does not
schedule while a step runs; and blocks must suffice for every row at full length."""

POLICIES = {"prefill-first": PREFILL_FIRST, "vllm-neuron": VLLM_NEURON}
"""Policies to compare ours with, by the word of the flag."""


@dataclass(slots=True)
class Timed:
    """One request: its arrival and the times of its tokens, in seconds of virtual time."""

    arrived: float
    long: bool
    num_prompt: int
    first: float = math.nan
    last: float = math.nan
    worst_gap: float = 0.0
    num_cached: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.arrived


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one policy, measured over a period after a warm-up."""

    policy: Policy
    seconds: float
    """Length of the measured period."""
    requests: list[Timed]
    """Requests that arrived in the period; all of them were completed."""
    gaps: list[float]
    """Times between consecutive tokens of these requests."""
    queue: list[tuple[float, int]]
    """(time since the start of the period, number of waiting requests from then on)."""
    num_tokens: int
    """Output tokens of all requests in the period."""
    busy_share: float
    shapes: dict[Shape, ShapeUse]
    """Uses in the whole run, including warm-up."""
    num_preemptions: int
    gap_bound: float | None
    """The engine's own bound of the gap between tokens; None if there is none."""
    tokens_per_row: float = 0.0
    """Of a row that had drafts in a step: the accepted ones and one more; 0 without any."""

    def num_good(self, ttft_target: float, gap_target: float) -> int:
        """Requests that met both targets."""
        return sum(one.ttft <= ttft_target and one.worst_gap <= gap_target for one in self.requests)

    def goodput(self, ttft_target: float, gap_target: float) -> float:
        return self.num_good(ttft_target, gap_target) / self.seconds

    @property
    def cached_share(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        return sum(a.num_cached for a in self.requests) / sum(a.num_prompt for a in self.requests)

    @property
    def mean_queue(self) -> float:
        changes = [*self.queue, (self.seconds, 0)]
        return sum(count * (end - begin) for (begin, count), (end, _) in pairwise(changes)) / self.seconds


MAX_BUSY_STEPS, BUSY_PROMPT = 600, 32


def busy_speed(
    limits: BackendLimits,
    times: StepTimes,
    policy: Policy,
    num_rows: int,
    *,
    host_seconds: float,
    plan: Settings | None = None,
) -> float:
    """Tokens per second while so many requests are answered all the time."""
    num_tokens = limits.max_model_length - BUSY_PROMPT
    num_steps = min(num_tokens // (1 + policy.num_drafts), MAX_BUSY_STEPS)
    talks = [
        Conversation(0.0, False, (Turn((row, *range(1, BUSY_PROMPT)), num_tokens, 0.0),)) for row in range(num_rows)
    ]
    step = times.decode.seconds(num_rows) + host_seconds
    begins = num_rows * (times.prefill.seconds(BUSY_PROMPT) + step)
    simulation = Simulation(
        iter(talks),
        replace(limits, max_rows=num_rows, num_blocks=num_rows * limits.num_blocks // limits.max_rows),
        times,
        policy,
        warm_up_seconds=begins + num_steps // 3 * step,
        seconds=num_steps // 3 * step,
        host_seconds_per_step=host_seconds,
        plan=plan,
    )
    outcome = simulation.run()
    return outcome.num_tokens / outcome.seconds


@dataclass(eq=False)
class _Talk:
    """A conversation in progress."""

    number: int
    conversation: Conversation
    said: list[int] = field(default_factory=list)
    turn: int = 0
    request: Timed | None = None
    measured: bool = False
    """Its current request arrived within the measured period."""


class Simulation:
    """The run of one policy; call `run` once."""

    def __init__(
        self,
        conversations: Iterator[Conversation],
        limits: BackendLimits,
        times: StepTimes,
        policy: Policy,
        *,
        warm_up_seconds: float,
        seconds: float,
        host_seconds_per_step: float = 0.0,
        plan: Settings | None = None,
    ) -> None:
        """Takes conversations, ordered by start time, until all measured requests are complete.

        plan: of the graphs that the device runs; None: the sizes of `times`.
        """
        self._policy = policy
        self._begin, self._end = warm_up_seconds, warm_up_seconds + seconds
        self._clock = VirtualClock()
        applied = policy.applied_to(limits)
        more = {
            "host_seconds_per_step": host_seconds_per_step,
            "acceptance": policy.acceptance,
            "draft_cost": policy.draft_cost,
        }
        self._backend = (
            SimulatedBackend(applied, times, self._clock, **more)
            if plan is None
            else PlannedBackend(plan, applied, times, self._clock, **more)
        )
        self._engine = Engine(
            self._backend,
            max_queued_requests=sys.maxsize,
            max_consecutive_prefills=policy.max_consecutive_prefills,
            drafting=Drafts(OnDevice(), policy.num_drafts),
            clock=self._clock.now,
        )
        self._conversations = enumerate(conversations)
        self._coming: list[tuple[float, int, _Talk]] = []
        """Heap of next requests by time, then number; always includes the first request of the next conversation."""
        self._running: dict[str, _Talk] = {}
        self._num_measured_running = 0
        self._requests: list[Timed] = []
        self._gaps: list[float] = []
        self._queue = [(0.0, 0)]
        self._num_tokens = 0

    def run(self) -> Outcome:
        self._begin_talk()
        busy_before = busy_after = 0.0
        while self._clock.now() < self._end or self._num_measured_running:
            if not self._engine.has_work:
                self._clock.sleep_until(self._coming[0][0] if self._coming else self._end)
            while self._coming and self._coming[0][0] <= self._clock.now():
                arrived, _, talk = heapq.heappop(self._coming)
                if talk.turn == 0:
                    self._begin_talk()
                # Later requests matter only while there is no queue: in a queue they wait behind all measured ones.
                if arrived < self._end or not self._engine.stats.num_waiting:
                    self._send(talk, arrived)
            for event in self._engine.step():
                self._take(event)
            busy = self._backend.timeline.busy_until(self._clock.now())
            busy_before = busy if self._clock.now() <= self._begin else busy_before
            busy_after = busy if self._clock.now() <= self._end else busy_after
            self._watch_queue()
        stats = self._engine.stats
        drafted = max(stats.num_drafted_rows_total, 1)
        return Outcome(
            policy=self._policy,
            seconds=self._end - self._begin,
            requests=self._requests,
            gaps=self._gaps,
            queue=self._queue,
            num_tokens=self._num_tokens,
            busy_share=(busy_after - busy_before) / (self._end - self._begin),
            shapes=self._backend.timeline.shapes,
            num_preemptions=stats.num_preemptions_total,
            tokens_per_row=(stats.num_drafted_rows_total + stats.num_accepted_drafts_total) / drafted,
            gap_bound=None if self._policy.prefills_first else stats.stream_gap_bound_seconds,
        )

    def _begin_talk(self) -> None:
        for number, conversation in islice(self._conversations, 1):
            heapq.heappush(self._coming, (conversation.begins, number, _Talk(number, conversation)))

    def _send(self, talk: _Talk, arrived: float) -> None:
        turn = talk.conversation.turns[talk.turn]
        talk.said += turn.token_ids
        talk.request = Timed(arrived, talk.conversation.long and talk.turn == 0, len(talk.said))
        talk.measured = self._begin <= arrived < self._end
        if talk.measured:
            self._requests.append(talk.request)
            self._num_measured_running += 1
        request_id = f"{talk.number}-{talk.turn}"
        self._running[request_id] = talk
        sampling = Sampling(max_tokens=turn.answer_tokens, seed=talk.number)
        self._engine.add(Request(request_id, tuple(talk.said), sampling))

    def _take(self, event: TokenEvent) -> None:
        talk, now = self._running[event.request_id], self._clock.now()
        request = talk.request
        assert request is not None
        if event.first:
            request.first, request.num_cached = now, event.first.num_cached_tokens
        else:
            request.worst_gap = max(request.worst_gap, now - request.last)
            if talk.measured:
                self._gaps.append(now - request.last)
        request.last = now
        talk.said += event.token_ids
        self._num_tokens += len(event.token_ids) if self._begin <= now < self._end else 0
        if event.finish_reason is None:
            return
        del self._running[event.request_id]
        self._num_measured_running -= talk.measured
        talk.turn += 1
        if talk.turn < len(talk.conversation.turns):
            pause = talk.conversation.turns[talk.turn].think_seconds
            heapq.heappush(self._coming, (now + pause, talk.number, talk))

    def _watch_queue(self) -> None:
        now, waiting = self._clock.now(), self._engine.stats.num_waiting
        if now <= self._begin:
            self._queue = [(0.0, waiting)]
        elif now < self._end and waiting != self._queue[-1][1]:
            self._queue.append((now - self._begin, waiting))
