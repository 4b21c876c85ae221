"""Loads an exported model onto Neuron devices. Called by `load_backend` in the process that will run it."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from neuron_runtime.backend.neuron.device import DeviceBackend
from neuron_runtime.backend.neuron.devices import check_cores, exec_timeout_seconds
from neuron_runtime.backend.neuron.failures import when_free
from neuron_runtime.backend.neuron.installed import device_memory
from neuron_runtime.backend.neuron.unread import HARMLESS, Reading, all_weights_read
from neuron_runtime.backend.optimum import library
from neuron_runtime.backend.optimum.foreign import holds_weights
from neuron_runtime.backend.optimum.graphs import described, fitting, prepare_environment
from neuron_runtime.backend.optimum.inputs import Inputs
from neuron_runtime.backend.optimum.library import Application
from neuron_runtime.backend.optimum.settings import Settings, limits_of
from neuron_runtime.backend.warming import lone_step
from neuron_runtime.backend_protocol import Backend, ProgressCallback
from neuron_runtime.checkpoint import check_tied_head, read_checkpoint
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say

_MOVED = re.compile(r"(?<=\.)(qkv_proj|o_proj)\.(?=(q_proj|k_proj|v_proj|Wqkv|o_proj)\.)")
"""Where the library moves the parameters of attention to, before it drops what no module has."""


def load(model_dir: Path, config: RuntimeConfig, progress: ProgressCallback, artifact: Path) -> Backend:
    """See `load_backend`."""
    library.check_installed()
    settings, target = described(fitting(config, artifact), model_dir)
    check_cores(target, settings.tensor)
    if not holds_weights(artifact):
        check_tied_head(read_checkpoint(model_dir))
    say("optimum-neuron: " + ", ".join(f"{name} {version}" for name, version in library.versions().items()))
    say(f"{settings.model_type} on {settings.tensor} logical cores of {target.platform.name}")
    prepare_environment(settings, target)
    progress("loading graphs and weights onto the device", 0.0)

    def attempt() -> Any:
        with all_weights_read([Reading(model_dir, _lost)], "optimum-neuron", settings.unread_weights):
            return library.load(model_dir, artifact)

    model = when_free(attempt)
    progress("loading graphs and weights onto the device", 1.0)
    return backend_of(Application(model, settings), settings, exec_timeout_seconds())


def _lost(dropped: Collection[str]) -> set[str]:
    """All that is dropped, by the checkpoint's names: unlike NxD Inference, the library leaves no copies behind."""
    return {_MOVED.sub("", name) for name in dropped if not HARMLESS.search(name)}


def backend_of(application: Application, settings: Settings, timeout_seconds: float) -> DeviceBackend:
    """The backend of a loaded model. timeout_seconds: after which the Neuron runtime gives up a step."""
    limits = limits_of(settings, timeout_seconds)
    longest = settings.prefill_tokens
    return DeviceBackend(
        application,
        Inputs(settings, limits),
        limits,
        [lone_step(limits, 0, 0, longest, decodes=False), lone_step(limits, 0, longest - 1, longest, decodes=True)],
        memory=device_memory,
        prefills_on_host=settings.prefills_on_host,
    )
