"""What the scheduler must know of a model compiled for NxD Inference: `limits_of`. Pure."""

from __future__ import annotations

from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.core import MAX_LOGPROBS, BackendLimits, PrefillBucket

TIMEOUT_SHARE = 0.9
"""The share of the Neuron runtime's own limit on a step after which the watchdog ends a hung one."""


def limits_of(settings: Settings, exec_timeout_seconds: float) -> BackendLimits:
    """The limits of a model. exec_timeout_seconds: after which the Neuron runtime gives up a step."""
    slots = settings.layout == "slots"
    return BackendLimits(
        max_rows=settings.max_rows,
        max_model_length=settings.max_model_length,
        # Prompts of a step run one after another, so together they take as long as the longest one alone.
        max_step_tokens=max(settings.max_context_length, settings.max_rows),
        max_prefill_rows=settings.max_rows,
        prefill_buckets=prefill_buckets(settings),
        max_prefill_start=max_prefill_start(settings),
        layout=settings.layout,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        mixes_phases=False,
        chunks_prefill=settings.segments,
        # A decode step overwrites every cache line that is not one of its rows.
        decodes_all_live_rows=slots,
        sorts_rows=slots,
        lowest_slot_first=slots,
        shares_prefixes=settings.shares_prefixes,
        sampling=settings.sampling,
        vocabulary_size=settings.vocabulary_size,
        max_top_k=settings.global_topk,
        top_p_keeps_crossing=settings.sampling == "Host",
        max_logprobs=0 if settings.sampling == "Device" else MAX_LOGPROBS,
        # A graph computes logits of the last position alone.
        reports_prompt_logprobs=False,
        steps_in_flight=2,
        token_feedback="same rows" if settings.asynchronous else "device",
        # NxD Inference launches the step after the one that was asked for, which writes one position more.
        num_lookahead_tokens=1 if settings.asynchronous else 0,
        max_step_seconds=TIMEOUT_SHARE * exec_timeout_seconds,
    )


def max_prefill_start(settings: Settings) -> int:
    """The largest position at which a prefill may start; 0: any."""
    reach = max(settings.prefix_buckets, default=0)
    # Free places of a prefill take cached tokens: also the last call of a sequence reads no more than this.
    longest = settings.max_model_length - settings.context_buckets[0]
    return reach if reach < longest else 0


def prefill_buckets(settings: Settings) -> tuple[PrefillBucket, ...]:
    """The sizes of a prefill. With slots a prompt must be shorter than its bucket, unless that is the largest."""
    last = settings.context_buckets[-1]
    strict = settings.layout == "slots"
    return tuple(
        PrefillBucket(size - 1 if strict and size != last else size, size)
        for size in settings.context_buckets
        if size > 1 or not strict
    )
