"""The block manager: the KV blocks of every sequence, and their sharing through the prefix cache.

Called by the scheduler to check what fits, to allocate and to free. It collects the block changes for the next batch.
It knows sequences and limits, but no rows and steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from neuron_runtime.core import BackendLimits
from neuron_runtime.engine.cache_events import CacheEvents
from neuron_runtime.engine.prefix_cache import Prefix, PrefixCache
from neuron_runtime.engine.sequence import NEVER, Sequence
from neuron_runtime.engine.stats import EngineStats


class BlockManager:
    """Maintains blocks, capacity, horizon and `next_full` of sequences; a block is free, cached, or held by them."""

    def __init__(self, limits: BackendLimits, stats: EngineStats, events: CacheEvents | None = None) -> None:
        self.cache = PrefixCache(limits.num_blocks, None if events is None else events.removed)
        self._events = events
        self.appended: list[tuple[int, int]] = []
        """Changes of blocks in the next batch, see `Batch`."""
        self._limits = limits
        self._stats = stats
        self._block_size = limits.block_size
        self._recomputes_all = limits.recomputes(limits.longest_sequence)
        # At least one token is fed; two if steps do not mix phases, so that the row is a prefill row.
        self._min_fed = 1 if limits.mixes_phases else 2

    # Admission

    def num_spare(self, running: Iterable[Sequence]) -> int:
        """Free blocks, minus one for each running sequence that may still grow."""
        return self.cache.num_free - sum(len(s.blocks) < self._most(s) for s in running)

    def secures(self, running: Iterable[Sequence], sequence: Sequence) -> bool:
        """Whether all that are never preempted can grow to their full length, and any one of the others beside them."""
        if self._recomputes_all:
            return True
        kept, growing = 0, 0
        for one in (*running, sequence):
            if self.is_preemptible(one):
                growing = max(growing, self._most(one))
            else:
                kept += self._most(one)
        return kept + growing <= self._limits.num_blocks

    def is_preemptible(self, sequence: Sequence) -> bool:
        """Whether it can be computed again at every length that it may reach."""
        return self._recomputes_all or self._limits.recomputes(sequence.max_length)

    def find(self, sequence: Sequence) -> Prefix:
        """The part of a waiting sequence that is cached or being computed."""
        max_found = 0
        # With prompt logprobs the whole prompt must be computed.
        if self._limits.shares_prefixes and sequence.request.sampling.prompt_logprobs is None:
            max_found = max(len(sequence.tokens) - self._min_fed, 0) // self._block_size
        prefix = self.cache.find(sequence.keys.first(max_found), sequence.order)
        usable = len(prefix.blocks)
        while not self._may_begin(sequence, usable * self._block_size):
            usable -= 1
        return prefix if usable == len(prefix.blocks) else self.cache.find(sequence.keys.first(usable), sequence.order)

    def _may_begin(self, sequence: Sequence, start: int) -> bool:
        """Whether the first row of a sequence may start here."""
        return self._limits.reaches(len(sequence.tokens), start) and not sequence.cuts_picture(start)

    def num_claimed(self, sequence: Sequence, prefix: Prefix) -> int:
        """Number of spare blocks that a waiting sequence takes when it is admitted."""
        needed = self._needed(sequence)
        known = len(prefix.blocks) + prefix.num_coming
        return needed - known + prefix.num_idle + (needed < self._most(sequence))

    def allocate(self, sequence: Sequence, cached: list[int]) -> None:
        """Allocate blocks for all tokens of a waiting sequence; `cached` are the computed blocks of its prefix."""
        self.cache.share(cached)
        self._hold(sequence, cached + self.cache.take(self._needed(sequence) - len(cached)))
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = len(cached) * self._block_size
        if self._limits.shares_prefixes:
            self._expect(sequence, len(cached))

    def _expect(self, sequence: Sequence, num_cached: int) -> None:
        """Register blocks that are being computed; counts cache queries and hits on first admission."""
        last = len(sequence.tokens) // self._block_size
        keys = sequence.keys.first(last)
        self.cache.expect(keys[num_cached:], sequence.blocks[num_cached:last], sequence.order)
        sequence.next_full = sequence.num_computed_tokens + self._block_size
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed_tokens
            if sequence.request.sampling.prompt_logprobs is None:
                self._stats.num_prefix_queries_total += sequence.num_prompt
            self._stats.num_prefix_hits_total += sequence.num_cached

    # Growth

    def append(self, sequences: list[Sequence]) -> bool:
        """Allocate the missing blocks for the next row of each; False and no change if too few are free."""
        missing = [max(self._needed(s, s.samples) - len(s.blocks), 0) for s in sequences]
        if sum(missing) > self.cache.num_free:
            return False
        for sequence, count in zip(sequences, missing, strict=True):
            blocks = self.cache.take(count)
            self._hold(sequence, sequence.blocks + blocks)
            self.appended += [(sequence.slot, block) for block in blocks]
        return True

    def make_room(self, sequence: Sequence, num_drafts: int) -> int:
        """Allocate free blocks for drafts behind its tokens; returns for how many of them there is room.

        It keeps the blocks if the drafts are rejected: its next tokens need them.
        """
        needed = self._limits.blocks_for(len(sequence.tokens) + num_drafts + self._limits.num_lookahead_tokens)
        blocks = self.cache.take(max(min(needed - len(sequence.blocks), self.cache.num_free), 0))
        if blocks:
            self._hold(sequence, sequence.blocks + blocks)
            self.appended += [(sequence.slot, block) for block in blocks]
        return min(num_drafts, sequence.capacity - len(sequence.tokens))

    def remember(self, sequence: Sequence) -> None:
        """Add blocks that a row has filled to the cache; tokens computed beyond the known ones do not count."""
        size = self._block_size
        last = min(sequence.num_computed_tokens, len(sequence.tokens)) // size
        first = sequence.next_full // size - 1
        keys = sequence.keys.first(last)
        found = self.cache.computed(keys[first:], sequence.blocks[first:last])
        if self._events is not None and found:
            request = sequence.request
            places = (first + place for place in found)
            self._events.stored(
                keys, places, sequence.tokens, request.adapter, request.cache_salt, pictures=request.pictures
            )
        sequence.next_full = (last + 1) * size

    def free(self, sequence: Sequence) -> None:
        """Return all its blocks, the last first, so that a prefix stays cached longer than its continuation."""
        self.cache.give_back(reversed(sequence.blocks))
        self._hold(sequence, [])
        sequence.next_full = NEVER

    # Arithmetic

    def _hold(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.blocks = blocks
        sequence.capacity = len(blocks) * self._block_size - self._limits.num_lookahead_tokens
        sequence.horizon = min(sequence.capacity - 1, sequence.max_length - 2)

    def _needed(self, sequence: Sequence, with_coming: bool = False) -> int:
        """Blocks for its tokens and the token of the row in flight."""
        return self._limits.blocks_for(len(sequence.tokens) + with_coming + self._limits.num_lookahead_tokens)

    def _most(self, sequence: Sequence) -> int:
        """Maximum number of its blocks; the last token is never fed."""
        return self._limits.blocks_for(sequence.max_length - 1 + self._limits.num_lookahead_tokens)
