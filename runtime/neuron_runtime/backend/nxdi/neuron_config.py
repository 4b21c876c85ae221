"""The fields of NeuronConfig, and how `overrideNeuronConfig` is merged into those that our own configuration decides.

Called by `settings`. Pure. NxD Inference drops a key that it does not know with a line in the log, so every key is
checked here. A key that has a field of ours decides it if the field is left open, and must agree with it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from neuron_runtime.backend.neuron.override import PATH, check_kind, near
from neuron_runtime.backend.neuron.unread import UNREAD, read_unread
from neuron_runtime.backend.nxdi.models import FAMILIES, is_private
from neuron_runtime.backend.nxdi.quantized import CHECKPOINT, EXCLUDED, OF_WEIGHTS
from neuron_runtime.errors import ConfigProblems, InvalidConfig
from neuron_runtime.flags import plain
from neuron_runtime.not_built import is_neutral

SAMPLING = "on_device_sampling_config"

CACHE_FLAG, CACHE_TYPE = "kv_cache_quant", "kv_quant_config"
"""Until release 0.7 the first one decides the type of the cache; since then the second one, and the first one tells the
compiler."""

OF_EAGLE = ("enable_eagle_speculation", "is_eagle3", "enable_eagle_draft_input_norm")

SHARDED = "save_sharded_checkpoint"
"""Puts the weights into the artifact."""


@dataclass(frozen=True, slots=True)
class NeuronField:
    """A keyword of NeuronConfig."""

    name: str
    path: str = ""
    """The field of our configuration that means the same."""
    derived: bool = False
    """It follows from other fields, so only its own value is accepted."""
    by: str = "the other settings make"
    """What a derived field follows from."""
    feature: str = ""
    """What is not supported yet; only neutral values are accepted."""
    neutral: tuple[Any, ...] = (False, 0, [], {})
    """Values besides None with which it is off."""
    kind: type | None = None
    """The type of its values; None: any."""
    only_experts: bool = False
    """Only models with mixtures of experts have it."""
    is_kept: bool = True
    """Whether NeuronConfig keeps it under its name."""


_Flag, _Number = partial(NeuronField, kind=bool), partial(NeuronField, kind=int)
_Ours, _Derived = NeuronField, partial(NeuronField, derived=True)
_SPECULATION, _DEBUGGING = "drafts of a model or of heads", "capturing tensors"
_QUANTIZATION = "another quantization than that of weights by channel"
_CHUNKS = "chunked prefill of NxD Inference, which does not work, but segments do"


def _all(make: Callable[..., NeuronField], names: str, **more: Any) -> tuple[NeuronField, ...]:
    return tuple(make(name, **more) for name in names.split())


FIELDS = (
    # Decided by a field of ours, or by the override where that is open.
    _Ours("batch_size", path="$.limits.maxSequences", kind=int),
    _Ours("seq_len", path="$.limits.maxModelLength", kind=int),
    _Ours("tp_degree", path="$.parallelism.tensor", kind=int),
    _Ours("logical_nc_config", path="$.accelerator.logicalNeuronCore", kind=int),
    _Ours("torch_dtype", path="$.dtype", kind=str),
    _Ours("context_encoding_buckets", path="$.buckets.context", kind=list),
    _Ours("token_generation_buckets", path="$.buckets.tokenGeneration", kind=list),
    _Ours("prefix_buckets", path="$.buckets.prefix", kind=list),
    _Ours("token_generation_batches", path="$.buckets.sequences", kind=list),
    _Ours("is_block_kv_layout", path="$.layout", kind=bool),
    _Ours("is_prefix_caching", path="$.prefixCaching", kind=bool),
    _Ours("pa_num_blocks", path="$.limits.numBlocks", kind=int),
    _Ours("pa_block_size", path="$.limits.blockSize", kind=int),
    _Ours("enable_bucketing", path="$.buckets.context", kind=bool),
    _Ours("async_mode", path="$.asyncMode", kind=bool),
    _Ours(SAMPLING, path="$.sampling"),
    _Ours("output_logits", path="$.sampling", kind=bool),
    # They follow from others.
    _Derived("max_context_length", path="$.buckets.context", kind=int),
    *_all(
        _Derived,
        "ctx_batch_size tkg_batch_size max_batch_size max_length n_positions n_active_tokens bucket_n_active_tokens "
        "is_continuous_batching padding_side world_size start_rank_id local_ranks_size pp_degree ep_degree "
        "allow_input_truncation kv_cache_batch_size kv_cache_padding_size skip_sharding",
    ),
    # Not built.
    *_all(
        NeuronField,
        "spec_batch_size is_eagle_draft is_medusa medusa_speculation_length num_medusa_heads medusa_tree "
        "token_tree_config draft_model_modules_to_not_convert eagle_rolling_buffer_kernel_enabled",
        feature=_SPECULATION,
    ),
    *_all(
        NeuronField,
        "quantized_mlp_kernel_enabled rmsnorm_quantize_kernel_enabled activation_quantization_type "
        "quantize_clamp_bound quantization_block_size quantization_block_axis quantization_scale_dtype "
        "is_mxfp4_compute is_full_model_shuffled",
        feature=_QUANTIZATION,
    ),
    *_all(_Derived, " ".join((*OF_WEIGHTS, CHECKPOINT)), by="the model's config.json makes"),
    _Ours(CACHE_FLAG, path="$.kvCacheDtype", kind=bool),
    _Derived(CACHE_TYPE, path="$.kvCacheDtype", kind=dict),
    _Derived("lora_config", path="$.adapters.maxActive"),
    _Derived("speculation_length", path="$.speculation", kind=int),
    *_all(_Derived, " ".join(("enable_fused_speculation", *OF_EAGLE)), path="$.speculation"),
    NeuronField("skip_vision", feature="multimodal input"),
    *_all(NeuronField, "tensor_replacement_config tensor_capture_config", feature=_DEBUGGING),
    NeuronField("attention_dp_degree", feature="data-parallel attention", neutral=(1,)),
    NeuronField("windowed_context_encoding_size", feature="windowed context encoding"),
    *_all(NeuronField, "is_chunked_prefill chunked_prefill_config", feature=_CHUNKS),
    # Free: kernels, parallelism within a step, options of the compiler.
    *_all(
        _Flag,
        "vocab_parallel fused_qkv sequence_parallel_enabled qk_layernorm flash_decoding_enabled attn_kernel_enabled "
        "qkv_kernel_enabled mlp_kernel_enabled mlp_kernel_fuse_residual_add save_sharded_checkpoint on_cpu "
        "qkv_kernel_nbsd_layout skip_warmup layer_boundary_markers disable_kv_cache_tiling k_cache_transposed "
        "fused_rmsnorm_skip_gamma qkv_kernel_fuse_residual_add attn_tkg_nki_kernel_enabled "
        "attn_tkg_builtin_kernel_enabled attn_block_tkg_nki_kernel_enabled attn_block_tkg_nki_kernel_cache_update "
        "enable_spill_reload_dge apply_seq_ids_mask attn_block_cte_nki_kernel_enabled moe_fused_nki_kernel_enabled "
        "router_topk_nki_kernel_enabled expert_mlp_nki_kernel_enabled shared_mlp_nki_kernel_enabled lm_head_pad "
        "enable_output_completion_notifications enable_cte_modular_flow strided_context_parallel_kernel_enabled "
        "attn_block_tkg_nki_kernel_cascaded_attention pre_rope_rmsnorm qkv_nki_kernel_enabled "
        "qkv_cte_nki_kernel_fuse_rope mlp_tkg_nki_kernel_enabled out_proj_kernel_enabled "
        "attn_block_tkg_nki_kernel_use_online_softmax switch_cc disable_numeric_cc_token disable_argmax_kernel "
        "attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb enable_ve_data_parallel",
    ),
    *_all(
        _Number,
        "cc_pipeline_tiling_factor weight_gather_seq_len_threshold cp_degree seq_len_threshold_for_cc_tiling "
        "lm_head_pad_alignment_size scratchpad_page_size mlp_cp_degree padded_hidden_size padded_intermediate_size",
    ),
    *_all(NeuronField, "rpl_reduce_dtype target attn_cls cast_type attention_dtype ep_dispatch_cc_option", kind=str),
    NeuronField("weights_to_skip_layout_optimization", kind=list),
    NeuronField("dma_order_config", kind=dict),
    # Of mixtures of experts.
    *_all(
        _Flag,
        "glu_mlp early_expert_affinity_modulation fused_shared_experts shared_experts_sequence_parallel_enabled "
        "return_expert_index transpose_shared_experts_weights use_index_calc_kernel moe_mask_padded_tokens "
        "return_router_logits",
        only_experts=True,
    ),
    _Flag("disable_normalize_top_k_affinities", only_experts=True, is_kept=False),
    *_all(_Number, "moe_tp_degree moe_ep_degree", only_experts=True),
    *_all(
        NeuronField,
        "capacity_factor hidden_act_scaling_factor hidden_act_bias gate_clamp_upper_limit gate_clamp_lower_limit "
        "up_clamp_upper_limit up_clamp_lower_limit",
        kind=float,
        only_experts=True,
    ),
    *_all(NeuronField, "blockwise_matmul_config router_config hybrid_sharding_config", kind=dict, only_experts=True),
    NeuronField("glu_type", kind=str, only_experts=True),
)

BY_NAME = {field.name: field for field in FIELDS}

EXPERTS = frozenset(family.application for family in FAMILIES if family.experts)
"""Applications whose NeuronConfig is one for mixtures of experts."""

SAMPLING_FIELDS = {
    field.name: field
    for field in (
        *_all(_Number, "global_topk sampling_dp_degree"),
        *_all(_Flag, "deterministic dynamic do_sample on_device_sampling_config top_k_kernel_enabled"),
    )
}
"""The fields of OnDeviceSamplingConfig, which drops others silently."""

OF_REQUESTS = ("top_k", "top_p", "temperature")
"""Also of OnDeviceSamplingConfig: with dynamic sampling they have no effect."""

ALIASES = {
    "global_top_k": "global_topk",
    "logical_neuron_cores": "logical_nc_config",
}


@dataclass(frozen=True, slots=True)
class Override:
    """A checked `overrideNeuronConfig`, by NeuronConfig's own names."""

    values: Mapping[str, Any]
    sampling: Mapping[str, Any]
    """Fields of OnDeviceSamplingConfig."""
    on_host: bool = False
    """Whether on-device sampling is switched off."""
    unread: tuple[str, ...] = ()
    """Patterns of names of tensors that no module needs to read."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


def spelled(key: str) -> str:
    """NeuronConfig's name of a key that may be written otherwise, or by another name."""
    name = plain(key)
    return ALIASES.get(name, name)


