"""Loads a compiled model onto Neuron devices. Called by `load_backend` in the process that will run it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from neuron_runtime.backend.neuron.device import Application, DeviceBackend
from neuron_runtime.backend.neuron.devices import check_cores, exec_timeout_seconds
from neuron_runtime.backend.neuron.failures import when_free
from neuron_runtime.backend.neuron.installed import device_memory
from neuron_runtime.backend.neuron.step_graphs import Decode
from neuron_runtime.backend.transformers_neuronx import library
from neuron_runtime.backend.transformers_neuronx.graphs import described, prepare_environment
from neuron_runtime.backend.transformers_neuronx.inputs import Inputs
from neuron_runtime.backend.transformers_neuronx.settings import Settings, all_graphs, limits_of
from neuron_runtime.backend.warming import lone_step
from neuron_runtime.backend_protocol import Backend, ProgressCallback
from neuron_runtime.checkpoint import check_tied_head, read_checkpoint
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.core import BackendLimits, Batch

LOADING = "loading graphs and weights onto the device"


def load(model_dir: Path, config: RuntimeConfig, progress: ProgressCallback, artifact: Path) -> Backend:
    """See `load_backend`."""
    library.check_installed()
    settings, target = described(config, model_dir)
    check_cores(target, settings.tensor)
    check_tied_head(read_checkpoint(model_dir))
    named = ", ".join(f"{name} {version}" for name, version in library.versions().items())
    say(f"transformers-neuronx: {named or 'versions unknown'}")
    say(
        f"warning: AWS's support of transformers-neuronx ended with Neuron SDK {library.END_OF_SUPPORT}: its successor "
        f"is the backend {library.SUCCESSORS}"
    )
    prepare_environment(settings, target)
    progress(LOADING, 0.0)
    model = when_free(lambda: library.load_from(settings, model_dir, artifact))
    progress(LOADING, 1.0)
    return backend_of(LoadedModel(settings, model), settings, limits_of(settings, exec_timeout_seconds()))


class Output(NamedTuple):
    tokens: torch.Tensor
    logits: torch.Tensor


NOTHING = torch.zeros(0)


class LoadedModel:
    """The application of `DeviceBackend`: one call of the model, and the parameters of the device's sampling."""

    def __init__(self, settings: Settings, model: Any) -> None:
        self._settings, self._model = settings, model

    def __call__(self, *, parameters: torch.Tensor | None = None, **arguments: torch.Tensor) -> Output:
        """parameters: of all lines, if they have changed; they stay on the device."""
        if parameters is not None:
            made = library.generation_config(self._settings, parameters.tolist())
            self._model.update_generation_config(made)
        output = self._model(**arguments)
        if self._settings.sampling == "Device":
            return Output(output.flatten().long(), NOTHING)
        return Output(NOTHING, output[:, None])


def backend_of(application: Application, settings: Settings, limits: BackendLimits) -> DeviceBackend:
    steps = list(warm_up_steps(settings, limits))
    return DeviceBackend(application, Inputs(settings, limits), limits, steps, memory=device_memory)


def warm_up_steps(settings: Settings, limits: BackendLimits) -> Iterator[Batch]:
    """A step for each graph."""
    for graph, (start, end) in all_graphs(settings):
        yield lone_step(limits, 0, start, end, decodes=isinstance(graph, Decode))
