"""A simulated device that runs the graphs of a plan of NxD Inference, which `plan-buckets --json` wrote.

Used by `bench simulate`. Which graph a call takes, and what the scheduler must know, are the rules of the backend
itself; how long it takes follows from its rows or tokens alone, as for other simulated devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuron_runtime.backend.neuron.devices import EXEC_TIMEOUT_SECONDS
from neuron_runtime.backend.neuron.step_graphs import Graph, Prefill
from neuron_runtime.backend.nxdi.buckets import all_graphs, decode_graph, limits_of, prefill_graph
from neuron_runtime.backend.nxdi.graph_plan import read_plan
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.backend.simulated.device import Clock, Shape, SimulatedBackend, SimulatedCall
from neuron_runtime.backend.simulated.step_times import StepTimes
from neuron_runtime.core import BackendLimits, Batch
from neuron_runtime.errors import InvalidConfig


def settings_of_plan(path: Path) -> Settings:
    """Raises InvalidConfig."""
    try:
        return read_plan(path)
    except ValueError as error:
        raise InvalidConfig("--plan", f"{path} {error}") from error


def limits_of_plan(settings: Settings) -> BackendLimits:
    return limits_of(settings, EXEC_TIMEOUT_SECONDS)


def flags_of_plan(settings: Settings, limits: BackendLimits) -> dict[str, Any]:
    """What the flags of a simulated device would say of it."""
    return {
        "--decode-buckets": list(settings.row_buckets or (settings.max_rows,)),
        "--prefill-buckets": list(settings.context_buckets),
        "--prefill": "chunks" if limits.chunks_prefill else "whole",
        "--token-feedback": limits.token_feedback,
        "--layout": limits.layout,
        "--max-model-len": limits.max_model_length,
        "--max-num-seqs": limits.max_rows,
        "--max-num-batched-tokens": limits.max_step_tokens,
        "--block-size": limits.block_size,
        "--num-gpu-blocks-override": limits.num_blocks,
        "--enable-prefix-caching": limits.shares_prefixes,
    }


def shapes_of_plan(settings: Settings) -> list[Shape]:
    """The shapes of all graphs, also those that no call takes."""
    return [_shape(graph) for graph in all_graphs(settings)]


def _shape(graph: Graph) -> Shape:
    if isinstance(graph, Prefill):
        return "prefill", graph.tokens, graph.prefix
    return "decode", graph.rows, graph.length


class PlannedBackend(SimulatedBackend):
    """See `SimulatedBackend`. Prompts run one after another, and all decode rows together."""

    def __init__(
        self,
        settings: Settings,
        limits: BackendLimits,
        times: StepTimes,
        clock: Clock,
        **more: float,
    ) -> None:
        """more: see `SimulatedBackend`."""
        super().__init__(limits, times, clock, **more)
        self._settings, self._curves = settings, (times.prefill.curve, times.decode.curve)

    def calls(self, batch: Batch) -> list[SimulatedCall]:
        rows, starts, settings = batch.rows, self.starts(batch.rows), self._settings
        prefill, decode = self._curves
        calls, num_decodes = [], batch.num_decodes
        for start, count in zip(starts[num_decodes:], rows.num_tokens[num_decodes:], strict=True):
            graph = prefill_graph(settings, start, start + count)
            calls.append(SimulatedCall(graph.name, _shape(graph), count, prefill.seconds(graph.tokens)))
        if positions := starts[:num_decodes]:
            slots = rows.slot[:num_decodes]
            num_rows = max(slots) + 1 if settings.layout == "slots" else len(slots)
            step = decode_graph(settings, num_rows, max(positions))
            filled, read = sum(positions) + sum(rows.num_tokens[:num_decodes]), step.length * len(positions)
            # A graph with drafts computes all of them, and makes them itself if it can, whether a row has some or not.
            seconds = decode.seconds(step.rows) * (1 + (step.width - 1) * self._draft_cost)
            if step.width > 1:
                seconds += max(prefill.seconds(step.num_computed_tokens) - decode.seconds(step.rows), 0.0)
            call = SimulatedCall(step.name, _shape(step), len(slots), seconds, num_positions=read, num_filled=filled)
            calls.insert(0, call)
        return calls