def read_override(override: Mapping[str, Any], application: str) -> Override:
    """Check the keys of an override and their types. Raises InvalidConfig with every wrong key.

    Args:
        application: see `Settings.application`; empty: not known yet. The NeuronConfig of one that is given by import
            path may have further fields, which `library` checks.
    """
    problems, values, sampling = ConfigProblems(), dict[str, Any](), dict[str, Any]()
    on_host, unread = False, tuple[str, ...]()
    for key, value in override.items():
        with problems.collecting():
            name, at = spelled(key), f"{PATH}.{key}"
            if name == SAMPLING and (value is None or value is False):
                on_host = True
            elif name == SAMPLING:
                for inner, one in _read_sampling(value, at).items():
                    _put(sampling, inner, one, f"{at}.{inner}")
            elif name == UNREAD:
                unread = (*unread, *read_unread(value, at))
            elif name == "global_topk":
                _put(sampling, name, _of_kind(SAMPLING_FIELDS[name], value, at), at)
            else:
                _put(values, name, _read(name, value, at, application), at)
    if on_host and sampling:
        problems.add(f"{PATH}.{SAMPLING}", "is off, so it has no global_topk: leave out one of them")
    problems.check()
    return Override(values, sampling, on_host, unread)


def _put(values: dict[str, Any], name: str, value: Any, at: str) -> None:
    if name in values and values[name] != value:
        raise InvalidConfig(at, f"is given twice, as {values[name]!r} and {value!r}: leave out one of them")
    values[name] = value


