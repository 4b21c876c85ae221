"""The engine in numbers: filled by scheduler and loop once per turn, sent as they are, read by `server.metrics`.

A new metric is a field here, the line that sets it, and a row of `FAMILIES`.
"""

from __future__ import annotations

import msgspec

from neuron_runtime.core import Kind


class StepStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One applied step."""

    step: int
    kind: Kind
    num_rows: int
    num_tokens: int
    """Tokens fed."""
    num_new_tokens: int
    """Tokens that went to clients."""
    device_seconds: float
    scheduled_ahead: bool
    """This step was scheduled while the one before it ran."""
    launched_ahead: bool
    """It was also launched before the one before it was collected."""
    bucket: str = ""
    """The compiled shape it ran in; empty where shapes are free."""
    num_computed_tokens: int = 0
    """Tokens that the device computed, padding included."""


class EngineStats(msgspec.Struct, kw_only=True, array_like=True):
    """Counts named `_total` only grow, all others are those of the moment or of the latest turn."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens of requests that no step has taken up."""
    num_blocks_used: int = 0
    num_blocks: int = 0
    num_preemptions_total: int = 0
    num_prompt_tokens_total: int = 0
    """Prompt tokens of requests that got their first token."""
    num_generation_tokens_total: int = 0
    num_prefix_queries_total: int = 0
    """Prompt tokens that were looked for in the prefix cache, of requests taken up for the first time."""
    num_prefix_hits_total: int = 0
    """Those of them that were found, and so not computed again."""
    num_prefill_steps_total: int = 0
    num_decode_steps_total: int = 0
    num_mixed_steps_total: int = 0
    num_decode_steps_ahead_total: int = 0
    """Decode steps that were scheduled while the step before them ran."""
    device_seconds_total: float = 0.0
    stream_gap_bound_seconds: float = 0.0
    """A running stream gets its next token within this time, as far as steps take no longer than any did so far."""
    backend_seconds_total: float = 0.0
    """Time that calls of the backend took, waiting for the device included; the rest of a turn is the host's."""
    last_step: StepStats | None = None
    """The step applied by the latest call of `Engine.step`; None if that call applied none."""
