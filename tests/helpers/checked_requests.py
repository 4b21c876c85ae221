"""Asserts the properties that admission guarantees to the engine: a checked request completes on an empty engine."""

from __future__ import annotations

from helpers.strict_backend import needs_logits
from neuron_runtime.core import BackendLimits, Request


def check_request(limits: BackendLimits, request: Request) -> None:
    sampling, prompt = request.sampling, request.prompt_token_ids
    assert len(prompt) >= max(1, limits.min_prefill_tokens)
    assert not limits.vocabulary_size or 0 <= min(prompt) <= max(prompt) < limits.vocabulary_size
    assert len(prompt) <= limits.longest_prompt
    assert 1 <= sampling.max_tokens <= limits.max_new_tokens(len(prompt))
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert limits.sampling != "Device" or not needs_logits(sampling, limits)
    assert (sampling.logprobs or 0) <= limits.max_logprobs
    assert sampling.prompt_logprobs is None or limits.reports_prompt_logprobs
    assert (sampling.prompt_logprobs or 0) <= limits.max_logprobs
