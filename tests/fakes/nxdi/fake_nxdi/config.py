"""NeuronConfig and InferenceConfig as a caller meets them: fields with their defaults, what sets what, what is refused.

The fields are data with the release that brought each. A keyword that the emulated release does not know is dropped
with a warning, as there; the strict fake refuses it, because a caller who sends it expects it to count.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch

import fake_nxdi
from fake_nxdi import lora, platform, quantized

CONFIG_FILE = "neuron_config.json"
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")}

BOTH = 7
"""The oldest release emulated here."""

FIELDS: dict[str, tuple[int, Any]] = {
    "padding_side": (BOTH, "right"),
    "allow_input_truncation": (BOTH, False),
    "on_cpu": (BOTH, False),
    "output_logits": (BOTH, False),
    "cast_type": (BOTH, "config"),
    "rpl_reduce_dtype": (BOTH, None),
    "attention_dtype": (BOTH, None),
    "vocab_parallel": (BOTH, False),
    "enable_cte_modular_flow": (BOTH, False),
    "layer_boundary_markers": (BOTH, False),
    "fused_qkv": (BOTH, False),
    "sequence_parallel_enabled": (BOTH, False),
    "weight_gather_seq_len_threshold": (BOTH, 32768),
    "attn_cls": (BOTH, "NeuronLlamaAttention"),
    "is_continuous_batching": (BOTH, False),
    "kv_cache_padding_size": (BOTH, 0),
    "on_device_sampling_config": (BOTH, None),
    "disable_argmax_kernel": (8, False),
    "async_mode": (BOTH, False),
    "enable_bucketing": (BOTH, False),
    "bucket_n_active_tokens": (BOTH, False),
    "context_encoding_buckets": (BOTH, None),
    "prefix_buckets": (BOTH, None),
    "token_generation_buckets": (BOTH, None),
    "token_generation_batches": (8, None),
    "quantized": (BOTH, False),
    "quantized_checkpoints_path": (BOTH, None),
    "quantization_type": (BOTH, "per_tensor_symmetric"),
    "quantization_dtype": (BOTH, "int8"),
    "quantization_block_size": (BOTH, None),
    "quantization_block_axis": (BOTH, None),
    "quantization_scale_dtype": (BOTH, "f32"),
    "is_mxfp4_compute": (BOTH, False),
    "is_full_model_shuffled": (BOTH, False),
    "modules_to_not_convert": (BOTH, None),
    "draft_model_modules_to_not_convert": (BOTH, None),
    "kv_cache_quant": (BOTH, False),
    "speculation_length": (BOTH, 0),
    "enable_fused_speculation": (BOTH, False),
    "enable_eagle_speculation": (BOTH, False),
    "eagle_rolling_buffer_kernel_enabled": (8, False),
    "is_eagle3": (BOTH, False),
    "is_eagle_draft": (BOTH, False),
    "enable_eagle_draft_input_norm": (BOTH, False),
    "token_tree_config": (BOTH, None),
    "is_medusa": (BOTH, False),
    "medusa_speculation_length": (BOTH, 0),
    "num_medusa_heads": (BOTH, 0),
    "medusa_tree": (BOTH, None),
    "is_block_kv_layout": (BOTH, False),
    "is_prefix_caching": (BOTH, False),
    "windowed_context_encoding_size": (BOTH, None),
    "chunked_prefill_config": (BOTH, None),
    "kv_quant_config": (8, None),
    "tensor_replacement_config": (BOTH, None),
    "tensor_capture_config": (BOTH, None),
    "lora_config": (BOTH, None),
    "tp_degree": (BOTH, 1),
    "cp_degree": (BOTH, 1),
    "mlp_cp_degree": (BOTH, 1),
    "attention_dp_degree": (BOTH, 1),
    "pp_degree": (BOTH, 1),
    "ep_degree": (BOTH, 1),
    "save_sharded_checkpoint": (BOTH, False),
    "skip_sharding": (BOTH, False),
    "enable_ve_data_parallel": (9, False),
    "qk_layernorm": (BOTH, False),
    "pre_rope_rmsnorm": (BOTH, False),
    "start_rank_id": (BOTH, 0),
    "flash_decoding_enabled": (BOTH, False),
    "disable_kv_cache_tiling": (BOTH, False),
    "k_cache_transposed": (BOTH, False),
    "attn_kernel_enabled": (BOTH, None),
    "strided_context_parallel_kernel_enabled": (BOTH, False),
    "qkv_kernel_enabled": (BOTH, False),
    "qkv_nki_kernel_enabled": (BOTH, False),
    "qkv_cte_nki_kernel_fuse_rope": (BOTH, False),
    "qkv_kernel_nbsd_layout": (BOTH, False),
    "mlp_kernel_enabled": (BOTH, False),
    "mlp_tkg_nki_kernel_enabled": (BOTH, False),
    "fused_rmsnorm_skip_gamma": (BOTH, False),
    "mlp_kernel_fuse_residual_add": (BOTH, False),
    "qkv_kernel_fuse_residual_add": (BOTH, False),
    "quantized_mlp_kernel_enabled": (BOTH, False),
    "out_proj_kernel_enabled": (BOTH, False),
    "activation_quantization_type": (BOTH, None),
    "attn_tkg_nki_kernel_enabled": (BOTH, False),
    "attn_tkg_builtin_kernel_enabled": (BOTH, False),
    "attn_block_tkg_nki_kernel_enabled": (BOTH, False),
    "attn_block_tkg_nki_kernel_cache_update": (BOTH, False),
    "attn_block_tkg_nki_kernel_cascaded_attention": (BOTH, False),
    "attn_block_tkg_nki_kernel_use_online_softmax": (BOTH, True),
    "attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb": (8, False),
    "attn_block_cte_nki_kernel_enabled": (BOTH, False),
    "rmsnorm_quantize_kernel_enabled": (BOTH, False),
    "quantize_clamp_bound": (BOTH, float("inf")),
    "moe_fused_nki_kernel_enabled": (BOTH, None),
    "router_topk_nki_kernel_enabled": (BOTH, None),
    "expert_mlp_nki_kernel_enabled": (BOTH, None),
    "shared_mlp_nki_kernel_enabled": (BOTH, None),
    "lm_head_pad_alignment_size": (BOTH, 1),
    "cc_pipeline_tiling_factor": (BOTH, 2),
    "seq_len_threshold_for_cc_tiling": (BOTH, 16384),
    "target": (BOTH, None),
    "enable_spill_reload_dge": (BOTH, False),
    "weights_to_skip_layout_optimization": (8, None),
    "dma_order_config": (8, None),
    "apply_seq_ids_mask": (BOTH, False),
    "skip_warmup": (BOTH, False),
    "enable_output_completion_notifications": (BOTH, False),
    "padded_hidden_size": (BOTH, None),
    "padded_intermediate_size": (BOTH, None),
    "disable_numeric_cc_token": (BOTH, False),
    "switch_cc": (BOTH, False),
    "ep_dispatch_cc_option": (8, "AR_AG"),
}
"""Fields whose default is a constant: first release (0.`n`) and default."""

logger = logging.getLogger("Neuron")


def to_torch_dtype(name: str) -> torch.dtype:
    assert name in DTYPES, f"Unsupported dtype: {name}"
    return DTYPES[name]


def to_dict(value: Any) -> Any:
    if type(value) is dict:
        return {key: to_dict(item) for key, item in value.items()}
    if type(value) is list:
        return [to_dict(item) for item in value]
    if inspect.isclass(value):
        return {"__module__": value.__module__, "__name__": value.__name__}
    if hasattr(value, "__dict__"):
        return {key: to_dict(item) for key, item in vars(value).items()}
    return str(value).split(".")[1] if type(value) is torch.dtype else value


class IncompatibleConfigError(ValueError):
    pass


class OnDeviceSamplingConfig:
    """Keywords that it does not know are dropped without a word."""

    def __init__(self, **kwargs: Any) -> None:
        known = {
            "do_sample": False,
            "top_k": 1,
            "top_p": 1.0,
            "temperature": 1.0,
            "dynamic": False,
            "deterministic": False,
            "global_topk": 256,
            "on_device_sampling_config": True,
            "top_k_kernel_enabled": fake_nxdi.has(9) and platform.target() != "trn1",
        }
        if fake_nxdi.has(8):
            known["sampling_dp_degree"] = 1
        if (unknown := sorted(set(kwargs) - set(known))) and fake_nxdi.strict():
            fake_nxdi.refuse("20-26", f"OnDeviceSamplingConfig drops {', '.join(unknown)} without a warning")
        self.__dict__.update(known, **{key: value for key, value in kwargs.items() if key in known})


class NeuronConfig:
    def __init__(self, **kwargs: Any) -> None:
        given = dict(kwargs)
        take = given.pop
        self.batch_size = take("batch_size", 1)
        self.seq_len = take("seq_len", 128)
        self.n_active_tokens = take("n_active_tokens", self.seq_len)
        self.n_positions = take("n_positions", self.seq_len)
        self.is_prefill_stage: bool | None = None
        dtype = given.get("torch_dtype", torch.bfloat16)
        self.torch_dtype = to_torch_dtype(dtype) if isinstance(dtype, str) else dtype
        self.overrides_torch_dtype = take("overrides_torch_dtype", True) if "torch_dtype" in given else False
        take("torch_dtype", None)
        self.max_context_length = take("max_context_length", self.seq_len)
        self.max_new_tokens = take("max_new_tokens", self.seq_len - self.max_context_length) or None
        self.max_length = take("max_length", self.seq_len)
        assert self.max_context_length <= self.max_length, "max_context_length cannot be more than max_length"
        for name in ("ctx_batch_size", "tkg_batch_size", "max_batch_size", "kv_cache_batch_size", "spec_batch_size"):
            setattr(self, name, take(name, self.batch_size))
        self.pa_num_blocks = take("pa_num_blocks", self.batch_size)
        self.pa_block_size = take("pa_block_size", self.seq_len)
        self.buckets = take("buckets", [self.seq_len])
        for name, (release, default) in FIELDS.items():
            if fake_nxdi.has(release):
                setattr(self, name, take(name, default))
        self.world_size = take("world_size", None) or self.tp_degree * self.pp_degree * self.ep_degree
        self.local_ranks_size = take("local_ranks_size", None) or self.world_size
        self.logical_nc_config = self._logical_core(given)
        self.lm_head_pad = take("lm_head_pad", self.logical_nc_config > 1)
        self.enable_long_context_mode = self.max_context_length >= 32 * 1024
        self.scratchpad_page_size = take("scratchpad_page_size", 1024 if self.enable_long_context_mode else None)
        self._derive()
        self._drop(given)
        self._check()

    def _logical_core(self, given: dict[str, Any]) -> int:
        asked = given.pop("logical_nc_config", given.pop("logical_neuron_cores", None))
        environment = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
        if environment is None:
            return int(asked) if asked is not None else platform.logical_core()
        if asked is not None and int(asked) != int(environment):
            warnings.warn(
                f"NEURON_LOGICAL_NC_CONFIG={environment} does not match provided logical_nc_config={asked}. "
                "Using NEURON_LOGICAL_NC_CONFIG to set LNC.",
                stacklevel=3,
            )
        return int(environment)

    def _derive(self) -> None:
        if type(self.on_device_sampling_config) is dict:
            self.on_device_sampling_config = OnDeviceSamplingConfig(**self.on_device_sampling_config)
        if type(self.lora_config) is dict:
            self.lora_config = lora.config_class()(**self.lora_config)
        if type(getattr(self, "kv_quant_config", None)) is dict:
            self.kv_quant_config = quantized.KVQuantizationConfig(**self.kv_quant_config)
        if self.enable_eagle_speculation:
            self.enable_fused_speculation = True
        self.enable_token_tree = self.token_tree_config is not None
        self.is_chunked_prefill = self.chunked_prefill_config is not None
        tiles = self.max_length > 128 and self.max_length % 128 == 0
        self.kv_cache_tiling = self.enable_fused_speculation and tiles and not self.disable_kv_cache_tiling
        self.is_hidden_dim_shuffled = self.is_intermediate_dim_shuffled = self.is_mxfp4_compute
        self.kv_cache_update_with_kernel = False
        self.tile_cc = self.cc_pipeline_tiling_factor > 1 and (
            self.mlp_kernel_enabled or self.quantized_mlp_kernel_enabled
        )
        if fake_nxdi.has(8):
            self.weights_to_skip_layout_optimization = self.weights_to_skip_layout_optimization or []
        else:
            self.weights_to_skip_layout_optimization = []
        if self.attention_dp_degree > 1:
            self.kv_cache_batch_size = self.tkg_batch_size // self.attention_dp_degree
        if fake_nxdi.has(9):
            if self.attn_tkg_nki_kernel_enabled or self.attn_tkg_builtin_kernel_enabled:
                self.attn_block_tkg_nki_kernel_enabled = True
            os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", platform.target())

    def _drop(self, unknown: dict[str, Any]) -> None:
        # A saved config holds what other fields decide; reading it back drops that with the same warning.
        strange = [key for key in unknown if not hasattr(self, key)]
        if strange and fake_nxdi.strict():
            fake_nxdi.refuse("20-26", f"NeuronConfig of 0.{fake_nxdi.SETTINGS.release} drops {', '.join(strange)}")
        if unknown:
            logger.warning("NeuronConfig init: Unexpected keyword arguments: %s", unknown)

    def _check(self) -> None:
        for name, limit in (
            ("context_encoding_buckets", "max_context_length"),
            ("token_generation_buckets", "max_length"),
        ):
            buckets = getattr(self, name)
            if buckets is not None:
                buckets.sort()
                assert buckets[-1] <= getattr(self, limit), f"bucket {buckets[-1]} should be <= {getattr(self, limit)}"
        if self.cast_type not in ("config", "as-declared"):
            raise ValueError("cast_type must be one of config, as-declared")
        if self.is_chunked_prefill:
            assert self.is_block_kv_layout, "is_block_kv_layout has to be true for chunked prefill"
        assert not self.quantized or self.quantized_checkpoints_path, "quantized_checkpoints_path is required"
        if self.is_medusa and self.async_mode:
            raise IncompatibleConfigError("Medusa Decoding is not yet supported with async.")
        if self.tp_degree % self.cp_degree:
            raise ValueError("TP Degree must be evenly divisible by CP Degree")
        if self.mlp_cp_degree > 1 and not self.sequence_parallel_enabled:
            raise IncompatibleConfigError("Context Parallel for MLP requires Sequence Parallel to be enabled")
        if self.attn_block_tkg_nki_kernel_enabled:
            assert self.qkv_kernel_enabled or self.qkv_nki_kernel_enabled, "the TKG attention kernel needs a QKV kernel"
            assert not self.flash_decoding_enabled, "Attention TKG kernels do not yet support flash decoding feature."
            assert not self.is_chunked_prefill, "Attention TKG kernels do not yet support contexted prefill feature."
        if self.k_cache_transposed:
            assert not self.is_block_kv_layout, "Transposed K cache is not yet supported by block KV cache feature."
        if self.tp_degree % self.attention_dp_degree:
            raise ValueError("TP Degree must be evenly divisible by DP Degree")
        if self.tkg_batch_size % self.attention_dp_degree:
            raise ValueError("Batch Size must be evenly divisible by DP Degree")
        if self.attention_dp_degree > 1 and not self.is_continuous_batching:
            raise ValueError("--is-continuous-batching must be enabled when running DP")
        self._check_row_buckets()

    def _check_row_buckets(self) -> None:
        batches = getattr(self, "token_generation_batches", None)
        if batches is None:
            return
        batches = sorted(batches) if isinstance(batches, list) else [batches]
        self.token_generation_batches = batches
        assert batches[-1] <= self.tkg_batch_size, (
            f"Token generation batch buckets {batches} should be <= token generation batch size ({self.tkg_batch_size})"
        )
        against = {
            "speculative decoding": self.speculation_length > 0 or self.enable_fused_speculation,
            "Medusa decoding": self.is_medusa,
            "token tree": self.enable_token_tree,
            "chunked prefill": self.is_chunked_prefill,
            "prefix caching": self.is_prefix_caching,
            "block KV layout": self.is_block_kv_layout,
        }
        if found := [name for name, present in against.items() if present]:
            raise ValueError(
                f"Batch bucketing (token_generation_batches={batches}) is not currently supported with the following "
                f"features: {', '.join(found)}. Please disable batch bucketing or the incompatible features."
            )


class MoENeuronConfig(NeuronConfig):
    def __init__(self, capacity_factor: float | None = None, glu_mlp: bool = True, **kwargs: Any) -> None:
        self.capacity_factor = float(capacity_factor) if capacity_factor is not None else None
        self.glu_mlp = glu_mlp
        defaults: dict[str, Any] = {
            "glu_type": "glu",
            "hidden_act_scaling_factor": 1.0,
            "hidden_act_bias": 0.0,
            "gate_clamp_upper_limit": None,
            "gate_clamp_lower_limit": None,
            "up_clamp_upper_limit": None,
            "up_clamp_lower_limit": None,
            "use_index_calc_kernel": False,
            "moe_mask_padded_tokens": False,
            "early_expert_affinity_modulation": False,
            "fused_shared_experts": False,
            "shared_experts_sequence_parallel_enabled": False,
            "return_expert_index": False,
            "return_router_logits": False,
            "hybrid_sharding_config": None,
            "moe_tp_degree": 1,
            "moe_ep_degree": 1,
            "transpose_shared_experts_weights": False,
            "blockwise_matmul_config": {},
            "router_config": None,
        }
        self.normalize_top_k_affinities = not kwargs.pop("disable_normalize_top_k_affinities", False)
        for name, default in defaults.items():
            setattr(self, name, kwargs.pop(name, default))
        super().__init__(**kwargs)


class MultimodalVisionNeuronConfig(NeuronConfig):
    def __init__(self, **kwargs: Any) -> None:
        self.skip_vision = kwargs.pop("skip_vision", False)
        super().__init__(**kwargs)


class FusedSpecNeuronConfig:
    def __init__(
        self,
        worker_cls: Any,
        draft_config: Any = None,
        draft_model_path: str | None = None,
        draft_model_cls: Any = None,
    ) -> None:
        self.worker_cls = worker_cls
        self.draft_config = draft_config
        self.draft_model_path = draft_model_path
        self.draft_model_cls = draft_model_cls


class InferenceConfig:
    attribute_map: dict[str, str] = {}  # noqa: RUF012

    def __init__(
        self,
        neuron_config: Any,
        fused_spec_config: Any = None,
        load_config: Any = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.neuron_config = neuron_config
        self.fused_spec_config = fused_spec_config
        (load_config or type(self).load_config)(self)
        self.metadata = metadata
        for key, value in kwargs.items():
            setattr(self, key, value)
        self.add_derived_config()
        self.validate_config()

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(type(self)._named(self, key), value)

    def __getattribute__(self, key: str) -> Any:
        if key.startswith("__") or key in ("attribute_map", "_named"):
            return super().__getattribute__(key)
        return super().__getattribute__(super().__getattribute__("attribute_map").get(key, key))

    def _named(self, key: str) -> str:
        return key if key == "attribute_map" else self.attribute_map.get(key, key)

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1

    def load_config(self) -> None:
        pass

    def get_required_attributes(self) -> list[str]:
        return []

    def validate_config(self) -> None:
        missing = [name for name in self.get_required_attributes() if not hasattr(self, name)]
        assert not missing, f"Config must define {missing}"

    def get_text_config(self) -> Any:
        return getattr(self, "text_config", None) or self

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig

    def to_json_string(self) -> str:
        return json.dumps(to_dict(self), indent=2, sort_keys=True)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        Path(json_file).write_text(self.to_json_string() + "\n", encoding="utf-8")

    def save(self, model_path: str | os.PathLike[str]) -> None:
        Path(model_path).mkdir(parents=True, exist_ok=True)
        self.to_json_file(Path(model_path, CONFIG_FILE))

    @classmethod
    def load(cls, model_path: str | os.PathLike[str], **kwargs: Any) -> InferenceConfig:
        return cls.from_json_file(Path(model_path, CONFIG_FILE), **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str], **kwargs: Any) -> InferenceConfig:
        return cls.from_json_string(Path(json_file).read_text(encoding="utf-8"), **kwargs)

    @classmethod
    def from_json_string(cls, json_string: str, **kwargs: Any) -> InferenceConfig:
        values = {**json.loads(json_string), **kwargs}
        if isinstance(values.get("neuron_config"), dict):
            values["neuron_config"] = cls.get_neuron_config_cls()(**values["neuron_config"])
        if isinstance(values.get("fused_spec_config"), dict):
            raise NotImplementedError("the fake reads no second model back from a file")
        return cls(**values)


def class_named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
