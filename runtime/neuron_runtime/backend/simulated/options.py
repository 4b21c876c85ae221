"""Options of a simulated device (step times, compiled sizes, phases, feedback) and its limits.

Read from `overrideNeuronConfig` of a served model, and built from flags by `neuron-runtime bench simulate`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from neuron_runtime.adapters.peft import TARGETS
from neuron_runtime.backend.simulated.step_times import PUBLISHED, Curve, PhaseTimes, StepTimes, constant, milliseconds
from neuron_runtime.config import RuntimeConfig, uses_blocks
from neuron_runtime.core import MAX_LOGPROBS, BackendLimits, PrefillBucket, TokenFeedback
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.validation import explain

DEFAULT_MAX_SEQUENCES = 32
DEFAULT_MAX_LENGTH = 4096
DEFAULT_MAX_STEP_TOKENS = 512
DEFAULT_BLOCK_SIZE = 16
DEFAULT_STEP_MILLISECONDS = 8.0
MAX_TOP_K = 256
"""From how many likeliest tokens a simulated device draws, as compiled models do by default."""

PATH = "$.overrideNeuronConfig"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The device of a simulated backend."""

    step_milliseconds: float | None = None
    """Duration of every step; excludes other times."""
    step_times: str | None = None
    """A name in `PUBLISHED`."""
    decode_milliseconds: tuple[tuple[int, float], ...] = ()
    """Pairs of rows and milliseconds; replaces those of `step_times`."""
    prefill_milliseconds: tuple[tuple[int, float], ...] = ()
    """Pairs of prompt tokens and milliseconds; replaces those of `step_times`."""
    decode_buckets: tuple[int, ...] = ()
    """Compiled sizes in rows; empty: every size."""
    prefill_buckets: tuple[int, ...] = ()
    """Compiled sizes in tokens; empty: every size."""
    prefill: Literal["whole", "chunks", "mixed"] = "mixed"
    """Prefill whole prompts in their own step, chunks between decode steps, or chunks in one step with decode rows."""
    token_feedback: TokenFeedback = "device"
    compile_seconds: Annotated[float, Meta(ge=0)] = 0.1
    """Time to compile each size, with `compile`."""
    compile_bytes: Annotated[int, Meta(ge=0)] = 0
    """Memory that a compiler needs, with `compile`."""


def read_options(settings: dict[str, Any]) -> Options:
    """Raises InvalidConfig, naming the path of the key."""
    try:
        options = msgspec.convert(settings, Options)
    except msgspec.ValidationError as error:
        path, message = explain(error, Options)
        unknown = re.fullmatch(r"Object contains unknown field `(.+)`", message)
        if unknown:
            message, path = "the simulated backend has no such setting: leave it out", f".{unknown[1]}"
        raise InvalidConfig(PATH + path, message) from error
    step_times(options)
    return options


def step_times(options: Options) -> StepTimes:
    """Raises InvalidConfig if the times are invalid or contradict each other."""
    points = options.decode_milliseconds, options.prefill_milliseconds
    if options.step_milliseconds is not None:
        if options.step_times is not None or any(points):
            raise InvalidConfig(f"{PATH}.stepMilliseconds", "cannot be combined with other times: set one of them")
        if options.step_milliseconds <= 0:
            raise InvalidConfig(f"{PATH}.stepMilliseconds", f"must be positive, got {options.step_milliseconds}")
        decode = prefill = constant(options.step_milliseconds / 1000)
    elif options.step_times is not None:
        if options.step_times not in PUBLISHED:
            known = ", ".join(PUBLISHED)
            raise InvalidConfig(f"{PATH}.stepTimes", f"must be one of {known}; got {options.step_times!r}")
        published = PUBLISHED[options.step_times]
        decode, prefill = milliseconds(published.decode), milliseconds(published.prefill)
    else:
        decode = prefill = constant(DEFAULT_STEP_MILLISECONDS / 1000)
    return StepTimes(
        decode=_phase("decode", decode, options.decode_milliseconds, options.decode_buckets),
        prefill=_phase("prefill", prefill, options.prefill_milliseconds, options.prefill_buckets),
    )


