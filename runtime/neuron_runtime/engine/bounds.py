"""The upper bound of a stream's gaps: no stream starves.

A pure function of the backend's limits. The loop reports it, and property tests check it.
"""

from __future__ import annotations

from collections.abc import Mapping

from neuron_runtime.core import BackendLimits, StepKind


def stream_gap_bound(
    limits: BackendLimits, longest_step_seconds: Mapping[StepKind, float], max_consecutive_prefills: int = 1
) -> float:
    """Maximum seconds until a running stream that is not preempted gets its next token.

    If phases mix, every step has a row of each running stream; otherwise at most `max_consecutive_prefills` steps are
    between two that do. With several tokens per row, a sequence skips a turn if its row in flight may be its last.

    longest_step_seconds: by kind, from the end of the previous step to the end of the step.
    """
    prefill = longest_step_seconds.get(StepKind.PREFILL, 0.0)
    own = max(longest_step_seconds.get(kind, 0.0) for kind in (StepKind.DECODE, StepKind.MIXED))
    turn = own if limits.mixes_phases else own + max_consecutive_prefills * prefill
    return turn + (max(turn, prefill) if limits.max_tokens_per_row > 1 else 0.0)
