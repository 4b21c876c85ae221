"""Which rows the host samples: the rule of the tests, written out, so that they judge `core.needs_host` by another.

Used by the strict backend and by the tests that predict tokens.
"""

from __future__ import annotations

from neuron_runtime.core import BackendLimits, Sampling


def is_of_host(sampling: Sampling, limits: BackendLimits) -> bool:
    """Whether the host samples the rows of a request, on a device that samples the others and returns logits too."""
    return limits.sampling == "DeviceWithLogits" and asks_for_logits(sampling, limits.max_top_k)


def asks_for_logits(sampling: Sampling, max_top_k: int) -> bool:
    """Whether a device that draws from this many likeliest tokens (0: from all) cannot sample by these parameters."""
    is_drawn = sampling.temperature > 0
    return any(
        (
            sampling.min_p > 0,
            sampling.repetition_penalty != 1,
            sampling.presence_penalty != 0,
            sampling.frequency_penalty != 0,
            len(sampling.logit_bias) > 0,
            sampling.allowed_token_ids is not None,
            sampling.form is not None,
            len(sampling.bad_words) > 0,
            sampling.min_tokens > 0,
            sampling.logprobs is not None,
            is_drawn and sampling.seeded,
            is_drawn and max_top_k > 0 and sampling.top_k > max_top_k,
        )
    )
