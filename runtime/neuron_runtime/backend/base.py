"""The seam between engine and device: the Backend protocol that every backend (torch, NxDI, fakes) implements.

Called by `engine.loop` on the one thread that owns the device. A backend handles batches and token ids; it knows
nothing of requests, text or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from neuron_runtime.core import BackendLimits, Batch, Late, StepOutput

ProgressCallback = Callable[[str, float], None]
"""Called with (stage, share done from 0 to 1) during long work."""

StepTime = tuple[Batch, float]
"""A step, and the seconds that a step of its shape takes."""


class IllegalBatch(Exception):
    """A batch broke the contract of `Batch` or `BackendLimits`. Always a bug in the engine."""


class Backend(Protocol):
    """Runs steps. The order of calls for one step is launch, sample, collect.

    `sample` is called exactly once per launched step and before the next launch. With two steps in flight the next
    step may be launched (and sampled) before the previous one is collected; steps are collected in order. An
    exception from any of the three leaves the device undefined: the engine process ends.
    """

    @property
    def limits(self) -> BackendLimits: ...

    def warm_up(self, progress: ProgressCallback) -> Iterable[StepTime]:
        """Run every compiled shape, so that the first request is not slower than others. Called once, before launch.

        Returns:
            Steps of the shapes that were run, with their times without first-run overhead.
        """

    def launch(self, batch: Batch) -> None:
        """Apply the delta and start the step. Returns as soon as the step is enqueued."""

    def sample(self, step: int, late: Late | None) -> None:
        """Choose tokens for the launched step; `late` is None unless a row needs data from the host."""

    def collect(self, step: int) -> StepOutput:
        """Block until the step is done and return what it produced."""

    def close(self) -> None:
        """Release the device. Safe to call twice."""
