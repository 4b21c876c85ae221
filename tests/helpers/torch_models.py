"""Small models with random weights, loaded backends for them, and the results of transformers with the same files."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from helpers.random_model import model_config, write_random_model
from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.backend.torch.loader import load
from neuron_runtime.config import AdapterOptions, EngineLimits, ModelSource, RuntimeConfig, Speculation
from neuron_runtime.host import FreeMemory

NEAR_TIE = 1e-3
"""Below this gap between the best two logits, different rounding may choose different tokens."""

NO_ADAPTERS = AdapterOptions()

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS: dict[str, dict[str, Any]] = {
    "Llama 2": {"num_kv_heads": 4},
    "Llama 3": {"rope_theta": 500000.0},
    "Llama 3.1": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
    "Llama 3.2": {
        "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA3_SCALING, "factor": 32.0},
        "tie_word_embeddings": True,
        "head_dim": 16,
    },
    "Mistral": {"architecture": "MistralForCausalLM", "sliding_window": 24},
    "Mistral without a window": {"architecture": "MistralForCausalLM", "sliding_window": None, "head_dim": 32},
    "Qwen2": {"architecture": "Qwen2ForCausalLM", "rope_theta": 1000000.0},
    "Qwen2 with YaRN": {
        "architecture": "Qwen2ForCausalLM",
        "rope_theta": 1000.0,
        "head_dim": 32,
        "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32},
    },
    "Qwen2.5, tied": {"architecture": "Qwen2ForCausalLM", "tie_word_embeddings": True, "sliding_window": 40},
    "Qwen2, window in the upper layers": {
        "architecture": "Qwen2ForCausalLM",
        "num_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 19,
        "max_window_layers": 1,
    },
    "Qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
    "Qwen3 with biases and a window in some layers": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 32,
        "num_layers": 3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 33,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Mixtral": {"architecture": "MixtralForCausalLM", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2-MoE with a dense layer": {
        "architecture": "Qwen2MoeForCausalLM",
        "num_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [1],
    },
    "Qwen3-MoE": {
        "architecture": "Qwen3MoeForCausalLM",
        "head_dim": 32,
        "num_layers": 2,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "gpt-oss": {
        "architecture": "GptOssForCausalLM",
        "head_dim": 16,
        "num_layers": 3,
        "intermediate_size": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 21,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "Llama 4": {
        "architecture": "Llama4ForCausalLM",
        "head_dim": 16,
        "num_layers": 4,
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 20,
        "floor_scale": 16,
        "rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0},
    },
    "Llama 4 with images, two experts and plain heads": {
        "architecture": "Llama4ForConditionalGeneration",
        "head_dim": 16,
        "num_layers": 3,
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layers": [0, 2],
        "no_rope_layers": [1, 0, 1],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_chunk_size": 32,
    },
    "Gemma 3": {
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 32,
        "num_layers": 4,
        "sliding_window": 22,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 5_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    "Gemma 3 with images and biases": {
        "architecture": "Gemma3ForConditionalGeneration",
        "head_dim": 16,
        "num_layers": 3,
        "sliding_window": 37,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
    },
}
"""Fields of every family that tests compare with transformers."""
DENSE = tuple(name for name, fields in MODELS.items() if "num_experts_per_tok" not in fields)
"""Those without experts, whose steps can be compiled."""

# Small products on few cores: the synchronisation of threads would cost more than it gains.
torch.set_num_threads(1)


def random_model(folder: Path, *, scale: float = 0.1, max_shard_bytes: int = 2**32, **config: Any) -> Path:
    """A folder with a model of `model_config(**config)`; the scale makes near ties rare."""
    write_random_model(folder, model_config(**config), scale=scale, max_shard_bytes=max_shard_bytes)
    return folder


def runtime_config(
    *,
    layout: Any = "auto",
    dtype: Any = "auto",
    prefix_caching: Any = "auto",
    chunked_prefill: Any = "auto",
    adapters: AdapterOptions = NO_ADAPTERS,
    max_drafts: int = 0,
    speculation: Speculation | None = None,
    **limits: int,
) -> RuntimeConfig:
    return RuntimeConfig(
        version=1,
        model=ModelSource(uri="file:///model"),
        served_names=("model",),
        layout=layout,
        dtype=dtype,
        prefix_caching=prefix_caching,
        chunked_prefill=chunked_prefill,
        adapters=adapters,
        speculation=speculation or Speculation(method="NGram" if max_drafts else "", num_tokens=max_drafts or 4),
        limits=EngineLimits(**limits),
    )


def load_backend(folder: Path, *, available_bytes: int = 2**30, **config: Any) -> TorchBackend:
    return load(folder, runtime_config(**config), lambda what, share: None, lambda: FreeMemory(available_bytes))


def reference(folder: Path) -> Any:
    """The same model in transformers, in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.ERROR)
    return AutoModelForCausalLM.from_pretrained(folder).float().eval()


def with_adapters(model: Any, adapters: Mapping[str, Path]) -> Any:
    """The same model with adapters, as the peft library adds them; see `use_adapter`."""
    from peft import PeftModel

    (first, folder), *others = adapters.items()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses what transformers deprecates
        tuned = PeftModel.from_pretrained(model, str(folder), adapter_name=first)
        for name, folder in others:
            tuned.load_adapter(str(folder), adapter_name=name)
    return tuned.eval()


def use_adapter(tuned: Any, name: str) -> None:
    """Let a model of `with_adapters` compute with this adapter, without one if the name is empty."""
    if name:
        tuned.base_model.enable_adapter_layers()
        tuned.set_adapter(name)
    else:
        tuned.base_model.disable_adapter_layers()


@torch.inference_mode()
def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits `[len(token_ids), vocabulary]` of one sequence."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits
