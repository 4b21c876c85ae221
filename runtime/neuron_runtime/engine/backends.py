"""The backends of this runtime.

Called by the supervisor to check the configured backend, and by the engine process to load it. A backend's package is
imported on demand; it is cheap to import, and loads its device stack only in `load_backend`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

from neuron_runtime.backend.base import Backend, ProgressCallback
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import InvalidConfig

PACKAGES = {"torch": "neuron_runtime.backend.torch", "simulated": "neuron_runtime.backend.simulated"}


class BackendPackage(Protocol):
    """Interface of a backend's package."""

    NEEDS_WEIGHTS: bool
    """Whether it needs a model's weights; otherwise its small files suffice."""

    def check_config(self, config: RuntimeConfig) -> None:
        """Check settings without model and device. Raises InvalidConfig."""

    def load_backend(self, model_dir: Path, config: RuntimeConfig, progress: ProgressCallback) -> Backend:
        """See `load_backend` of the torch backend."""


SHORT_TOKENS = 128
"""Fewer tokens of prompt plus output are hardly on purpose: the shortest chats take more."""


def warn_if_short(config: RuntimeConfig, limits: BackendLimits) -> None:
    """Print a line if requests may have very few tokens."""
    length = limits.max_model_length
    if length < SHORT_TOKENS:
        configured = bool(config.limits.max_model_length)
        cause = "so it is configured" if configured else "the model or the free memory allow no more"
        say(f"warning: prompt and answer together may have only {length} tokens: {cause} (maxModelLength)")


def check_backend(config: RuntimeConfig) -> None:
    """Raises InvalidConfig if the backend is not part of this runtime, or does not support the configuration."""
    backend_package(config).check_config(config)


def backend_package(config: RuntimeConfig) -> BackendPackage:
    """Raises InvalidConfig if the backend is not part of this runtime."""
    if config.backend not in PACKAGES:
        known = ", ".join(PACKAGES)
        raise InvalidConfig("$.backend", f"`{config.backend}` is not supported yet; supported backends: {known}")
    return cast(BackendPackage, importlib.import_module(PACKAGES[config.backend]))
