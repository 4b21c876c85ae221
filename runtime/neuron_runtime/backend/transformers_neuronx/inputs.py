"""Batches as calls of transformers-neuronx: `model(input_ids, cache_ids, start_ids)`.

Used by the backend on the engine's thread, while the step before runs. The contract, from the source of v0.13:

- `cache_ids` are positions, `start_ids` the lines of the cache, one for each row (`base._preprocess`).
- A call with more than one column whose first position is 0 encodes prompts, any other generates a token for each row
  (`base._prepare_for_continuous_batching`). A prompt of one token is therefore padded to two.
- Prompts of a call are padded at the right; the largest position of a row says where its prompt ends, so padding has
  position 0 (`base._prepare_for_par_ctx_rhs_padding`). The graph stores a line from position 0 on, whatever the
  positions say (`attention_utils.update_indices_context`), and takes them for the rotation of keys alone.
- Rows of a token call are put into their lines by `start_ids`; lines that are not named get token 0 at position 0,
  which overwrites what they hold (`base._prepare_for_continuous_batching`). So every live line must be a row.
- Ids and positions have one dtype, because both are scattered into tensors of that of the ids (same place).
- Results come in the order of the rows (`base._postprocess`).
- Sampling parameters of the device belong to lines, and stay until they are replaced
  (`decoder.update_generation_config`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from neuron_runtime.backend.neuron.device import GREEDY, Call, FloatArray, column, device_parameters
from neuron_runtime.backend.neuron.step_graphs import Graph, Prefill
from neuron_runtime.backend.slots import FedRows, IntArray, SlotMirror
from neuron_runtime.backend.transformers_neuronx.settings import Settings, decode_graph, prefill_graph
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import BackendLimits, Batch, GraphUse

LARGEST_TEMPERATURE = 1e4
"""The device divides logits by it in the model's dtype: above, they are all equal to it anyway."""


@dataclass(slots=True)
class PromptCall(Call):
    """One call with several prompts: one run of the graph for each."""

    lengths: Sequence[int] = ()

    @property
    def uses(self) -> Sequence[GraphUse]:
        return [GraphUse(self.graph.name, length, self.graph.num_computed_tokens) for length in self.lengths]


class Inputs:
    """See `neuron.device.Inputs`."""

    def __init__(self, settings: Settings, limits: BackendLimits) -> None:
        self._settings, self._mirror = settings, SlotMirror(limits)
        self._started = np.zeros(settings.max_rows, dtype=bool)
        """Lines that a token call must not lose."""
        self._parameters: FloatArray = np.full((settings.max_rows, 3), GREEDY, dtype=np.float32)
        self._changed = False
        """Whether the device has other parameters."""
        self._resolved: tuple[Batch, FedRows, list[tuple[Graph, IntArray]]] | None = None

    def graphs(self, batch: Batch) -> list[Graph]:
        return [graph for graph, _ in self._resolve(batch)[1]]

    def apply(self, batch: Batch) -> tuple[list[Call], FedRows]:
        rows, planned = self._resolve(batch)
        self._mirror.apply(batch, rows)
        self._change(batch)
        calls = [self._call(batch.step, rows, graph, of_call) for graph, of_call in planned]
        self._started[rows.slots] = True
        if self._changed and calls:
            calls[0].arguments["parameters"] = torch.from_numpy(self._parameters.copy())
            self._changed = False
        self._resolved = None
        return calls, rows

    def _change(self, batch: Batch) -> None:
        for slot in batch.released:
            self._started[slot] = False
        if self._settings.sampling != "Device":
            return
        for added in batch.added:
            top_k, top_p, temperature = device_parameters(added.sampling, self._settings.global_top_k)
            wanted = (top_k, top_p, min(temperature, LARGEST_TEMPERATURE))
            if added.sampling.temperature < self._settings.least_temperature:
                wanted = GREEDY
            if tuple(self._parameters[added.slot]) != wanted:
                self._parameters[added.slot], self._changed = wanted, True

    def _resolve(self, batch: Batch) -> tuple[FedRows, list[tuple[Graph, IntArray]]]:
        """The rows of the batch, and its calls: the graph and the rows of each."""
        if self._resolved is None or self._resolved[0] is not batch:
            rows = self._mirror.resolve(batch)
            self._resolved = (batch, rows, self._planned(batch.step, rows))
        return self._resolved[1:]

    def _planned(self, step: int, rows: FedRows) -> list[tuple[Graph, IntArray]]:
        planned: list[tuple[Graph, IntArray]] = []
        count = rows.num_decodes
        try:
            if count:
                planned.append((decode_graph(self._settings, int(rows.start[:count].max())), np.arange(count)))
            of_graph: dict[Graph, list[int]] = {}
            for row in range(count, len(rows.slots)):
                if rows.start[row]:
                    raise ValueError(
                        f"row {row} begins at position {rows.start[row]}: a prompt is computed in one call"
                    )
                of_graph.setdefault(prefill_graph(self._settings, int(rows.ends[row])), []).append(row)
        except ValueError as error:
            raise IllegalBatch(f"step {step}: {error}") from error
        return planned + [(graph, np.array(of_call)) for graph, of_call in of_graph.items()]

    def _call(self, step: int, rows: FedRows, graph: Graph, of_call: IntArray) -> Call:
        places = np.arange(len(of_call))
        slots, start, ends = rows.slots[of_call], rows.start[of_call], rows.ends[of_call]
        arguments = {"start_ids": torch.from_numpy(slots)}
        if isinstance(graph, Prefill):
            width = max(int(ends.max()), 2)
            positions = np.arange(width)
            given = positions < ends[:, None]
            arguments["input_ids"] = torch.from_numpy(np.where(given, self._mirror.tokens[slots, :width], 0))
            arguments["cache_ids"] = torch.from_numpy(np.where(given, positions, 0))
            return PromptCall(graph, arguments, of_call, places, int(ends.sum()), lengths=ends.tolist())
        absent = self._started.copy()
        absent[slots] = False
        if absent.any():
            raise IllegalBatch(f"step {step} would overwrite slot {int(absent.argmax())}, which has no row")
        arguments["cache_ids"] = column(start)
        named = self._mirror.named(rows, of_call)
        return Call(graph, arguments, of_call, places, len(of_call), named, rows.after[of_call], places)
