"""Detects steps that are late or hang: each shape of step has a usual time and a limit, derived from earlier steps.

The engine process wraps its backend in `WatchedBackend`, which writes both for the device to shared memory. The
supervisor reads them: a late engine is not ready, and an overdue one is killed. `StepLimits` is the rule, without a
clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from neuron_runtime.backend.base import Backend, ProgressCallback, StepTime
from neuron_runtime.core import BackendLimits, Batch, Kind, Late, StepOutput

MIN_STEP_SECONDS = 30.0
STEP_FACTOR = 10.0
FIRST_STEP_SECONDS = 600.0
USUAL_FACTOR = 1.5
LATE_SECONDS = 5.0
"""An engine is late this long after the usual end of its steps, or after it should have shown life between steps."""
MEMORY = 0.9
"""Decay of the measured maximum with each step, so that a first step that compiled is forgotten."""

Shape = tuple[Kind, int, int]
"""Kind of a step, its rows and its tokens, each rounded up to a power of two."""


class StepLimits:
    """How long a step may take.

    Args:
        min_seconds: smallest limit of any step.
        factor: limit as a multiple of the time measured for the shape.
        first_seconds: limit of the first step of a shape that was not warmed up, because it may compile.
    """

    def __init__(
        self,
        min_seconds: float = MIN_STEP_SECONDS,
        factor: float = STEP_FACTOR,
        first_seconds: float = FIRST_STEP_SECONDS,
    ) -> None:
        self.min_seconds = min_seconds
        self._factor = factor
        self._first_seconds = first_seconds
        self._measured: dict[Shape, float] = {}

    def seconds(self, batch: Batch) -> float:
        """Limit of this step, counted from the end of the previous one."""
        measured = self._measured.get(shape_of(batch))
        if measured is None:
            return max(self._first_seconds, self.min_seconds)
        return max(self._factor * measured, self.min_seconds)

    def usual_seconds(self, batch: Batch) -> float:
        """Longest usual duration of this step: its limit, until one of its shape was measured."""
        measured = self._measured.get(shape_of(batch))
        return self.seconds(batch) if measured is None else USUAL_FACTOR * measured

    def observe(self, batch: Batch, seconds: float) -> None:
        """Record the duration of a step."""
        shape = shape_of(batch)
        self._measured[shape] = max(seconds, MEMORY * self._measured.get(shape, 0.0))


def shape_of(batch: Batch) -> Shape:
    return batch.kind, _rounded(len(batch.rows)), _rounded(batch.num_tokens)


def _rounded(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


class Watch(Protocol):
    """The part of `lifeline.Deadline` used here."""

    def set(self, seconds: float, usual_seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class _TimedStep:
    batch: Batch
    began: float


class WatchedBackend:
    """A backend that sets a deadline before every call: the sum of the limits of all steps in flight.

    The caller of `Engine.step` sets its own deadline between steps.
    """

    def __init__(
        self,
        backend: Backend,
        watch: Watch,
        step_limits: StepLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._watch = watch
        self._step_limits = step_limits or StepLimits()
        self._clock = clock
        self._in_flight: deque[_TimedStep] = deque()
        self._last_end = clock()

    @property
    def limits(self) -> BackendLimits:
        return self._backend.limits

    def warm_up(self, progress: ProgressCallback) -> tuple[StepTime, ...]:
        """Runs without a deadline, because compilation may take long. Its steps count as measured."""
        times = tuple(self._backend.warm_up(progress))
        for batch, seconds in times:
            self._step_limits.observe(batch, seconds)
        return times

    def launch(self, batch: Batch) -> None:
        self._in_flight.append(_TimedStep(batch, self._clock()))
        self._arm()
        self._backend.launch(batch)

    def sample(self, step: int, late: Late | None) -> None:
        self._backend.sample(step, late)

    def collect(self, step: int) -> StepOutput:
        self._arm()
        output = self._backend.collect(step)
        launched, now = self._in_flight.popleft(), self._clock()
        self._step_limits.observe(launched.batch, now - max(launched.began, self._last_end))
        self._last_end = now
        self._arm()
        return output

    def close(self) -> None:
        self._backend.close()

    def _arm(self) -> None:
        seconds = sum(self._step_limits.seconds(launched.batch) for launched in self._in_flight)
        usual_seconds = sum(self._step_limits.usual_seconds(launched.batch) for launched in self._in_flight)
        # With nothing in flight, the deadline covers the host's work on the last output.
        self._watch.set(max(seconds, self._step_limits.min_seconds), usual_seconds + LATE_SECONDS)
