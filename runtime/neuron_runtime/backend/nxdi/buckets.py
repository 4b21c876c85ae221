"""Which compiled graph a call of NxD Inference takes, by its own rules, and what the scheduler must know of them.

Called by the backend for names, times and padding of steps, and by whoever plans buckets. Pure: sizes in, sizes out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from neuron_runtime.backend.neuron.devices import TIMEOUT_SHARE
from neuron_runtime.backend.neuron.step_graphs import Decode, Graph, Prefill, at_least
from neuron_runtime.backend.nxdi.settings import RECOMPUTED, Settings
from neuron_runtime.core import MAX_LOGPROBS, BackendLimits, PrefillBucket

LOOKAHEAD = 2
"""In asynchronous mode, a decode step this close below the end of a bucket runs alone, in the next larger bucket."""


def prefill_graph(settings: Settings, start: int, end: int) -> Prefill:
    """The graph that computes the tokens of a prompt from `start` to `end`. Raises ValueError if none does."""
    active, prefixes = settings.context_buckets, settings.prefix_buckets
    if settings.layout == "slots":
        more = settings.vision.spare - 1 if settings.vision else 0
        return Prefill(_above(active, end + more))
    least, most = RECOMPUTED
    if least < end <= most and most in active and 0 in prefixes:
        return Prefill(most)
    tokens = at_least(active, end - start)
    free = tokens - (end - start)
    return Prefill(tokens, at_least(prefixes, max(start - free, 0)))


def decode_graph(settings: Settings, num_rows: int, position: int) -> Decode:
    """The graph of a decode call. Raises ValueError if none fits.

    num_rows: rows of the call; with slots at least the highest one plus 1. position: the largest of a row.
    """
    buckets = settings.token_buckets
    if settings.max_drafts:
        width = 1 + settings.max_drafts
        return Decode(settings.max_rows, _above(buckets, position + width), width)
    if settings.row_buckets:
        rows = at_least(sorted({*settings.row_buckets, settings.max_rows}), num_rows)
        return Decode(rows, at_least(buckets, position))
    if settings.asynchronous and any(position < bucket <= position + LOOKAHEAD for bucket in buckets):
        return Decode(settings.max_rows, buckets[min(bisect_right(buckets, position) + 1, len(buckets) - 1)])
    return Decode(settings.max_rows, _above(buckets, position))


def all_graphs(settings: Settings) -> Iterator[Graph]:
    """Every graph that is compiled, in the order of NxD Inference."""
    prefixes = settings.prefix_buckets if settings.layout == "blocks" else (0,)
    for tokens in settings.context_buckets:
        for prefix in prefixes:
            yield Prefill(tokens, prefix)
    for rows in sorted({*settings.row_buckets, settings.max_rows}, reverse=True):
        for length in settings.token_buckets:
            yield Decode(rows, length, 1 + settings.max_drafts)


def span_that_takes(settings: Settings, graph: Graph) -> tuple[int, int] | None:
    """Start and end of a row whose call takes this graph; None if no call within the model's length does."""
    if isinstance(graph, Decode):
        first = max([length for length in settings.token_buckets if length < graph.length], default=1)
        first = max(first - 1 - settings.max_drafts, 1) if settings.max_drafts else first
        candidates = [(at, at + 1) for at in (first, first + 1) if at < graph.length]
    elif settings.layout == "slots":
        ends = (graph.tokens - settings.vision.spare,) if settings.vision else (graph.tokens, graph.tokens - 1)
        candidates = [(0, min(end, settings.max_model_length)) for end in ends]
    else:
        # The longest call within the prefix's size; if that one is recomputed, the longest that is not.
        ends = (min(graph.prefix + graph.tokens, settings.max_model_length), RECOMPUTED[0])
        candidates = [(max(end - graph.tokens, 0), end) for end in ends if end <= settings.max_model_length]
    return next((one for one in candidates if one[1] > one[0] >= 0 and _takes(settings, graph, *one)), None)


def _takes(settings: Settings, graph: Graph, start: int, end: int) -> bool:
    if isinstance(graph, Decode):
        return decode_graph(settings, graph.rows, start) == graph
    try:
        return prefill_graph(settings, start, end) == graph
    except ValueError:
        return False


def _above(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket above the size; the largest may be equal to it."""
    at = bisect_right(buckets, size)
    return buckets[at] if at < len(buckets) else at_least(buckets, size)


def limits_of(settings: Settings, exec_timeout_seconds: float) -> BackendLimits:
    """The limits of a model. exec_timeout_seconds: after which the Neuron runtime gives up a step."""
    slots, context, vision = settings.layout == "slots", settings.context_buckets, settings.vision
    spare = vision.spare if vision else int(slots)
    reach = max(settings.prefix_buckets, default=0)
    # Drafts of an EAGLE head are kept by each row's own parameters.
    greedy_only = settings.draft is not None and not settings.draft.eagle
    # Free places of a prefill take cached tokens: also the last call of a sequence reads no more than this.
    longest_prefix = settings.max_model_length - context[0]
    return BackendLimits(
        max_rows=settings.max_rows,
        max_model_length=settings.max_model_length,
        # Prompts of a step run one after another, so together they take as long as the longest one alone.
        max_step_tokens=max(settings.max_context_length, settings.max_rows * (1 + settings.max_drafts)),
        max_prefill_rows=settings.max_rows,
        # With slots a prompt must be shorter than its bucket, unless that is the largest. Where pictures are seen,
        # what stands for no feature goes to the last place of the bucket, whether it has a token or not.
        prefill_buckets=tuple(
            PrefillBucket(size - spare if vision or size != context[-1] else size, size)
            for size in context
            if size > spare
        ),
        max_drafts=settings.max_drafts,
        drafts_every_row=settings.draft is not None,
        max_prefill_start=reach if reach < longest_prefix else 0,
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
        top_p_keeps_crossing=settings.sampling == "Host" or greedy_only,
        greedy_only=greedy_only,
        max_logprobs=0 if settings.sampling == "Device" else MAX_LOGPROBS,
        # A graph computes logits of the last position alone.
        reports_prompt_logprobs=False,
        steps_in_flight=2,
        token_feedback="same rows" if settings.asynchronous else "device",
        # NxD Inference launches the step after the one that was asked for, which writes one position more.
        num_lookahead_tokens=1 if settings.asynchronous else 0,
        max_adapters=settings.max_adapters,
        max_loaded_adapters=settings.max_loaded_adapters,
        max_adapter_rank=settings.max_adapter_rank,
        adapter_targets=settings.adapter_targets,
        # An adapter is bound to a row's seat by the call that computes the prompt.
        begins_with_prefill=settings.max_adapters > 0,
        max_pictures=vision.max_pictures if vision else 0,
        max_picture_tokens=vision.max_picture_tokens if vision else 0,
        max_tokens_of_pictures=vision.max_tokens if vision else 0,
        max_step_seconds=TIMEOUT_SHARE * exec_timeout_seconds,
    )
