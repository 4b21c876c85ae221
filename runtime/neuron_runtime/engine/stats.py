"""The engine in numbers: filled by scheduler and loop once per turn, sent as they are, read by `server.metrics`.

A new metric is a field here, the line that sets it, and a row of `FAMILIES`.
"""

from __future__ import annotations

import msgspec

from neuron_runtime.core import Kind


class StepStats(msgspec.Struct, kw_only=True, array_like=True):
    """One applied step."""

    step: int
    kind: Kind
    num_tokens: int
    """Tokens fed."""
    num_computed_tokens: int
    """Tokens that the device computed, padding included."""
    num_new_tokens: int = 0
    """Tokens that went to clients."""
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    """Time of the turn that applied it, outside the backend's calls."""
    bucket: str = ""
    """The compiled shape it ran in; empty where shapes are free."""


class EngineStats(msgspec.Struct, kw_only=True, array_like=True):
    """Fields named `_total` only grow; the others hold the present value, or that of the latest turn."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens of requests that no step has taken up."""
    num_blocks_used: int = 0
    num_blocks: int = 0
    num_preemptions_total: int = 0
    num_prefix_queries_total: int = 0
    """Prompt tokens that were looked for in the prefix cache, of requests taken up for the first time."""
    num_prefix_hits_total: int = 0
    """Those of them that were found, and so not computed again."""
    stream_gap_bound_seconds: float = 0.0
    """A running stream gets its next token within this time if no step takes longer than the longest so far."""
    backend_seconds_total: float = 0.0
    """Time that calls of the backend took, waiting for the device included."""
    work_seconds_total: float = 0.0
    """Time in which there was work."""
    last_step: StepStats | None = None
    """The step that the latest turn applied; None if it applied none."""
