"""Model folders of any shape with random weights and no tokenizer, as transformers reads them.

For tests and for the benchmarks' models `random:SHAPE`. Equal arguments give equal bytes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.backend.torch.loader import DTYPES
from neuron_runtime.checkpoint import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE

MODEL_TYPES = {
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}
TEXT_CLASSES = {
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}
"""Of models with images, the class of their text."""

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
"""Of a model with images, which tests of text have no use for."""


def model_type(architecture: str) -> str:
    """What transformers calls the family: `SeedOssForCausalLM` is `seed_oss`."""
    if architecture in MODEL_TYPES:
        return MODEL_TYPES[architecture]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", architecture.removesuffix("ForCausalLM")).lower()


def model_config(
    *,
    architecture: str = "LlamaForCausalLM",
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 128,
    vocabulary_size: int = 256,
    max_position_embeddings: int = 512,
    dtype: str = "float32",
    **others: Any,
) -> dict[str, Any]:
    """A config.json; `others` are fields of the file, e.g. `tie_word_embeddings=True` or `sliding_window=64`."""
    if architecture in TEXT_CLASSES:
        text = model_config(
            architecture=TEXT_CLASSES[architecture],
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=intermediate_size,
            vocabulary_size=vocabulary_size,
            max_position_embeddings=max_position_embeddings,
            dtype=dtype,
            **others,
        )
        named = {"architectures": [architecture], "model_type": model_type(architecture), "torch_dtype": dtype}
        return {**named, "text_config": text, "vision_config": VISION}
    return {
        "architectures": [architecture],
        "model_type": model_type(architecture),
        "vocab_size": vocabulary_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        **others,
    }


def as_stored(tensors: dict[str, torch.Tensor], architecture: str) -> dict[str, torch.Tensor]:
    """The tensors as transformers names and lays them in this class, from those of one expert each."""
    if architecture == "GptOssForCausalLM":
        return stacked(tensors, alternate=True)
    if architecture.startswith("Llama4"):
        prefix = "language_model." if architecture == "Llama4ForConditionalGeneration" else ""
        both = stacked(tensors, alternate=False)
        found = {prefix + name.replace(".mlp.", ".feed_forward."): tensor for name, tensor in both.items()}
        return found | ({"vision_model.class_embedding": torch.zeros(16)} if prefix else {})
    if architecture == "Gemma3ForConditionalGeneration":
        found = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        return found | {"vision_tower.vision_model.post_layernorm.weight": torch.zeros(16)}
    return tensors


def stacked(tensors: dict[str, torch.Tensor], *, alternate: bool) -> dict[str, torch.Tensor]:
    """The experts of a layer in one tensor. alternate: rows of gate and up do, instead of following one another."""
    found: dict[str, torch.Tensor] = {}
    of_experts: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(.*)", name):
            of_experts.setdefault((match[1], match[2]), []).append(tensor)
        else:
            found[name] = tensor
    for (module, part), each in of_experts.items():
        projection, kind = part.split(".")
        if projection == "up_proj":
            continue
        stack, name = torch.stack(each), projection
        if projection == "gate_proj":
            both = stack, torch.stack(of_experts[module, f"up_proj.{kind}"])
            stack, name = (
                (torch.stack(both, dim=2).flatten(1, 2) if alternate else torch.cat(both, dim=1)),
                "gate_up_proj",
            )
        ends = {"weight": "", "bias": "_bias", "blocks": "_blocks", "scales": "_scales"}
        found[f"{module}.{name}{ends[kind]}"] = (stack.transpose(1, 2) if kind == "weight" else stack).contiguous()
    return found


def write_random_model(
    folder: Path, config: dict[str, Any], *, seed: int = 0, scale: float = 0.04, max_shard_bytes: int = 2**32
) -> None:
    """Write config.json and weights drawn from a normal distribution of standard deviation `scale`.

    Norm weights are drawn around 1. Raises the errors of `decoder_config`.
    """
    dtype = DTYPES[config["torch_dtype"]]
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    num_shard_bytes = 0
    tensors = {}
    for name, shape in tensor_shapes(decoder_config(config)).items():
        values = torch.randn(shape, generator=generator) * scale
        tensors[name] = (values + 1.0 if name.endswith("norm.weight") else values).to(dtype)
    for name, tensor in as_stored(tensors, config["architectures"][0]).items():
        if shards[-1] and num_shard_bytes + tensor.nbytes > max_shard_bytes:
            shards.append({})
            num_shard_bytes = 0
        shards[-1][name] = tensor
        num_shard_bytes += tensor.nbytes
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS_FILE, metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
