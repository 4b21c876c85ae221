"""`NxdiBackend`: the Backend protocol over an application of NxD Inference."""

from __future__ import annotations

from collections.abc import Iterator

from neuron_runtime.backend.neuron.device import Application, DeviceBackend
from neuron_runtime.backend.neuron.installed import device_memory
from neuron_runtime.backend.neuron.step_graphs import Decode
from neuron_runtime.backend.nxdi.buckets import all_graphs, span_that_takes
from neuron_runtime.backend.nxdi.inputs import Inputs
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.backend.warming import lone_step
from neuron_runtime.core import BackendLimits, Batch


class NxdiBackend(DeviceBackend):
    """See `DeviceBackend`."""

    def __init__(
        self, application: Application, settings: Settings, limits: BackendLimits, *, in_group: bool = False
    ) -> None:
        steps = warm_up_steps(settings, limits)
        super().__init__(application, Inputs(settings, limits), limits, steps, memory=device_memory, in_group=in_group)


def warm_up_steps(settings: Settings, limits: BackendLimits) -> Iterator[Batch]:
    """A step for each graph that a call takes."""
    for graph in all_graphs(settings):
        if span := span_that_takes(settings, graph):
            decodes = isinstance(graph, Decode)
            slot = graph.num_computed_tokens - 1 if decodes and settings.layout == "slots" else 0
            yield lone_step(limits, slot, *span, decodes=decodes)
