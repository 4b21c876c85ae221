"""The table of step times in docs/benchmarks.md, from the simulated backend. Called by `generate`."""

from __future__ import annotations

from markdown_table import table
from neuron_runtime.backend.simulated.step_times import PUBLISHED


def published_step_times() -> str:
    """The step times that `--step-times` and `stepTimes` name, with their sources."""
    return table(
        ("Name", "Decode, ms at rows", "Prefill, ms at tokens", "Source"),
        ((f"`{name}`", _points(one.decode), _points(one.prefill), one.source) for name, one in PUBLISHED.items()),
    )


def _points(curve: tuple[tuple[int, float], ...]) -> str:
    return ", ".join(f"{milliseconds:g} at {size}" for size, milliseconds in curve)
