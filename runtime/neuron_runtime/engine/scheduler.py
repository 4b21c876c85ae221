"""The scheduler: decides which sequences take part in each step, with how many tokens, in which slots and blocks.

Called by `engine.loop`: `schedule` creates the next batch while the previous step still runs, `apply` processes the
output of a step. The requirements of the strictest backends apply to all: decode steps have every live row in slot
order, and the lowest free slot is assigned first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import merge
from typing import NamedTuple

from neuron_runtime.core import (
    KNOWN,
    NO_TOKEN,
    BackendLimits,
    Batch,
    First,
    Request,
    Rows,
    StepOutput,
    TokenEvent,
    needs_host,
)
from neuron_runtime.engine.blocks import BlockManager
from neuron_runtime.engine.cache_events import CacheEvents
from neuron_runtime.engine.drafting import Drafting
from neuron_runtime.engine.running import RunningSet, WaitingQueue, by_order, by_slot
from neuron_runtime.engine.sequence import Phase, Sequence
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.errors import BackendFailed

PrefillRow = tuple[Sequence, int]
"""A sequence and the number of its tokens that a step feeds."""
Candidate = tuple[Sequence, list[int] | None]
"""A sequence that may prefill; if it is waiting, with the cached blocks of its first tokens."""


class ScheduledStep(NamedTuple):
    """A step that is not applied yet; row i of the batch belongs to sequences[i]."""

    batch: Batch
    sequences: list[Sequence]


class Scheduler:
    """Schedules steps; at most two steps are scheduled and not applied at any time.

    A step with drafts is the only one: what it accepts decides where the next rows start.
    """

    def __init__(
        self,
        limits: BackendLimits,
        max_consecutive_prefills: int = 1,
        drafting: Drafting | None = None,
        cache_events: CacheEvents | None = None,
    ) -> None:
        self.limits = limits
        self._drafting = drafting if limits.max_drafts else None
        self.stats = EngineStats(num_blocks=limits.num_blocks)
        self.waiting = WaitingQueue()
        self.running = RunningSet(limits)
        self.blocks = BlockManager(limits, self.stats, cache_events)
        self.scheduled: deque[ScheduledStep] = deque()
        """Not applied yet, oldest first."""
        self._live: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._newest: Sequence | None = None
        self._num_steps = 0
        self._max_consecutive_prefills = max_consecutive_prefills
        self._consecutive_prefills = 0
        # With one step in flight it is collected before the next launch, so a slot can be reused at once. Blocks for
        # the prefix cache wait until the step is applied, because only then is their content known.
        self._slots_wait = limits.steps_in_flight > 1
        self._blocks_wait = self._slots_wait or limits.shares_prefixes

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def num_live(self) -> int:
        return len(self._live)

    def add(self, request: Request) -> None:
        """Queue a request that can run within the limits."""
        order = (request.priority, self._num_arrivals)
        on_host = needs_host(request.sampling, self.limits)
        self._newest = sequence = Sequence(request, order, self.limits.block_size, self._newest, on_host)
        if self.limits.feeds_pictures_whole:
            sequence.whole_pictures = request.pictures
        self._num_arrivals += 1
        self._live[request.request_id] = sequence
        self.waiting.insert_in_order(sequence)

    def abort(self, request_id: str) -> None:
        """Remove a request in any phase; unknown and finished ones are ignored."""
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return
        match sequence.phase:
            case Phase.WAITING:
                self.waiting.remove(sequence)
            case Phase.PREFILL | Phase.DECODE:
                self._release(sequence)
                self._free(sequence)
        sequence.phase = Phase.FINISHED

    # Scheduling

    def schedule(self) -> Batch | None:
        """The next step; None if nothing can run before the step in flight is applied, or nothing is left."""
        limits, decoding = self.limits, self.running.decoding
        if self._waits_for_drafts():
            return None
        for sequence in [s for s in self._due() if len(s.tokens) + 1 >= s.max_length and s.samples]:
            self._release(sequence)  # the row in flight certainly produces its last token
            self._free(sequence)
        decoders: list[Sequence] = []
        prefills: list[PrefillRow] = []
        if not limits.mixes_phases and self._consecutive_prefills < self._max_consecutive_prefills:
            prefills = self._prefill_rows(limits.max_step_tokens)
        if not prefills:
            ready = self._make_room()
            if ready is None:
                return None
            decoders = ready
            if limits.mixes_phases or not decoding:
                prefills = self._prefill_rows(limits.max_step_tokens - len(decoders))
                if cached := [s for s, _ in prefills if s.phase is Phase.DECODE]:
                    # All but the last token was cached: a decode row from the start.
                    decoders = sorted(decoders + cached, key=by_slot)
                    prefills = [(s, n) for s, n in prefills if s.phase is Phase.PREFILL]
        return self._batch(decoders, prefills) if decoders or prefills else None

    def _waits_for_drafts(self) -> bool:
        """Whether the step in flight has drafts, or the next one should have some."""
        if self._drafting is None or not self.scheduled:
            return False
        return bool(self.scheduled[-1].batch.rows.drafts) or self._drafting.wants(self.running.decoding)

    def _due(self) -> list[Sequence]:
        """Decoding sequences that may need a block for their next row, or may already have their last one in flight."""
        return [s for s in self.running.decoding if len(s.tokens) > s.horizon]

    def _make_room(self) -> list[Sequence] | None:
        """The sequences that decode now, each with the blocks it needs; None: wait for the step in flight.

        Nothing is preempted while a step is in flight: it may end a sequence, and the blocks that it writes cannot be
        reused yet.
        """
        while not self.blocks.append([s for s in self._due() if len(s.tokens) + 1 > s.capacity]):
            if self.scheduled:
                return None
            self._preempt(max(filter(self.blocks.is_preemptible, self.running), key=by_order))
        return self.running.decoding[:]

    def _drafts(self, decoders: list[Sequence], prefills: list[PrefillRow]) -> tuple[tuple[int, ...], ...]:
        """Drafts for these rows, of which the step has tokens and the cache has blocks left; empty without any.

        They never reach beyond the last token that a sequence may feed.
        """
        if self._drafting is None or self.scheduled or not decoders or not self._drafting.wants(decoders):
            return ()
        limits, drafts = self.limits, []
        budget = limits.max_step_tokens - len(decoders) - sum(limits.num_computed(n) for _, n in prefills)
        for sequence in decoders:
            most = min(limits.max_drafts, budget, sequence.max_length - len(sequence.tokens) - 1)
            of_row = self._drafting.propose(sequence, most) if most > 0 else ()
            if of_row:
                of_row = of_row[: self.blocks.make_room(sequence, len(of_row))]
            budget -= len(of_row)
            drafts.append(of_row)
        return tuple(drafts) if any(drafts) else ()

    def _prefill_rows(self, budget: int) -> list[PrefillRow]:
        """Prompts in progress and new ones in order of service; the first that does not fit blocks later ones."""
        rows: list[PrefillRow] = []
        if not (self.waiting or self.running.prefilling):
            return rows
        for sequence, cached in self._candidates():
            start = sequence.num_scheduled_tokens if cached is None else len(cached) * self.limits.block_size
            part = self._part(len(sequence.tokens), start, budget)
            if part and sequence.whole_pictures:
                part = self._before_picture(sequence, start, part)
            if not part:
                break
            if cached is not None:
                self.waiting.remove(sequence)
                self.blocks.allocate(sequence, cached)
                self.running.admit(sequence)
            rows.append((sequence, part))
            budget -= self.limits.num_computed(part)
            if budget < self.limits.num_computed(1) or len(rows) == self.limits.max_prefill_rows:
                break  # before the next one's prefix is looked for
        return rows

    def _part(self, num_tokens: int, start: int, budget: int) -> int:
        """Number of tokens that one step feeds of a sequence from `start` on; 0 if no allowed part fits the budget.

        A chunk leaves a rest that chunks of the largest size can reach, so that the next one is never refused.
        """
        limits, rest = self.limits, num_tokens - start
        if rest <= limits.longest_prefill and limits.num_computed(rest) <= budget:
            return rest
        if not limits.chunks_prefill:
            return 0
        exact = [bucket.fits for bucket in limits.prefill_buckets if bucket.computes <= budget]
        sizes = exact if limits.prefill_buckets else [budget]
        part = max((size for size in sizes if limits.reaches(num_tokens, start + size)), default=0)
        return part if part >= limits.min_chunk_tokens else 0

    def _before_picture(self, sequence: Sequence, start: int, part: int) -> int:
        """What is left of a part that may not end within a picture; 0 if that is too small a chunk."""
        for picture in sequence.whole_pictures:
            if picture.start < start + part < picture.end:
                part = max(picture.start - start, 0)
                return part if part >= self.limits.min_chunk_tokens else 0
        return part

    def _candidates(self) -> Iterator[Candidate]:
        """Prompts in progress and waiting prompts that can start, in order of service.

        A waiting prompt can start if its blocks fit, one block remains for each sequence that may still grow, and
        preemption can make room for all that may come; the first one that does not fit blocks later ones. A prompt
        whose prefix is being computed is skipped but keeps its reservation: the sequence that computes the prefix is
        earlier in order, so it waits for nothing else.
        """
        running, waiting = self.running, self.running.startable(self.waiting)
        spare = self.blocks.num_spare(running) if waiting else 0
        for sequence in merge(running.prefilling[:], waiting, key=by_order):
            if sequence.phase is Phase.PREFILL:
                yield sequence, None
            elif spare >= 0:
                prefix = self.blocks.find(sequence)
                spare -= self.blocks.num_claimed(sequence, prefix)
                if not self.blocks.secures(running, sequence):
                    spare = -1
                if spare >= 0 and not prefix.num_coming:
                    yield sequence, prefix.blocks

    def _batch(self, decoders: list[Sequence], prefills: list[PrefillRow]) -> Batch:
        step, num_decode = self._num_steps, len(decoders)
        decoders_wait = not decoders and bool(self.running.decoding)
        self._consecutive_prefills = self._consecutive_prefills + 1 if decoders_wait else 0
        sequences = decoders + [s for s, _ in prefills]
        rows = self._rows(decoders, prefills, sequences)
        for row, sequence in enumerate(decoders):
            sequence.in_flight, sequence.row, sequence.samples = step, row, True
            sequence.num_scheduled_tokens += rows.num_tokens[row]
        for row, (sequence, count) in enumerate(prefills, num_decode):
            sequence.in_flight, sequence.row, sequence.samples = step, row, rows.samples[row]
            sequence.num_scheduled_tokens += count
            if sequence.num_unscheduled_tokens == 1:
                self.running.finish_prefill(sequence)
        blocks, running = self.blocks, self.running
        batch = Batch(
            step=step,
            rows=rows,
            num_prefills=len(prefills),
            added=tuple(running.added),
            appended_blocks=tuple(blocks.appended),
            released=tuple(running.released),
            adapters=tuple(running.places.changes),
        )
        for changes in (running.places.changes, running.added, blocks.appended, running.released):
            changes.clear()
        self._num_steps += 1
        self.scheduled.append(ScheduledStep(batch, sequences))
        return batch

    def _rows(self, decoders: list[Sequence], prefills: list[PrefillRow], sequences: list[Sequence]) -> Rows:
        num_decode, newest = len(decoders), self.scheduled[-1] if self.scheduled else None
        if newest is not None and not prefills and newest.sequences == decoders:
            # Every row follows the same row of the step in flight: many steps in succession have equal rows.
            repeated, every = newest.batch.rows, tuple(range(num_decode))
            if not newest.batch.num_prefills and repeated.after == every:
                return repeated
            unknown = (NO_TOKEN,) * num_decode
            return Rows(repeated.slot, (0,) * num_decode, (1,) * num_decode, unknown, every, (True,) * num_decode)
        drafts = self._drafts(decoders, prefills)
        num_decoded = tuple([1 + len(of_row) for of_row in drafts]) if drafts else (1,) * num_decode
        return Rows(
            slot=tuple([s.slot for s in sequences]),
            start=tuple([s.num_computed_tokens if s.in_flight is None else 0 for s in sequences]),
            num_tokens=num_decoded + tuple(n for _, n in prefills),
            token=tuple([s.tokens[s.num_computed_tokens] if s.in_flight is None else NO_TOKEN for s in decoders])
            + tuple(
                s.tokens[s.num_computed_tokens] if s.in_flight is None and n == 1 else NO_TOKEN for s, n in prefills
            ),
            after=tuple([KNOWN if s.in_flight is None else s.row for s in sequences]),
            samples=(True,) * num_decode + tuple(n == s.num_unscheduled_tokens for s, n in prefills),
            drafts=drafts and drafts + ((),) * len(prefills),
        )

    # Applying

    def apply(self, output: StepOutput) -> list[TokenEvent]:
        """Apply the output of the oldest scheduled step. Raises BackendFailed if it belongs to another step."""
        batch, sequences = self.scheduled.popleft()
        check_output(batch, output)
        drafts = batch.rows.drafts
        step, finished, events = batch.step, Phase.FINISHED, []
        vectors = output.vectors or (b"",) * len(sequences)
        for i, (sequence, num_tokens, sampled, vector) in enumerate(
            zip(sequences, batch.rows.num_tokens, output.token_ids, vectors, strict=True)
        ):
            if sequence.in_flight == step:
                sequence.in_flight, sequence.samples = None, False
            sequence.num_computed_tokens += num_tokens
            if drafts and drafts[i]:
                num_rejected = num_tokens - len(sampled)
                sequence.num_computed_tokens -= num_rejected
                sequence.num_scheduled_tokens -= num_rejected
                if i not in output.without_drafts:
                    self._learn(sequence, len(drafts[i]), len(sampled) - 1)
            if sequence.phase is not finished:
                first = len(sequence.tokens) == sequence.num_prompt
                if first and output.prompt_logprobs:
                    sequence.prompt_logprobs += output.prompt_logprobs[i]
                if sampled or vector:
                    kept, reason = sequence.accept(sampled)
                    logprobs = output.logprobs[i][: len(kept)] if output.logprobs else ()
                    request_id = sequence.request.request_id
                    begun = First(sequence.num_cached or 0, 0.0, sequence.prompt_logprobs, vector) if first else None
                    events.append(TokenEvent(request_id, kept, reason, logprobs, begun))
                    if reason:
                        if sequence.phase is not Phase.LEAVING:
                            self._release(sequence)
                        sequence.phase = finished
                        del self._live[request_id]
            if sequence.num_computed_tokens >= sequence.next_full:
                self.blocks.remember(sequence)
            if sequence.phase is finished:
                self._free(sequence)
        return events

    def _learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        if self._drafting is not None and sequence.phase is not Phase.FINISHED:
            self._drafting.learn(sequence, num_drafts, num_accepted)
            self.stats.count_drafts(num_drafts, num_accepted)

    # Leaving

    def _release(self, sequence: Sequence) -> None:
        """No further step has a row of it; `_free` returns its slot and blocks."""
        self.running.release(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Return what no step in flight can write; called again when the row in flight is applied."""
        in_flight = sequence.in_flight is not None
        if sequence.slot >= 0 and not (in_flight and self._slots_wait):
            self.running.free_slot(sequence)
        if not (in_flight and self._blocks_wait):
            self.blocks.free(sequence)
        if not in_flight:
            self.running.places.give_back(sequence)

    def _preempt(self, victim: Sequence) -> None:
        """Return a sequence to the queue with all its tokens, to be recomputed. Only while nothing is in flight."""
        self._release(victim)
        self._free(victim)
        victim.prompt_logprobs = ()
        self.waiting.insert_in_order(victim)
        self.stats.num_preemptions_total += 1


def check_output(batch: Batch, output: StepOutput) -> None:
    """Raise BackendFailed unless the output belongs to this step."""
    counts = output.counts
    if output.step != batch.step or len(counts) != len(batch.rows):
        raise BackendFailed(
            f"the backend returned step {output.step} with {len(counts)} rows, "
            f"expected step {batch.step} with {len(batch.rows)} rows"
        )
    rows = batch.rows
    if counts == list(rows.samples):  # True == 1: a fast path for most steps
        return
    most = [
        samples + len(drafts) for samples, drafts in zip(rows.samples, rows.drafts or ((),) * len(rows), strict=True)
    ]
    if any(not min(limit, 1) <= count <= limit for count, limit in zip(counts, most, strict=True)):
        raise BackendFailed(
            f"step {batch.step}: rows returned {counts} tokens, expected at least one and at most {most}"
        )
