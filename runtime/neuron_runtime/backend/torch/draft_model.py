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
from neuron_runtime.core import NO_TOKEN, Batch

MAX_CAUGHT_UP = 512
"""Tokens at most that a step computes of what the model has seen and this one has not, so that no step takes long."""
MAX_IDLE_STEPS = 256
"""After so many steps without drafts prompts are no longer computed with those of the model."""


class DraftModel:
    def __init__(self, decoder: Decoder, cache: KVCache, mirror: SlotMirror, ranks: Ranks = ALONE) -> None:
        """ranks: those of the model. Each has all of this one, but processors that differ may round to other drafts."""
        self._decoder, self._cache, self._mirror, self._ranks = decoder, cache, mirror, ranks
        self._computed: IntArray = np.zeros(len(mirror.live), dtype=np.int64)
        """Of each slot, how many of its tokens are in the cache. A shared prefix counts: its blocks are those of the
        sequence that computed it."""
        self._num_idle = 0
        """Steps without drafts."""

    def follow(self, batch: Batch, rows: FedRows) -> None:
        """Compute the prompts of a step, as the model does."""
        if len(rows.slots) > rows.num_decodes or batch.added:
            starts = dict(zip(rows.slots.tolist(), rows.start.tolist(), strict=True))
            for added in batch.added:
                self._computed[added.slot] = starts.get(added.slot, 0)
        self._num_idle += 1
        prompts = np.arange(rows.num_decodes, len(rows.slots))
        prompts = prompts[self._computed[rows.slots[prompts]] == rows.start[prompts]]
        if self._num_idle <= MAX_IDLE_STEPS and len(prompts):
            slots, start, ends = rows.slots[prompts], rows.start[prompts], rows.ends[prompts]
            self._forward(self._tokens(slots, start, ends), slots, start, ends - start)
            self._computed[slots] = ends

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
        self._computed[slots] = ends
        for place in range(int(num_left.max(initial=0))):
            tokens = self._likeliest(fed, slots, start, num_tokens)
            drafts[ready, place] = tokens
            going = num_left > place + 1
            ready, slots, num_left, tokens = ready[going], slots[going], num_left[going], tokens[going]
            start, num_tokens, fed = (start + num_tokens)[going], np.ones(len(ready), dtype=np.int64), tokens
        return rows._replace(drafts=self._ranks.first(torch.from_numpy(drafts)).numpy())

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
                self._computed[slot] += budget
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
