"""The keywords of transformers-neuronx's NeuronConfig (v0.13), as manifests written for that library set them.

Its own backend takes the type of each from here, or why it cannot set it; `arguments` says what becomes of each on
other backends. Pure data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True)
class NeuronxField:
    """A keyword. Those without a cure change only layouts or speed."""

    name: str
    kind: type | None = None
    """The type of its values; None: any."""
    cure: str = ""
    """What to do on another backend, where the keyword would change results."""
    neutral: tuple[Any, ...] = ()
    """Values besides None with which it changes nothing anywhere."""
    refused: str = ""
    """Why its own backend does not take it."""
    llama_only: bool = False
    """Its class for Mistral does not read it, or fails with it."""
    shared: bool = False
    """NxD Inference has a keyword of the same name."""


_Flag, _Number, _Word = (partial(NeuronxField, kind=kind) for kind in (bool, int, str))
_DENSE = "sparse attention is not supported: leave it out"
_NORM = "the models that are served have this norm: leave it out"
_QUANTIZES = "only the backend transformers-neuronx quantizes weights: leave it out, or use that one"


def _all(make: Callable[..., NeuronxField], names: str, **more: Any) -> tuple[NeuronxField, ...]:
    return tuple(make(name, **more) for name in names.split())


FIELDS = (
    # With effect on results.
    NeuronxField("quant", dict, cure="set the quantization instead"),
    NeuronxField("kv_cache_quant", dict, cure=_QUANTIZES, neutral=(False,), shared=True),
    NeuronxField(
        "on_device_generation",
        dict,
        cure="requests say how they are sampled: leave it out, or set the sampling mode to Device",
    ),
    _Word("cast_logits_dtype", cure="logits are float32: leave it out", neutral=("float32",)),
    _Flag("bf16_rms_norm", cure="norms are computed in float32: leave it out", neutral=(False,), llama_only=True),
    _Flag("has_pre_attention_norm", cure=_NORM, refused=_NORM, neutral=(True,)),
    # Decided by fields of ours.
    NeuronxField("continuous_batching", dict, refused="follows from maxSequences: set that instead"),
    _Word("padding_side", refused="is right with continuous batching: leave it out", neutral=("right",), shared=True),
    _Flag(
        "output_all_logits",
        refused="prompts return the logits of their last position alone: leave it out",
        neutral=(False,),
    ),
    _Flag("log_softmax_scores", refused="log-probabilities come from the logits: leave it out", neutral=(False,)),
    # Not built.
    NeuronxField("sparse_attn", cure=_DENSE, refused=_DENSE),
    _Word(
        "cache_layout",
        refused="paged attention is not supported: each request has one line of the cache, so leave it out",
        neutral=("SBH",),
    ),
    *_all(
        _Flag,
        "is_eagle_target is_eagle_draft",
        refused="speculative decoding is not supported: leave it out",
        neutral=(False,),
    ),
    # Layouts and speed.
    *_all(_Word, "attention_layout collectives_layout group_query_attention all_reduce_dtype"),
    *_all(_Flag, "fuse_qkv qkv_tiling weight_tiling on_device_embedding"),
    *_all(
        _Flag,
        "shard_over_sequence duplicate_q_weight_sos sequence_parallel_norm attn_output_transposed fused_rmsnorm_qkv "
        "fused_rmsnorm_mlp mlp_out_weight_transpose fuse_mlp",
        llama_only=True,
    ),
    *_all(_Number, "sequence_parallel_norm_threshold compilation_worker_count"),
    *_all(NeuronxField, "mlp_in_weight_tiling_permute_order mlp_out_weight_tiling_permute_order", kind=list),
)

BY_NAME = {field.name: field for field in FIELDS}

QUANT_VARIABLE = "NEURON_QUANT_DTYPE"
"""Its own backend quantizes weights to this type."""

SEVERAL_NODES = ("NEURON_RANK_ID", "NEURON_LOCAL_TP", "NEURON_PP_STAGES")
"""Variables by which the library divides a model among nodes, which its own backend refuses."""

OTHER_VARIABLES = (
    *SEVERAL_NODES,
    *("NEURON_INTERNAL_TRANSFORM_WEIGHT_LAYOUT", "NEURON_INTERNAL_ASSUME_ALL_PROMPT_LENGTHS_ARE_EQUAL"),
    *("NEURON_VOCAB_PAD_DIVISOR", "HLO_SNAPSHOT_PATH", "HLO_SNAPSHOT_STEPS", "HLO_SNAPSHOT_ALL_WORKERS"),
)
"""Variables that only the library reads."""
