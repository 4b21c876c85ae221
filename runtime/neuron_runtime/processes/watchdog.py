"""Detects steps that are late or hang: each graph has a usual time and a limit, derived from earlier steps.

The engine process wraps its backend in `WatchedBackend`, which writes both for the device to shared memory. The
supervisor reads them: a late engine is not ready, and an overdue one is killed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from neuron_runtime.backend_protocol import AdapterBackend, Backend, ProgressCallback, StepTime
from neuron_runtime.core import BackendLimits, Batch, Late, StepOutput

MIN_STEP_SECONDS = 30.0
STEP_FACTOR = 10.0
FIRST_STEP_SECONDS = 600.0
USUAL_FACTOR = 1.5
LATE_SECONDS = 5.0
"""An engine is late this long after the usual end of its steps, or after it should have shown life between steps."""
ADAPTER_SECONDS = 60.0
"""Longer a step may take for each adapter that was added before it: a backend may read and share it out only then."""
MEMORY = 0.9
"""Decay of the measured maximum with each step, so that a first step that compiled is forgotten."""


@dataclass
class StepLimits:
    """How long a step of each graph may take. No clock."""

    min_seconds: float = MIN_STEP_SECONDS
    factor: float = STEP_FACTOR
    """Limit as a multiple of the time measured for the graph."""
    first_seconds: float = FIRST_STEP_SECONDS
    """Limit of the first step of a graph that was not warmed up, because it may compile."""
    max_seconds: float = math.inf
    _measured: dict[str, float] = field(default_factory=dict, init=False)

    def seconds(self, graph: str) -> float:
        """Limit of a step of this graph, counted from the end of the previous step."""
        measured = self._measured.get(graph)
        expected = self.first_seconds if measured is None else self.factor * measured
        return min(max(expected, self.min_seconds), self.max_seconds)

    def usual_seconds(self, graph: str) -> float:
        """Longest usual duration of such a step: its limit, until one was measured."""
        measured = self._measured.get(graph)
        return self.seconds(graph) if measured is None else USUAL_FACTOR * measured

    def observe(self, graph: str, seconds: float) -> None:
        self._measured[graph] = max(seconds, MEMORY * self._measured.get(graph, 0.0))


class WatchedBackend:
    """A backend that sets a deadline before every call: the sum of the limits of all steps in flight.

    The caller of `Engine.step` sets its own deadline between steps.

    set_deadline: of `lifeline.Deadline`; gets the limit and the usual time.
    """

    def __init__(
        self,
        backend: Backend,
        set_deadline: Callable[[float, float], None],
        step_limits: StepLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._set_deadline = set_deadline
        self._step_limits = step_limits or StepLimits(max_seconds=backend.limits.max_step_seconds or math.inf)
        self._clock = clock
        self._in_flight: deque[tuple[str, float, int]] = deque()
        """The graph of each step, when it was launched, and the number of adapters that were added before it."""
        self._num_added = 0
        """Adapters, since the newest launch."""
        self._last_end = clock()

    @property
    def limits(self) -> BackendLimits:
        return self._backend.limits

    def warm_up(self, progress: ProgressCallback) -> tuple[StepTime, ...]:
        """Runs without a deadline, because compilation may take long. Its steps count as measured."""
        times = tuple(self._backend.warm_up(progress))
        for batch, seconds in times:
            self._step_limits.observe(self._backend.graph(batch), seconds)
        return times

    def graph(self, batch: Batch) -> str:
        return self._backend.graph(batch)

    def launch(self, batch: Batch) -> None:
        self._in_flight.append((self._backend.graph(batch), self._clock(), self._num_added))
        self._num_added = 0
        self._arm()
        self._backend.launch(batch)

    def sample(self, step: int, late: Late | None) -> None:
        self._backend.sample(step, late)

    def collect(self, step: int) -> StepOutput:
        self._arm()
        output = self._backend.collect(step)
        (graph, began, num_added), now = self._in_flight.popleft(), self._clock()
        if not num_added:
            self._step_limits.observe(graph, now - max(began, self._last_end))
        self._last_end = now
        self._arm()
        return output

    def read_adapter(self, folder: Path) -> Any:
        return cast(AdapterBackend, self._backend).read_adapter(folder)

    def add_adapter(self, digest: str, folder: Path, weights: Any) -> None:
        self._num_added += 1
        self._arm()
        cast(AdapterBackend, self._backend).add_adapter(digest, folder, weights)

    def remove_adapter(self, digest: str) -> None:
        self._arm()
        cast(AdapterBackend, self._backend).remove_adapter(digest)

    def close(self) -> None:
        self._backend.close()

    def _arm(self) -> None:
        adding = ADAPTER_SECONDS * (self._num_added + sum(num_added for _, _, num_added in self._in_flight))
        seconds = adding + sum(self._step_limits.seconds(graph) for graph, *_ in self._in_flight)
        usual_seconds = adding + sum(self._step_limits.usual_seconds(graph) for graph, *_ in self._in_flight)
        # With nothing in flight, the deadline covers the host's work on the last output.
        self._set_deadline(max(seconds, self._step_limits.min_seconds), usual_seconds + LATE_SECONDS)
