"""Statistics of the engine: updated by scheduler and loop once per turn, sent unchanged, read by `server.metrics`.

A new metric needs a field here, the line that sets it, and a row of `FAMILIES`.
"""

from __future__ import annotations

import msgspec

from neuron_runtime.core import DeviceMemory, GraphUse, StepKind


class StepStats(msgspec.Struct, kw_only=True, array_like=True):
    """One applied step."""

    step: int
    kind: StepKind
    num_tokens: int
    """Tokens fed."""
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    """Time of the turn that applied it, without calls of the backend."""
    graphs: tuple[GraphUse, ...] = ()
    """What the device ran, one entry per call; empty if shapes are dynamic."""


class EngineStats(msgspec.Struct, kw_only=True, array_like=True):
    """Fields named `_total` only increase; the others have the current value, or that of the latest turn."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens of waiting requests."""
    num_blocks_used: int = 0
    num_blocks: int = 0
    num_preemptions_total: int = 0
    num_prefix_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache, counted when a request is first scheduled."""
    num_prefix_hits_total: int = 0
    """Those of them that were found, and so not computed again."""
    num_drafted_rows_total: int = 0
    """Rows that had drafts."""
    num_drafts_total: int = 0
    num_accepted_drafts_total: int = 0
    accepted_by_place_total: list[int] = msgspec.field(default_factory=list)
    """How often the first draft of a row was accepted, the second, and so on."""
    stream_gap_bound_seconds: float = 0.0
    """Bound on the time between tokens of a running stream if no step takes longer than the longest so far."""
    backend_seconds_total: float = 0.0
    """Time of backend calls, including waits for the device."""
    work_seconds_total: float = 0.0
    """Time in which the engine had work."""
    group_wait_seconds_total: tuple[float, ...] = ()
    """For each other rank, time in which a step was done here and not yet there; empty without a group."""
    running_adapters: tuple[str, ...] = ()
    """Digests of the adapters of running requests."""
    waiting_adapters: tuple[str, ...] = ()
    """The same of waiting requests."""
    device_memory: DeviceMemory | None = None
    """As a step last reported it; None: no step did."""
    last_step: StepStats | None = None
    """The step applied by the latest turn, if any."""

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """What became of the drafts of one row."""
        self.num_drafted_rows_total += 1
        self.num_drafts_total += num_drafts
        self.num_accepted_drafts_total += num_accepted
        by_place = self.accepted_by_place_total
        by_place.extend([0] * (num_accepted - len(by_place)))
        for place in range(num_accepted):
            by_place[place] += 1
