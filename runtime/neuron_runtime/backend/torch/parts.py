"""Which part of a model each rank has. Pure, and without torch.

Queries, keys, values, gate and up are split by rows; output and down by columns, whose products the ranks add up;
embedding and head by tokens. Ranks that have the same heads of queries to serve share a head of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from neuron_runtime.backend.torch.architecture import DecoderConfig
from neuron_runtime.errors import ExitCode, FatalError


class TensorPart(NamedTuple):
    """A range of one dimension of a tensor. `padded` rows: the range may end beyond the tensor, in zeros."""

    dimension: int
    begin: int
    end: int


WHOLE = None
ELSEWHERE = TensorPart(0, 0, 0)
"""Another rank has this tensor."""


def part_of_model(model: DecoderConfig, size: int) -> DecoderConfig:
    """The shape of what one rank computes; the vocabulary stays whole.

    Raises FatalError (UNSUPPORTED_ARCHITECTURE) if the model cannot be split among so many ranks.
    """
    for name, count in (("num_attention_heads", model.num_heads), ("intermediate_size", model.intermediate_size)):
        if count % size:
            raise _indivisible(name, count, size)
    if model.num_kv_heads % size and size % model.num_kv_heads:
        raise _indivisible("num_key_value_heads", model.num_kv_heads, size)
    return replace(
        model,
        num_heads=model.num_heads // size,
        num_kv_heads=max(1, model.num_kv_heads // size),
        intermediate_size=model.intermediate_size // size,
    )


def _indivisible(name: str, count: int, size: int) -> FatalError:
    message = f"config.json: {name} ({count}) cannot be split among {size} ranks: choose another tensor-parallel degree"
    return FatalError(ExitCode.UNSUPPORTED_ARCHITECTURE, message)


def tokens_of(model: DecoderConfig, rank: int, size: int) -> range:
    """The tokens whose embedding and logits one rank has. The last ranks may have some that do not exist."""
    each = -(-model.vocabulary_size // size)
    return range(rank * each, (rank + 1) * each)


def parts_of(model: DecoderConfig, rank: int, size: int) -> Mapping[str, TensorPart | None]:
    """By the last words of a tensor's name, the part that one rank reads; names that are missing are read whole."""
    if size == 1:
        return {}
    part, dim = part_of_model(model, size), model.head_dim

    def nth(dimension: int, count: int, number: int = rank) -> TensorPart:
        return TensorPart(dimension, number * count, (number + 1) * count)

    query, inner = part.num_heads * dim, part.intermediate_size
    # With fewer heads of keys than ranks, neighbours have the same one.
    keys = nth(0, part.num_kv_heads * dim, rank * model.num_kv_heads // size // part.num_kv_heads)
    tokens = tokens_of(model, rank, size)
    # A bias after a sum over ranks must be added once.
    once = WHOLE if rank == 0 else ELSEWHERE
    by_rows = {"q": nth(0, query), "k": keys, "v": keys, "gate": nth(0, inner), "up": nth(0, inner)}
    return {
        **dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), TensorPart(0, tokens.start, tokens.stop)),
        **{f"{name}_proj.{kind}": part for name, part in by_rows.items() for kind in ("weight", "bias")},
        "o_proj.weight": nth(1, query),
        "down_proj.weight": nth(1, inner),
        **dict.fromkeys(("o_proj.bias", "down_proj.bias"), once),
    }
