"""The seam between engine and device: the Backend protocol that every backend (torch, NxDI, fakes) implements.

Called by `engine.loop` on the one thread that owns the device, and wrapped by `distributed` for groups. A backend
knows batches and token ids; requests, text and HTTP are not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from neuron_runtime.core import BackendLimits, Batch, Late, StepOutput

ProgressCallback = Callable[[str, float], None]
"""Called with (what is being done, share done from 0 to 1) during long work."""

StepTime = tuple[Batch, float]
"""A step, and the seconds that one of its shape takes."""


class IllegalBatch(Exception):
    """A batch broke the contract of `Batch` or `BackendLimits`. A bug of the engine, never a client's doing."""


class Backend(Protocol):
    """Runs steps. The order of calls for one step is launch, sample, collect.

    `sample` is called exactly once per launched step and before the next launch. With two steps in flight the next
    step may be launched (and sampled) before the previous one is collected; steps are collected in order. An
    exception from any of the three leaves the device undefined: the engine process ends.
    """

    @property
    def limits(self) -> BackendLimits: ...

    def warm_up(self, progress: ProgressCallback) -> Iterable[StepTime]:
        """Run every compiled shape, so that the first request pays for nothing. Called once, before launch.

        Returns:
            Steps of the shapes that were run and timed, each without what happens the first time alone.
        """

    def launch(self, batch: Batch) -> None:
        """Take over the delta and start the step. Returns as soon as the device has been told."""

    def sample(self, step: int, late: Late | None) -> None:
        """Choose tokens for the launched step; `late` is None unless a row needs the host."""

    def collect(self, step: int) -> StepOutput:
        """Block until the step is done and return what it produced."""

    def close(self) -> None:
        """Release the device. Safe to call twice."""