def _phase(name: str, curve: Curve, points: tuple[tuple[int, float], ...], buckets: tuple[int, ...]) -> PhaseTimes:
    if points:
        try:
            curve = milliseconds(points)
        except ValueError as error:
            raise InvalidConfig(f"{PATH}.{name}Milliseconds", str(error)) from error
    if list(buckets) != sorted({*buckets}) or min(buckets, default=1) < 1:
        raise InvalidConfig(f"{PATH}.{name}Buckets", f"must be positive and in ascending order, got {list(buckets)}")
    return PhaseTimes(curve, buckets)


def limits_of(config: RuntimeConfig, options: Options, *, vocabulary_size: int, longest: int) -> BackendLimits:
    """The limits of a simulated device. Values that the configuration leaves open are derived.

    longest: the model's maximum length; the default is that, but at most DEFAULT_MAX_LENGTH. Raises InvalidConfig with
    the field and the numbers.
    """
    configured, adapters = config.limits, config.adapters
    rows = configured.max_sequences or DEFAULT_MAX_SEQUENCES
    length = configured.max_model_length or min(longest, DEFAULT_MAX_LENGTH)
    if not 2 <= length <= longest:
        raise InvalidConfig(
            "$.limits.maxModelLength", f"must be from 2 to the model's {longest} positions, got {length}"
        )
    sampling = config.sampling or "Device"
    on_host = sampling == "Host"
    whole, blocks = options.prefill == "whole", uses_blocks(config)
    if config.chunked_prefill == ("enabled" if whole else "disabled"):
        setting = "overrideNeuronConfig.prefill"
        raise InvalidConfig("$.chunkedPrefill", f"{config.chunked_prefill} contradicts {setting} {options.prefill!r}")
    if blocks is None:
        blocks = not whole
    # Steps that mix phases compute the tokens of all their prompts together, others each prompt in its own size.
    buckets = tuple(PrefillBucket(size, size) for size in options.prefill_buckets) if options.prefill != "mixed" else ()
    # With whole prompts, a step must fit the longest one.
    longest_row = buckets[-1].computes if buckets else length if whole else DEFAULT_MAX_STEP_TOKENS
    step_tokens = configured.max_step_tokens or max(longest_row, rows if whole else 2 * rows)
    block_size = (configured.block_size or DEFAULT_BLOCK_SIZE) if blocks else length
    per_sequence = -(-length // block_size)
    num_blocks = (configured.num_blocks or rows * per_sequence) if blocks else rows
    if num_blocks < per_sequence:
        raise InvalidConfig(
            "$.limits.numBlocks",
            f"one sequence of {length} tokens needs {per_sequence} blocks of {block_size}, but there are {num_blocks}",
        )
    try:
        return BackendLimits(
            max_rows=rows,
            max_model_length=length,
            max_step_tokens=step_tokens,
            max_prefill_rows=rows if options.prefill == "mixed" else 1,
            prefill_buckets=buckets,
            layout="blocks" if blocks else "slots",
            block_size=block_size,
            num_blocks=num_blocks,
            mixes_phases=options.prefill == "mixed",
            chunks_prefill=not whole,
            # Compiled graphs with contiguous cache lines require it.
            decodes_all_live_rows=whole and not blocks,
            sorts_rows=not blocks,
            lowest_slot_first=not blocks,
            shares_prefixes=blocks and config.prefix_caching != "disabled",
            sampling=sampling,
            vocabulary_size=vocabulary_size,
            max_top_k=0 if on_host else min(MAX_TOP_K, vocabulary_size),
            top_p_keeps_crossing=on_host,
            max_logprobs=0 if sampling == "Device" else MAX_LOGPROBS,
            reports_prompt_logprobs=on_host,
            steps_in_flight=1 if options.token_feedback == "host" else 2,
            token_feedback=options.token_feedback,
            max_drafts=config.speculation.max_drafts,
            max_adapters=adapters.max_active,
            max_loaded_adapters=adapters.max_loaded or adapters.max_active,
            max_adapter_rank=adapters.max_rank if adapters.max_active else 0,
            adapter_targets=adapters.targets or TARGETS,
        )
    except ValueError as error:
        raise InvalidConfig("$.limits.maxStepTokens", f"{step_tokens} with {rows} sequences: {error}") from error
