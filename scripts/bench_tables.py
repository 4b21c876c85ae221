"""Tables of docs/benchmarks.md, from what the simulated backend declares. Called by `generate`; measures nothing."""

from __future__ import annotations

from neuron_runtime.backend.simulated.step_times import PUBLISHED


def published_step_times() -> str:
    """The step times that `--step-times` and `stepTimes` name, with their sources."""
    rows = (
        f"| `{one.name}` | {_points(one.decode)} | {_points(one.prefill)} | {one.source} |"
        for one in PUBLISHED.values()
    )
    return "\n".join(["| Name | Decode, ms at rows | Prefill, ms at tokens | Source |", "|---|---|---|---|", *rows])


def _points(curve: tuple[tuple[int, float], ...]) -> str:
    return ", ".join(f"{milliseconds:g} at {size}" for size, milliseconds in curve)
