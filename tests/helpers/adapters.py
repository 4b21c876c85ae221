"""LoRA adapters of some kilobytes in PEFT's format with random weights, written without torch or the peft library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from helpers.tiny_model import TINY_CONFIG
from neuron_runtime.adapters.peft import CONFIG_FILE, TARGETS, WEIGHTS_FILE
from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes

Tensors = dict[str, np.ndarray[Any, Any]]


def tensor_name(layer: int, target: str, half: str) -> str:
    block = "self_attn" if target in TARGETS[:4] else "mlp"
    return f"base_model.model.model.layers.{layer}.{block}.{target}.lora_{half}.weight"


def adapter_tensors(
    model: Mapping[str, Any] = TINY_CONFIG,
    *,
    rank: int = 4,
    targets: Sequence[str] = TARGETS,
    layers: Sequence[int] | None = None,
    ranks: Mapping[tuple[int, str], int] | None = None,
    seed: int = 0,
    scale: float = 0.1,
    dtype: Any = np.float32,
) -> Tensors:
    """The tensors of an adapter of a model with this config.json. ranks: those of single projections that differ."""
    shapes, rng = tensor_shapes(decoder_config(model)), np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(model["num_hidden_layers"]) if layers is None else layers:
        for target in targets:
            block = "self_attn" if target in TARGETS[:4] else "mlp"
            rows, columns = shapes[f"model.layers.{layer}.{block}.{target}.weight"]
            its_rank = (ranks or {}).get((layer, target), rank)
            tensors[tensor_name(layer, target, "A")] = rng.normal(0, scale, (its_rank, columns)).astype(dtype)
            tensors[tensor_name(layer, target, "B")] = rng.normal(0, scale, (rows, its_rank)).astype(dtype)
    return tensors


def adapter_config(*, rank: int = 4, targets: Sequence[str] = TARGETS, **changes: Any) -> dict[str, Any]:
    """An adapter_config.json as PEFT writes it, with changes."""
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "org/base",
        "bias": "none",
        "corda_config": None,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 2 * rank,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "qalora_group_size": 16,
        "r": rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        **changes,
    }


def write_adapter(
    folder: Path,
    model: Mapping[str, Any] = TINY_CONFIG,
    *,
    rank: int = 4,
    targets: Sequence[str] = TARGETS,
    config: Mapping[str, Any] | None = None,
    more_tensors: Tensors | None = None,
    **of_tensors: Any,
) -> Path:
    """Writes both files. config: changes of the configuration; of_tensors: arguments of `adapter_tensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = adapter_config(rank=rank, targets=targets, **(config or {}))
    (folder / CONFIG_FILE).write_text(json.dumps(made, indent=2), encoding="utf-8")
    tensors = adapter_tensors(model, rank=rank, targets=targets, **of_tensors) | (more_tensors or {})
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder
