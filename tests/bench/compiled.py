"""Compiled decode steps of the torch backend compared with eager ones, without the engine, in turns in one process.

Called by the suite. Both kinds run over the same weights and cache. The model is compiled into the user's store of
artifacts and found there the next time; that time is not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bare_step import BareDecoder
from bench.report import Load, Meter
from neuron_runtime.arguments import default_artifacts_dir
from neuron_runtime.artifacts.compiling import make, wanted_artifact
from neuron_runtime.artifacts.store import artifact_store
from neuron_runtime.config import ModelSource, RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import ExitCode, FatalError

TURN_STEPS = 8
"""Steps of one kind before the other has its turn: few, so that both see the same machine."""


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds per step for one number of rows; the ratio is the median over pairs of turns, above one: faster."""

    eager_seconds: float
    compiled_seconds: float
    ratio: float
    load: Load


def measure(
    model_dir: Path, limits: BackendLimits, counts: Sequence[int], *, start: int, num_turns: int
) -> dict[int, Point]:
    """Greedy steps of each number of rows, from position `start` on, on this thread.

    Raises:
        FatalError: COMPILE_FAILED, e.g. without a C++ compiler; ARTIFACT_MISSING where this machine cannot run them.
    """
    eager = BareDecoder(model_dir, limits.max_rows, limits.max_model_length)
    if reason := eager.eager_because():
        raise FatalError(ExitCode.ARTIFACT_MISSING, reason)
    compiled = eager.compiled(artifact(model_dir))
    points = {}
    for rows in counts:
        for one in (eager, compiled):
            one.decode(rows, start, 2)
        meter = Meter()
        turns = [
            tuple(statistics.fmean(one.decode(rows, start, TURN_STEPS)) for one in (eager, compiled))
            for _ in range(num_turns)
        ]
        before, after = (statistics.median(one) for one in zip(*turns, strict=True))
        points[rows] = Point(before, after, statistics.median(one / other for one, other in turns), meter.read())
    return points


def artifact(model_dir: Path) -> Path:
    """The compiled model, from the user's store."""
    config = RuntimeConfig(version=1, model=ModelSource(uri=model_dir.as_uri()), served_names=("m",), compile=True)
    wanted = wanted_artifact(config, model_dir)
    said: list[str] = []

    def progress(stage: str, share: float) -> None:
        if stage not in said:
            said.append(stage)
            say(stage)

    return make(wanted, artifact_store(default_artifacts_dir()), progress)[0].folder
