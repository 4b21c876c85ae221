"""The mirror of the slots, fed by batches alone: tokens and cache blocks of each slot, and a step's rows as arrays.

Used by the backends that compute; refuses batches that violate the contract. State lies in arrays, so that a step over
many rows costs a few array operations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import KNOWN, NO_TOKEN, Added, BackendLimits, Batch, Rows

IntArray = npt.NDArray[np.int64]


class FedRows(NamedTuple):
    """The rows of a batch as arrays, with the start of every row known. The first `num_decodes` rows decode."""

    slots: IntArray
    start: IntArray
    ends: IntArray
    token: IntArray
    after: IntArray
    samples: npt.NDArray[np.bool_]
    num_decodes: int
    repeats: bool = False
    """Each row feeds the next token of the same decode row of the step before, and no slot has changed hands."""
    drafts: IntArray | None = None
    """`[rows, most drafts]`, padded with NO_TOKEN; None if no row has any."""
    num_drafts: IntArray | None = None
    """Of each row, with `drafts`. Such a row feeds its token and its drafts, and `ends` behind them."""

    def samples_at(self, rows: IntArray) -> IntArray:
        """The position in its sequence of the first token that each of these rows samples."""
        ends: IntArray = self.ends[rows]
        return ends if self.num_drafts is None else ends - self.num_drafts[rows]


class SlotMirror:
    """A caller asks for the rows of a batch (`resolve`), which changes nothing, and then applies it (`apply`)."""

    def __init__(self, limits: BackendLimits) -> None:
        num_slots, self._limits = limits.max_rows, limits
        self.live = np.zeros(num_slots, dtype=bool)
        # One more than the model's length: the token sampled at the last position is known but never fed.
        self.tokens = np.zeros((num_slots, limits.max_model_length + 1), dtype=np.int32)
        self.num_known: IntArray = np.zeros(num_slots, dtype=np.int64)
        """Tokens of each slot that are in `tokens`."""
        max_blocks = limits.blocks_for(limits.max_model_length)
        self.blocks: IntArray = np.zeros((num_slots, max_blocks), dtype=np.int64)
        """The blocks of each slot, in order; any valid block behind them."""
        self._num_blocks: IntArray = np.zeros(num_slots, dtype=np.int64)
        self._capacity: IntArray = np.zeros(num_slots, dtype=np.int64)
        """Tokens that fit the blocks and the model's length."""
        none = np.zeros(0, dtype=np.int64)
        self._previous = FedRows(none, none, none, none, none, none.astype(bool), num_decodes=0)
        """Rows of the batch applied last."""
        self._repeatable: Rows | None = None
        """The same as they came, if all are decode rows."""
        self._num_repeats = 0
        """Steps that may repeat the rows of the last one before a row outgrows its blocks."""

    def resolve(self, batch: Batch) -> FedRows:
        """The rows of the batch that is applied next. Raises IllegalBatch if a row waits for one of another slot."""
        return self._next_rows() if self._repeats(batch) else self._read_rows(batch)

    def apply(self, batch: Batch, rows: FedRows) -> None:
        """Apply the delta and check the rows, which `resolve` has returned.

        Raises IllegalBatch if a slot, block, position or token is impossible.
        """
        self._change(batch)
        self._check(batch.step, rows)
        self._repeatable = None if batch.num_prefills or batch.rows.drafts else batch.rows
        self._previous = rows

    def learn(self, rows: FedRows) -> None:
        """Keep the tokens that rows of the batch applied last have named."""
        named = np.flatnonzero(rows.token != NO_TOKEN)
        self._keep(rows.slots[named], rows.start[named], rows.token[named])

    def record(self, rows: IntArray, tokens: IntArray) -> None:
        """Token `tokens[i]` was sampled by row `rows[i]` of the batch applied last. A row that sampled several comes as
        often, next to each other and in the order of its tokens."""
        slots, positions = self.sampled_positions(rows)
        if self._previous.num_drafts is not None:
            positions = positions + places_in_runs(rows)
        self._keep(slots, positions, tokens)

    def sampled_positions(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Slots of rows of the batch applied last, and the position in the sequence of the first token that each
        samples."""
        return self._previous.slots[rows], self._previous.samples_at(rows)

    def named(self, rows: FedRows, decodes: IntArray | slice) -> IntArray:
        """The tokens that these decode rows feed, as a copy; NO_TOKEN where the step before samples it."""
        token: IntArray = rows.token[decodes].copy()
        if not rows.repeats:
            slots, start = rows.slots[decodes], rows.start[decodes]
            known = np.flatnonzero((token == NO_TOKEN) & (start < self.num_known[slots]))
            token[known] = self.tokens[slots[known], start[known]]
        return token

    def token_ids(self, rows: FedRows) -> IntArray:
        """The tokens that the rows feed, row after row, if the mirror has them all; drafts are never in the mirror."""
        num_tokens = rows.ends - rows.start
        row_of_token = np.repeat(np.arange(len(num_tokens)), num_tokens)
        place = np.arange(len(row_of_token)) - (np.cumsum(num_tokens) - num_tokens)[row_of_token]
        fed: IntArray = self.tokens[rows.slots[row_of_token], rows.start[row_of_token] + place].astype(np.int64)
        if rows.drafts is not None and rows.num_drafts is not None:
            drafted = np.flatnonzero((place > 0) & (rows.num_drafts[row_of_token] > 0))
            fed[drafted] = rows.drafts[row_of_token[drafted], place[drafted] - 1]
        return fed

    def _keep(self, slots: IntArray, positions: IntArray, tokens: IntArray) -> None:
        self.tokens[slots, positions] = tokens
        # Where a slot comes several times, its last position is written last.
        self.num_known[slots] = np.maximum(self.num_known[slots], positions + 1)

    # The delta

    def _change(self, batch: Batch) -> None:
        for slot in batch.released:
            if not self.live[slot]:
                raise IllegalBatch(f"step {batch.step} releases slot {slot}, which is free")
            self.live[slot] = False
        for added in batch.added:
            self._add(batch.step, added)
        for slot, block in batch.appended_blocks:
            self._append_block(batch.step, slot, block)

    def _add(self, step: int, added: Added) -> None:
        slot, length, longest = added.slot, len(added.token_ids), self._limits.max_model_length
        if not 0 <= slot < len(self.live) or self.live[slot]:
            raise IllegalBatch(f"step {step} adds a sequence at slot {slot}, which is taken or does not exist")
        if not 0 < length <= longest:
            raise IllegalBatch(f"step {step} adds {length} tokens at slot {slot}; max {longest}")
        self.live[slot] = True
        self.tokens[slot, :length] = added.token_ids
        self.num_known[slot] = length
        self._hold(slot, 0)
        self.blocks[slot] = 0
        for block in added.blocks:
            self._append_block(step, slot, block)

    def _append_block(self, step: int, slot: int, block: int) -> None:
        count = self._num_blocks[slot]
        if not self.live[slot] or count == self.blocks.shape[1] or not 0 <= block < self._limits.num_blocks:
            raise IllegalBatch(f"step {step} gives block {block} to slot {slot}, which cannot take it")
        self.blocks[slot, count] = block
        self._hold(slot, count + 1)

    def _hold(self, slot: int, num_blocks: int) -> None:
        self._num_blocks[slot], self._num_repeats = num_blocks, 0
        self._capacity[slot] = min(num_blocks * self._limits.block_size, self._limits.max_model_length)

    # The rows

    def _repeats(self, batch: Batch) -> bool:
        """See `FedRows.repeats`."""
        rows, before = batch.rows, self._repeatable
        return (
            before is not None
            and not (batch.num_prefills or batch.released or batch.added or rows.drafts)
            and (rows.slot, rows.num_tokens, rows.samples) == (before.slot, before.num_tokens, before.samples)
            and rows.after == tuple(range(len(rows)))
        )

    def _next_rows(self) -> FedRows:
        before = self._previous
        if not before.repeats:
            token = np.full(len(before.slots), NO_TOKEN, dtype=np.int64)
            before = before._replace(token=token, after=np.arange(len(token)), repeats=True)
        return before._replace(start=before.ends, ends=before.ends + 1)

    def _read_rows(self, batch: Batch) -> FedRows:
        rows, previous = batch.rows, self._previous
        slots = np.array(rows.slot, dtype=np.int64)
        start = np.array(rows.start, dtype=np.int64)
        after = np.array(rows.after, dtype=np.int64)
        waits = np.flatnonzero(after != KNOWN)
        if len(waits):
            if after.max() >= len(previous.slots) or (previous.slots[after[waits]] != slots[waits]).any():
                raise IllegalBatch(f"step {batch.step} waits for a row of another slot")
            if previous.num_drafts is not None and previous.num_drafts[after[waits]].any():
                raise IllegalBatch(f"step {batch.step} waits for a row with drafts")
            # One token a row: a row ends where its tokens end, whether it sampled or not.
            start[waits] = previous.ends[after[waits]]
        num_tokens = np.array(rows.num_tokens, dtype=np.int64)
        drafts, num_drafts = self._read_drafts(batch, num_tokens, after) if rows.drafts else (None, None)
        return FedRows(
            slots=slots,
            start=start,
            ends=start + num_tokens,
            token=np.array(rows.token, dtype=np.int64),
            after=after,
            samples=np.array(rows.samples, dtype=bool),
            num_decodes=batch.num_decodes,
            drafts=drafts,
            num_drafts=num_drafts,
        )

    def _read_drafts(self, batch: Batch, num_tokens: IntArray, after: IntArray) -> tuple[IntArray, IntArray]:
        given = batch.rows.drafts
        num_drafts = np.array([len(one) for one in given], dtype=np.int64)
        illegal = (num_drafts > self._limits.max_drafts) | (num_drafts > 0) & (
            (np.arange(len(given)) >= batch.num_decodes) | (num_tokens != 1 + num_drafts) | (after != KNOWN)
        )
        if illegal.any():
            raise IllegalBatch(
                f"step {batch.step} row {int(np.flatnonzero(illegal)[0])} has drafts: it must decode, wait for no row, "
                f"and feed its token and at most {self._limits.max_drafts} drafts"
            )
        drafts = np.full((len(given), int(num_drafts.max())), NO_TOKEN, dtype=np.int64)
        for row, of_row in enumerate(given):
            drafts[row, : len(of_row)] = of_row
        return drafts, num_drafts

    def _check(self, step: int, rows: FedRows) -> None:
        if rows.repeats and self._num_repeats:
            self._num_repeats -= 1
            return
        slots, start, ends = rows.slots, rows.start, rows.ends
        room = self._capacity[slots] - ends
        comes = (rows.token != NO_TOKEN) | (rows.after != KNOWN)
        comes[rows.num_decodes :] = False  # prefill rows feed tokens of the mirror
        known = ends if rows.num_drafts is None else ends - rows.num_drafts
        illegal = ~self.live[slots] | (ends <= start) | (start < 0) | (known > self.num_known[slots]) & ~comes
        illegal |= room < 0
        if illegal.any():
            row = int(np.flatnonzero(illegal)[0])
            raise IllegalBatch(
                f"step {step} row {row} feeds positions {start[row]} to {ends[row]} of slot {slots[row]}, which "
                f"has {self.num_known[slots[row]]} tokens in {self._num_blocks[slots[row]]} blocks"
            )
        self._num_repeats = int(room.min()) if len(room) else 0


def places_in_runs(rows: IntArray) -> IntArray:
    """For each element, how many equal ones are right before it."""
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    places: IntArray = np.arange(len(rows)) - np.repeat(begins, np.diff(begins, append=len(rows)))
    return places
