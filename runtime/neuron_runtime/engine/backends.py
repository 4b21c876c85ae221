"""Which backends this runtime can build, and from where.

Called by the supervisor (is the configured one there?) and by the engine process (build it). Modules are named, not
imported: each brings its own device stack.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

from neuron_runtime.backend.base import Backend, Progress
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.errors import InvalidConfig

BUILDERS = {"torch": "neuron_runtime.backend.torch:load_torch_backend"}


class BackendBuilder(Protocol):
    def __call__(self, model_dir: Path, config: RuntimeConfig, progress: Progress) -> Backend: ...


def check_backend(config: RuntimeConfig) -> None:
    """Raises InvalidConfig when the configured backend is not built into this runtime."""
    if config.backend not in BUILDERS:
        known = ", ".join(BUILDERS)
        raise InvalidConfig("$.backend", f"`{config.backend}` is not built into this runtime yet; it has: {known}")


def backend_builder(config: RuntimeConfig) -> BackendBuilder:
    """The function that loads the configured backend; importing it may take seconds. Raises InvalidConfig."""
    check_backend(config)
    module, _, function = BUILDERS[config.backend].partition(":")
    return cast(BackendBuilder, getattr(importlib.import_module(module), function))
