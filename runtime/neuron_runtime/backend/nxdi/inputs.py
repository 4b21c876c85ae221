"""Batches as calls of NxD Inference: the mirror of the slots, and the arguments of `forward()`.

Used by the backend on the engine's thread, while the step before runs. NxD Inference takes one prompt per call, or one
token for each of a fixed number of sequences; whether a call is a prompt it decides from positions. What it would pad
or sort by itself, at a cost that grows with the square of the rows, arrives padded and sorted here. Tensors are new for
each call, because NxD Inference keeps some of them and writes to others; only a block table that no row has outgrown is
passed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from neuron_runtime.backend.nxdi.buckets import Decode, Graph, Prefill, decode_graph, prefill_graph
from neuron_runtime.backend.nxdi.sampling_rows import DeviceParameters, FloatArray, IntArray
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import KNOWN, NO_TOKEN, Added, Batch, Rows

NO_SLOT = -1
"""In a slot mapping: keys and values of the token are not kept."""
MAX_SEQUENCE_ID = 2**30
"""Identifiers of sequences start again here; NxD Inference casts them to int32."""


class StepRows(NamedTuple):
    """The rows of a batch as arrays, with the start of every row known."""

    slots: IntArray
    start: IntArray
    ends: IntArray
    token: IntArray
    after: IntArray
    samples: npt.NDArray[np.bool_]
    prefills: npt.NDArray[np.bool_]
    """Rows that take a call of their own."""
    decodes: IntArray
    """Indices of the other rows, which share a call."""
    repeats: bool = False
    """Each row feeds the next token of the same decode row of the step before, and no slot has changed hands."""


@dataclass(slots=True)
class Call:
    """One call of `forward()`."""

    graph: Graph
    arguments: dict[str, torch.Tensor]
    rows: IntArray
    """The rows of the batch that the call computes."""
    places: IntArray
    """Index of each of these rows in the output."""
    num_tokens: int
    """Tokens that these rows feed."""
    tokens: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Of a decode call: the token of each of these rows; NO_TOKEN if the step before samples it."""
    after: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """For each of these rows, its row in the step before."""
    source: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """For each row of the call, the index of the row it holds, or repeats."""

    def feed(self, previous: IntArray) -> None:
        """Put in the tokens that the step before has sampled; `previous` holds one for each of its rows."""
        if not len(self.source):
            return
        waits = np.flatnonzero(self.tokens == NO_TOKEN)
        if len(waits):
            self.tokens[waits] = previous[self.after[waits]]
        self.arguments["input_ids"] = _column(self.tokens[self.source])


@dataclass(slots=True)
class _Places:
    """What decode steps with the same rows have in common."""

    places: IntArray
    """Index of each decode row in the call."""
    source: IntArray
    """For each row of the call, the index of the row it holds, or repeats."""
    of_place: IntArray
    """For each row of the call, its slot."""
    identifiers: IntArray
    """For each row of the call, the number of its sequence."""
    parameters: FloatArray
    """For each row of the call, how it is sampled."""
    num_rows: int
    """See `decode_graph`."""
    position: int
    """The largest one of the newest call."""
    table: torch.Tensor | None = None
    """The block table of the newest call, unless a row got a block since."""


