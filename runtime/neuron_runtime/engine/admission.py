"""What may enter the engine at all, and how long everything that entered can take.

`check_request` is asked by `Engine.add`, `max_new_tokens` by whoever fills in a missing `max_tokens`; `max_steps` is
the promise that every request ends. Pure functions of the backend's limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neuron_runtime.core import BackendLimits, Kind, Request
from neuron_runtime.errors import InvalidRequest


def max_new_tokens(limits: BackendLimits, num_prompt_tokens: int) -> int:
    """The largest `max_tokens` that a prompt of this length can be given; not positive when the prompt is too long."""
    cached = limits.num_blocks * limits.block_size - limits.num_lookahead_tokens
    return min(limits.longest_sequence, cached + 1) - num_prompt_tokens


def check_request(limits: BackendLimits, request: Request) -> None:
    """Pass a request that runs to its end on an empty engine.

    Raises:
        InvalidRequest: naming the field and the limit.
    """
    sampling, token_ids = request.sampling, request.prompt_token_ids
    length = len(token_ids)
    longest_prompt = limits.longest_sequence if limits.chunks_prefill else limits.longest_prefill
    room = max_new_tokens(limits, length)
    for wrong, name, message in (
        (not length, "prompt", "the prompt is empty: at least one token is needed"),
        (
            bool(limits.vocabulary_size and token_ids)
            and not 0 <= min(token_ids) <= max(token_ids) < limits.vocabulary_size,
            "prompt",
            f"the prompt has a token outside the model's vocabulary of {limits.vocabulary_size}",
        ),
        (
            length < limits.min_prefill_tokens,
            "prompt",
            f"the prompt has {_tokens(length)}, this model needs at least {limits.min_prefill_tokens}",
        ),
        (
            length > longest_prompt,
            "prompt",
            f"the prompt has {_tokens(length)}, at most {longest_prompt} can be processed",
        ),
        (
            room < 1,
            "prompt",
            f"the prompt has {_tokens(length)}, prompt and answer together may have {length + room}",
        ),
        (sampling.max_tokens < 1, "max_tokens", f"max_tokens must be at least 1, got {sampling.max_tokens}"),
        (
            sampling.max_tokens > room,
            "max_tokens",
            f"max_tokens is {sampling.max_tokens} and the prompt has {_tokens(length)}, together they may have "
            f"{length + room}: ask for at most {room}",
        ),
        (
            sampling.min_tokens > sampling.max_tokens,
            "min_tokens",
            f"min_tokens is {sampling.min_tokens}, above max_tokens ({sampling.max_tokens})",
        ),
        (
            bool(limits.max_top_k) and sampling.top_k > limits.max_top_k,
            "top_k",
            f"top_k is {sampling.top_k}, this model samples from at most {limits.max_top_k}",
        ),
        (
            (sampling.logprobs or 0) > limits.max_logprobs,
            "logprobs",
            f"{sampling.logprobs} logprobs per token are wanted, this model reports at most {limits.max_logprobs}",
        ),
        (
            sampling.prompt_logprobs is not None and not limits.reports_prompt_logprobs,
            "prompt_logprobs",
            "this model does not report the log-probabilities of prompts",
        ),
        (
            (sampling.prompt_logprobs or 0) > limits.max_logprobs,
            "prompt_logprobs",
            f"{sampling.prompt_logprobs} per token of the prompt are wanted, this model reports at most "
            f"{limits.max_logprobs}",
        ),
    ):
        if wrong:
            raise InvalidRequest(message, field=name)


def max_steps(limits: BackendLimits, requests: Iterable[Request], max_consecutive_prefills: int = 1) -> int:
    """Steps within which all of `requests` end, whatever the order of arrival, preemptions and aborts.

    The running sequence that comes first in order is never preempted and advances in every step that its phase
    allows. It changes at most twice per request (one ends, or one that comes before it is admitted), and each time
    it may have to compute all tokens known so far.
    """
    requests = list(requests)
    beside = limits.max_rows - 1 if limits.mixes_phases else 0
    part = min(limits.longest_prefill, limits.max_step_tokens - beside) if limits.chunks_prefill else None
    lengths = [len(r.prompt_token_ids) + r.sampling.max_tokens - 1 for r in requests]
    prefills = max((-(-length // part) if part else 1 for length in lengths), default=0)
    advances = sum(r.sampling.max_tokens for r in requests) + 2 * len(requests) * prefills
    turns = 1 if limits.mixes_phases else 1 + max_consecutive_prefills
    # With several tokens per row, a row behind one that may be the last sits out a step; and each request that ends
    # unforeseen leaves one step in flight that nobody needs.
    return advances * turns * (2 if limits.max_tokens_per_row > 1 else 1) + len(requests)


def stream_gap_bound(
    limits: BackendLimits, longest_step_seconds: Mapping[Kind, float], max_consecutive_prefills: int = 1
) -> float:
    """Seconds within which a stream that runs, and is not preempted, gets its next token.

    Where phases mix, every step has a row of each running stream; else at most `max_consecutive_prefills` steps come
    between two that have one. With several tokens per row, a row behind one that may be the last sits out a turn.

    Args:
        longest_step_seconds: by kind, from the end of the step before to the end of the step.
    """
    prefill = longest_step_seconds.get(Kind.PREFILL, 0.0)
    own = max(longest_step_seconds.get(kind, 0.0) for kind in (Kind.DECODE, Kind.MIXED))
    turn = own if limits.mixes_phases else own + max_consecutive_prefills * prefill
    return turn + (max(turn, prefill) if limits.max_tokens_per_row > 1 else 0.0)


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"
