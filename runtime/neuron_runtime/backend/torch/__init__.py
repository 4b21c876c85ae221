"""The torch backend: a decoder of our own on CPUs. `check_config` and `load_backend` are its only entrances;
`prepare` is the part of the latter that benchmarks time with the loader.

Importing this package is cheap: torch is imported when a model is loaded, so commands that need no model start fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neuron_runtime.backend.torch.allocation import set_up_allocation
from neuron_runtime.backend.torch.read_ahead import read_ahead
from neuron_runtime.errors import InvalidConfig

if TYPE_CHECKING:
    from neuron_runtime.backend.base import Backend, ProgressCallback
    from neuron_runtime.config import RuntimeConfig

__all__ = ["NEEDS_WEIGHTS", "check_config", "load_backend", "prepare"]

NEEDS_WEIGHTS = True


def check_config(config: RuntimeConfig) -> None:
    """Raises InvalidConfig for what this backend can never do, whatever the model."""
    for key in config.override_neuron_config:
        raise InvalidConfig(f"$.overrideNeuronConfig.{key}", "the torch backend has no such setting: leave it out")


def prepare(model_dir: Path) -> None:
    """What has to begin before torch is imported, or is best begun then."""
    set_up_allocation()  # first: a thread that is there already has a heap of its own
    read_ahead(model_dir)


def load_backend(model_dir: Path, config: RuntimeConfig, progress: ProgressCallback) -> Backend:
    """Check a model folder, decide the limits, read the weights. `warm_up` is left to the caller.

    Raises:
        FatalError: MODEL_NOT_FOUND, INVALID_MODEL, UNSUPPORTED_ARCHITECTURE or DEVICE_OUT_OF_MEMORY.
        InvalidConfig: a limit or the dtype of the configuration cannot be served; the field is named.
    """
    prepare(model_dir)
    from neuron_runtime.backend.torch.loader import load  # noqa: PLC0415  (torch takes seconds to import)

    return load(model_dir, config, progress)
