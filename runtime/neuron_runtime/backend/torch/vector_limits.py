"""Derives the limits of a model that computes vectors from configuration, shape and free memory, or refuses with the
numbers. Pure, and without torch.

A text is computed whole in one step, and nothing of it is kept. So a step has room for the longest text, a slot is no
more than a number, and there is nothing to share, to chunk or to preempt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from neuron_runtime.backend.torch.choices import SHARE_OF_MEMORY
from neuron_runtime.backend.torch.vector_models import VectorModel, architecture_of, computes_only_vectors, shapes_of
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import ConfigProblems, ExitCode, FatalError, InvalidConfig
from neuron_runtime.host import FreeMemory, gib
from neuron_runtime.recipes import Recipe

DEFAULT_MAX_SEQUENCES = 64
"""Texts in a step: enough short ones to keep the processors busy."""
DEFAULT_STEP_TOKENS = 2048
DEFAULT_MAX_LENGTH = 8192
"""A step takes the longer the longer its texts are, and all others wait for it."""


def check_settings(config: RuntimeConfig) -> None:
    """Raises InvalidConfig for settings without meaning where vectors are computed; names the fields."""
    problems = ConfigProblems()
    for path, given, neutral in (
        ("$.compile", config.compile, (False,)),
        ("$.quantization", config.quantization, ("auto", "none")),
        ("$.layout", config.layout, ("auto", "slots")),
        ("$.prefixCaching", config.prefix_caching, ("auto", "disabled")),
        ("$.chunkedPrefill", config.chunked_prefill, ("auto", "disabled")),
        ("$.limits.blockSize", config.limits.block_size, (0,)),
        ("$.limits.numBlocks", config.limits.num_blocks, (0,)),
        ("$.parallelism.tensor", config.parallelism.tensor, (0, 1)),
        ("$.adapters.maxActive", config.adapters.max_active, (0,)),
        ("$.speculation.method", config.speculation.method, ("",)),
    ):
        if given not in neutral:
            problems.add(path, f"must not be set with task {config.task!r}, got {given!r}: leave it out")
    problems.check()


def check_task(config: RuntimeConfig, model: VectorModel) -> None:
    """Raises InvalidConfig if the model does not compute what the task is."""
    if config.task == "rerank" and model.head is None:
        message = (
            f"{model.architecture} has no head that scores pairs of texts: set embed, which also compares texts by "
            "their vectors"
        )
        raise InvalidConfig("$.task", message)
    if config.task == "embed" and model.head is not None:
        raise InvalidConfig("$.task", f"{model.architecture} scores pairs of texts: set rerank")


def check_generates(config: Mapping[str, Any]) -> None:
    """config: the model's config.json. Raises InvalidConfig if the model has nothing that could generate text."""
    if computes_only_vectors(config):
        task = "rerank" if "ForSequence" in architecture_of(config) else "embed"
        raise InvalidConfig("$.task", f"{architecture_of(config)} generates no text: set {task}")


def vector_size(model: VectorModel, recipe: Recipe) -> int:
    return recipe.size(model.body.hidden_size) if model.head is None else 1


def vector_limits(
    config: RuntimeConfig, model: VectorModel, recipe: Recipe, dtype_bytes: int, free: FreeMemory
) -> BackendLimits:
    """Raises InvalidConfig with the field, or FatalError (DEVICE_OUT_OF_MEMORY) with the numbers."""
    check_task(config, model)
    wanted, longest = config.limits, model.body.max_position_embeddings
    rows = wanted.max_sequences or DEFAULT_MAX_SEQUENCES
    if wanted.max_model_length > longest:
        message = f"must be at most the model's {longest} positions, got {wanted.max_model_length}"
        raise InvalidConfig("$.limits.maxModelLength", message)
    length = wanted.max_model_length or min(longest, recipe.max_tokens or longest, DEFAULT_MAX_LENGTH)
    tokens = wanted.max_step_tokens or max(length, DEFAULT_STEP_TOKENS, rows)
    if tokens < max(length, rows):
        message = f"must be at least maxModelLength ({length}) and maxSequences ({rows}): a text is one step"
        raise InvalidConfig("$.limits.maxStepTokens", f"{message}; got {tokens}")
    weights = _num_weights(model) * dtype_bytes
    per_token = 4 * (10 * model.body.hidden_size + 3 * model.body.intermediate_size)
    needed = math.ceil((weights + tokens * per_token) / SHARE_OF_MEMORY)
    if needed > free.available:
        raise FatalError(
            ExitCode.DEVICE_OUT_OF_MEMORY,
            f"not enough memory for this model: {free} of which {SHARE_OF_MEMORY:.0%} may be used: weights "
            f"{gib(weights)}, and {gib(tokens * per_token)} for steps of {tokens} tokens; {free.cure(needed)}",
        )
    return BackendLimits(
        max_rows=rows,
        max_model_length=length,
        max_step_tokens=tokens,
        max_prefill_rows=rows,
        layout="slots",
        block_size=length,
        num_blocks=rows,
        chunks_prefill=False,
        vocabulary_size=model.body.vocabulary_size,
        steps_in_flight=2,
        token_feedback="device",
        vector_size=vector_size(model, recipe),
    )


def _num_weights(model: VectorModel) -> int:
    """A layer exists twice while it is laid out."""
    sizes = [math.prod(shape) for shape in shapes_of(model).values()]
    return sum(sizes) + max(sizes)
