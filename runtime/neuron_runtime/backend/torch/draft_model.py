"""What proposes drafts on the device: the tokens that a smaller network thinks likeliest after a sequence's last one.

The backend calls `DraftModel` on the device thread, around a step of the model. It reads the tokens of the mirror and
has a cache of its own, which lies as that of the model does. It never changes an answer. What it computes with is a
`Network`: a second model, or an EAGLE head (`eagle_head.py`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from neuron_runtime.backend.slots import FedRows, IntArray, SlotMirror
from neuron_runtime.backend.torch.cache import KVCache, StepPlan, StepRows
from neuron_runtime.backend.torch.decoder import Decoder, Tap
from neuron_runtime.backend.torch.ranks import ALONE, Ranks
from neuron_runtime.core import NO_TOKEN, Added, Batch

MAX_CAUGHT_UP = 512
"""Tokens at most that a step computes of what the model has seen and this one has not, so that no step takes long."""
MAX_IDLE_STEPS = 256
"""After so many steps without drafts prompts are no longer computed with those of the model."""


class Network(Protocol):
    """cache: computed from its first position on. tap: gets hidden states of the model; None if it needs none."""

    cache: KVCache
    tap: Tap | None

    def hear(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        """What the model has computed in a step: the hidden states that its head reads, and before what the tap got."""

    def forward(self, token_ids: torch.Tensor, plan: StepPlan, before: torch.Tensor | None) -> torch.Tensor:
        """Feed `token_ids` `[tokens]`, storing their keys and values. Returns a state of each.

        before: the state of the position before each token, if these are drafts of its own; None: they are known.
        """

    def likeliest(self, states: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each state."""


class SecondModel:
    """Implements `Network`. It knows tokens alone."""

    tap: Tap | None = None

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self.cache = decoder, cache

    def hear(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        pass

    def forward(self, token_ids: torch.Tensor, plan: StepPlan, before: torch.Tensor | None) -> torch.Tensor:
        return self._decoder.forward(token_ids, plan)

    def likeliest(self, states: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(states).argmax(dim=-1)


class DraftModel:
    def __init__(self, network: Network, mirror: SlotMirror, ranks: Ranks = ALONE) -> None:
        """ranks: those of the model. Each has all of the network, but processors that differ may round to other
        drafts."""
        self._network, self._cache, self._mirror, self._ranks = network, network.cache, mirror, ranks
        self.tap = network.tap
        self._computed: IntArray = np.zeros(len(mirror.live), dtype=np.int64)
        """Of each slot, how many of its tokens are in the cache, or have no place there."""
        self._filled: IntArray = np.zeros(len(self._cache.keys[0]), dtype=np.int64)
        """Of each block, how many of its tokens are, from the first on: a prefix may be shared whose answer had no
        drafts."""
        self._num_idle = 0
        """Steps without drafts."""

    def apply(self, batch: Batch, rows: FedRows) -> None:
        """What the batch changes, before its rows run."""
        if batch.added:
            starts = dict(zip(rows.slots.tolist(), rows.start.tolist(), strict=True))
            for added in batch.added:
                self._enter(added, starts.get(added.slot, 0))
        for _, block in batch.appended_blocks:
            self._filled[block] = 0

    def follow(self, rows: FedRows, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Compute the prompts of a step, behind the model. plan, hidden: those of the model."""
        self._network.hear(plan, hidden)
        self._num_idle += 1
        prompts = np.arange(rows.num_decodes, len(rows.slots))
        computed = self._computed[rows.slots[prompts]]
        behind = np.maximum(rows.start[prompts] - computed, 0)
        prompts = prompts[((behind == 0) | (np.cumsum(behind) <= MAX_CAUGHT_UP)) & (computed < rows.ends[prompts])]
        if self._num_idle <= MAX_IDLE_STEPS and len(prompts):
            slots, ends = rows.slots[prompts], rows.ends[prompts]
            start = self._computed[slots]
            self._forward(self._tokens(slots, start, ends), slots, start, ends - start)
            self._keep(slots, start, ends)

    def fill(self, rows: FedRows) -> FedRows:
        """The rows with drafts in place of those that the device is to make; without any where there is no time. Known
        tokens alone count as computed, so what was rejected is computed anew."""
        if rows.drafts is None or rows.num_drafts is None:
            return rows
        wanted = np.flatnonzero((rows.num_drafts > 0) & (rows.drafts[:, 0] == NO_TOKEN))
        if not len(wanted):
            return rows
        self._num_idle = 0
        ready = self._caught_up(rows, wanted)
        drafts, num_drafts, fed_to = rows.drafts.copy(), rows.num_drafts.copy(), rows.ends.copy()
        late = np.setdiff1d(wanted, ready)
        drafts[late], num_drafts[late], fed_to[late] = NO_TOKEN, 0, rows.start[late] + 1
        num_left = rows.num_drafts[ready]
        slots, ends = rows.slots[ready], rows.start[ready] + 1
        start = self._computed[slots]
        fed, num_tokens = self._tokens(slots, start, ends), ends - start
        self._keep(slots, start, ends)
        states: torch.Tensor | None = None
        for place in range(int(num_left.max(initial=0))):
            states = self._forward(fed, slots, start, num_tokens, states)[torch.from_numpy(np.cumsum(num_tokens) - 1)]
            tokens = self._network.likeliest(states).numpy()
            drafts[ready, place] = tokens
            going = num_left > place + 1
            ready, slots, num_left, fed = ready[going], slots[going], num_left[going], tokens[going]
            start, num_tokens = (start + num_tokens)[going], np.ones(len(ready), dtype=np.int64)
            states = states[torch.from_numpy(going)]
        drafts = self._ranks.first(torch.from_numpy(drafts)).numpy()
        return rows._replace(drafts=drafts, num_drafts=num_drafts, ends=fed_to)

    def _enter(self, added: Added, num_shared: int) -> None:
        """A sequence whose first `num_shared` tokens are in blocks that others computed."""
        size, blocks = self._cache.line_length, np.array(added.blocks, dtype=np.int64)
        shared, own = np.split(blocks, [num_shared // size])
        self._filled[own] = 0
        filled = self._filled[shared]
        full = int(np.cumprod(filled == size).sum())
        self._computed[added.slot] = max(full * size + int(filled[full : full + 1].sum()), self._cache.first)

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

    def _forward(
        self, fed: IntArray, slots: IntArray, start: IntArray, num_tokens: IntArray, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        plan = self._cache.plan(StepRows(start, num_tokens, self._mirror.blocks[slots]))
        return self._network.forward(torch.from_numpy(fed), plan, before)
