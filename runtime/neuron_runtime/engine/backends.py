"""Which backends this runtime can build, and from where.

Called by the supervisor (is the configured one there?) and by the engine process (build it). Modules are named, not
imported before they are asked for: a backend's package is light, what it loads brings a device stack.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

from neuron_runtime.backend.base import Backend, ProgressCallback
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.errors import InvalidConfig

PACKAGES = {"torch": "neuron_runtime.backend.torch", "simulated": "neuron_runtime.backend.simulated"}


class BackendPackage(Protocol):
    """What the package of a backend has."""

    NEEDS_WEIGHTS: bool
    """Whether a model must be there whole; else its small files will do."""

    def check_config(self, config: RuntimeConfig) -> None:
        """What can be said without the model and without a device. Raises InvalidConfig."""

    def load_backend(self, model_dir: Path, config: RuntimeConfig, progress: ProgressCallback) -> Backend:
        """See `load_backend` of the torch backend."""


def check_backend(config: RuntimeConfig) -> None:
    """Raises InvalidConfig when the configured backend is not built into this runtime, or cannot do what is asked."""
    backend_package(config).check_config(config)


def backend_package(config: RuntimeConfig) -> BackendPackage:
    """Raises InvalidConfig when the configured backend is not built into this runtime."""
    if config.backend not in PACKAGES:
        known = ", ".join(PACKAGES)
        raise InvalidConfig("$.backend", f"`{config.backend}` is not built into this runtime yet; it has: {known}")
    return cast(BackendPackage, importlib.import_module(PACKAGES[config.backend]))
