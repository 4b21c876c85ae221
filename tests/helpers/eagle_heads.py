"""EAGLE heads for small models, named and shaped as the published ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file


def memoryless(folder: Path, share: float) -> None:
    """Makes the model in a folder one that a head can guess: all but its embedding and its head counts little."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = tensor * share
    save_file(tensors, file)


def write_head(
    folder: Path,
    model: Path,
    version: Literal[1, 3],
    *,
    known: int = 0,
    input_norm: bool = False,
    **config: Any,
) -> Path:
    """A head that guesses the next token by the last one alone. For one of version 3, all of the model's heads together
    are as wide as its hidden states, and it has as many for keys as for queries.

    Args:
        known: tokens that a head of version 3 knows; 0: all, and it has no map.
        input_norm: a head of version 1 has a norm before its attention.
    """
    folder.mkdir(parents=True)
    of_model = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    hidden, inner = of_model["hidden_size"], of_model["intermediate_size"]
    size = of_model.get("head_dim") or hidden // of_model["num_attention_heads"]
    queries, keys = of_model["num_attention_heads"] * size, of_model["num_key_value_heads"] * size
    reads = hidden * (2 if version == 3 else 1)
    random = torch.Generator().manual_seed(7)
    layer = "layers.0" if version == 1 else "midlayer"
    nothing, one = torch.zeros(hidden, hidden), torch.eye(hidden)
    tensors = {
        "fc.weight": torch.cat((one, nothing), dim=1) if version == 1 else torch.zeros(hidden, 3 * hidden),
        f"{layer}.self_attn.q_proj.weight": torch.randn(queries, reads, generator=random),
        f"{layer}.self_attn.k_proj.weight": torch.randn(keys, reads, generator=random),
        f"{layer}.self_attn.v_proj.weight": torch.zeros(keys, reads),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(hidden, queries),
        f"{layer}.mlp.gate_proj.weight": torch.randn(inner, hidden, generator=random),
        f"{layer}.mlp.up_proj.weight": torch.randn(inner, hidden, generator=random),
        f"{layer}.mlp.down_proj.weight": torch.zeros(hidden, inner),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
    }
    if version == 1:
        tensors["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    if version == 3:
        # Its attention finds the token that it reads, which is most like itself, and passes it on.
        token = torch.cat((torch.eye(hidden), nothing), dim=1)
        attention = {"q_proj": 3 * token, "k_proj": 3 * token, "v_proj": token, "o_proj": one}
        tensors |= {f"{layer}.self_attn.{name}.weight": tensor for name, tensor in attention.items()}
        tensors |= {f"{layer}.hidden_norm.weight": torch.ones(hidden), "norm.weight": torch.ones(hidden)}
        if known:
            tokens = torch.randperm(len(head), generator=random)[:known].sort().values
            tensors["d2t"] = tokens - torch.arange(known)
            tensors["t2d"] = torch.isin(torch.arange(len(head)), tokens)
            head = head[tokens]
        tensors["lm_head.weight"] = head
    if version == 3 or input_norm:
        tensors[f"{layer}.input_layernorm.weight"] = torch.ones(hidden)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    names = {1: "LlamaForCausalLM", 3: "LlamaForCausalLMEagle3"}
    draft = {"draft_vocab_size": known} if known else {}
    kind = {"architectures": [names[version]], "model_type": "llama", "num_hidden_layers": 1}
    document = {**of_model, **kind, **draft, **config}
    (folder / "config.json").write_text(json.dumps(document))
    return folder
