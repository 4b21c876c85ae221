"""The backend's mirror of the slots, fed by batches alone: tokens and cache lines of each slot.

Used on the device thread only. It resolves the rows of a batch (which tokens, from where) and records sampled tokens,
so a row that waits for the step in flight finds its token here. It refuses batches that violate the contract.
"""

from __future__ import annotations

import numpy as np

from neuron_runtime.backend.torch.cache import IntArray, StepRows
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import KNOWN, NO_TOKEN, Added, BackendLimits, Batch


class SlotMirror:
    """State per slot as arrays, so that a step over many rows costs a few array operations."""

    def __init__(self, limits: BackendLimits) -> None:
        self._limits = limits
        self._live = np.zeros(limits.max_rows, dtype=bool)
        # One more than the model's length: the token sampled at the last position is known but never fed.
        self.tokens = np.zeros((limits.max_rows, limits.max_model_length + 1), dtype=np.int32)
        self._num_known = np.zeros(limits.max_rows, dtype=np.int64)
        max_lines = -(-limits.max_model_length // limits.block_size)
        self._lines = np.zeros((limits.max_rows, max_lines), dtype=np.int64)
        self._num_lines = np.zeros(limits.max_rows, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(limits.max_rows, dtype=np.int64)
        self.num_prompt_logprobs = np.full(limits.max_rows, -1, dtype=np.int64)
        """Per slot; -1: none requested, or already reported."""
        self._slots: IntArray = np.zeros(0, dtype=np.int64)
        self._ends: IntArray = np.zeros(0, dtype=np.int64)

    def apply(self, batch: Batch) -> tuple[StepRows, IntArray]:
        """Apply the delta and resolve the rows.

        Returns:
            The rows, and the token ids they feed, row after row.

        Raises:
            IllegalBatch: a slot, block, position or token is impossible.
        """
        for slot in batch.released:
            if not self._live[slot]:
                raise IllegalBatch(f"step {batch.step} releases slot {slot}, which is free")
            self._live[slot] = False
        for slot, num_kept in batch.kept_blocks:
            if not (self._live[slot] and 0 < num_kept <= self._num_lines[slot]):
                raise IllegalBatch(f"step {batch.step} keeps {num_kept} blocks of slot {slot}, which has fewer")
            self._num_lines[slot] = num_kept
        for added in batch.added:
            self._add(batch.step, added)
        for slot, block in batch.appended_blocks:
            self._append_line(batch.step, slot, block)
        return self._resolve(batch)

    def record(self, rows: IntArray, tokens: IntArray) -> None:
        """Token `tokens[i]` was sampled by row `rows[i]` of the batch applied last."""
        slots, positions = self._slots[rows], self._ends[rows]
        self.tokens[slots, positions] = tokens
        self._num_known[slots] = positions + 1

    def sampled_positions(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Slots of the given rows of the last batch, and the position in the sequence that each would sample."""
        return self._slots[rows], self._ends[rows]

    def prompt_targets(self, batch: Batch) -> list[tuple[int, IntArray]]:
        """Rows of the batch applied last that feed prompt tokens and request prompt log-probabilities.

        Returns:
            Each row with the tokens that follow the ones it feeds, up to the end of the prompt.
        """
        found = []
        for row in np.flatnonzero(self.num_prompt_logprobs[self._slots] >= 0).tolist():
            slot, end = self._slots[row], self._ends[row]
            begin = end - batch.rows.num_tokens[row]
            targets = self.tokens[slot, begin + 1 : min(end + 1, self._num_prompt_tokens[slot])]
            if len(targets):
                found.append((row, targets.astype(np.int64)))
        return found

    def _add(self, step: int, added: Added) -> None:
        slot, length = added.slot, len(added.token_ids)
        if not 0 <= slot < self._limits.max_rows or self._live[slot]:
            raise IllegalBatch(f"step {step} adds a sequence at slot {slot}, which is taken or does not exist")
        if not 0 < length <= self._limits.max_model_length:
            raise IllegalBatch(f"step {step} adds {length} tokens at slot {slot}; max {self._limits.max_model_length}")
        self._live[slot] = True
        self.tokens[slot, :length] = added.token_ids
        self._num_known[slot] = length
        self._num_lines[slot] = 0
        for block in added.blocks:
            self._append_line(step, slot, block)
        self._num_prompt_tokens[slot] = added.num_prompt_tokens
        # A sequence that has output tokens was preempted, after its prompt had been reported.
        wanted = None if length > added.num_prompt_tokens else added.sampling.prompt_logprobs
        self.num_prompt_logprobs[slot] = -1 if wanted is None else wanted

    def _append_line(self, step: int, slot: int, block: int) -> None:
        count = self._num_lines[slot]
        if not self._live[slot] or count == self._lines.shape[1] or not 0 <= block < self._limits.num_blocks:
            raise IllegalBatch(f"step {step} gives block {block} to slot {slot}, which cannot take it")
        self._lines[slot, count] = block
        self._num_lines[slot] = count + 1

    def _resolve(self, batch: Batch) -> tuple[StepRows, IntArray]:
        rows = batch.rows
        slots = np.array(rows.slot, dtype=np.int64)
        start = np.array(rows.start, dtype=np.int64)
        num_tokens = np.array(rows.num_tokens, dtype=np.int64)
        token = np.array(rows.token, dtype=np.int64)
        after = np.array(rows.after, dtype=np.int64)
        waits = np.flatnonzero(after != KNOWN)
        if len(waits):
            if after.max() >= len(self._slots) or (self._slots[after[waits]] != slots[waits]).any():
                raise IllegalBatch(f"step {batch.step} waits for a row of another slot")
            # One token a row: a row ends where its tokens end, whether it sampled or not.
            start[waits] = self._ends[after[waits]]
        ends = start + num_tokens
        named = np.flatnonzero(token != NO_TOKEN)
        self.tokens[slots[named], start[named]] = token[named]
        self._num_known[slots[named]] = np.maximum(self._num_known[slots[named]], ends[named])
        illegal = (
            ~self._live[slots]
            | (num_tokens < 1)
            | (start < 0)
            | (ends > self._num_known[slots])
            | (ends > self._num_lines[slots] * self._limits.block_size)
            | (ends > self._limits.max_model_length)
        )
        if illegal.any():
            row = int(np.flatnonzero(illegal)[0])
            raise IllegalBatch(
                f"step {batch.step} row {row} feeds positions {start[row]} to {ends[row]} of slot {slots[row]}, which "
                f"has {self._num_known[slots[row]]} tokens in {self._num_lines[slots[row]]} blocks"
            )
        self._slots, self._ends = slots, ends
        row_of_token = np.repeat(np.arange(len(slots)), num_tokens)
        position = np.arange(len(row_of_token)) - (np.cumsum(num_tokens) - num_tokens)[row_of_token]
        token_ids = self.tokens[slots[row_of_token], start[row_of_token] + position].astype(np.int64)
        return StepRows(start=start, num_tokens=num_tokens, lines=self._lines[slots]), token_ids
