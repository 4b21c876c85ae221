"""Counts the steps of an engine by their kind, and whether they were scheduled while the step before them ran."""

from __future__ import annotations

from collections import Counter

from neuron_runtime.core import Batch, StepKind
from neuron_runtime.engine.loop import Engine


class StepCounts:
    """Counts of an engine that has not made a step yet."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._schedule = engine._schedule
        self._counts: Counter[tuple[StepKind, bool]] = Counter()
        engine._schedule = self._counted  # type: ignore[method-assign]

    @property
    def num_ahead(self) -> int:
        """Decode steps that were scheduled while the step before them ran."""
        return self._counts[StepKind.DECODE, True]

    def num(self, kind: StepKind) -> int:
        return self._counts[kind, False] + self._counts[kind, True]

    def _counted(self) -> Batch | None:
        runs = bool(self._engine._in_flight)
        batch = self._schedule()
        if batch is not None:
            self._counts[batch.kind, runs] += 1
        return batch
