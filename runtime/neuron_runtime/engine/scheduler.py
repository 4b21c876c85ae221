"""Decides what every step does: which sequences take part, with how many tokens, in which slots and blocks.

Driven by `engine.loop`: `schedule` makes the next batch while the step before still runs, `apply` takes in what a step
produced. Knows token ids and `BackendLimits`; no text, device, clock or thread.

One rule covers prefill, chunks, decode, recomputation and several tokens per row: a sequence has tokens, and `computed`
must catch up with them. What the strictest backends demand is done for all: decode steps carry every live row in slot
order, and slots are handed out lowest first.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter
from typing import NamedTuple

from neuron_runtime.core import (
    KNOWN,
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    Kind,
    Request,
    Rows,
    StepOutput,
    TokenEvent,
)
from neuron_runtime.engine.blocks import Pool
from neuron_runtime.engine.sequence import RowInFlight, Sequence
from neuron_runtime.errors import BackendFailed

_order = attrgetter("order")
_slot = attrgetter("slot")


class Planned(NamedTuple):
    """A scheduled step that is not applied yet; sequences[i] owns row i of the batch."""

    batch: Batch
    sequences: list[Sequence]


class Scheduler:
    """Sequences wait, run, and leave; at most two steps are scheduled and not applied at any time."""

    def __init__(self, limits: BackendLimits, max_consecutive_prefills: int = 1) -> None:
        self.limits = limits
        self.slots = Pool(limits.max_rows)
        self.blocks = Pool(limits.num_blocks)
        self.waiting: list[Sequence] = []
        """In order of service."""
        self.running: list[Sequence] = []
        """Sequences that hold a slot and are not leaving."""
        self.planned: deque[Planned] = deque()
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of requests that got their first token."""
        self._live: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._num_steps = 0
        self._max_consecutive_prefills = max_consecutive_prefills
        self._consecutive_prefills = 0
        self._recomputes = limits.recomputes
        self._released: list[int] = []
        self._kept: dict[int, int] = {}
        self._added: list[Added] = []
        self._appended: list[tuple[int, int]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def num_live(self) -> int:
        return len(self._live)

    def add(self, request: Request) -> None:
        """Queue a request that `admission.check_request` has passed."""
        sequence = Sequence(request, (request.priority, self._num_arrivals))
        self._num_arrivals += 1
        self._live[request.request_id] = sequence
        insort(self.waiting, sequence, key=_order)

    def abort(self, request_id: str) -> None:
        """Forget a request wherever it stands; unknown and finished ones are fine."""
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return
        sequence.done = True
        if sequence.slot >= 0 and not sequence.leaving:
            self._leave(sequence)
        elif not sequence.leaving:
            self.waiting.remove(sequence)

    # Scheduling

    def schedule(self) -> Batch | None:
        """The next step, or None when nothing can run before the step in flight is applied (or nothing is left)."""
        limits = self.limits
        for sequence in [s for s in self.running if s.samples and len(s.tokens) + 1 >= s.max_length]:
            self._leave(sequence)  # the row in flight brings its last token for certain
        decoding = [s for s in self.running if s.decodes]
        rows: list[tuple[Sequence, int]] = []
        may_prefill = not decoding or self._consecutive_prefills < self._max_consecutive_prefills
        if may_prefill and not limits.mixes_phases:
            rows = self._prefill_rows(limits.max_step_tokens)
        if not rows:
            missing = self._make_room(decoding)
            if missing is None:
                return None
            rows = self._decode_rows(missing)
            if limits.mixes_phases:
                rows += self._prefill_rows(limits.max_step_tokens - len(rows))
        return self._batch(rows, bool(decoding)) if rows else None

    def _make_room(self, decoding: list[Sequence]) -> list[tuple[Sequence, int]] | None:
        """The sequences that decode now and the blocks each is short of, all free; None: wait for the step in flight.

        A row behind one that may be the last (several tokens per row) is left out until that is known. Nobody is
        preempted while a step is in flight: its surplus may be enough, and what it writes to cannot be reused yet.
        """
        most = self.limits.max_tokens_per_row
        ready = [s for s in decoding if not (s.samples and len(s.tokens) + most >= s.max_length)]
        if self.limits.decodes_all_live_rows and len(ready) < len(decoding):
            return None
        missing = [(s, self._num_blocks(s, most if s.samples else 0) - len(s.blocks)) for s in ready]
        while sum(count for _, count in missing) > self.blocks.num_free:
            if self.planned:
                return None
            self._preempt(max(self.running, key=_order))
            missing = [(s, count) for s, count in missing if s.slot >= 0]
        return missing

    def _decode_rows(self, missing: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        for sequence, count in missing:
            for block in self.blocks.take(count) if count else ():
                sequence.blocks.append(block)
                self._appended.append((sequence.slot, block))
        return [(s, 1) for s in sorted((s for s, _ in missing), key=_slot)]

    def _prefill_rows(self, budget: int) -> list[tuple[Sequence, int]]:
        """Prompts in progress first, then new ones in order; the first that does not fit holds back those behind."""
        rows: list[tuple[Sequence, int]] = []
        started = sorted((s for s in self.running if not s.decodes), key=_order)
        while len(rows) < self.limits.max_prefill_rows:
            sequence = started.pop(0) if started else self._next_to_admit()
            part = self._part(sequence, budget) if sequence else 0
            if sequence is None or not part:
                break
            if sequence.slot < 0:
                self._admit(sequence)
            rows.append((sequence, part))
            budget -= part
        return rows

    def _part(self, sequence: Sequence, budget: int) -> int:
        """How many of its tokens are fed in one step; 0 when no allowed part fits the budget."""
        part = min(sequence.todo, budget, self.limits.longest_prefill)
        whole = part == sequence.todo
        return part if whole or (self.limits.chunks_prefill and part >= self.limits.min_chunk_tokens) else 0

    def _next_to_admit(self) -> Sequence | None:
        """The head of the queue if its whole prompt has room, with one block to spare for each that may still grow."""
        if not self.waiting or not self.slots.num_free:
            return None
        head = self.waiting[0]
        growing = sum(self._num_blocks(s) < self._max_blocks(s) for s in (*self.running, head))
        return head if self._num_blocks(head) + growing <= self.blocks.num_free else None

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        (sequence.slot,) = self.slots.take(1)
        sequence.blocks = self.blocks.take(self._num_blocks(sequence))
        request = sequence.request
        self._added.append(
            Added(
                slot=sequence.slot,
                token_ids=tuple(sequence.tokens),
                num_prompt_tokens=sequence.num_prompt,
                sampling=request.sampling,
                blocks=tuple(sequence.blocks),
                adapter=request.adapter,
            )
        )

    def _batch(self, rows: list[tuple[Sequence, int]], decoders_wait: bool) -> Batch:
        num_decode = sum(s.decodes for s, _ in rows)
        kind = Kind.PREFILL if not num_decode else Kind.DECODE if num_decode == len(rows) else Kind.MIXED
        self._consecutive_prefills = self._consecutive_prefills + 1 if kind is Kind.PREFILL and decoders_wait else 0
        batch = Batch(
            step=self._num_steps,
            kind=kind,
            rows=Rows(
                slot=tuple(s.slot for s, _ in rows),
                start=tuple(0 if s.row else s.computed for s, _ in rows),
                num_tokens=tuple(n for _, n in rows),
                token=tuple(NO_TOKEN if s.row or n > 1 else s.tokens[s.computed] for s, n in rows),
                after=tuple(s.row.row if s.row else KNOWN for s, _ in rows),
                samples=tuple(n == s.todo for s, n in rows),
            ),
            added=tuple(self._added),
            appended_blocks=tuple(self._appended),
            released=tuple(self._released),
            kept_blocks=tuple(self._kept.items()),
        )
        self._num_steps += 1
        for changes in (self._added, self._appended, self._released, self._kept):
            changes.clear()
        for index, (sequence, num_tokens) in enumerate(rows):
            sequence.row = RowInFlight(batch.step, index, num_tokens, batch.rows.samples[index])
        self.planned.append(Planned(batch, [s for s, _ in rows]))
        return batch

    # Applying

    def apply(self, output: StepOutput) -> list[TokenEvent]:
        """Take in the oldest step that is not applied. Raises BackendFailed when the output is not that step's."""
        batch, sequences = self.planned.popleft()
        self._check(batch, output)
        events = []
        for i, sequence in enumerate(sequences):
            sampled = output.token_ids[i]
            sequence.computed += batch.rows.num_tokens[i] + max(len(sampled) - 1, 0)
            if sequence.row and sequence.row.step == batch.step:
                sequence.row = None
            if sampled and not sequence.done:
                first = len(sequence.tokens) == sequence.num_prompt
                kept, reason = sequence.accept(sampled)
                logprobs = output.logprobs[i][: len(kept)] if output.logprobs else ()
                self.num_prompt_tokens += sequence.num_prompt if first else 0
                request_id = sequence.request.request_id
                events.append(TokenEvent(request_id, kept, reason, logprobs, first=first))
                if reason:
                    sequence.done = True
                    del self._live[request_id]
            self._settle(sequence)
        return events

    def _check(self, batch: Batch, output: StepOutput) -> None:
        counts = [len(sampled) for sampled in output.token_ids]
        most = self.limits.max_tokens_per_row
        if output.step != batch.step or len(counts) != len(batch.rows):
            raise BackendFailed(
                f"the backend returned step {output.step} with {len(counts)} rows, "
                f"step {batch.step} with {len(batch.rows)} rows was due"
            )
        if any(not 1 <= n <= most if samples else n for n, samples in zip(counts, batch.rows.samples, strict=True)):
            raise BackendFailed(f"step {batch.step}: each sampling row brings 1 to {most} tokens, got {counts}")

    def _settle(self, sequence: Sequence) -> None:
        """After a row was applied: let go of what the sequence does not need any more."""
        if sequence.leaving:
            self._free_after_last_row(sequence)
        elif sequence.done:
            self._leave(sequence)
        elif surplus := sequence.blocks[(keep := self._num_blocks(sequence)) :]:
            del sequence.blocks[keep:]
            self.blocks.give_back(surplus)
            self._kept[sequence.slot] = keep

    def _leave(self, sequence: Sequence) -> None:
        """Release the slot by the next batch; what it holds is free once no step in flight can write to it."""
        self.running.remove(sequence)
        self._released.append(sequence.slot)
        self._kept.pop(sequence.slot, None)
        sequence.leaving = True
        self._free_after_last_row(sequence)

    def _free_after_last_row(self, sequence: Sequence) -> None:
        # With one step in flight the row in flight is collected before the next launch: nothing to wait for.
        if sequence.slot >= 0 and (sequence.row is None or self.limits.steps_in_flight == 1):
            self.slots.give_back([sequence.slot])
            self.blocks.give_back(sequence.blocks)
            sequence.slot, sequence.blocks = -1, []

    def _preempt(self, victim: Sequence) -> None:
        """Back to the queue with all its tokens; they are computed again later. Only while nothing is in flight."""
        self._leave(victim)
        victim.leaving, victim.computed = False, 0
        insort(self.waiting, victim, key=_order)
        self.num_preemptions += 1

    # Arithmetic of blocks

    def _num_blocks(self, sequence: Sequence, num_coming: int = 0) -> int:
        """Blocks for its tokens, those a row in flight may bring, and drafts; all at once if it is never preempted."""
        if not self._recomputes:
            return self._max_blocks(sequence)
        return self.limits.blocks_for(len(sequence.tokens) + num_coming + self.limits.num_lookahead_tokens)

    def _max_blocks(self, sequence: Sequence) -> int:
        """Blocks it holds at most: the last token is never fed."""
        return self.limits.blocks_for(sequence.max_length - 1 + self.limits.num_lookahead_tokens)
