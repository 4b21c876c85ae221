"""Batches as calls of optimum-neuron: which graph each takes, and the arguments of `forward()` or `prefill_chunk()`.

Used by the backend on the engine's thread, while the step before runs. In a decode call row i works on slot i, whatever
`seq_ids` say, and the library fills up missing rows with the first row's token and position, which it writes into
their slots. So every decode call has a row for every slot; that of a slot which does not take part writes where the
slot's own next token will overwrite it.
"""

from __future__ import annotations

import numpy as np
import torch

from neuron_runtime.backend.neuron.device import GREEDY, Call, FloatArray, column, device_parameters, row_of
from neuron_runtime.backend.neuron.step_graphs import Decode, Graph, Prefill
from neuron_runtime.backend.optimum.settings import Settings
from neuron_runtime.backend.slots import FedRows, IntArray, SlotMirror
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import BackendLimits, Batch


class Inputs:
    """See `neuron.device.Inputs`."""

    def __init__(self, settings: Settings, limits: BackendLimits) -> None:
        num_slots, self._settings = settings.max_rows, settings
        self._prefill = Prefill(settings.prefill_tokens)
        self._decode = Decode(num_slots, settings.max_model_length)
        self._mirror = SlotMirror(limits)
        self._num_computed: IntArray = np.zeros(num_slots, dtype=np.int64)
        """Where the next token of each slot is computed, once all calls made so far have run. A prompt overwrites what
        it finds, so it does not matter what a slot without a sequence has."""
        self._parameters: FloatArray = np.full((num_slots, 3), GREEDY, dtype=np.float32)
        """How the sequence in each slot is sampled."""
        self._sequence_ids: IntArray = np.arange(num_slots)

    def graphs(self, batch: Batch) -> list[Graph]:
        """The graphs that the batch will run. Raises IllegalBatch if a prompt or chunk is too long."""
        if batch.num_prefills and max(batch.rows.num_tokens[batch.num_decodes :]) > self._settings.prefill_tokens:
            raise IllegalBatch(f"step {batch.step} prefills more than {self._settings.prefill_tokens} tokens in a row")
        return [self._decode] * bool(batch.num_decodes) + [self._prefill] * batch.num_prefills

    def apply(self, batch: Batch) -> tuple[list[Call], FedRows]:
        """Apply the delta; returns the calls in the order in which they must run, and the rows.

        Raises IllegalBatch if a slot, position or token is impossible.
        """
        self.graphs(batch)
        rows = self._mirror.resolve(batch)
        self._mirror.apply(batch, rows)
        for added in batch.added:
            self._parameters[added.slot] = device_parameters(added.sampling, self._settings.max_topk)
        calls = [self._decode_call(rows)] if rows.num_decodes else []
        calls += [self._prefill_call(batch.step, rows, row) for row in range(rows.num_decodes, len(rows.slots))]
        self._num_computed[rows.slots] = rows.ends
        return calls, rows

    def _prefill_call(self, step: int, rows: FedRows, row: int) -> Call:
        slot, start, end = int(rows.slots[row]), int(rows.start[row]), int(rows.ends[row])
        tokens = self._mirror.tokens[slot, start:end].astype(np.int64)
        positions = np.arange(start, end)
        padding = self._settings.prefill_tokens - (end - start)
        # All places of the last token are equal, so it does not matter which of them is sampled, or written last.
        tokens = np.pad(tokens, (0, padding), mode="edge")
        if self._settings.chunk_tokens:
            positions = np.pad(positions, (0, padding), mode="edge")
        elif start == 0:
            # Padded by the library with 1, a prompt of two tokens would have several largest positions.
            positions = np.pad(positions, (0, padding))
        else:
            raise IllegalBatch(f"step {step} prefills from position {start}, but a call computes whole prompts")
        arguments = {
            "input_ids": row_of(tokens),
            "position_ids": row_of(positions),
            "seq_ids": torch.tensor([slot]),
            "sampling_params": torch.from_numpy(self._parameters[[slot]]),
        }
        return Call(self._prefill, arguments, np.array([row]), np.zeros(1, dtype=np.int64), end - start)

    def _decode_call(self, rows: FedRows) -> Call:
        count = rows.num_decodes
        slots, start = rows.slots[:count], rows.start[:count]
        # A full sequence has no next position; its last one is not read any more.
        positions = np.minimum(self._num_computed, self._settings.max_model_length - 1)
        positions[slots] = start
        named = self._mirror.named(rows, slice(count))
        source = np.zeros(self._settings.max_rows, dtype=np.int64)  # slots without a row repeat the first one's token
        source[slots] = np.arange(count)
        arguments = {
            "position_ids": column(positions),
            "seq_ids": torch.from_numpy(self._sequence_ids.copy()),
            "sampling_params": torch.from_numpy(self._parameters.copy()),
        }
        return Call(self._decode, arguments, np.arange(count), slots, count, named, rows.after[:count], source)
