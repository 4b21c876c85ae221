"""The waiting queue and the running set of the scheduler.

They move sequences, assign slots and update phases; the scheduler decides what to move and when.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from neuron_runtime.core import Added, BackendLimits
from neuron_runtime.engine.adapters import Places
from neuron_runtime.engine.pool import Pool
from neuron_runtime.engine.sequence import Phase, Sequence

by_order = attrgetter("order")
by_slot = attrgetter("slot")


class WaitingQueue(list[Sequence]):
    """Sequences without a slot, in order of service."""

    def insert_in_order(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        insort(self, sequence, key=by_order)


class RunningSet:
    """Sequences with a slot. A sequence is in `prefilling` or `decoding`, according to its phase."""

    def __init__(self, limits: BackendLimits) -> None:
        self.slots = Pool(limits.max_rows)
        self.places = Places(limits.max_adapters)
        self._begins_with_prefill = limits.begins_with_prefill
        self.prefilling: list[Sequence] = []
        """In order of service."""
        self.decoding: list[Sequence] = []
        """In slot order."""
        self.added: list[Added] = []
        self.released: list[int] = []
        """Changes of slots in the next batch."""

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.prefilling
        yield from self.decoding

    def startable(self, waiting: WaitingQueue) -> list[Sequence]:
        """The first waiting sequences for which there are slots, and places for their adapters."""
        if self.places.exist:
            return self.places.startable(waiting, self.slots.num_free)
        return waiting[: self.slots.num_free]

    def admit(self, sequence: Sequence) -> None:
        """Assign the lowest free slot to a startable sequence that has its blocks."""
        (sequence.slot,) = self.slots.take(1)
        self.places.take(sequence)
        if sequence.num_unscheduled_tokens > 1 or not sequence.num_computed_tokens or self._begins_with_prefill:
            sequence.phase = Phase.PREFILL
            insort(self.prefilling, sequence, key=by_order)
        else:
            self._decode(sequence)
        request = sequence.request
        self.added.append(
            Added(
                slot=sequence.slot,
                token_ids=tuple(sequence.tokens),
                num_prompt_tokens=sequence.num_prompt,
                sampling=request.sampling,
                blocks=tuple(sequence.blocks),
                adapter=sequence.place,
                second_at=request.second_at,
                pictures=request.pictures,
            )
        )

    def finish_prefill(self, sequence: Sequence) -> None:
        """Its next row is a decode row."""
        self.prefilling.remove(sequence)
        self._decode(sequence)

    def release(self, sequence: Sequence) -> None:
        """The next batch releases its slot; the number is free once `free_slot` is called."""
        (self.decoding if sequence.phase is Phase.DECODE else self.prefilling).remove(sequence)
        self.released.append(sequence.slot)
        sequence.phase = Phase.LEAVING

    def free_slot(self, sequence: Sequence) -> None:
        self.slots.give_back([sequence.slot])
        sequence.slot = -1

    def _decode(self, sequence: Sequence) -> None:
        sequence.phase = Phase.DECODE
        insort(self.decoding, sequence, key=by_slot)
