"""The engine of an `LLM`: in the caller's process, or in one of its own if only its end frees the device.

`engine_of` chooses. Both find the model, load and warm up the backend, and turn requests into token events, step by
step. They know nothing of text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

from neuron_runtime.artifacts.loading import find_model, load_backend
from neuron_runtime.backend_protocol import Backend
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import StageLines
from neuron_runtime.core import BackendLimits, Request, TokenEvent
from neuron_runtime.engine.backends import backend_package, warn_of_limits
from neuron_runtime.engine.guides import Guides
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.grammars.guides import grammar_guides
from neuron_runtime.local_settings import LocalSettings


class OfflineEngine(Protocol):
    """Exceptions of `step` leave it unusable."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def has_work(self) -> bool:
        """Whether `step` may have more to say."""

    def find_model(self) -> Path:
        """The folder of the model's files, fetched if necessary. Raises FatalError."""

    def load(self) -> BackendLimits:
        """Load and warm up the backend, after `find_model`. Raises FatalError."""

    def add(self, request: Request) -> None:
        """Queue an admitted request."""

    def abort(self, request_id: str) -> None:
        """Stop a request; idempotent."""

    def step(self) -> list[TokenEvent]: ...

    def close(self) -> None:
        """Release device and memory; idempotent."""


def engine_of(config: RuntimeConfig, settings: LocalSettings) -> OfflineEngine:
    if backend_package(config).FREED_BY_EXIT:
        from neuron_runtime.offline.process_engine import ProcessEngine  # noqa: PLC0415  (brings sockets)

        return ProcessEngine(config, settings)
    return LocalEngine(config, settings)


class LocalEngine:
    def __init__(self, config: RuntimeConfig, settings: LocalSettings) -> None:
        self._config = config
        self._settings = settings
        self._progress = StageLines()
        self._model_dir = Path()
        self._backend: Backend | None = None
        self._guides: Guides | None = None
        self._engine: Engine

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def find_model(self) -> Path:
        self._model_dir = find_model(self._config, self._settings, self._progress)
        return self._model_dir

    def load(self) -> BackendLimits:
        self._backend = load_backend(self._model_dir, self._config, self._settings, self._progress)
        warn_of_limits(self._config, self._backend.limits)
        self._backend.warm_up(self._progress)
        # No queue limit, because the caller waits for all answers anyway.
        self._guides = grammar_guides(self._model_dir, self._backend.limits)
        self._engine = Engine(self._backend, max_queued_requests=sys.maxsize, guides=self._guides)
        return self._backend.limits

    def add(self, request: Request) -> None:
        self._engine.add(request)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def step(self) -> list[TokenEvent]:
        events = self._engine.step()
        for _, error in self._engine.take_refused():
            raise error
        return events

    def close(self) -> None:
        if self._guides is not None:
            self._guides.close()
            self._guides = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None
