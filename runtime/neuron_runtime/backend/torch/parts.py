"""Which part of a model each rank has. Pure, and without torch.

Queries, keys, values, gate and up are split by rows; output and down by columns, whose products the ranks add up;
embedding and head by tokens. Each expert is split as a whole layer is. Ranks that have the same heads of queries to
serve share a head of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from neuron_runtime.backend.torch.architecture import DecoderConfig
from neuron_runtime.errors import ExitCode, FatalError


class TensorPart(NamedTuple):
    """One of `num_parts` equal ones along a dimension of a tensor. The last ones may end beyond it, in zeros."""

    dimension: int
    number: int
    num_parts: int

    def span(self, size: int) -> range:
        """The indices of a dimension of this size."""
        each = -(-size // self.num_parts)
        return range(self.number * each, (self.number + 1) * each)


WHOLE = None
ELSEWHERE = TensorPart(0, 0, 0)
"""Another rank has this tensor."""


def part_of_model(model: DecoderConfig, size: int) -> DecoderConfig:
    """The shape of what one rank computes; the vocabulary stays whole.

    Raises FatalError (UNSUPPORTED_ARCHITECTURE) if the model cannot be split among so many ranks.
    """
    experts = model.experts
    for name, count, may_be_shared in (
        ("num_attention_heads", model.num_heads, False),
        ("intermediate_size", model.intermediate_size, False),
        ("num_key_value_heads", model.num_kv_heads, True),
        ("the size of an expert", experts.intermediate_size if experts else 0, False),
        ("the size of the shared expert", experts.shared_size if experts else 0, False),
    ):
        if count % size and not (may_be_shared and size % count == 0):
            what = f"config.json: {name} ({count}) cannot be split among {size} ranks"
            message = f"{what}: choose another tensor-parallel degree"
            raise FatalError(ExitCode.UNSUPPORTED_ARCHITECTURE, message)
    return replace(
        model,
        num_heads=model.num_heads // size,
        num_kv_heads=max(1, model.num_kv_heads // size),
        intermediate_size=model.intermediate_size // size,
        experts=experts
        and replace(
            experts, intermediate_size=experts.intermediate_size // size, shared_size=experts.shared_size // size
        ),
    )


def tokens_of(model: DecoderConfig, rank: int, size: int) -> range:
    """The tokens whose embedding and logits one rank has. The last ranks may have some that do not exist."""
    return TensorPart(0, rank, size).span(model.vocabulary_size)


def parts_of(model: DecoderConfig, rank: int, size: int) -> Mapping[str, TensorPart | None]:
    """By the last words of a tensor's name, the part that one rank reads; names that are missing are read whole."""
    if size == 1:
        return {}
    # With fewer heads of keys than ranks, neighbours have the same one.
    num_keys = min(size, model.num_kv_heads)
    keys = TensorPart(0, rank * num_keys // size, num_keys)
    rows, columns = TensorPart(0, rank, size), TensorPart(1, rank, size)
    # A bias after a sum over ranks must be added once.
    once = WHOLE if rank == 0 else ELSEWHERE
    by_rows = {"q_proj": rows, "k_proj": keys, "v_proj": keys, "gate_proj": rows, "up_proj": rows}
    return {
        **dict.fromkeys(("embed_tokens.weight", "lm_head.weight", "w1.weight", "w3.weight"), rows),
        **{f"{name}.{kind}": part for name, part in by_rows.items() for kind in ("weight", "bias")},
        "self_attn.sinks": rows,
        **dict.fromkeys(("o_proj.weight", "down_proj.weight", "w2.weight"), columns),
        **dict.fromkeys(("o_proj.bias", "down_proj.bias"), once),
    }
