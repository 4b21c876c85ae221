"""The simulated backend: no model, a device that is a timeline. `check_config` and `load_backend` serve with it.

As backend `simulated` of a served model it keeps real time and needs no weights, only the model's config.json and
tokenizer: everything above the device can be loaded and timed. The benchmarks put its parts together themselves.
"""

from __future__ import annotations

from pathlib import Path

from neuron_runtime.backend.base import Backend, ProgressCallback
from neuron_runtime.backend.simulated.clock import WallClock
from neuron_runtime.backend.simulated.device import SimulatedBackend
from neuron_runtime.backend.simulated.options import DEFAULT_MAX_LENGTH, limits_of, read_options, step_times
from neuron_runtime.checkpoint import InvalidModel, read_config
from neuron_runtime.config import RuntimeConfig

__all__ = ["NEEDS_WEIGHTS", "check_config", "load_backend"]

NEEDS_WEIGHTS = False


def check_config(config: RuntimeConfig) -> None:
    """Raises InvalidConfig for settings that cannot be, whatever the model."""
    read_options(config.override_neuron_config)


def load_backend(model_dir: Path, config: RuntimeConfig, progress: ProgressCallback) -> Backend:
    """A device with the model's vocabulary and length, and the times of the settings.

    Raises:
        InvalidModel: config.json is missing or says no vocabulary size.
        InvalidConfig: a limit or a setting cannot be; the field is named.
    """
    model = read_config(model_dir)
    size, positions = model.get("vocab_size"), model.get("max_position_embeddings", DEFAULT_MAX_LENGTH)
    for name, value, least in (("vocab_size", size, 1), ("max_position_embeddings", positions, 2)):
        if not isinstance(value, int) or value < least:
            raise InvalidModel(f"{model_dir / 'config.json'}: {name} must be a number from {least}, got {value!r}")
    assert isinstance(size, int)
    options = read_options(config.override_neuron_config)
    limits = limits_of(config, options, vocabulary_size=size, longest=positions)
    progress("simulating a device", 1.0)
    return SimulatedBackend(limits, step_times(options), WallClock())
