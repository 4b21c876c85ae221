"""Upper bounds: every request ends, and no stream starves.

Pure functions of the backend's limits. The loop reports `stream_gap_bound`; property tests check both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neuron_runtime.core import BackendLimits, Request, StepKind


def max_steps(limits: BackendLimits, requests: Iterable[Request], max_consecutive_prefills: int = 1) -> int:
    """Maximum number of steps until all of `requests` end, for any order of arrival, preemptions and aborts.

    The running sequence that is first in order is never preempted and advances in every step that its phase allows.
    Another sequence becomes first at most twice per request (one ends, or an earlier one is admitted), and each time
    it may have to recompute all its tokens.
    """
    requests = list(requests)
    beside = limits.max_rows - 1 if limits.mixes_phases else 0
    # With buckets, the largest fits beside the rows of all others.
    part = min(limits.longest_prefill, limits.max_step_tokens - beside) if limits.chunks_prefill else None
    lengths = [len(r.prompt_token_ids) + r.sampling.max_tokens - 1 for r in requests]
    prefills = max((-(-length // part) if part else 1 for length in lengths), default=0)
    advances = sum(r.sampling.max_tokens for r in requests) + 2 * len(requests) * prefills
    turns = 1 if limits.mixes_phases else 1 + max_consecutive_prefills
    # With several tokens per row, a sequence skips a step if its row in flight may be its last. A request that ends
    # unexpectedly leaves one unneeded step in flight.
    return advances * turns * (2 if limits.max_tokens_per_row > 1 else 1) + len(requests)


def stream_gap_bound(
    limits: BackendLimits, longest_step_seconds: Mapping[StepKind, float], max_consecutive_prefills: int = 1
) -> float:
    """Maximum seconds until a running stream that is not preempted gets its next token.

    If phases mix, every step has a row of each running stream; otherwise at most `max_consecutive_prefills` steps are
    between two that do. With several tokens per row, a sequence skips a turn if its row in flight may be its last.

    Args:
        longest_step_seconds: by kind, from the end of the previous step to the end of the step.
    """
    prefill = longest_step_seconds.get(StepKind.PREFILL, 0.0)
    own = max(longest_step_seconds.get(kind, 0.0) for kind in (StepKind.DECODE, StepKind.MIXED))
    turn = own if limits.mixes_phases else own + max_consecutive_prefills * prefill
    return turn + (max(turn, prefill) if limits.max_tokens_per_row > 1 else 0.0)