class Inputs:
    """The mirror of the slots, as arrays, so that a step over many rows costs a few array operations."""

    def __init__(self, settings: Settings) -> None:
        num_slots, self._settings = settings.max_rows, settings
        self._block_size = settings.block_size
        self._live = np.zeros(num_slots, dtype=bool)
        self._started = np.zeros(num_slots, dtype=bool)
        """Slots with keys and values that a decode step must not lose."""
        self._tokens = np.zeros((num_slots, settings.max_model_length), dtype=np.int64)
        """Known when the sequence was added; later ones come with the rows."""
        self._num_known = np.zeros(num_slots, dtype=np.int64)
        self._blocks = np.zeros((num_slots, -(-settings.max_model_length // settings.block_size)), dtype=np.int64)
        self._num_blocks = np.zeros(num_slots, dtype=np.int64)
        self._capacity = np.zeros(num_slots, dtype=np.int64)
        """Tokens that fit the blocks and the model's length."""
        self._parameters = DeviceParameters(num_slots, settings.global_topk)
        self._sequence_ids = np.zeros(num_slots, dtype=np.int64)
        self._next_id = num_slots
        self._resolved: tuple[Batch | None, StepRows, list[Graph]] = (None, _NO_ROWS, [])
        self._previous = _NO_ROWS
        """Rows of the batch applied last."""
        self._repeatable: Rows | None = None
        """The same as they came, if all are decode rows."""
        self._places: _Places | None = None
        """Of the decode call made last."""
        self._num_repeats = 0
        """Steps that may repeat the rows of the last one before a row outgrows its blocks."""

    def graphs(self, batch: Batch) -> list[Graph]:
        """The graphs that the batch will run, before or after it is applied.

        Raises:
            IllegalBatch: no graph fits a row.
        """
        return self._resolve(batch)[1]

    def apply(self, batch: Batch) -> tuple[list[Call], StepRows]:
        """Apply the delta; returns the calls in the order in which they must run, and the rows.

        The decode call comes first: with slots it overwrites the lines of all sequences that it does not hold.

        Raises:
            IllegalBatch: a slot, block, position or token is impossible.
        """
        rows, graphs = self._resolve(batch)
        self._change(batch)
        self._check(batch.step, rows)
        calls: list[Call] = []
        if len(rows.decodes):
            places = self._places
            if places is None or not rows.repeats:
                places = self._places = self._placed(batch.step, rows, graphs[0])
            else:
                places.position += 1
            calls.append(self._decode_call(rows, graphs[0], places))
        if len(graphs) > len(calls):
            prefills = np.flatnonzero(rows.prefills).tolist()
            for row, graph in zip(prefills, graphs[len(calls) :], strict=True):
                calls.append(self._prefill_call(rows, row, graph))
        if not rows.repeats:
            self._started[rows.slots] = True
        self._repeatable = batch.rows if len(rows.decodes) == len(batch.rows) else None
        self._previous, self._resolved = rows, (None, _NO_ROWS, [])
        return calls, rows

    # The mirror

    def _change(self, batch: Batch) -> None:
        for slot in batch.released:
            if not self._live[slot]:
                raise IllegalBatch(f"step {batch.step} releases slot {slot}, which is free")
            self._live[slot] = self._started[slot] = False
        for slot, num_kept in batch.kept_blocks:
            if not (self._live[slot] and 0 < num_kept <= self._num_blocks[slot]):
                raise IllegalBatch(f"step {batch.step} keeps {num_kept} blocks of slot {slot}, which has fewer")
            self._hold(slot, num_kept)
        for added in batch.added:
            self._add(batch.step, added)
        for slot, block in batch.appended_blocks:
            self._append_block(batch.step, slot, block)

    def _add(self, step: int, added: Added) -> None:
        slot, length = added.slot, len(added.token_ids)
        if not 0 <= slot < len(self._live) or self._live[slot]:
            raise IllegalBatch(f"step {step} adds a sequence at slot {slot}, which is taken or does not exist")
        if not 0 < length <= self._tokens.shape[1]:
            raise IllegalBatch(f"step {step} adds {length} tokens at slot {slot}; max {self._tokens.shape[1]}")
        self._live[slot] = True
        self._tokens[slot, :length] = added.token_ids
        self._num_known[slot] = length
        self._hold(slot, 0)
        self._blocks[slot] = 0
        for block in added.blocks:
            self._append_block(step, slot, block)
        self._parameters.set(slot, added.sampling)
        self._sequence_ids[slot] = self._next_id
        self._next_id = self._next_id + 1 if self._next_id < MAX_SEQUENCE_ID else len(self._live)

    def _append_block(self, step: int, slot: int, block: int) -> None:
        count = self._num_blocks[slot]
        if not self._live[slot] or count == self._blocks.shape[1] or not 0 <= block < self._settings.num_blocks:
            raise IllegalBatch(f"step {step} gives block {block} to slot {slot}, which cannot take it")
        self._blocks[slot, count] = block
        self._hold(slot, count + 1)
        if self._places is not None:
            self._places.table = None

    def _hold(self, slot: int, num_blocks: int) -> None:
        self._num_blocks[slot], self._num_repeats = num_blocks, 0
        self._capacity[slot] = min(num_blocks * self._block_size, self._settings.max_model_length)

    def _resolve(self, batch: Batch) -> tuple[StepRows, list[Graph]]:
        if self._resolved[0] is not batch:
            rows = self._next_rows() if self._repeats(batch) else self._read_rows(batch)
            self._resolved = (batch, rows, self._graphs(batch.step, rows))
        return self._resolved[1:]

    def _repeats(self, batch: Batch) -> bool:
        """See `StepRows.repeats`."""
        rows, before = batch.rows, self._repeatable
        return (
            before is not None
            and not (batch.released or batch.kept_blocks or batch.added)
            and (rows.slot, rows.num_tokens, rows.samples) == (before.slot, before.num_tokens, before.samples)
            and rows.after == tuple(range(len(rows)))
        )

    def _next_rows(self) -> StepRows:
        before = self._previous
        if not before.repeats:
            token = np.full(len(before.slots), NO_TOKEN, dtype=np.int64)
            before = before._replace(token=token, after=np.arange(len(token)), repeats=True)
        return before._replace(start=before.ends, ends=before.ends + 1)

    def _read_rows(self, batch: Batch) -> StepRows:
        rows, previous = batch.rows, self._previous
        slots = np.array(rows.slot, dtype=np.int64)
        start = np.array(rows.start, dtype=np.int64)
        after = np.array(rows.after, dtype=np.int64)
        num_tokens = np.array(rows.num_tokens, dtype=np.int64)
        waits = np.flatnonzero(after != KNOWN)
        if len(waits):
            if after.max() >= len(previous.slots) or (previous.slots[after[waits]] != slots[waits]).any():
                raise IllegalBatch(f"step {batch.step} waits for a row of another slot")
            # One token a row: a row ends where its tokens end, whether it sampled or not.
            start[waits] = previous.ends[after[waits]]
        samples = np.array(rows.samples, dtype=bool)
        prefills = (num_tokens > 1) | ~samples | (start == 0)
        return StepRows(
            slots=slots,
            start=start,
            ends=start + num_tokens,
            token=np.array(rows.token, dtype=np.int64),
            after=after,
            samples=samples,
            prefills=prefills,
            decodes=np.flatnonzero(~prefills),
        )

    def _graphs(self, step: int, rows: StepRows) -> list[Graph]:
        found: list[Graph] = []
        try:
            if rows.repeats and self._places is not None:
                return [decode_graph(self._settings, self._places.num_rows, self._places.position + 1)]
            if len(rows.decodes):
                found.append(decode_graph(self._settings, *self._extent(rows)))
            if len(rows.decodes) < len(rows.slots):
                for row in np.flatnonzero(rows.prefills).tolist():
                    found.append(prefill_graph(self._settings, int(rows.start[row]), int(rows.ends[row])))
        except ValueError as error:
            raise IllegalBatch(f"step {step}: {error}") from error
        return found

    def _check(self, step: int, rows: StepRows) -> None:
        if rows.repeats and self._num_repeats:
            self._num_repeats -= 1
            return
        slots, ends = rows.slots, rows.ends
        room = self._capacity[slots] - ends
        comes = (rows.token != NO_TOKEN) | (rows.after != KNOWN)
        illegal = (
            ~self._live[slots]
            | (ends <= rows.start)
            | (rows.start < 0)
            | (ends > self._num_known[slots]) & (rows.prefills | ~comes)
            | (room < 0)
        )
        if illegal.any():
            row = int(np.flatnonzero(illegal)[0])
            raise IllegalBatch(
                f"step {step} row {row} feeds positions {rows.start[row]} to {ends[row]} of slot {slots[row]}, which "
                f"has {self._num_known[slots[row]]} tokens in {self._num_blocks[slots[row]]} blocks"
            )
        self._num_repeats = int(room.min()) if len(room) else 0

    # Calls

    def _prefill_call(self, rows: StepRows, row: int, graph: Graph) -> Call:
        assert isinstance(graph, Prefill)
        slot, start, end = int(rows.slots[row]), int(rows.start[row]), int(rows.ends[row])
        width = end
        positions = np.arange(end, dtype=np.int64)
        if end == 1:
            # NxD Inference pads positions with 1, and samples at the largest: it must not pad a prompt of one token.
            width = graph.tokens
            positions = np.zeros(width, dtype=np.int64)
        arguments = {
            "input_ids": _row(_padded(self._tokens[slot, :end], width)),
            "position_ids": _row(positions),
            "sampling_params": torch.from_numpy(self._parameters.rows(rows.slots[row : row + 1])),
        }
        if self._settings.layout == "slots":
            arguments["seq_ids"] = torch.tensor([slot])
            if end == 1:
                # The mask alone decides the bucket.
                arguments["attention_mask"] = torch.ones((1, 1), dtype=torch.int64)
        else:
            blocks = self._blocks[slot]
            fed = np.arange(start, end)
            arguments |= {
                "seq_ids": torch.tensor([self._sequence_ids[slot]]),
                "slot_mapping": _row(blocks[fed // self._block_size] * self._block_size + fed % self._block_size),
                "block_table": _row(blocks[: -(-end // self._block_size)].copy()),
                "full_context_lens": torch.tensor([[end]]),
                "computed_context_lens": torch.tensor([[start]]),
            }
        return Call(graph, arguments, np.array([row]), np.zeros(1, dtype=np.int64), end - start)

    def _extent(self, rows: StepRows) -> tuple[int, int]:
        """Number of rows and largest position of a decode call; see `decode_graph`."""
        slots, start = rows.slots[rows.decodes], rows.start[rows.decodes]
        return int(slots.max()) + 1 if self._settings.layout == "slots" else len(slots), int(start.max())

    def _placed(self, step: int, rows: StepRows, graph: Graph) -> _Places:
        slots, num_rows = rows.slots[rows.decodes], graph.num_computed_tokens
        if by_line := self._settings.layout == "slots":
            absent = self._started & self._live
            absent[slots] = False
            if absent.any():
                raise IllegalBatch(f"step {step} would overwrite slot {int(absent.argmax())}, which has no row")
        places = slots if by_line else np.arange(len(slots))
        source = np.zeros(num_rows, dtype=np.int64)  # places without a sequence repeat the first row
        source[places] = np.arange(len(slots))
        identifiers = np.arange(num_rows)
        if not by_line:
            # Identifiers below the number of slots belong to no sequence.
            identifiers[: len(slots)] = self._sequence_ids[slots]
        of_place = slots[source]
        return _Places(places, source, of_place, identifiers, self._parameters.rows(of_place), *self._extent(rows))

    def _decode_call(self, rows: StepRows, graph: Graph, found: _Places) -> Call:
        assert isinstance(graph, Decode)
        start, named, after = rows.start, rows.token, rows.after
        if not rows.repeats:
            start, named, after = start[rows.decodes], named[rows.decodes], after[rows.decodes]
        positions = start[found.source]
        arguments = {
            "position_ids": _column(positions),
            "sampling_params": torch.from_numpy(found.parameters.copy()),
            "seq_ids": torch.from_numpy(found.identifiers.copy()),
        }
        if self._settings.layout == "blocks":
            block, offset = np.divmod(positions, self._block_size)
            kept = self._blocks[found.of_place, block] * self._block_size + offset
            kept[len(start) :] = NO_SLOT
            width = graph.length // self._block_size
            if found.table is None or found.table.shape[1] != width:
                found.table = torch.from_numpy(self._blocks[found.of_place, :width])
            arguments |= {
                "slot_mapping": _column(kept),
                "block_table": found.table,
                "full_context_lens": _column(positions + 1),
                "computed_context_lens": _column(positions.copy()),
            }
        if rows.repeats:
            named = named.copy()  # `feed` writes to it
        else:
            slots = rows.slots[rows.decodes]
            prompts = np.flatnonzero((named == NO_TOKEN) & (start < self._num_known[slots]))
            named[prompts] = self._tokens[slots[prompts], start[prompts]]
        return Call(graph, arguments, rows.decodes, found.places, len(start), named, after, found.source)


def _no_rows() -> StepRows:
    none = np.zeros(0, dtype=np.int64)
    return StepRows(none, none, none, none, none, none.astype(bool), none.astype(bool), none)


_NO_ROWS = _no_rows()


def _padded(tokens: IntArray, width: int) -> IntArray:
    padded = np.zeros(width, dtype=np.int64)
    padded[: len(tokens)] = tokens
    return padded


def _row(values: IntArray) -> torch.Tensor:
    return torch.from_numpy(values.reshape(1, -1))


def _column(values: IntArray) -> torch.Tensor:
    return torch.from_numpy(values.reshape(-1, 1))
