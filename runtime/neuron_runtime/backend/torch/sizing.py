"""Derives the limits of the torch backend from configuration, model shape and free memory, or refuses with the numbers.

Called once by the loader before weights are read. Pure: the caller passes the free memory. By default the length is the
model's maximum with room for all sequences at that length, or less if memory is short.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from neuron_runtime.adapters.peft import TARGETS
from neuron_runtime.backend.host_sampling.likeliest import ROWS_AT_ONCE
from neuron_runtime.backend.torch.architecture import DecoderConfig, projections, tensor_shapes
from neuron_runtime.backend.torch.choices import SHARE_OF_MEMORY, block_size_of
from neuron_runtime.backend.torch.held import MULTIPLIED_OUT, Held, weight_bytes
from neuron_runtime.backend.torch.towers import TowerNeeds
from neuron_runtime.config import AdapterOptions, RuntimeConfig
from neuron_runtime.core import MAX_LOGPROBS, BackendLimits, grammar_bytes
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.host import FreeMemory, gib

DEFAULT_MAX_SEQUENCES = 8
DEFAULT_MAX_STEP_TOKENS = 512
MIN_DEFAULT_LENGTH = 64
"""If less than this fits, the process exits instead of serving uselessly short sequences."""


class DraftNeeds(NamedTuple):
    """What makes drafts beside the model, in numbers of the model's dtype: its weights, and what it keeps per token."""

    weights: int
    per_token: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The arithmetic, in bytes."""

    free: FreeMemory
    weights: int
    adapters: int
    """Those of all places, those that are kept, and one that is read."""
    scratch: int
    per_token: int
    """Keys and values of one token in all layers."""

    @property
    def cache(self) -> int:
        """Memory left for keys and values; may be negative."""
        return int(self.free.available * SHARE_OF_MEMORY) - self._others

    def cure(self, num_tokens: int) -> str:
        """What a user can do if the cache must have room for this many tokens."""
        needed = self._others + num_tokens * self.per_token
        return self.free.cure(math.ceil(needed / SHARE_OF_MEMORY))

    @property
    def _others(self) -> int:
        return self.weights + self.adapters + self.scratch

    def __str__(self) -> str:
        adapters = f"adapters {gib(self.adapters)}, " if self.adapters else ""
        return (
            f"{SHARE_OF_MEMORY:.0%} of {self.free} may be used: weights {gib(self.weights)}, "
            f"{adapters}scratch {gib(self.scratch)}, leaving {gib(self.cache)} for the cache "
            f"at {self.per_token} bytes per token"
        )


def derive_limits(
    config: RuntimeConfig,
    model: DecoderConfig,
    dtype_bytes: int,
    free: FreeMemory,
    draft: DraftNeeds | None = None,
    *,
    held: Held = MULTIPLIED_OUT,
    pictures: TowerNeeds | None = None,
) -> BackendLimits:
    """Derive every limit. draft: what makes drafts. pictures: None if the model sees none.

    Raises:
        InvalidConfig: a configured limit is impossible; names the field and the numbers.
        FatalError: DEVICE_OUT_OF_MEMORY if not even the minimum fits.
    """
    limits = config.limits
    size_of_blocks = block_size_of(config)
    wants_blocks = size_of_blocks > 0
    rows = limits.max_sequences or DEFAULT_MAX_SEQUENCES
    chunks = config.chunked_prefill != "disabled"
    whole = pictures.most.tokens if pictures is not None and pictures.feeds_whole and chunks else 0
    least = max(rows, whole + rows - 1)
    step_tokens = limits.max_step_tokens or max(DEFAULT_MAX_STEP_TOKENS, least)
    if step_tokens < rows:
        raise InvalidConfig(
            "$.limits.maxStepTokens", f"must be at least maxSequences ({rows}), one token each; got {step_tokens}"
        )
    if step_tokens < least:
        problem = f"must be at least {least}: the {whole} tokens of a picture, which one step computes, beside a token"
        raise InvalidConfig(
            "$.limits.maxStepTokens", f"{problem} of each other of maxSequences ({rows}); got {step_tokens}"
        )
    if limits.max_model_length > model.max_position_embeddings:
        raise InvalidConfig(
            "$.limits.maxModelLength",
            f"must be at most the model's {model.max_position_embeddings} positions, got {limits.max_model_length}",
        )
    if limits.max_model_length == 1:
        raise InvalidConfig("$.limits.maxModelLength", "must be at least 2: one prompt token and one output token")
    adapters = config.adapters
    of_adapters = _adapter_bytes(model, adapters, dtype_bytes)
    max_drafts = config.speculation.max_drafts
    places = min(rows * (1 + max_drafts), step_tokens)
    memory = _memory(
        model, dtype_bytes, free, rows=rows, places=places, step_tokens=step_tokens, adapters=of_adapters, held=held
    )
    if draft is not None:
        memory = replace(
            memory,
            weights=memory.weights + draft.weights * dtype_bytes,
            per_token=memory.per_token + draft.per_token * dtype_bytes,
        )
    if pictures is not None:
        # Features of a step, and of the pictures that it begins with and ends in.
        features = (step_tokens + 2 * pictures.most.tokens) * pictures.most.depth * model.hidden_size * dtype_bytes
        memory = replace(
            memory,
            weights=memory.weights + pictures.weights * dtype_bytes,
            scratch=memory.scratch + pictures.scratch + features,
        )
    if memory.cache < MIN_DEFAULT_LENGTH * memory.per_token:
        cure = memory.cure(MIN_DEFAULT_LENGTH)
        raise FatalError(ExitCode.DEVICE_OUT_OF_MEMORY, f"not enough memory for this model: {memory}; {cure}")
    block_size, num_blocks, length = (
        _blocks(config, model, memory, rows, size_of_blocks) if wants_blocks else _slots(config, model, memory, rows)
    )
    return BackendLimits(
        max_rows=rows,
        max_model_length=length,
        max_step_tokens=step_tokens,
        max_prefill_rows=rows,
        max_drafts=max_drafts,
        layout="blocks" if wants_blocks else "slots",
        chunks_prefill=chunks,
        block_size=block_size,
        num_blocks=num_blocks,
        # Compact slots are read in place. Blocks may be shared, because rows may start anywhere.
        lowest_slot_first=not wants_blocks,
        shares_prefixes=wants_blocks and config.prefix_caching != "disabled",
        sampling="Host",
        vocabulary_size=model.vocabulary_size,
        max_logprobs=MAX_LOGPROBS,
        reports_prompt_logprobs=True,
        steps_in_flight=2,
        max_pictures=length if pictures else 0,
        max_picture_tokens=pictures.most.tokens if pictures else 0,
        feeds_pictures_whole=pictures is not None and pictures.feeds_whole,
        token_feedback="device",
        max_adapters=adapters.max_active,
        max_loaded_adapters=_num_loaded(adapters),
        max_adapter_rank=adapters.max_rank if adapters.max_active else 0,
        adapter_targets=_targets(model, adapters),
    )


def _num_loaded(adapters: AdapterOptions) -> int:
    return (adapters.max_loaded or adapters.max_active) if adapters.max_active else 0


def _adapter_bytes(model: DecoderConfig, adapters: AdapterOptions, dtype_bytes: int) -> int:
    """Memory of all adapters; one of a smaller rank, or of fewer projections, takes less."""
    if not adapters.max_active:
        return 0
    shapes = projections(model)
    per_layer = sum(sum(shapes[target]) for target in _targets(model, adapters)) * adapters.max_rank
    return (adapters.max_active + _num_loaded(adapters) + 1) * model.num_layers * per_layer * dtype_bytes


def _targets(model: DecoderConfig, adapters: AdapterOptions) -> tuple[str, ...]:
    """Raises InvalidConfig."""
    if not adapters.max_active:
        return ()
    known = projections(model)
    if unknown := [target for target in adapters.targets if target not in known]:
        message = f"adapters of {model.architecture} may change {', '.join(known)}, not {', '.join(unknown)}"
        raise InvalidConfig("$.adapters.targets", message)
    return adapters.targets or tuple(target for target in TARGETS if target in known)


def _slots(config: RuntimeConfig, model: DecoderConfig, memory: Memory, rows: int) -> tuple[int, int, int]:
    fits = memory.cache // (rows * memory.per_token)
    length = config.limits.max_model_length or min(model.max_position_embeddings, fits)
    if length > fits or length < min(MIN_DEFAULT_LENGTH, model.max_position_embeddings) > fits:
        # Name the length if the configuration sets it; otherwise the number of sequences is what can be changed.
        field = "$.limits.maxModelLength" if config.limits.max_model_length else "$.limits.maxSequences"
        raise InvalidConfig(field, f"{rows} sequences of {max(length, MIN_DEFAULT_LENGTH)} tokens do not fit: {memory}")
    return length, rows, length


def _blocks(config: RuntimeConfig, model: DecoderConfig, memory: Memory, rows: int, size: int) -> tuple[int, int, int]:
    fits = memory.cache // (size * memory.per_token)
    length = config.limits.max_model_length or min(model.max_position_embeddings, fits * size)
    per_sequence = -(-length // size)
    num_blocks = config.limits.num_blocks or min(rows * per_sequence, fits)
    field = "$.limits.numBlocks" if config.limits.num_blocks else "$.limits.maxModelLength"
    if num_blocks > fits:
        raise InvalidConfig(field, f"{num_blocks} blocks of {size} tokens do not fit, at most {fits} do: {memory}")
    if num_blocks < per_sequence:
        if not config.limits.max_model_length:
            return size, num_blocks, num_blocks * size
        raise InvalidConfig(
            field,
            f"one sequence of {length} tokens needs {per_sequence} blocks of {size}, but there are {num_blocks}: "
            f"{memory}",
        )
    return size, num_blocks, length


def needs_of_model(draft: DecoderConfig) -> DraftNeeds:
    return DraftNeeds(_weight_bytes(draft, 1), draft.kv_elements_per_token)


def needs_of_head(shapes: Collection[tuple[int, ...]], per_token: int) -> DraftNeeds:
    """shapes: of its tensors. A weight exists twice while it is packed."""
    sizes = [math.prod(shape) for shape in shapes]
    return DraftNeeds(sum(sizes) + max(sizes), per_token)


def _weight_bytes(model: DecoderConfig, dtype_bytes: int, held: Held = MULTIPLIED_OUT) -> int:
    embedding = model.vocabulary_size * model.hidden_size * dtype_bytes
    # A tied head is a second, packed copy. A weight exists twice while it is packed; the largest is an embedding.
    return weight_bytes(tensor_shapes(model), dtype_bytes, held) + embedding * (1 + model.tied_embeddings)


def _memory(
    model: DecoderConfig,
    dtype_bytes: int,
    free: FreeMemory,
    *,
    rows: int,
    places: int,
    step_tokens: int,
    adapters: int = 0,
    held: Held = MULTIPLIED_OUT,
) -> Memory:
    """places: tokens whose logits a step computes at most. adapters: bytes."""
    experts = model.experts
    widest = max(
        model.intermediate_size, (experts.intermediate_size * experts.top_k + experts.shared_size) if experts else 0
    )
    activations = step_tokens * (8 * model.hidden_size + 3 * widest) * 4
    # Logits from the head, as float32, and a copy where they are both adjusted and reported; plus scratch for a few
    # rows at a time.
    scores = model.vocabulary_size * (places * 3 * 4 + ROWS_AT_ONCE * 8 * 8)
    return Memory(
        free=free,
        weights=_weight_bytes(model, dtype_bytes, held),
        adapters=adapters,
        scratch=activations + scores + grammar_bytes(rows),
        per_token=model.kv_elements_per_token * dtype_bytes,
    )
