"""The engine of an `LLM`: in the caller's process, or in one of its own if only its end frees the device.

`engine_of` chooses. Both find the model, load and warm up the backend, and turn requests into token events, step by
step. They know nothing of text.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from neuron_runtime.adapters.peft import check_digest
from neuron_runtime.artifacts.loading import find_model, load_backend
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import StageLines
from neuron_runtime.core import BackendLimits, Request, TokenEvent
from neuron_runtime.engine.backends import backend_package, warn_of_limits
from neuron_runtime.engine.drafts import drafts_of
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

    def load_adapter(self, digest: str, folder: Path) -> None:
        """Requests may use this adapter from now on; they wait until it is loaded. Its files were checked."""

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
        self._engine: Engine
        self._closing = ExitStack()

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
        backend = load_backend(self._model_dir, self._config, self._settings, self._progress)
        self._closing.callback(backend.close)
        warn_of_limits(self._config, backend.limits)
        backend.warm_up(self._progress)
        guides = grammar_guides(self._model_dir, backend.limits)
        self._closing.callback(guides.close)
        # No queue limit, because the caller waits for all answers anyway.
        self._engine = Engine(
            backend,
            max_queued_requests=sys.maxsize,
            guides=guides,
            drafting=drafts_of(self._config.speculation, backend.limits),
            check_adapter=check_digest,
        )
        self._closing.callback(self._engine.close)
        return backend.limits

    def load_adapter(self, digest: str, folder: Path) -> None:
        self._engine.load_adapter(digest, folder)

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
        self._closing.close()
