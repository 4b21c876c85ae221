"""A second, smaller model that proposes drafts: the tokens that it thinks likeliest after a sequence's last one.

The backend calls it on the device thread, before a step whose rows have drafts for the device to make. It reads the
tokens of the mirror and has a cache of its own, which lies as that of the model does. It never changes an answer.
"""

from __future__ import annotations

import numpy as np
import torch

from neuron_runtime.backend.slots import FedRows, IntArray, SlotMirror
from neuron_runtime.backend.torch.cache import KVCache, StepRows
from neuron_runtime.backend.torch.decoder import Decoder
from neuron_runtime.backend.torch.ranks import ALONE, Ranks
from neuron_runtime.core import NO_TOKEN, Added, Batch

MAX_CAUGHT_UP = 512
"""Tokens at most that a step computes of what the model has seen and this one has not, so that no step takes long."""
MAX_IDLE_STEPS = 256
"""After so many steps without drafts prompts are no longer computed with those of the model."""


class DraftModel:
    def __init__(self, decoder: Decoder, cache: KVCache, mirror: SlotMirror, ranks: Ranks = ALONE) -> None:
        """ranks: those of the model. Each has all of this one, but processors that differ may round to other drafts."""
        self._decoder, self._cache, self._mirror, self._ranks = decoder, cache, mirror, ranks
        self._computed: IntArray = np.zeros(len(mirror.live), dtype=np.int64)
        """Of each slot, how many of its tokens are in the cache."""
        self._filled: IntArray = np.zeros(len(cache.keys[0]), dtype=np.int64)
        """Of each block, how many of its tokens are, from the first on: a prefix may be shared whose answer had no
        drafts."""
        self._num_idle = 0
        """Steps without drafts."""

    def follow(self, batch: Batch, rows: FedRows) -> None:
        """Compute the prompts of a step, as the model does."""
        if batch.added:
            starts = dict(zip(rows.slots.tolist(), rows.start.tolist(), strict=True))
            for added in batch.added:
                self._enter(added, starts.get(added.slot, 0))
        for _, block in batch.appended_blocks:
            self._filled[block] = 0
        self._num_idle += 1
        prompts = np.arange(rows.num_decodes, len(rows.slots))
        behind = rows.start[prompts] - self._computed[rows.slots[prompts]]
        prompts = prompts[(behind == 0) | (np.cumsum(behind) <= MAX_CAUGHT_UP)]
        if self._num_idle <= MAX_IDLE_STEPS and len(prompts):
            slots, ends = rows.slots[prompts], rows.ends[prompts]
            start = self._computed[slots]
            self._forward(self._tokens(slots, start, ends), slots, start, ends - start)
            self._keep(slots, start, ends)

    def fill(self, rows: FedRows) -> FedRows:
        """The rows with drafts in place of those that the device is to make. Only known tokens count as computed, so
        what was rejected is computed anew."""
        if rows.drafts is None or rows.num_drafts is None:
            return rows
        wanted = np.flatnonzero((rows.num_drafts > 0) & (rows.drafts[:, 0] == NO_TOKEN))
        if not len(wanted):
            return rows
        self._num_idle = 0
        drafts = rows.drafts.copy()
        drafts[wanted] = np.where(drafts[wanted] == NO_TOKEN, 0, drafts[wanted])  # any token, where there is no time
        ready = self._caught_up(rows, wanted)
        num_left = rows.num_drafts[ready]
        slots, ends = rows.slots[ready], rows.start[ready] + 1
        start = self._computed[slots]
        fed, num_tokens = self._tokens(slots, start, ends), ends - start
        self._keep(slots, start, ends)
        for place in range(int(num_left.max(initial=0))):
            tokens = self._likeliest(fed, slots, start, num_tokens)
            drafts[ready, place] = tokens
            going = num_left > place + 1
            ready, slots, num_left, tokens = ready[going], slots[going], num_left[going], tokens[going]
            start, num_tokens, fed = (start + num_tokens)[going], np.ones(len(ready), dtype=np.int64), tokens
        return rows._replace(drafts=self._ranks.first(torch.from_numpy(drafts)).numpy())

    def _enter(self, added: Added, num_shared: int) -> None:
        """A sequence whose first `num_shared` tokens are in blocks that others computed."""
        size, blocks = self._cache.line_length, np.array(added.blocks, dtype=np.int64)
        shared, own = np.split(blocks, [num_shared // size])
        self._filled[own] = 0
        filled = self._filled[shared]
        full = int(np.cumprod(filled == size).sum())
        self._computed[added.slot] = full * size + int(filled[full : full + 1].sum())

    def _keep(self, slots: IntArray, start: IntArray, ends: IntArray) -> None:
        """The tokens from `start` to `ends` of these slots are in the cache, as are those before."""
        self._computed[slots] = ends
        size = self._cache.line_length
        for slot, begin, end in zip(slots, start // size, ends, strict=True):
            places = np.arange(begin, -(-end // size))
            blocks = self._mirror.blocks[slot, places]
            self._filled[blocks] = np.maximum(self._filled[blocks], np.minimum(end - places * size, size))

    def _caught_up(self, rows: FedRows, wanted: IntArray) -> IntArray:
        """Those of the rows that this step can draft for. The others are brought nearer, the first ones first."""
        behind = rows.start[wanted] + 1 - self._computed[rows.slots[wanted]]
        budget, ready = MAX_CAUGHT_UP, []
        for row, missing in zip(wanted.tolist(), behind.tolist(), strict=True):
            if missing <= budget:
                ready.append(row)
            elif budget:
                slot = int(rows.slots[row])
                start = int(self._computed[slot])
                one, begin, end = (np.array([value]) for value in (slot, start, start + budget))
                self._forward(self._tokens(one, begin, end), one, begin, end - begin)
                self._keep(one, begin, end)
            budget = max(budget - missing, 0)
        return np.array(ready, dtype=np.int64)

    def _tokens(self, slots: IntArray, start: IntArray, ends: IntArray) -> IntArray:
        """Those of the sequences in these slots from `start` to `ends`, row after row."""
        if not len(slots):
            return np.zeros(0, dtype=np.int64)
        tokens = self._mirror.tokens
        parts = [tokens[slot, at:end] for slot, at, end in zip(slots, start, ends, strict=True)]
        return np.concatenate(parts).astype(np.int64)

    def _likeliest(self, fed: IntArray, slots: IntArray, start: IntArray, num_tokens: IntArray) -> IntArray:
        """The likeliest token after each row."""
        hidden = self._forward(fed, slots, start, num_tokens)
        last = torch.from_numpy(np.cumsum(num_tokens) - 1)
        found: IntArray = self._decoder.logits(hidden[last]).argmax(dim=-1).numpy()
        return found

    def _forward(self, fed: IntArray, slots: IntArray, start: IntArray, num_tokens: IntArray) -> torch.Tensor:
        plan = self._cache.plan(StepRows(start, num_tokens, self._mirror.blocks[slots]))
        return self._decoder.forward(torch.from_numpy(fed), plan)