def _read(name: str, value: Any, at: str, application: str) -> Any:
    field = BY_NAME.get(name)
    if field is None:
        if is_private(application):
            return value
        raise InvalidConfig(at, _unknown(name, [*BY_NAME, *ALIASES, "global_topk", UNREAD]))
    if field.only_experts and application and application not in EXPERTS and not is_private(application):
        raise InvalidConfig(at, f"is for mixtures of experts, which {application} is not: leave it out")
    if field.feature:
        if not is_neutral(value, field.neutral):
            raise InvalidConfig(at, f"{value!r}: {field.feature} is not supported yet: leave it out")
        return value
    if name == "speculation_length" and is_neutral(value, field.neutral):
        return 0
    if name in ("enable_fused_speculation", *OF_EAGLE):
        return not is_neutral(value, field.neutral)
    if name == CACHE_TYPE and is_neutral(value, field.neutral):
        return None
    if name == EXCLUDED and value is not None:
        check_kind(list, value, at)
        return sorted(map(str, value))
    return _of_kind(field, value, at)


def _of_kind(field: NeuronField, value: Any, at: str) -> Any:
    if field.kind is None or (value is None and field.kind is bool):
        return value
    if field.name == "token_generation_batches" and isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if field.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return value
    check_kind(field.kind, value, at)
    if isinstance(value, list) and field.path and not all(type(one) is int and one >= 0 for one in value):
        raise InvalidConfig(at, f"must be a list of sizes, got {value!r}")
    return value


