"""The configuration classes, with the arguments and the refusals of the real ones (`config.py`)."""

from __future__ import annotations

import enum
from typing import Any


class Layout(enum.Enum):
    HSB = "HSB"
    BSH = "BSH"
    SBH = "SBH"


class GQA(enum.Enum):
    SHARD_OVER_HEADS = "shard-over-heads"
    SHARD_OVER_BATCH = "shard-over-batch"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"


class QuantizationConfig:
    def __init__(
        self,
        quant_dtype: str = "s8",
        dequant_dtype: str = "f16",
        quantize_method: str = "vector_dynamic",
        quantize_attn: bool = True,
        no_quantize_list: Any = (),
    ) -> None:
        if quant_dtype not in ("s8", "f8e4m3fn"):
            raise NotImplementedError(f"{quant_dtype} is not implemented.")
        if quantize_method not in ("vector_dynamic", "direct_cast"):
            raise NotImplementedError(f"{quantize_method} is not implemented.")
        self.quant_dtype, self.dequant_dtype = quant_dtype, dequant_dtype
        self.quantize_method, self.quantize_attn = quantize_method, quantize_attn
        self.no_quantize_list = list(no_quantize_list)


class KVCacheQuantizationConfig:
    def __init__(
        self, quant_dtype: str = "s8", dequant_dtype: str = "bf16", quantize_method: str = "direct_cast"
    ) -> None:
        if quant_dtype not in ("s8", "f16", "bf16", "f8e4m3fn"):
            raise NotImplementedError(f"{quant_dtype} is not implemented.")
        self.quant_dtype, self.dequant_dtype, self.quantize_method = quant_dtype, dequant_dtype, quantize_method


class ContinuousBatchingConfig:
    def __init__(self, **given: Any) -> None:
        named = given.pop("batch_size_for_shared_caches", None)
        self.max_num_seqs = given.pop("max_num_seqs", None) or named
        if self.max_num_seqs is None:
            raise KeyError("batch_size_for_shared_caches")
        self.max_model_len = given.pop("max_model_len", None)
        self.optimized_paged_attention = bool(given.pop("optimized_paged_attention", False))
        self.enable_chunked_prefill = bool(given.pop("enable_chunked_prefill", False))
        assert not given, f"unexpected key word arguments: {given.keys()}"

    @property
    def batch_size_for_shared_caches(self) -> int:
        return int(self.max_num_seqs)


class GenerationConfig:
    vocab_size = 0

    def __init__(
        self,
        *,
        max_length: int | None = None,
        do_sample: bool = False,
        top_k: Any = 50,
        top_p: Any = 1.0,
        top_p_min_tokens: Any = 1,
        global_top_k: int | None = None,
        eos_token_id: int | None = None,
        temperature: Any = 1.0,
        dynamic: bool = False,
        deterministic: bool = False,
        per_batch_line: bool = False,
    ) -> None:
        self.max_length, self.do_sample, self.per_batch_line = max_length, do_sample, per_batch_line
        self.top_k, self.top_p, self.temperature = top_k, top_p, temperature
        self.top_p_min_tokens, self.global_top_k, self.eos_token_id = top_p_min_tokens, global_top_k, eos_token_id
        self.dynamic, self.deterministic = dynamic, deterministic


FLAGS = (
    *("sequence_parallel_norm", "bf16_rms_norm", "on_device_embedding", "fuse_qkv", "qkv_tiling", "weight_tiling"),
    *("log_softmax_scores", "shard_over_sequence", "output_all_logits", "attn_output_transposed", "fused_rmsnorm_qkv"),
    *("fused_rmsnorm_mlp", "mlp_out_weight_transpose", "fuse_mlp", "is_eagle_target", "is_eagle_draft"),
    "duplicate_q_weight_sos",
)
OTHERS = {
    "sparse_attn": None,
    "quant": None,
    "kv_cache_quant": None,
    "continuous_batching": None,
    "attention_layout": Layout.HSB,
    "collectives_layout": Layout.HSB,
    "cache_layout": Layout.SBH,
    "padding_side": "left",
    "group_query_attention": None,
    "sequence_parallel_norm_threshold": 2048,
    "on_device_generation": None,
    "all_reduce_dtype": None,
    "cast_logits_dtype": "float32",
    "mlp_in_weight_tiling_permute_order": [1, 2, 0, 3],
    "mlp_out_weight_tiling_permute_order": [1, 2, 0, 3],
    "has_pre_attention_norm": True,
    "compilation_worker_count": None,
}


class NeuronConfig:
    on_device_generation: GenerationConfig | None
    continuous_batching: ContinuousBatchingConfig | None
    quant: QuantizationConfig | None
    shard_over_sequence: bool
    compilation_worker_count: int | None

    def __init__(self, **given: Any) -> None:
        known = {**dict.fromkeys(FLAGS, False), **OTHERS}
        unknown = {name: value for name, value in given.items() if name not in known}
        assert not unknown, f"Unexpected NeuronConfig keyword arguments: {unknown}"
        for name, value in {**known, **given}.items():
            setattr(self, name, value)
        dtype = self.cast_logits_dtype  # type: ignore[attr-defined]
        assert dtype in ("float32", "float16", "bfloat16"), f"The `cast_logits_dtype={dtype}` argument must be one of"
        if self.group_query_attention is not None:  # type: ignore[has-type]
            self.group_query_attention = GQA(self.group_query_attention)  # type: ignore[has-type]
        self.lhs_aligned = self.continuous_batching is not None or self.padding_side == "right"  # type: ignore[attr-defined]
