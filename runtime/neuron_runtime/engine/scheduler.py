"""Decides what every step does: which sequences take part, with how many tokens, in which slots and blocks.

Driven by `engine.loop`: `schedule` makes the next batch while the step before still runs, `apply` takes in what a step
produced. Knows token ids and `BackendLimits`; no text, device, clock or thread.

One rule covers prefill, chunks, decode, recomputation and several tokens per row: a sequence has tokens, and `computed`
must catch up with them. What the strictest backends demand is done for all: decode steps carry every live row in slot
order, and slots are handed out lowest first. Blocks that are cached already count as computed.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

from neuron_runtime.core import (
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
from neuron_runtime.engine.prefix_cache import PrefixCache
from neuron_runtime.engine.sequence import NEVER, Sequence
from neuron_runtime.errors import BackendFailed

_order = attrgetter("order")
_slot = attrgetter("slot")


PrefillRow = tuple[Sequence, int]
"""A sequence and how many of its tokens a step feeds."""
Candidate = tuple[Sequence, list[int] | None]
"""A sequence whose prompt may go on, and if it is new, the blocks that hold its first tokens already."""


class Planned(NamedTuple):
    """A scheduled step that is not applied yet; sequences[i] owns row i of the batch."""

    batch: Batch
    sequences: list[Sequence]


class Scheduler:
    """Sequences wait, run, and leave; at most two steps are scheduled and not applied at any time."""

    def __init__(self, limits: BackendLimits, max_consecutive_prefills: int = 1) -> None:
        self.limits = limits
        self.slots = Pool(limits.max_rows)
        self.blocks = PrefixCache(limits.num_blocks)
        self.waiting: list[Sequence] = []
        """In order of service."""
        self.starting: list[Sequence] = []
        """Admitted, with more to feed than the one newest token; in order of service."""
        self.decoding: list[Sequence] = []
        """In slot order."""
        self.planned: deque[Planned] = deque()
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of requests that got their first token."""
        self.num_prefix_queries = 0
        """Prompt tokens that were looked for in the prefix cache."""
        self.num_prefix_hits = 0
        """Those of them that were found."""
        self._live: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._num_steps = 0
        self._max_consecutive_prefills = max_consecutive_prefills
        self._consecutive_prefills = 0
        self._recomputes = limits.recomputes
        self._most = limits.max_tokens_per_row
        # In tokens; 0 where nothing is shared.
        self._max_hit = (limits.max_prefix_hit or limits.max_model_length) if limits.shares_prefixes else 0
        # One token is fed at least; where steps do not mix phases two, so that the row is one of a prompt.
        self._min_fed = 1 if limits.mixes_phases else 2
        # With one step in flight the row in flight is collected before the next launch: the slot can be used again.
        # What it computes is known when it is applied, so blocks that are to be found again wait for that.
        self._slots_wait = limits.steps_in_flight > 1
        self._blocks_wait = self._slots_wait or self._max_hit > 0
        self._released: list[int] = []
        self._kept: dict[int, int] = {}
        self._added: list[Added] = []
        self._appended: list[tuple[int, int]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a slot and are not leaving."""
        return [*self.starting, *self.decoding]

    @property
    def num_running(self) -> int:
        return len(self.starting) + len(self.decoding)

    def add(self, request: Request) -> None:
        """Queue a request that `admission.check_request` has passed."""
        sequence = Sequence(request, (request.priority, self._num_arrivals), self.limits.block_size)
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
        for sequence in [s for s in self.decoding if s.samples and len(s.tokens) + 1 >= s.max_length]:
            self._leave(sequence)  # the row in flight brings its last token for certain
        decoders: list[Sequence] = []
        prefills: list[PrefillRow] = []
        if not limits.mixes_phases and self._consecutive_prefills < self._max_consecutive_prefills:
            prefills = self._prefill_rows(limits.max_step_tokens)
        if not prefills:
            ready = self._make_room()
            if ready is None:
                return None
            decoders = ready
            if limits.mixes_phases or not self.decoding:
                prefills = self._prefill_rows(limits.max_step_tokens - len(decoders))
                if cached := [s for s, _ in prefills if s.decodes]:
                    # All but the last token was cached: a decode row from the start.
                    decoders = sorted(decoders + cached, key=_slot)
                    prefills = [(s, n) for s, n in prefills if not s.decodes]
        return self._batch(decoders, prefills) if decoders or prefills else None

    def _make_room(self) -> list[Sequence] | None:
        """The sequences that decode now, each with the blocks it needs; None: wait for the step in flight.

        A row behind one that may be the last (several tokens per row) is left out until that is known. Nobody is
        preempted while a step is in flight: its surplus may be enough, and what it writes to cannot be reused yet.
        """
        most = self._most
        while True:
            ready = [s for s in self.decoding if not (s.samples and len(s.tokens) + most >= s.max_length)]
            if self.limits.decodes_all_live_rows and len(ready) < len(self.decoding):
                return None
            short = [s for s in ready if len(s.tokens) + (most if s.samples else 0) > s.capacity]
            missing = [(s, self._num_blocks(s, most if s.samples else 0) - len(s.blocks)) for s in short]
            if sum(count for _, count in missing) <= self.blocks.num_free:
                break
            if self.planned:
                return None
            self._preempt(max(self.running, key=_order))
        for sequence, count in missing:
            blocks = self.blocks.take(count)
            self._hold(sequence, sequence.blocks + blocks)
            self._appended += [(sequence.slot, block) for block in blocks]
        return ready

    def _prefill_rows(self, budget: int) -> list[PrefillRow]:
        """Prompts in progress and new ones in order of service; the first that does not fit holds back those behind."""
        rows: list[PrefillRow] = []
        for sequence, cached in self._candidates():
            todo = sequence.todo if cached is None else len(sequence.tokens) - len(cached) * self.limits.block_size
            part = self._part(todo, budget)
            if not part:
                break
            if cached is not None:
                self._admit(sequence, cached)
            rows.append((sequence, part))
            budget -= part
            if not budget or len(rows) == self.limits.max_prefill_rows:
                break  # before the next one's prefix is looked for
        return rows

    def _part(self, todo: int, budget: int) -> int:
        """How many of so many tokens are fed in one step; 0 when no allowed part fits the budget."""
        part = min(todo, budget, self.limits.longest_prefill)
        return part if part == todo or (self.limits.chunks_prefill and part >= self.limits.min_chunk_tokens) else 0

    def _candidates(self) -> Iterator[Candidate]:
        """Prompts in progress and those of the queue that can start, in order of service.

        To start, a whole prompt has room, with one block to spare for each sequence that may still grow; the first
        without room holds back those behind it in the queue. One whose prefix is being computed is passed over, and
        keeps its room: the row that computes it comes first in order, so it waits for that and nothing else.
        """
        waiting = self.waiting[: self.slots.num_free]
        if not waiting:
            yield from [(sequence, None) for sequence in self.starting]
            return
        spare = self.blocks.num_free - sum(len(s.blocks) < self._max_blocks(s) for s in self.running)
        for sequence in merge(self.starting[:], waiting, key=_order):
            if sequence.slot >= 0:
                yield sequence, None
                continue
            if spare < 0:
                continue
            prefix = self.blocks.find(sequence.keys.first(self._findable(sequence)), sequence.order)
            num_blocks = self._num_blocks(sequence)
            known = len(prefix.blocks) + prefix.num_coming
            spare -= num_blocks - known + prefix.num_idle + (num_blocks < self._max_blocks(sequence))
            if spare >= 0 and not prefix.num_coming:
                yield sequence, prefix.blocks

    def _findable(self, sequence: Sequence) -> int:
        """The most blocks that it may find cached."""
        if not sequence.reads_cache:
            return 0
        return max(min(len(sequence.tokens) - self._min_fed, self._max_hit), 0) // self.limits.block_size

    def _admit(self, sequence: Sequence, cached: list[int]) -> None:
        self.waiting.remove(sequence)
        (sequence.slot,) = self.slots.take(1)
        self.blocks.share(cached)
        self._hold(sequence, cached + self.blocks.take(self._num_blocks(sequence) - len(cached)))
        sequence.computed = sequence.fed = len(cached) * self.limits.block_size
        if self._max_hit:
            self._expect(sequence, len(cached))
        if sequence.todo > 1 or not sequence.fed:
            insort(self.starting, sequence, key=_order)
        else:
            self._decode(sequence)
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

    def _expect(self, sequence: Sequence, num_cached: int) -> None:
        """Tell the cache which blocks are being computed; the first time, count what was looked for and found."""
        last = len(sequence.tokens) // self.limits.block_size
        keys = sequence.keys.first(last)
        self.blocks.expect(keys[num_cached:], sequence.blocks[num_cached:last], sequence.order)
        sequence.next_full = sequence.computed + self.limits.block_size
        if sequence.num_cached is None:
            sequence.num_cached = sequence.computed
            self.num_prefix_queries += sequence.num_prompt if sequence.reads_cache else 0
            self.num_prefix_hits += sequence.computed

    def _decode(self, sequence: Sequence) -> None:
        """Its next row is a decode row, and so are all that follow."""
        sequence.decodes = True
        insort(self.decoding, sequence, key=_slot)

    def _batch(self, decoders: list[Sequence], prefills: list[PrefillRow]) -> Batch:
        step, num_decode = self._num_steps, len(decoders)
        kind = Kind.PREFILL if not decoders else Kind.MIXED if prefills else Kind.DECODE
        decoders_wait = kind is Kind.PREFILL and bool(self.decoding)
        self._consecutive_prefills = self._consecutive_prefills + 1 if decoders_wait else 0
        sequences = decoders + [s for s, _ in prefills]
        batch = Batch(
            step=step,
            kind=kind,
            rows=Rows(
                slot=tuple([s.slot for s in sequences]),
                start=tuple([0 if s.row >= 0 else s.computed for s in sequences]),
                num_tokens=(1,) * num_decode + tuple(n for _, n in prefills),
                token=tuple([NO_TOKEN if s.row >= 0 else s.tokens[s.computed] for s in decoders])
                + tuple(NO_TOKEN if s.row >= 0 or n > 1 else s.tokens[s.computed] for s, n in prefills),
                after=tuple([s.row for s in sequences]),
                samples=(True,) * num_decode + tuple(n == s.todo for s, n in prefills),
            ),
            added=tuple(self._added),
            appended_blocks=tuple(self._appended),
            released=tuple(self._released),
            kept_blocks=tuple(self._kept.items()),
        )
        self._num_steps += 1
        for changes in (self._added, self._appended, self._released, self._kept):
            changes.clear()
        for row, sequence in enumerate(decoders):
            sequence.row, sequence.step, sequence.samples = row, step, True
            sequence.fed += 1
        for row, (sequence, num_tokens) in enumerate(prefills, num_decode):
            sequence.samples = batch.rows.samples[row]
            sequence.row, sequence.step = row, step
            sequence.fed += num_tokens
            if sequence.todo == 1:
                self.starting.remove(sequence)
                self._decode(sequence)
        self.planned.append(Planned(batch, sequences))
        return batch

    # Applying

    def apply(self, output: StepOutput) -> list[TokenEvent]:
        """Take in the oldest step that is not applied. Raises BackendFailed when the output is not that step's."""
        batch, sequences = self.planned.popleft()
        self._check(batch, output)
        may_have_surplus = self._most > 1
        events = []
        for i, (sequence, num_tokens, sampled) in enumerate(
            zip(sequences, batch.rows.num_tokens, output.token_ids, strict=True)
        ):
            if sequence.step == batch.step:
                sequence.row, sequence.samples = -1, False
            sequence.computed += num_tokens
            if len(sampled) > 1:
                sequence.computed += len(sampled) - 1
                sequence.fed += len(sampled) - 1
            if not sequence.done:
                first = len(sequence.tokens) == sequence.num_prompt
                if first and output.prompt_logprobs:
                    sequence.prompt_logprobs += output.prompt_logprobs[i]
                if sampled:
                    kept, reason = sequence.accept(sampled)
                    logprobs = output.logprobs[i][: len(kept)] if output.logprobs else ()
                    request_id = sequence.request.request_id
                    if first:
                        self.num_prompt_tokens += sequence.num_prompt
                        cached, told = sequence.num_cached or 0, sequence.prompt_logprobs
                        events.append(TokenEvent(request_id, kept, reason, logprobs, told, cached, first=True))
                    else:
                        events.append(TokenEvent(request_id, kept, reason, logprobs))
                    if reason:
                        sequence.done = True
                        del self._live[request_id]
            if sequence.computed >= sequence.next_full:
                self._remember(sequence)
            if sequence.done or may_have_surplus:
                self._settle(sequence)
        return events

    def _check(self, batch: Batch, output: StepOutput) -> None:
        counts = list(map(len, output.token_ids))
        most = self._most
        if output.step != batch.step or len(counts) != len(batch.rows):
            raise BackendFailed(
                f"the backend returned step {output.step} with {len(counts)} rows, "
                f"step {batch.step} with {len(batch.rows)} rows was due"
            )
        one_each = counts == list(batch.rows.samples)  # True is 1: spares most steps the walk
        if not one_each and any(
            not 1 <= n <= most if samples else n for n, samples in zip(counts, batch.rows.samples, strict=True)
        ):
            raise BackendFailed(f"step {batch.step}: each sampling row brings 1 to {most} tokens, got {counts}")

    def _remember(self, sequence: Sequence) -> None:
        """Tell the cache of blocks that this row has filled; beyond the known tokens nothing counts."""
        size = self.limits.block_size
        last = min(sequence.computed, len(sequence.tokens)) // size
        first = sequence.next_full // size - 1
        self.blocks.computed(sequence.keys.first(last)[first:], sequence.blocks[first:last])
        sequence.next_full = (last + 1) * size

    def _settle(self, sequence: Sequence) -> None:
        """After a row was applied: let go of what the sequence does not need any more."""
        if sequence.leaving:
            self._free(sequence)
        elif sequence.done:
            self._leave(sequence)
        elif surplus := sequence.blocks[(keep := self._num_blocks(sequence)) :]:
            self._hold(sequence, sequence.blocks[:keep])
            self.blocks.give_back(surplus)
            self._kept[sequence.slot] = keep

    def _leave(self, sequence: Sequence) -> None:
        """Release the slot by the next batch; what it holds is free once no step in flight can write to it."""
        (self.decoding if sequence.decodes else self.starting).remove(sequence)
        self._released.append(sequence.slot)
        self._kept.pop(sequence.slot, None)
        sequence.leaving, sequence.decodes = True, False
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Give back what nothing in flight needs; a beginning stays cached longer than what builds on it."""
        in_flight = sequence.row >= 0
        if sequence.slot >= 0 and not (in_flight and self._slots_wait):
            self.slots.give_back([sequence.slot])
            sequence.slot = -1
        if not (in_flight and self._blocks_wait):
            self.blocks.give_back(reversed(sequence.blocks))
            self._hold(sequence, [])
            sequence.next_full = NEVER

    def _preempt(self, victim: Sequence) -> None:
        """Back to the queue with all its tokens; they are computed again later. Only while nothing is in flight."""
        self._leave(victim)
        victim.leaving = False
        victim.prompt_logprobs = ()
        insort(self.waiting, victim, key=_order)
        self.num_preemptions += 1

    # Arithmetic of blocks

    def _hold(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.blocks = blocks
        sequence.capacity = len(blocks) * self.limits.block_size - self.limits.num_lookahead_tokens

    def _num_blocks(self, sequence: Sequence, num_coming: int = 0) -> int:
        """Blocks for its tokens, those a row in flight may bring, and drafts; all at once if it is never preempted."""
        if not self._recomputes:
            return self._max_blocks(sequence)
        return self.limits.blocks_for(len(sequence.tokens) + num_coming + self.limits.num_lookahead_tokens)

    def _max_blocks(self, sequence: Sequence) -> int:
        """Blocks it holds at most: the last token is never fed."""
        return self.limits.blocks_for(sequence.max_length - 1 + self.limits.num_lookahead_tokens)