def _read_sampling(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidConfig(at, f'must be an object such as {{"global_topk": 64}}, or null, got {value!r}')
    problems, values = ConfigProblems(), dict[str, Any]()
    for key, one in value.items():
        name, inside = spelled(key), f"{at}.{key}"
        with problems.collecting():
            if name in OF_REQUESTS:
                if one not in (1, 1.0, None):
                    raise InvalidConfig(inside, "is set by requests, or by the model's generation_config.json")
            elif name not in SAMPLING_FIELDS:
                raise InvalidConfig(inside, _unknown(name, [*SAMPLING_FIELDS, *OF_REQUESTS, "global_top_k"]))
            elif name == "dynamic" and one is False:
                raise InvalidConfig(inside, "must be true: every request has its own sampling parameters")
            elif name == SAMPLING and one is False:
                raise InvalidConfig(inside, "must be true; to sample on the host, set `sampling` to Host")
            else:
                _put(values, name, _of_kind(SAMPLING_FIELDS[name], one, inside), inside)
    problems.check()
    values.pop(SAMPLING, None)
    return values


def _unknown(name: str, known: list[str]) -> str:
    return f"NxD Inference has no setting `{name}`{near(name, known)}"


def merge(ours: Mapping[str, Any], also_derived: Mapping[str, Any], override: Override) -> dict[str, Any]:
    """All arguments of NeuronConfig. Raises InvalidConfig if the override contradicts them.

    Args:
        ours: those that our settings decide.
        also_derived: what NeuronConfig derives from them itself.
    """
    problems, merged = ConfigProblems(), dict(ours)
    known = {**also_derived, **ours}
    for name, value in override.values.items():
        field = BY_NAME.get(name)
        if field is None or not (field.path or field.derived or field.feature):
            merged[name] = value
        elif field.derived and not _same(value, known[name], field):
            cure = f"set {field.path.removeprefix('$.')} instead" if field.path else "leave it out"
            made = "unset" if known[name] is None else repr(known[name])
            problems.add(f"{PATH}.{name}", f"is {value!r}, but {field.by} it {made}: {cure}")
    problems.check()
    return merged


def _same(value: Any, known: Any, field: NeuronField) -> bool:
    return bool(value == known) or (known is None and is_neutral(value, field.neutral))
